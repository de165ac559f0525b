"""score_heads, select_tokens and append_kv under the checker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal.emulator.dropin import from_numpy, installed, to_numpy
from tests.metal.helpers import to_mlx
from tests.metal.reference import TOLERANCE, expected_scores, expected_set, relative_rms, round_to

ORDERS = ("forward", "reverse", "shuffled")


def _int32(values):
    import mlx.core as mx

    return mx.array(values, mx.int32)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "dtype,dim",
    [("float32", 64), ("float16", 64), ("bfloat16", 64), ("float16", 96), ("float16", 128), ("bfloat16", 256)],
)
def test_scores(dtype: str, dim: int, splits: int) -> None:
    """Heads of two KV heads, one alone in its group; rows past the end are NaN; one length is zero."""
    from dustin.metal_kernels.score_heads import score_heads

    rng = np.random.default_rng(dim)
    lengths, heads = (131, 40, 0), (0, 4, 1, 2)
    q = round_to(rng.normal(size=(3, 3, 4, dim)), dtype)
    k = round_to(rng.normal(size=(3, 150, 2, dim)), dtype)
    for b, n in enumerate(lengths):
        k[b, n:] = np.nan
    with installed(order=ORDERS[splits % 3]) as log:
        got = np.array(
            score_heads(to_mlx(q, dtype), to_mlx(k, dtype), heads, 6, _int32(lengths), dim**-0.5, splits=splits)
        )
    want = expected_scores(q, k, heads, 3, lengths, dim**-0.5)
    assert not log.findings
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    assert relative_rms(got[np.isfinite(want)], want[np.isfinite(want)]) <= TOLERANCE["float32"]


def test_scores_of_many_queries_and_sequences() -> None:
    """All heads of 7 a group times 5 rows, ten sequences."""
    from dustin.metal_kernels.score_heads import score_heads

    rng = np.random.default_rng(1)
    lengths = tuple(range(1, 41, 4))
    q, k = rng.normal(size=(10, 5, 14, 64)).astype(np.float32), rng.normal(size=(10, 41, 2, 64)).astype(np.float32)
    with installed() as log:
        got = np.array(score_heads(to_mlx(q, "float32"), to_mlx(k, "float32"), range(14), 14, _int32(lengths), 0.125))
    want = expected_scores(q, k, tuple(range(14)), 7, lengths, 0.125)
    assert not log.findings
    assert relative_rms(got[np.isfinite(want)], want[np.isfinite(want)]) <= TOLERANCE["float32"]


def select(
    target, draft, lengths, budget: int, sinks: int, recent: int, num_draft: int, order="forward", path="kernel"
):
    import mlx.core as mx

    from dustin.metal_kernels import fallback, select_tokens

    choose = select_tokens.select_tokens if path == "kernel" else fallback.select_tokens
    arrays = [None if x is None else mx.array(x) for x in (target, draft)]
    quota = {"num_sink_tokens": sinks, "num_recent_tokens": recent, "num_draft_selected": num_draft}
    with installed(order=order) as log:
        indices, counts = choose(*arrays, _int32(lengths), budget=budget, **quota)
    assert not log.findings
    counts = np.array(counts)
    assert np.array(indices).shape == (len(lengths), budget)
    return [np.array(indices)[b, : counts[b]].tolist() for b in range(len(lengths))]


def ties(rng, shape: tuple[int, ...]) -> np.ndarray:
    """Scores with many equals, negatives and both zeros."""
    x = rng.integers(-3, 12, size=shape).astype(np.float32) * 2.0**-20
    return np.where(x == 0, rng.choice([0.0, -0.0], size=shape), x).astype(np.float32)


@pytest.mark.parametrize("order,path", [*((o, "kernel") for o in ORDERS), ("forward", "array")])
@pytest.mark.parametrize("num_draft", [0, 20, 36])
def test_quota_rule(num_draft: int, order: str, path: str) -> None:
    """Lengths below, at and above the budget; ties everywhere."""
    rng = np.random.default_rng(num_draft)
    lengths = (1300, 48, 49, 20, 333)
    target, draft = ties(rng, (5, 1301)), ties(rng, (5, 1301))
    got = select(target, draft, lengths, 48, 4, 8, num_draft, order, path)
    assert got == [expected_set(target[b], draft[b], n, 48, 4, 8, num_draft) for b, n in enumerate(lengths)]


@pytest.mark.parametrize("path", ["kernel", "array"])
def test_missing_scores(path: str) -> None:
    """The other score takes the share; with neither the recent window fills the budget."""
    rng = np.random.default_rng(3)
    x, lengths = ties(rng, (9, 200)), (200, 150, 10, 199, 99, 40, 16, 17, 18)
    assert select(x, None, lengths, 16, 2, 3, 9, path=path) == [
        expected_set(x[b], x[b], n, 16, 2, 3, 0) for b, n in enumerate(lengths)
    ]
    assert select(None, x, lengths, 16, 2, 3, 1, path=path) == [
        expected_set(x[b], x[b], n, 16, 2, 3, 11) for b, n in enumerate(lengths)
    ]
    assert select(None, None, lengths, 16, 2, 3, 9, path=path) == [
        list(range(n)) if n <= 16 else [0, 1, *range(n - 14, n)] for n in lengths
    ]


def test_protected_tokens_must_fit() -> None:
    with pytest.raises(ValueError, match="budget"):
        select(np.zeros((1, 50), np.float32), None, (50,), 8, 4, 8, 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("path", ["kernel", "array"])
def test_append(dtype: str, path: str) -> None:
    """Ragged rows land in place, bit for bit; rows that do not fit change nothing and say so."""
    import mlx.core as mx

    from dustin.metal_kernels import append_kv, fallback

    rng = np.random.default_rng(5)
    shape = (4, 20, 2, 64)
    caches = [round_to(rng.normal(size=shape), dtype) for _ in "kv"]
    new = [round_to(rng.normal(size=(4, 4, 2, 64)), dtype) for _ in "kv"]
    lengths, tokens = (3, 18, 16, 0), (4, 2, 4, 0)
    overflow = (3, 18, 18, 0)
    append = append_kv.append_kv if path == "kernel" else fallback.append_kv
    for starts, ends in ((lengths, [7, 20, 20, 0]), (overflow, [7, 20, -1, 0])):
        arrays = [to_mlx(x, dtype) for x in caches]
        mx.eval(arrays)
        address = to_numpy(arrays[0]).ctypes.data
        with installed() as log:
            k, v, at, got = append(*arrays, *(to_mlx(x, dtype) for x in new), _int32(starts), _int32(tokens))
        assert not log.findings
        assert np.array(at).tolist() == list(starts) and np.array(got).tolist() == ends
        if path == "kernel":
            assert to_numpy(k).ctypes.data == address
        for out, old, rows in ((k, caches[0], new[0]), (v, caches[1], new[1])):
            want = old.copy()
            for b in range(4):
                if ends[b] >= 0:
                    want[b, starts[b] : starts[b] + tokens[b]] = rows[b, : tokens[b]]
            assert np.array_equal(np.array(out.astype(mx.float32)), want)


def test_append_into_a_strided_cache() -> None:
    """A view of a larger buffer is written in place too; its other rows stay as they were."""
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv

    base = [from_numpy(np.arange(2 * 24 * 2 * 64, dtype=np.float32).reshape(2, 24, 2, 64), "float32") for _ in "kv"]
    views = [x[:, :20] for x in base]
    mx.eval(base, views)
    new = mx.full((2, 1, 2, 64), -1.0)
    with installed():
        k, _, _, _ = append_kv(*views, new, new, _int32([2, 19]), _int32([1, 1]))
    got = np.array(k)
    assert (got[0, 2] == -1).all() and (got[1, 19] == -1).all() and (got == -1).sum() == 2 * 2 * 64
