"""Bytes that the kernels read, counted by access, against the bytes they must read; threadgroup memory against the plan.

The shape is the one the project is about: T = 6 query rows, 8 query heads a KV head, head_dim 128, bfloat16.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.metal.emulator.dropin import installed
from tests.metal.helpers import call
from tests.metal.reference import TOLERANCE, Case
from tests.metal.stock import stock_attention

SMALL = ("indices", "blocks", "counts", "lengths", "num_tokens")


def traffic(form: str, case: Case, splits: int | None, transform=None) -> tuple[float, float]:
    """(K, V and set bytes, all device bytes) read, each over its ideal."""
    from dustin.metal_kernels.dense_verify import dense_verify_bytes
    from dustin.metal_kernels.sparse_verify import sparse_verify_bytes

    with installed(transform=transform) as log:
        call(case, form, splits)
    shape = (case.head_dim, case.dtype, case.num_rows, case.num_heads, case.num_kv_heads)
    if form == "dense":
        ideal = dense_verify_bytes(*shape, list(case.lengths), list(case.num_tokens))
    else:
        counts = [len(case.rows_of(b, form)) for b in range(len(case.lengths))]
        ideal = sparse_verify_bytes(*shape, counts, list(case.num_tokens))
    loaded = log.reports[0].loaded
    assert loaded["k"] + loaded["v"] == ideal
    assert log.reports[0].touched["k"] + log.reports[0].touched["v"] == ideal
    with_set = ideal + sum(loaded.get(n, 0) for n in SMALL[:2])
    query = case.q.size * 2
    everything = sum(
        r.loaded[n]
        for r in log.reports
        for n in r.loaded
        if not n.endswith(("_shape", "_strides")) and n not in SMALL[2:] + ("scale",)
    )
    return with_set / ideal, everything / (ideal + query)


@pytest.mark.parametrize("form,limit", [("sparse", 1.1), ("blocks", 1.1), ("dense", 1.05)])
def test_each_row_is_read_once(form: str, limit: float) -> None:
    case = Case((400,), (6,), 6, 16, 2, 128, "bfloat16", 512, 256)
    kv, everything = traffic(form, case, 1)
    assert kv <= limit and everything <= limit, (kv, everything)


def test_splits_read_each_row_once_too() -> None:
    """With key splits only q is read again and the partial sums are added (counted in `everything`, not bounded here)."""
    kv, _ = traffic("sparse", Case((400,), (6,), 6, 16, 2, 128, "bfloat16", 512, 256), 4)
    assert kv <= 1.1


def test_a_second_read_is_counted() -> None:
    """A kernel that loads every staged row twice computes the same and fails here."""
    case = Case((70,), (3,), 3, 8, 2, 64, "float16", 90, 20)
    once = "if (present) x = *(const device vec<T, W>*)(source + offset + d);"
    twice = once + " if (present) x = *(const volatile device uint*)(source + offset + d) == 1u ? x : x;"

    def transform(kernel):
        assert once in kernel.source
        return dataclasses.replace(kernel, source=kernel.source.replace(once, twice))

    with pytest.raises(AssertionError, match="ideal|=="):
        traffic("sparse", case, 1, transform)


def test_stock_attention_reads_every_row_for_every_query() -> None:
    """The same shape through MLX's own kernel: K, V once per query row and head, 48 times the ideal."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((8, 6, 128), (1, 134, 128), (1, 134, 128)))
    _, report = stock_attention(q, k, v, "float16", causal=False)
    ideal = 2 * 134 * 128 * 2
    assert (report.loaded["keys"] + report.loaded["values"]) / ideal == 48


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["dense", "sparse", "blocks"])
def test_threadgroup_memory_is_as_declared(form: str, dtype: str, splits: int) -> None:
    from dustin.metal_kernels.plan import MAX_THREADGROUP_BYTES, blocks_plan, verify_plan

    case = Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, dtype, 90, 20)
    with installed() as log:
        call(case, form, splits)
    plan = (blocks_plan if form == "blocks" else verify_plan)(64, dtype, 4, 10, 2, 3, 20)
    assert log.reports[0].threadgroup_bytes == plan.threadgroup_bytes <= MAX_THREADGROUP_BYTES


def test_no_plan_exceeds_the_limits() -> None:
    """Every head_dim, dtype, T and group size: at most 32 KB and 512 threads, and every row has a SIMD-group."""
    from dustin.metal_kernels.plan import HEAD_DIMS, ITEM_BYTES, MAX_THREADGROUP_BYTES, blocks_plan, verify_plan

    for dim in HEAD_DIMS:
        for dtype in ITEM_BYTES:
            for rows in range(1, 17):
                for group in (1, 2, 4, 5, 6, 7, 8, 12, 16):
                    for make in (verify_plan, blocks_plan):
                        plan = make(dim, dtype, rows, 2 * group, 2, 4, 1024)
                        assert plan.threadgroup_bytes <= MAX_THREADGROUP_BYTES and plan.threads <= 512
                        held = plan.tile if make is blocks_plan else 8 * plan.simdgroups
                        assert held * plan.row_blocks >= plan.rows


def test_scores_and_selection_as_declared() -> None:
    import mlx.core as mx

    from dustin.metal_kernels import score_heads, select_tokens

    q, k = mx.random.normal((2, 1, 4, 64)), mx.random.normal((2, 150, 2, 64))
    n = mx.array([131, 40], mx.int32)
    with installed() as log:
        scores = score_heads.score_heads(q, k, (0, 4, 1, 2), 6, n, 0.125, splits=1)
        select_tokens.select_tokens(
            scores, None, n, budget=32, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0
        )
    memory = [r.threadgroup_bytes for r in log.reports]
    assert memory[:2] == list(score_heads.score_heads_threadgroup_bytes(64, "float32", 4))
    assert memory[2] == select_tokens.THREADGROUP_BYTES
    assert log.reports[0].loaded["k"] == score_heads.score_heads_bytes(64, "float32", 2, (131, 40))
    protected = 2 * (2 + 4) * 4
    assert log.reports[2].touched["target"] == select_tokens.select_tokens_bytes([131, 40], both=False) - protected


def test_append_moves_only_the_rows() -> None:
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv, append_kv_bytes

    cache, new = [mx.zeros((2, 20, 2, 64), mx.float16) for _ in "kv"], mx.ones((2, 4, 2, 64), mx.float16)
    mx.eval(cache)
    with installed() as log:
        append_kv(*cache, new, new, mx.array([3, 0], mx.int32), mx.array([2, 4], mx.int32))
    report = log.reports[0]
    moved = append_kv_bytes(64, "float16", 2, [2, 4])
    assert (
        report.loaded["k_new"] + report.loaded["v_new"] == moved == report.stored["k_cache"] + report.stored["v_cache"]
    )
