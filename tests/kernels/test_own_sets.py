"""What sets of the kv heads' own are made with: codes and projected queries, scores by kv head, attention over a set for each."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dustin.backends.torch_triton.compact_keys import CompactKeys, fit  # noqa: E402
from dustin.triton_kernels.attention_core import AttentionConfig  # noqa: E402
from dustin.triton_kernels.packed_rows import packed_keys, packed_rows  # noqa: E402
from dustin.triton_kernels.packed_scores import PackedConfig, packed_scores  # noqa: E402
from dustin.triton_kernels.score_heads import group_heads, score_heads, score_layers  # noqa: E402
from dustin.triton_kernels.sparse_verify import sparse_verify  # noqa: E402
from tests.kernels.reference import check_parity, paged_case  # noqa: E402


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """fp32 [..., rank] of codes [..., rank / 2]."""
    return torch.cat([(codes << 4) >> 4, codes >> 4], -1).float()


def rows_of(case, pool: torch.Tensor, b: int, length: int) -> torch.Tensor:
    """The first `length` rows of sequence b in a pool."""
    return pool[case.page_table[b].long()].flatten(0, 1)[:length]


def a_case(device: str, dtype: torch.dtype, tokens: int):
    heads = (6, 2, 32) if device == "cpu" else (28, 4, 128)
    lengths = [150, 9, 0] if device == "cpu" else [5000, 9, 0]
    case = paged_case(device, dtype, lengths=lengths, num_tokens=[tokens] * 3, tokens=tokens, heads=heads, page_size=32)
    return case, heads, lengths


@pytest.mark.parametrize("rank", [32, 64])
def test_codes_and_queries(device: str, rank: int) -> None:
    """The launch is what CompactKeys computes: newest keys encoded in place, nothing else touched, queries projected."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case, (num_heads, kv_heads, dim), lengths = a_case(device, dtype, 3)
    if rank > dim:
        pytest.skip("rank above the head dimension")
    q = torch.randn(3, 3, num_heads, dim, device=device).to(dtype)
    gen = torch.Generator().manual_seed(0)
    keys = torch.randn(256, kv_heads, dim, generator=gen).to(device)
    queries = torch.randn(256, num_heads, dim, generator=gen).to(device)
    inverse = 1 / 10000 ** (torch.arange(dim // 2) / (dim // 2))
    compact = fit({0: queries}, {0: keys}, rank, inverse.to(device), 512)
    flat = case.k_pool.flatten(0, 1)
    codes = torch.full((len(flat), kv_heads, rank // 2), 5, dtype=torch.int8, device=device)
    got = packed_rows(
        q, case.k_pool, codes, case.page_table, case.lengths, compact.mean[0], compact.encode[0], compact.decode[0], num_rows=2
    )
    want = compact.queries(0, q[:, :2].float())
    check_parity(got, want.to(got.dtype), torch.float32 if dtype == torch.float32 else torch.float16)
    pages = codes.unflatten(0, case.k_pool.shape[:2])
    written = torch.zeros(len(flat), dtype=torch.bool, device=device)
    places = written.unflatten(0, case.k_pool.shape[:2])
    wrong = rows = 0
    for b, length in enumerate(lengths):
        first = max(0, length - 16)
        mine = rows_of(case, pages, b, length)[first:]
        expected = compact.codes_of(0, rows_of(case, case.k_pool, b, length)[first:])
        wrong += int((numbers_of(mine) != numbers_of(expected)).sum())
        rows += expected.numel()
        for position in range(first, length):
            places[int(case.page_table[b, position // 32]), position % 32] = True
    # A coordinate that lies between two steps may go either way.
    assert wrong <= rows // 500
    assert (codes[~written] == 5).all()


@pytest.mark.parametrize("rank", [32, 64])
def test_codes_of_prompts(device: str, rank: int) -> None:
    """What packed_rows writes for the newest keys, for any stretch of each sequence: a page's end inside, one key, none."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case, (_, kv_heads, dim), lengths = a_case(device, dtype, 3)
    if rank > dim:
        pytest.skip("rank above the head dimension")
    mean, encode = (torch.randn(*shape, device=device) for shape in ((kv_heads, dim), (kv_heads, dim, rank)))
    compact = CompactKeys(rank, {0: mean}, {0: encode / dim**0.5}, {})
    codes = torch.full((len(case.k_pool) * 32, kv_heads, rank // 2), 5, dtype=torch.int8, device=device)
    stretches = [(13, lengths[0] - 2), (8, 9), (0, 0)]
    begins, ends = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*stretches, strict=True))
    bases = compact.mean[0], compact.encode[0]
    packed_keys(case.k_pool, codes, case.page_table, begins, ends, *bases, most=lengths[0] - 15)
    pages, wrong, numbers = codes.unflatten(0, case.k_pool.shape[:2]), 0, 0
    untouched = torch.ones(len(codes), dtype=torch.bool, device=device)
    places = untouched.unflatten(0, case.k_pool.shape[:2])
    for b, (begin, end) in enumerate(stretches):
        want = compact.codes_of(0, rows_of(case, case.k_pool, b, end)[begin:])
        wrong += int((numbers_of(rows_of(case, pages, b, end)[begin:]) != numbers_of(want)).sum())
        numbers += 2 * want.numel()
        for position in range(begin, end):
            places[int(case.page_table[b, position // 32]), position % 32] = False
    # A coordinate that lies between two steps may go either way.
    assert wrong <= numbers // 1000
    assert (codes[untouched] == 5).all()
    with pytest.raises(ValueError, match="ends: expected shape .3., got .2."):
        packed_keys(case.k_pool, codes, case.page_table, begins, ends[:2], *bases, most=1)
    with pytest.raises(ValueError, match="rank: expected a power of two from 32 on, got 16"):
        packed_keys(case.k_pool, codes, case.page_table, begins, ends, mean, encode[..., :16].contiguous(), most=1)


def check_by_kv_head(case, codes: torch.Tensor, lengths: list[int], rows: list[int], q: torch.Tensor, scores: torch.Tensor) -> None:
    """Scores [B * Hkv, columns] are the mean softmax of each kv head's queries over the numbers in its codes, at a scale of 0.2."""
    kv_heads = len(scores) // len(lengths)
    group = q.shape[2] // kv_heads
    for b, length in enumerate(lengths):
        keys = numbers_of(rows_of(case, codes, b, length))
        for h in range(kv_heads):
            mine = scores[b * kv_heads + h]
            assert mine[length:].isneginf().all()
            if not rows[b] or not length:
                assert (mine[:length] == 0).all()
                continue
            asked = q[b, : rows[b], h * group : (h + 1) * group].double()
            want = torch.softmax(torch.einsum("rgd,nd->rgn", asked, keys[:, h].double()) * 0.2, -1).mean((0, 1))
            check_parity(mine[:length], want.float(), torch.float32 if q.dtype == torch.float32 else torch.float16)


@pytest.mark.parametrize("keep", [True, False])
def test_scores_by_kv_head(device: str, keep: bool) -> None:
    """Every kv head's own mass, by packed keys, in both ways of unpacking them."""
    case, (num_heads, kv_heads, _), lengths = a_case(device, torch.float32, 3)
    rank, rows = 32 if device == "cpu" else 64, [3, 2, 0]
    codes = torch.randint(-128, 128, (*case.k_pool.shape[:3], rank // 2), dtype=torch.int8, device=device)
    groups = group_heads(tuple(range(num_heads)), num_heads, kv_heads, device)
    columns = max(lengths) + 2
    # The interpreter has no bfloat16.
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])):
        q = (torch.randn(3, 3, num_heads, rank, device=device) * 0.3).to(dtype)
        scores = torch.full((3 * kv_heads, columns), float("nan"), device=device)
        fed = torch.tensor(rows, dtype=torch.int32, device=device)
        score_heads(
            q, codes, case.page_table, case.lengths, groups, scores, num_rows=fed, scale=0.2, keep_weights=keep, by_group=True
        )
        check_by_kv_head(case, codes, lengths, rows, q, scores)
    with pytest.raises(ValueError, match="by_group: expected one layer, got 2"):
        score_layers([q] * 2, [codes] * 2, case.page_table, case.lengths, [groups] * 2, scores, num_rows=fed, by_group=True)


@pytest.mark.parametrize(("tile", "chunk"), [(16, 64), (32, 32), (64, 64), (128, 128), (0, 0)])
@pytest.mark.parametrize("many", [False, True])
def test_scores_by_packed_keys_alone(device: str, tile: int, chunk: int, many: bool) -> None:
    """packed_scores is the mean softmax of each kv head, whatever the chunks; a far first tile moves no sum out of range."""
    case, (num_heads, kv_heads, _), lengths = a_case(device, torch.float32, 3)
    rank = 32 if device == "cpu" else 64
    # Columns of one product, or a few more than that.
    most = 3 if not many else 12 if device == "cpu" else 6
    rows = [most, most - 1, 0]
    codes = torch.randint(-128, 128, (*case.k_pool.shape[:3], rank // 2), dtype=torch.int8, device=device)
    columns = max(lengths) + 2
    fed = torch.tensor(rows, dtype=torch.int32, device=device)
    # Tiles of less than a page of 32 keys, of one, two and four.
    some = PackedConfig(tile, chunk, 128, 2) if device == "cpu" else PackedConfig(max(64, tile), 16 * chunk, 256, 3)
    config = some if chunk else None
    for dtype, size in ((torch.float32, 0.3), (torch.float16, 0.3), (torch.float16, 12.0)):
        q = (torch.randn(3, most, num_heads, rank, device=device) * size).to(dtype)
        scores = torch.full((3 * kv_heads, columns), float("nan"), device=device)
        packed_scores(q, codes, case.page_table, case.lengths, scores, num_rows=fed, scale=0.2, config=config)
        check_by_kv_head(case, codes, lengths, rows, q, scores)
    with pytest.raises(ValueError, match="q: expected rows . heads per kv head <= 128, got "):
        packed_scores(q.repeat(1, 20, 1, 1), codes, case.page_table, case.lengths, scores, num_rows=fed, scale=0.2)


def test_chunks_whose_first_tiles_lie_far_apart(device: str) -> None:
    """The best key of a chunk may lie further above its first tile than floats reach, and above the others' first tiles not at
    all: what one chunk adds to another must not depend on where either began."""
    case, (num_heads, kv_heads, _), lengths = a_case(device, torch.float32, 1)
    rank = 32 if device == "cpu" else 64
    tile, chunk = (16, 64) if device == "cpu" else (64, 256)
    # In base 2 a product is 10 times the first number of a key, which is 7 or -8.
    step = 10.0 / (0.2 * 1.4426950408889634)
    codes = torch.zeros(*case.k_pool.shape[:3], rank // 2, dtype=torch.int8, device=device)
    flat, pages = codes.flatten(0, 1), case.page_table[0].tolist()
    first = torch.full((lengths[0],), -8, dtype=torch.int8)
    first[0] = first[chunk + tile + 3] = 7
    for position, number in enumerate(first.tolist()):
        flat[pages[position // 32] * 32 + position % 32, :, 0] = number & 15
    fed = torch.tensor([1, 1, 0], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.float16):
        q = torch.zeros(3, 1, num_heads, rank, device=device, dtype=dtype)
        q[..., 0] = step
        scores = torch.full((3 * kv_heads, max(lengths) + 2), float("nan"), device=device)
        config = PackedConfig(tile, chunk, chunk // 2, 2)
        packed_scores(q, codes, case.page_table, case.lengths, scores, num_rows=fed, scale=0.2, config=config)
        check_by_kv_head(case, codes, lengths, [1, 1, 0], q, scores)
        torch.testing.assert_close(scores[:kv_heads, 0], torch.full((kv_heads,), 0.5, device=device), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="config: expected chunk and span to be multiples of 16 keys, got 40, 32"):
        packed_scores(
            q, codes, case.page_table, case.lengths, scores, num_rows=fed, scale=0.2, config=PackedConfig(16, 40, 32)
        )
    with pytest.raises(ValueError, match="config.chunk: expected .* keys or more"):
        few = PackedConfig(2, 2, 2) if device == "cpu" else PackedConfig(64, 64, 64)
        packed_scores(q, codes, case.page_table, case.lengths, scores, num_rows=fed, scale=0.2, config=few)


@pytest.mark.parametrize("splits", ["merged", "fused", "default"])
def test_attention_over_a_set_for_each_kv_head(device: str, splits: str) -> None:
    """One launch is the same as one for each kv head over its own keys, bit for bit, whatever merges the splits."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case, (num_heads, kv_heads, dim), lengths = a_case(device, dtype, 3)
    group, tokens = num_heads // kv_heads, 3
    q = torch.randn(3, tokens, num_heads, dim, device=device).to(dtype)
    width = 24
    indices = torch.zeros(3 * kv_heads, width, dtype=torch.int32)
    counts = torch.zeros(3 * kv_heads, dtype=torch.int32)
    for row in range(3 * kv_heads):
        # Sets of a sequence may differ in size.
        size = max(0, min(lengths[row // kv_heads], width - row % kv_heads))
        picked = torch.randperm(lengths[row // kv_heads])[:size].sort().values
        indices[row, :size], counts[row] = picked.int(), size
    indices, counts = indices.to(device), counts.to(device)
    fused = {"merged": 0, "fused": 8, "default": 0}[splits]
    config = AttentionConfig(16, 16, 4, 2, waves=8.0, fused_splits=fused, max_splits=4, ahead=False)
    config = None if splits == "default" else config
    rest = (case.page_table, case.lengths, case.num_tokens)
    got = sparse_verify(q, case.k_pool, case.v_pool, *rest, indices, counts, config=config)
    for h in range(kv_heads):
        mine = slice(h * group, (h + 1) * group)
        sets = torch.arange(3, device=device) * kv_heads + h
        # As many programs as in the whole launch, or the splits would be others: the head is asked for once for each kv head.
        part = q[:, :, mine].repeat(1, 1, kv_heads, 1).contiguous()
        pools = [pool[:, :, h : h + 1].expand(-1, -1, kv_heads, -1).contiguous() for pool in (case.k_pool, case.v_pool)]
        want = sparse_verify(part, *pools, *rest, indices[sets].contiguous(), counts[sets].contiguous(), config=config)
        assert torch.equal(got[:, :, mine], want[:, :, :group])
    with pytest.raises(ValueError, match="indices: expected shape"):
        sparse_verify(q, case.k_pool, case.v_pool, *rest, indices[:-1], counts[:-1])
