"""append_kv and rope_append against float64, ragged rows, untouched pool rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dustin.triton_kernels.append_kv import append_kv  # noqa: E402
from dustin.triton_kernels.rope_append import rope_append  # noqa: E402
from tests.kernels.reference import check_parity, paged_case  # noqa: E402


def build(device: str, dtype: torch.dtype):
    heads = (6, 2, 16) if device == "cpu" else (28, 4, 128)
    return paged_case(
        device, dtype, lengths=[30, 3, 15], num_tokens=[0, 0, 0], tokens=3, heads=heads, page_size=16
    ), torch.tensor([3, 0, 2], dtype=torch.int32, device=device)


def pool_row(case, pool: torch.Tensor, b: int, position: int) -> torch.Tensor:
    page_size = pool.shape[1]
    return pool[int(case.page_table[b, position // page_size]), position % page_size]


def dtypes(device: str) -> list:
    return [torch.float32, torch.float16] if device == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def test_append(device: str) -> None:
    for dtype in dtypes(device):
        case, fed = build(device, dtype)
        k_new, v_new = torch.randn_like(case.k[:, :3]), torch.randn_like(case.k[:, :3])
        before = case.k_pool.isnan().sum()
        # Views of one buffer with K and V side by side.
        both = torch.stack([case.k_pool, case.v_pool], 3)
        case.k_pool, case.v_pool = both[:, :, :, 0], both[:, :, :, 1]
        append_kv(k_new, v_new, case.k_pool, case.v_pool, case.page_table, case.lengths, fed)
        for b in range(3):
            for t in range(int(fed[b])):
                position = int(case.lengths[b]) + t
                assert torch.equal(pool_row(case, case.k_pool, b, position), k_new[b, t])
                assert torch.equal(pool_row(case, case.v_pool, b, position), v_new[b, t])
        assert int(before - case.k_pool.isnan().sum()) == 5 * k_new[0, 0].numel()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [H, D] float64; cos, sin [R/2]."""
    half = cos.shape[0]
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], 1)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    return x if weight is None else x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("share", [1, 2])
def test_rope_append(device: str, norm: bool, share: int) -> None:
    for dtype in dtypes(device):
        case, fed = build(device, dtype)
        num_heads, dim = case.q.shape[2:]
        num_kv_heads = case.k.shape[2]
        packed = torch.randn(3, 3, (num_heads + 2 * num_kv_heads) * dim, device=device).to(dtype)
        q, k, v = packed.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim], -1)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        both = torch.stack([case.k_pool, case.v_pool], 3)
        case.k_pool, case.v_pool = both[:, :, :, 0], both[:, :, :, 1]
        angles = torch.rand(64, dim // 2 // share, device=device) * 6.28
        cos, sin = angles.cos(), angles.sin()
        weights = [torch.rand(dim, device=device).to(dtype) + 0.5 for _ in range(2)] if norm else [None, None]
        out = rope_append(
            q, k, v, case.k_pool, case.v_pool, case.page_table, case.lengths, fed, cos, sin,
            q_norm=weights[0], k_norm=weights[1],
        )  # fmt: skip
        # The fed rows alone, one sequence after another, give the same to the bit.
        rows = torch.cat([packed[b, : int(n)] for b, n in enumerate(fed)] + [packed[:1, 0]])
        parts = [x.unflatten(-1, (-1, dim)) for x in rows.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim], -1)]
        pools = torch.zeros_like(both), torch.zeros_like(both)
        both_ways = []
        for pool, given, more in (
            (pools[0], (q, k, v), {}), (pools[1], parts, {"starts": (fed.cumsum(0) - fed).int(), "max_tokens": 3}),
        ):  # fmt: skip
            both_ways.append(rope_append(
                *given, pool[:, :, :, 0], pool[:, :, :, 1], case.page_table, case.lengths, fed, cos, sin,
                q_norm=weights[0], k_norm=weights[1], out=torch.zeros(q.shape, dtype=dtype, device=device), **more,
            ))  # fmt: skip
        assert torch.equal(*both_ways) and torch.equal(*pools)
        for b in range(3):
            for t in range(int(fed[b])):
                position = int(case.lengths[b]) + t
                c, s = cos[position].double(), sin[position].double()
                check_parity(out[b, t], rotate(normed(q[b, t], weights[0]), c, s))
                check_parity(pool_row(case, case.k_pool, b, position), rotate(normed(k[b, t], weights[1]), c, s))
                assert torch.equal(pool_row(case, case.v_pool, b, position), v[b, t])
