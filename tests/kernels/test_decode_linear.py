"""Products of a decoding step with norm, RoPE, append, gate and residual inside, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from dustin.triton_kernels import stream_rows
from dustin.triton_kernels.decode_linear import LinearConfig, LinearScratch, Stream
from dustin.triton_kernels.linear_add import linear_add
from dustin.triton_kernels.norm_linear import norm_gate_up, norm_qkv
from dustin.triton_kernels.wide_linear import WideConfig, WideScratch, wide_linear
from tests.kernels.conftest import INTERPRETED

EPS = 1e-6
# (block_n, block_k, parts, splits, swap): one piece, pieces shared by the warps, a pipelined loop, weights on the left; then
# split depths.
CONFIGS = [(16, 128, 1, 1), (16, 32, 4, 1), (8, 32, 1, 1), (16, 32, 1, 1, True)]
CONFIGS += [(16, 32, 1, 3), (16, 16, 2, 3), (16, 32, 1, 3, True)]


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def normal(*shape: int, device: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()


def stream_of(x: torch.Tensor, norm: torch.Tensor, tiles: int) -> Stream:
    """A residual stream of rows x whose squares lie in equal shares in `tiles`."""
    scratch = LinearScratch(tiles * len(x), 1, 1, x.device)
    scratch.squares.copy_((x.double().square().sum(1) / tiles).float().repeat(tiles))
    return Stream(x, x * norm, scratch, tiles)


def limit() -> float:
    return 2e-3 if INTERPRETED else 1.2e-2


def config_of(case: tuple[int, ...]) -> LinearConfig:
    block_n, block_k, parts, splits, *swap = case
    return LinearConfig(block_n, block_k, parts, splits, swap=bool(swap))


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_linear_add_updates_the_residual_and_leaves_its_squares(device, case, rows):
    columns, depth = 40, 104
    x, w, bias = (normal(*s, device=device, seed=i) for i, s in enumerate([(rows, depth), (columns, depth), (columns,)]))
    residual, norm = normal(rows, columns, device=device, seed=3), normal(columns, device=device, seed=4)
    expected = residual.double() + x.double() @ w.double().T + bias.double()
    stream = Stream(residual, torch.empty_like(residual), LinearScratch(1000, 20000, 100, torch.device(device)), 0)
    linear_add(x, w, bias, stream, norm, config=config_of(case))
    assert rms(residual, expected) < limit()
    assert rms(stream.scaled, residual.double() * norm.double()) < limit()
    squares = stream.scratch.squares[: stream.tiles * rows].view(stream.tiles, rows).sum(0)
    assert rms(squares, residual.double().square().sum(1)) < 1e-5
    assert not stream.scratch.counters.any()


@pytest.mark.parametrize("case", CONFIGS[:4])
@pytest.mark.parametrize("rows", [1, 24])
def test_gate_and_up(device, case, rows):
    hidden, size = 104, 40
    x, w, norm = (normal(*s, device=device, seed=i) for i, s in enumerate([(rows, hidden), (2 * size, hidden), (hidden,)]))
    out = norm_gate_up(stream_of(x, norm, 3), w, eps=EPS, config=config_of(case))
    y = normed(x, norm) @ w.double().T
    expected = torch.nn.functional.silu(y[:, :size]) * y[:, size:]
    assert rms(out, expected) < 3 * limit()


@pytest.mark.parametrize("case", CONFIGS[:4])
def test_queries_are_rotated_and_keys_and_values_go_to_the_pages_of_fed_rows(device, case):
    batch, tokens, hidden, heads, kv_heads, dim, page = 3, 2, 104, 3, 1, 32, 4
    sizes = [(batch * tokens, hidden), ((heads + 2 * kv_heads) * dim, hidden), ((heads + 2 * kv_heads) * dim,), (hidden,)]
    x, w, bias, norm = (normal(*s, device=device, seed=i) for i, s in enumerate(sizes))
    pools = [torch.full((9, page, kv_heads, dim), 7.0, dtype=x.dtype, device=device) for _ in range(2)]
    table = torch.tensor([[3, 8, 1], [0, 2, 4], [5, 6, 7]], dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 0, 9], dtype=torch.int32, device=device)
    fed = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    angle = torch.arange(12, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1.0, dim // 2, dtype=torch.float64)
    cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
    stream = stream_of(x, norm, 1)
    q = norm_qkv(stream, w, bias, *pools, table, lengths, fed, cos, sin, eps=EPS, config=config_of(case))
    y = (normed(x, norm) @ w.double().T + bias.double()).view(batch, tokens, heads + 2 * kv_heads, dim)
    position = (lengths[:, None] + torch.arange(tokens, device=device)).clamp(max=11).cpu()
    c, s = (f.double()[position][:, :, None].to(device) for f in (cos.cpu(), sin.cpu()))
    first, second = y[..., : dim // 2], y[..., dim // 2 :]
    turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    assert rms(q, turned[:, :, :heads]) < 2 * limit()
    expected = [torch.full_like(pool, 7.0) for pool in pools]
    for b in range(batch):
        for t in range(int(fed[b])):
            at = int(lengths[b]) + t
            row = (int(table[b, at // page]), at % page)
            expected[0][row] = turned[b, t, heads : heads + kv_heads].to(x.dtype)
            expected[1][row] = y[b, t, heads + kv_heads :].to(x.dtype)
    for pool, wanted in zip(pools, expected, strict=True):
        assert rms(pool, wanted) < 2 * limit()
        assert torch.equal(pool == 7.0, wanted == 7.0)


@pytest.mark.parametrize("rows", [1, 5, 24, 40])
def test_wide_linear_with_the_gate_inside(device, rows):
    x, w = normal(rows, 104, device=device, seed=0), normal(2 * 48, 104, device=device, seed=1, scale=0.1)
    gate, up = (x.double() @ w.double().T).chunk(2, 1)
    out = wide_linear(x, w, gate=True, config=WideConfig(16, 32))
    assert out.shape == (rows, 48)
    assert rms(out, torch.nn.functional.silu(gate) * up) < limit()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", [1, 24])
def test_wide_linear_is_the_product_and_leaves_its_counters_at_zero(device, rows, splits):
    x, w, bias = (normal(*s, device=device, seed=i) for i, s in enumerate([(rows, 104), (40, 104), (40,)]))
    scratch = WideScratch(3 * 3 * 16 * 32, 3, device)
    for b in (bias, None):
        out = wide_linear(x, w, b, config=WideConfig(16, 32, splits), scratch=scratch)
        assert rms(out, x.double() @ w.double().T + (0 if b is None else b.double())) < limit()
        assert not scratch.counters.any()


def test_wide_linear_names_what_is_wrong(device):
    x, w = normal(4, 32, device=device, seed=0), normal(2 * 40, 32, device=device, seed=1)
    with pytest.raises(ValueError, match=r"weight: expected two halves of a multiple of 16 rows, got \[80, 32\]"):
        wide_linear(x, w, gate=True, config=WideConfig(16, 32))
    with pytest.raises(ValueError, match="gate: expected no bias and one split, got 2 splits"):
        wide_linear(x, w[:64].contiguous(), gate=True, config=WideConfig(16, 32, splits=2))
    with pytest.raises(ValueError, match="x: expected 1 to 64 rows.* got 65"):
        wide_linear(normal(65, 32, device=device, seed=0), w)
    with pytest.raises(ValueError, match="scratch.partials: expected at least"):
        wide_linear(x, w, config=WideConfig(16, 16, splits=2), scratch=WideScratch(1, 9, device))


def test_embedding_last_norm_and_captured_heads(device):
    hidden = 40
    embedding, norm = normal(11, hidden, device=device, seed=0), normal(hidden, device=device, seed=1)
    tokens = torch.tensor([[1, 10], [0, 4], [9, 9]], device=device)
    stream = stream_rows.embed_rows(tokens, embedding, norm, LinearScratch(6, 1, 1, torch.device(device)))
    residual = stream.residual
    assert torch.equal(residual, embedding[tokens.flatten()])
    assert rms(stream.scaled, residual.double() * norm.double()) < limit()
    assert rms(stream.scratch.squares, residual.double().square().sum(1)) < 1e-5
    fed = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    last = torch.tensor([1, 2, 4], device=device)
    assert rms(stream_rows.last_norm(residual, fed, norm, EPS), normed(residual[last], norm)) < limit()
    q = normal(3, 2, 5, 16, device=device, seed=2)
    heads = torch.tensor([4, 0, 2], device=device)
    assert torch.equal(stream_rows.capture_heads(q, heads, fed, False), q[:, :, heads])
    assert torch.equal(stream_rows.capture_heads(q, heads, fed, True), q.flatten(0, 1)[last][:, None][:, :, heads])


def test_bad_input_is_named(device):
    x, w, norm = (normal(*shape, device=device, seed=0) for shape in ((65, 32), (16, 32), (16,)))
    config = LinearConfig(16, 32)

    def call(rows: int, scratch: LinearScratch, x: torch.Tensor = x) -> None:
        residual = normal(rows, 16, device=device, seed=2)
        linear_add(x[:rows], w, None, Stream(residual, residual.clone(), scratch, 0), norm, config=config)

    scratch = LinearScratch(1000, 1000, 10, torch.device(device))
    with pytest.raises(ValueError, match="x: expected 1 to 64 rows.*65"):
        call(65, scratch)
    with pytest.raises(ValueError, match="x: expected dtype"):
        call(4, scratch, x.float())
    with pytest.raises(ValueError, match="scratch.squares"):
        call(4, LinearScratch(1, 1, 1, torch.device(device)))


@pytest.mark.parametrize("rows", [1, 5])
def test_head_argmax_equals_the_argmax_of_stored_logits(device, rows):
    from dustin.triton_kernels.argmax_rows import argmax_rows
    from dustin.triton_kernels.head_argmax import head_argmax

    x, w = normal(rows, 64, device=device, seed=0), normal(75, 64, device=device, seed=1)
    w[70] = w[20]
    logits = (x.double() @ w.double().T).to(x.dtype)
    tokens, finite = head_argmax(x, w, vocabulary=75, config=LinearConfig(16, 32))
    assert torch.equal(tokens, argmax_rows(logits)[0])
    assert bool(finite.all())
    assert int(head_argmax(x, w, vocabulary=20, config=LinearConfig(16, 32))[0].max()) < 20
    w[33, 5] = float("nan")
    assert not head_argmax(x, w, vocabulary=75, config=LinearConfig(16, 32))[1].any()
