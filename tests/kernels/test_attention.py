"""dense_verify and sparse_verify against float64, with NaN in every unused pool row."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dustin.triton_kernels.attention_core import EMPTY, AttentionConfig, AttentionWorkspace  # noqa: E402
from dustin.triton_kernels.dense_verify import dense_verify  # noqa: E402
from dustin.triton_kernels.runtime import num_multiprocessors  # noqa: E402
from dustin.triton_kernels.sparse_verify import choose_config, sparse_verify  # noqa: E402
from dustin.triton_kernels.sparse_verify import plan as sparse_plan  # noqa: E402
from dustin.triton_kernels.translate_slots import translate_slots  # noqa: E402
from tests.kernels.reference import attention, check_parity, paged_case, random_set, relative_rms  # noqa: E402

# (heads, page size, lengths, num_tokens, T); head ratios 1, 5, 6, 7, 8 and a finished row among them.
SMALL = [
    ((2, 2, 16), 16, [37, 5], [3, 1], 3),
    ((5, 1, 32), 32, [50], [2], 2),
    ((7, 1, 96), 16, [33, 70], [2, 0], 2),
]
LARGE = [
    ((64, 8, 128), 64, [4001, 517, 0, 2048], [6, 3, 6, 0], 6),
    ((64, 8, 128), 16, [700, 33], [1, 1], 1),
    ((28, 4, 128), 32, [3000, 1024], [6, 5], 6),
    ((14, 2, 64), 64, [900, 31], [16, 9], 16),
    ((12, 2, 128), 128, [2500], [5], 5),
    ((10, 2, 96), 64, [777, 64], [4, 2], 4),
    ((16, 8, 256), 64, [1500, 65], [6, 4], 6),
    ((5, 1, 256), 32, [300], [16], 16),
]
BASIC = [torch.float32, torch.float16]
TYPES = [*BASIC, torch.bfloat16]


def cases(device: str) -> list:
    return SMALL if device == "cpu" else LARGE


def build(device: str, dtype: torch.dtype, shape: tuple, seed: int = 0):
    heads, page_size, lengths, num_tokens, tokens = shape
    return paged_case(
        device, dtype, lengths=lengths, num_tokens=num_tokens, tokens=tokens, heads=heads, page_size=page_size, seed=seed
    )


def each(device: str, start: int = 0, which: int | None = None):
    """Cases by dtype; the interpreter's bf16 arithmetic is wrong, so bf16 runs on the device alone."""
    for i, shape in enumerate(cases(device)):
        dtypes = [BASIC[(i + start) % 2]] if device == "cpu" else TYPES if start == 0 else [BASIC[i % 2], torch.bfloat16]
        for dtype in dtypes:
            if which in (None, i):
                yield build(device, dtype, shape, i)


every_case = pytest.mark.parametrize("which", range(len(LARGE)))


@every_case
def test_dense(device: str, which: int) -> None:
    for case in each(device, 0, which):
        check_parity(dense_verify(*case.inputs), attention(case))


@every_case
def test_dense_window_and_softcap(device: str, which: int) -> None:
    for case in each(device, 1, which):
        out = dense_verify(*case.inputs, window=20, softcap=5.0)
        check_parity(out, attention(case, window=20, softcap=5.0))


def test_dense_by_descriptors(device: str) -> None:
    small = [((8, 2, 16), 16, [40, 9, 0], [5, 3, 5], 5), ((2, 1, 32), 32, [65, 31], [2, 0], 2)]
    large = [((28, 4, 128), 64, [1000, 77, 2048], [33, 10, 18], 33), ((64, 8, 128), 128, [700, 64], [16, 16], 16)]
    for i, shape in enumerate(small if device == "cpu" else large):
        case = build(device, torch.float16, shape, i)
        for splits in (1.0, 4.0, 40.0):
            tile = (16, 16) if device == "cpu" else (128, 64)
            config = AttentionConfig(*tile, 4, 2, waves=splits, described=True)
            check_parity(dense_verify(*case.inputs, config=config), attention(case))
            check_parity(dense_verify(*case.inputs, window=20, config=config), attention(case, window=20))


def test_dense_rows_beyond_one_tile(device: str) -> None:
    tokens = 5 if device == "cpu" else 64
    shape = ((8, 2, 16), 16, [40, 9], [5, 3], 5) if device == "cpu" else ((64, 8, 128), 64, [1000, 77], [64, 40], tokens)
    case = build(device, torch.float16, shape)
    config = AttentionConfig(16, 16, 4, 2) if device == "cpu" else None
    check_parity(dense_verify(*case.inputs, config=config), attention(case))


def test_dense_into_packed_rows(device: str) -> None:
    """Fed rows alone, one sequence after another, however splits merge: in one program, in the last one, by a second launch."""
    small = [((8, 2, 16), 16, [40, 9, 30, 21], [5, 0, 2, 3], 5), ((2, 1, 32), 32, [65, 31], [2, 1], 3)]
    large = [((28, 4, 128), 64, [1000, 77, 0, 2048], [9, 10, 0, 3], 10), ((14, 2, 64), 16, [700, 64], [1, 16], 16)]
    for i, shape in enumerate(small if device == "cpu" else large):
        case = build(device, torch.float16, shape, i)
        fed, want = case.num_tokens.tolist(), attention(case)
        starts = (case.num_tokens.cumsum(0) - case.num_tokens).int()
        wanted = torch.cat([want[b, :n] for b, n in enumerate(fed)])
        tile = (16, 16) if device == "cpu" else (64, 64)
        for splits, fused in ((0.01, 8), (40.0, 64), (40.0, 1)):
            out = torch.full((sum(fed) + 2, *case.q.shape[2:]), 7.0, dtype=case.q.dtype, device=device)
            config = AttentionConfig(*tile, 4, 2, waves=splits, fused_splits=fused)
            assert dense_verify(*case.inputs, config=config, out=out, starts=starts) is out
            check_parity(out[: sum(fed)], wanted)
            assert (out[sum(fed) :] == 7).all()
    with pytest.raises(ValueError, match="starts: expected"):
        dense_verify(*case.inputs, out=out, starts=starts.long())
    with pytest.raises(ValueError, match="out: expected the packed rows"):
        dense_verify(*case.inputs, starts=starts)
    with pytest.raises(ValueError, match="out: expected"):
        dense_verify(*case.inputs, out=case.q, starts=starts)


def counts_of(case, fraction: float = 0.4) -> list[int]:
    return [int(int(n) * fraction) for n in case.lengths]


@every_case
def test_sparse(device: str, which: int) -> None:
    for case in each(device, 0, which):
        indices, counts = random_set(case, counts_of(case))
        out = sparse_verify(*case.inputs, indices, counts)
        check_parity(out, attention(case, indices, counts))


@every_case
def test_sparse_window_and_softcap(device: str, which: int) -> None:
    for case in each(device, 1, which):
        indices, counts = random_set(case, counts_of(case))
        out = sparse_verify(*case.inputs, indices, counts, window=25, softcap=5.0)
        check_parity(out, attention(case, indices, counts, window=25, softcap=5.0))


def test_sparse_blocks(device: str) -> None:
    unit = 16
    case = build(device, torch.float32, ((4, 2, 16), 16, [55, 32], [2, 2], 2))
    blocks = torch.tensor([[0, 3], [1, 9]], dtype=torch.int32, device=device)
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    out = sparse_verify(*case.inputs, blocks, counts, block_size=unit)
    tokens = torch.zeros((2, 2 * unit), dtype=torch.int32, device=device)
    tokens[0, :16], tokens[0, 16:23] = torch.arange(16), torch.arange(48, 55)
    tokens[1, :16] = torch.arange(16, 32)
    want = attention(case, tokens, torch.tensor([23, 16], dtype=torch.int32))
    check_parity(out, want)


@every_case
def test_everything_selected_is_dense(device: str, which: int) -> None:
    for case in each(device, 0, which):
        indices, counts = random_set(case, [int(n) for n in case.lengths])
        check_parity(sparse_verify(*case.inputs, indices, counts), dense_verify(*case.inputs).double())


def test_every_split_and_merge_agree(device: str) -> None:
    """One split, a merge in the last program, a merge in a second kernel; workspace passed in and reused."""
    shape = ((4, 2, 32), 16, [150, 20], [2, 2], 2) if device == "cpu" else ((64, 8, 128), 64, [9000, 100], [6, 6], 6)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = build(device, dtype, shape)
    indices, counts = random_set(case, counts_of(case))
    block_m = 16 if device == "cpu" else 64
    workspace = AttentionWorkspace(4096 * block_m, shape[0][2], 4096, device)
    slots = translate_slots(indices, counts, case.lengths, case.num_tokens, case.page_table, case.k_pool.shape[1], case.q.shape[1])
    given = {"slots": slots[0], "slot_counts": slots[1]}
    # (waves, splits merged in the last program, parts of the value dims, tiles before the next kernel may start)
    variants = ((0.0, 8, 1, 0), (4.0, 64, 1, 1), (4.0, 0, 1, 0), (0.0, 4, 2, 2), (1.5, 64, 2, 0), (1.0, 4, 1, 9))
    for waves, fused, parts, trigger in variants:
        if shape[0][2] // parts < 16:
            parts = 1
        config = AttentionConfig(
            block_m, 16, 4, 3, waves=waves, fused_splits=fused, value_parts=parts, trigger=trigger, prefetch_bytes=1 << 20
        )
        for settled in (False, True):
            check_parity(dense_verify(*case.inputs, config=replace(config, value_parts=1), workspace=workspace), attention(case))
            out = sparse_verify(*case.inputs, indices, counts, config=config, workspace=workspace, **given, settled=settled)
            check_parity(out, attention(case, indices, counts))
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_last_split_takes_the_partials_of_the_others(device: str, splits: int) -> None:
    """Budgets of whole tiles, ragged ones and none; the scratch is left as it was, and repeats are equal to the bit."""
    small = ((4, 2, 32), 16, [200, 190, 150, 40, 0], [3, 2, 1, 0, 3], 3)
    shape = small if device == "cpu" else ((64, 8, 128), 64, [4096, 3000, 1500, 64, 0], [6, 5, 1, 0, 6], 6)
    case = build(device, torch.float16 if device == "cpu" else torch.bfloat16, shape)
    tile, block_m = (16, 16) if device == "cpu" else (64, 64)
    given = {"page_size": case.k_pool.shape[1], "max_tokens": case.q.shape[1]}
    programs = case.q.shape[0] * case.k_pool.shape[2]
    waves = (splits * programs + 0.01) / num_multiprocessors(case.q.device)
    config = AttentionConfig(block_m, tile, 4, 3, waves=waves, fused_splits=4, handed_splits=4)
    plan = sparse_plan(case.q, case.k_pool.shape[2], 10**4, config)
    assert (plan.splits, plan.fused, plan.num_handed) == (splits, True, programs * (splits - 1) * block_m)
    workspace = AttentionWorkspace(plan.num_rows, shape[0][2], plan.num_counters, device, plan.num_handed)
    for counts in ([8 * tile, 4 * tile, 2 * tile, 0, 0], [7 * tile + 1, 5 * tile - 3, tile, 2, 0]):
        indices, counted = random_set(case, counts)
        slots = translate_slots(indices, counted, case.lengths, case.num_tokens, case.page_table, **given)
        for settled in (False, True):
            for window in (0, 3 * tile):
                out = sparse_verify(
                    *case.inputs, indices, counted, slots=slots[0], slot_counts=slots[1], config=config, settled=settled,
                    workspace=workspace, window=window,
                )  # fmt: skip
                check_parity(out, attention(case, indices, counted, window=window))
                assert splits == 1 or settled or torch.equal(out, sparse_verify(
                    *case.inputs, indices, counted, config=config, workspace=workspace, window=window
                ))  # fmt: skip
                assert bool((workspace.handed == EMPTY).all()), "a partial was left behind"
    if splits > 1:
        small = AttentionWorkspace(plan.num_rows, shape[0][2], plan.num_counters, device, plan.num_handed - 1)
        with pytest.raises(ValueError, match="workspace.handed"):
            sparse_verify(*case.inputs, indices, counted, config=config, workspace=small)


def test_configurations_keep_two_programs_apart_where_measured() -> None:
    """Four stages are more than half a processor's memory, three are less."""
    cells = [(rows, splits) for rows in (42, 48) for splits in (0, 1, 2, 4)]
    stages = {(rows, splits): choose_config(rows, 128, torch.bfloat16, splits).num_stages for rows, splits in cells}
    assert stages == {(42, 0): 3, (42, 1): 4, (42, 2): 4, (42, 4): 3, (48, 0): 3, (48, 1): 3, (48, 2): 4, (48, 4): 3}
    assert [choose_config(48, 128, torch.bfloat16, n, chained=False).num_stages for n in (0, 1, 2, 4)] == [3, 4, 4, 4]
    assert choose_config(8, 128, torch.bfloat16, 2, chained=False).num_stages == 3  # a draft's single row: as it was


def test_no_partial_looks_like_an_absent_one() -> None:
    """EMPTY is a NaN that arithmetic does not make: a program would wait for ever for a word equal to it."""
    word = torch.tensor([EMPTY], dtype=torch.int32).view(torch.float32)
    made = [torch.tensor(float("inf")) - float("inf"), torch.tensor(float("nan")), torch.zeros(()) / 0]
    assert word.isnan().all()
    assert all(int(value.view(torch.int32)) != EMPTY for value in made)


def test_keys_and_values_side_by_side(device: str) -> None:
    """Pools that are views of one [pages, page_size, Hkv, 2, D] buffer."""
    case = next(each(device))
    indices, counts = random_set(case, counts_of(case))
    both = torch.stack([case.k_pool, case.v_pool], 3)
    views = (case.q, both[:, :, :, 0], both[:, :, :, 1], *case.inputs[3:])
    assert torch.equal(dense_verify(*views), dense_verify(*case.inputs))
    assert torch.equal(sparse_verify(*views, indices, counts), sparse_verify(*case.inputs, indices, counts))


def test_repeats_are_bit_identical(device: str) -> None:
    case = next(each(device))
    indices, counts = random_set(case, counts_of(case))
    slots = translate_slots(
        indices, counts, case.lengths, case.num_tokens, case.page_table, case.k_pool.shape[1], case.q.shape[1]
    )
    first = sparse_verify(*case.inputs, indices, counts)
    for _ in range(2 if device == "cpu" else 20):
        again = sparse_verify(*case.inputs, indices, counts, slots=slots[0], slot_counts=slots[1])
        assert torch.equal(first, again)


def test_finished_rows_are_zero(device: str) -> None:
    case = next(each(device))
    case.num_tokens[0] = 0
    indices, counts = random_set(case, counts_of(case))
    out = torch.full_like(case.q, float("nan"))
    assert not dense_verify(*case.inputs, out=out)[0].any()
    out.fill_(float("nan"))
    assert not sparse_verify(*case.inputs, indices, counts, out=out)[0].any()


def coded(case, length: int) -> None:
    """q = 0 and v[j] = bits of j: the output times the number of keys is a vector of exact counts."""
    case.q.zero_()
    bits = (torch.arange(case.v.shape[1], device=case.q.device)[:, None] >> torch.arange(case.q.shape[3], device=case.q.device)) & 1
    rows = bits[:, None, :].expand(-1, case.v.shape[2], -1).to(case.q.dtype)
    page_size = case.v_pool.shape[1]
    positions = torch.arange(length, device=case.q.device)
    case.v_pool[case.page_table[0][positions // page_size].long(), positions % page_size] = rows[:length]
    case.v[0] = rows


def test_coded_values_count_every_token(device: str) -> None:
    length, count = (120, 40) if device == "cpu" else (32000, 1024)
    heads = (4, 2, 16) if device == "cpu" else (64, 8, 128)
    case = build(device, torch.float32, (heads, 16, [length], [1], 1))
    coded(case, length + 1)
    indices, counts = random_set(case, [count])
    out = sparse_verify(*case.inputs, indices, counts)[0, 0] * (count + 1)
    keys = torch.cat([indices[0].long(), torch.tensor([length], device=device)])
    want = case.v[0, keys, 0].double().sum(0)
    assert torch.allclose(out.double(), want.expand_as(out), atol=0.05)
    # One neighbour instead of the right token is seen by the same check.
    free = [j for j in range(length) if j not in set(indices[0].tolist()) and j - 1 in set(indices[0].tolist())][0]
    wrong = indices.clone()
    wrong[0][wrong[0] == free - 1] = free
    out = sparse_verify(*case.inputs, wrong, counts)[0, 0] * (count + 1)
    assert not torch.allclose(out.double(), want.expand_as(out), atol=0.05)


def test_the_parity_check_catches_wrong_kernels(device: str) -> None:
    """Mutations: a wrong index, a visible future token, a stale tail, zeros, NaN."""
    case = build(device, torch.float16, ((4, 2, 16), 16, [60], [3], 3))
    indices, counts = random_set(case, [24])
    good = attention(case, indices, counts)
    check_parity(sparse_verify(*case.inputs, indices, counts), good)
    free = [j for j in range(60) if j not in set(indices[0].tolist()) and j - 1 in set(indices[0].tolist())][0]
    wrong = indices.clone()
    wrong[0][wrong[0] == free - 1] = free
    # Stale tail: the committed length is one too short and last round's rejected row is read.
    stale = case.lengths + 0
    stale -= 1
    mutants = {
        "one index off": sparse_verify(*case.inputs, wrong, counts),
        "one index missing": sparse_verify(*case.inputs, indices, counts - 1),
        "future token": attention(case, indices, counts, future=1).half(),
        "stale tail": sparse_verify(*case.inputs[:4], stale, case.num_tokens, indices, counts),
        "zeros": torch.zeros_like(case.q),
        "not a number": torch.full_like(case.q, float("nan")),
    }
    for name, out in mutants.items():
        with pytest.raises(AssertionError):
            check_parity(out, good)
            pytest.fail(f"{name} passed with {relative_rms(out, good)}")


def test_bad_input_is_refused_by_name(device: str) -> None:
    case = build(device, torch.float16, ((4, 2, 16), 16, [60], [3], 3))
    indices, counts = random_set(case, [24])
    q, k_pool, v_pool, page_table, lengths, num_tokens = case.inputs
    with pytest.raises(ValueError, match="q: expected 1 to 64 query rows"):
        many = q[:, :1].expand(1, 65, 4, 16).contiguous()
        sparse_verify(many, k_pool, v_pool, page_table, lengths, num_tokens, indices, counts)
    with pytest.raises(ValueError, match=r"lengths: expected dtype torch.int32"):
        dense_verify(q, k_pool, v_pool, page_table, lengths.long(), num_tokens)
    with pytest.raises(ValueError, match="k_pool: expected rows of equal distance"):
        dense_verify(q, k_pool.transpose(0, 1), v_pool, page_table, lengths, num_tokens)
    with pytest.raises(ValueError, match="head_dim"):
        narrow = k_pool[..., :8].contiguous()
        dense_verify(q[..., :8].contiguous(), narrow, narrow, page_table, lengths, num_tokens)
    with pytest.raises(ValueError, match=r"indices\[0, 23\]: expected 0 to 59, got 60"):
        indices[0, 23] = 60
        sparse_verify(*case.inputs, indices, counts, debug=True)
    with pytest.raises(ValueError, match="multiple of 2 query heads"):
        dense_verify(q[:, :, :3].contiguous(), k_pool, v_pool, page_table, lengths, num_tokens)
