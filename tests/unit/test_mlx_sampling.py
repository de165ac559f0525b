"""Selection, warps, samplers and acceptance of the MLX backend against the numpy specification, beyond the parity table."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm")):
    pytest.skip('needs mlx and mlx-lm: pip install "dustin-llm[mlx]"', allow_module_level=True)

import mlx.core as mx

import dustin.backends.mlx_metal as package
from dustin.backends.mlx_metal.backend import create
from dustin.backends.mlx_metal.set_ops import descending
from dustin.backends.numpy_reference.backend import create as create_numpy
from dustin.interfaces import HostVerdict, TokenSet, WarpBatch

OURS, SPEC = create("auto"), create_numpy()
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
WARPS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "top_k": 9}, {"temperature": 0.0, "repetition_penalty": 9.0},
    {"temperature": 1e-6}, {"temperature": 1e-45, "top_p": 0.9}, {"temperature": 5e-324}, {"temperature": 1e300},
]  # fmt: skip


def warp(count: int, **changes: Any) -> WarpBatch:
    return WarpBatch(**{name: (changes.get(name, value),) * count for name, value in NEUTRAL.items()})


def rows_of(token_set: TokenSet) -> list[list[int]]:
    return [row[:n] for row, n in zip(token_set.indices.tolist(), token_set.counts.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("given", ["both", "target", "draft", "none"])
def test_select_equals_the_specification(seed: int, given: str) -> None:
    """Ties, NaN and -inf among the scores, an empty row, scores narrower and wider than the rows."""
    rng = np.random.default_rng(seed)
    lengths = [40, 7, 120, 0, 33]
    scores = [(rng.integers(0, 5, (5, width)) / 5).astype(np.float32) for width in (int(rng.integers(90, 150)), 120)]
    scores[0][0, 3], scores[0][2, 7:9], scores[1][2, 11] = -np.inf, np.nan, np.nan
    target, draft = (part if given in ("both", name) else None for part, name in zip(scores, ("target", "draft"), strict=True))
    options = {"budget": 20, "num_draft_selected": int(rng.integers(0, 16)), "num_sink_tokens": 2, "num_recent_tokens": 5}
    arrays = [None if part is None else mx.array(part) for part in (target, draft)]
    assert rows_of(OURS.select(*arrays, lengths, **options)) == rows_of(SPEC.select(target, draft, lengths, **options))


def test_extend_and_replace_rows_equal_the_specification() -> None:
    indices, counts = np.array([[0, 3, 6, 9, 12], [1, 2, 4, -1, -1]], dtype=np.int32), np.array([5, 3], dtype=np.int32)
    ours, theirs = TokenSet(mx.array(indices), mx.array(counts)), TokenSet(indices, counts)
    for starts, stops in (([13, 5], [15, 9]), ([13, 5], [13, 5]), ([13, 5], [8, 2]), ([20, 6], [21, 6])):
        assert rows_of(OURS.extend(ours, starts, stops)) == rows_of(SPEC.extend(theirs, starts, stops))
    grown = OURS.extend(ours, [13, 5], [15, 9])
    assert rows_of(OURS.replace_set_rows(ours, grown, [False, True])) == [[0, 3, 6, 9, 12], [1, 2, 4, 5, 6, 7, 8]]
    with pytest.raises(ValueError, match="expected 2 of each"):
        OURS.extend(ours, [1], [2])


@pytest.mark.parametrize("changes", WARPS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_probabilities_equal_the_specification(changes: dict[str, Any], tied: bool) -> None:
    """NaN and +inf among the logits, ties, tokens in flight."""
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((2, 4, 31))
    logits = np.round(logits) if tied else logits
    logits[1, 2, 3], logits[1, 3, 4] = np.nan, np.inf
    logits = logits.astype(np.float32)
    context, inflight, options = [[1, 2, 2, 9], [7]], np.array([[9, 4, 4], [0, 0, 30]], dtype=np.int32), warp(2, **changes)
    want = SPEC.probabilities(logits.astype(np.float64), options, context, inflight)
    got = np.array(OURS.probabilities(mx.array(logits), options, context, mx.array(inflight)))
    assert np.array_equal(got > 0, want > 0)
    assert np.allclose(got, want, atol=1e-6)


def test_bad_warps_are_refused() -> None:
    logits = mx.zeros((1, 2, 9))
    for context, inflight, message in (
        (None, mx.array([[1]]), "context is None"),
        ([[1]], None, "inflight has 0"),
        ([[9]], mx.array([[1]]), "is 9, expected one below .* 9"),
    ):
        with pytest.raises(ValueError, match=message):
            OURS.probabilities(logits, warp(1, repetition_penalty=1.2), context, inflight)
    with pytest.raises(ValueError, match="warp has 2 rows"):
        OURS.probabilities(logits, warp(2), None, None)


def test_sample_is_the_inverse_cdf() -> None:
    p = mx.broadcast_to(mx.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]), (6, 1, 6))
    assert OURS.sample(p, [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])[:, 0].tolist() == [1, 1, 3, 3, 4, 4]
    with pytest.raises(ValueError, match="uniforms"):
        OURS.sample(p[:1], [1.0])


def test_a_large_vocabulary_is_drawn_as_float64_does() -> None:
    """152,064 tokens: the specification's token, or one whose cumulative share is within 1e-6; never one that was cut."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((8, 1, 152064))).astype(np.float32)
    options, uniforms = warp(8, top_k=5000, top_p=0.95), rng.random(8).tolist()
    mine = OURS.probabilities(mx.array(logits), options, None, None)
    its = SPEC.probabilities(logits.astype(np.float64), options, None, None)
    drawn = OURS.sample(mine, uniforms)[:, 0].tolist()
    for b, token in enumerate(drawn):
        cumulative = np.cumsum(its[b, 0])
        assert its[b, 0, token] > 0
        assert cumulative[token] - its[b, 0, token] - 1e-6 <= uniforms[b] <= cumulative[token] + 1e-6
    assert np.array_equal(np.array(mine) > 0, its > 0)


@pytest.mark.parametrize("seed", range(5))
def test_accept_greedy_equals_the_specification(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((4, 4, 3))).astype(np.float32)
    drafts, counts = rng.integers(0, 3, (4, 3)), [3, 2, 0, 1]
    logits[3, 3], logits[2, 0, 1] = np.nan, np.nan
    ours = OURS.read(OURS.accept_greedy(OURS.tokens(drafts.tolist()), counts, mx.array(logits)))
    theirs = SPEC.read(SPEC.accept_greedy(drafts, counts, logits))
    assert ours.finite == theirs.finite == (True, True, False, True)
    assert ours.num_accepted == theirs.num_accepted and ours.tokens[:2] == theirs.tokens[:2]
    nothing = OURS.accept_greedy(OURS.tokens([[], []]), [0, 0], mx.array([[[0.0, 1.0]], [[3.0, 3.0]]]))
    assert OURS.read(nothing).tokens == ((1,), (0,))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("one_hot", [False, True])
def test_accept_sampled_equals_the_specification(seed: int, one_hot: bool) -> None:
    rng = np.random.default_rng(seed)
    # Eighths are exact in fp32, so both backends compare the same numbers.
    p, q = (rng.multinomial(8, np.ones(4) / 4, (5, n)) / 8 for n in (4, 3))
    drafts, counts = rng.integers(0, 4, (5, 3)), [3, 3, 2, 1, 0]
    u, last = rng.random((5, 3)).tolist(), rng.random(5).tolist()
    arrays = (None if one_hot else mx.array(q.astype(np.float32)), mx.array(p.astype(np.float32)), mx.array(p.astype(np.float32)))
    got = OURS.read(OURS.accept_sampled(OURS.tokens(drafts.tolist()), counts, *arrays, u, last))
    assert got == SPEC.read(SPEC.accept_sampled(drafts, counts, None if one_hot else q, p, p, u, last))
    assert isinstance(got, HostVerdict) and isinstance(got.tokens[0][0], int) and isinstance(got.finite[0], bool)


def test_speculative_sampling_keeps_the_law() -> None:
    """The first emitted token follows p whatever q is: chi-square over 20,000 rounds, 3 degrees of freedom."""
    rounds = 20000
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.55, 0.25, 0.15, 0.05])
    rng = np.random.default_rng(5)
    wide = [mx.broadcast_to(mx.array(x.astype(np.float32)), (rounds, n, 4)) for x, n in ((q, 1), (p, 2))]
    drafts = OURS.sample(wide[0], rng.random(rounds).tolist())
    uniforms = rng.random((rounds, 1)).tolist(), rng.random(rounds).tolist()
    verdict = OURS.accept_sampled(drafts, [1] * rounds, *wide, wide[1], *uniforms)
    seen = np.bincount(np.array(verdict.tokens[:, 0]), minlength=4)
    assert ((seen - rounds * p) ** 2 / (rounds * p)).sum() < 16.3
    assert ((seen - rounds * q) ** 2 / (rounds * q)).sum() > 1000


def test_read_with_logprobs_equals_the_specification() -> None:
    rng = np.random.default_rng(2)
    logits = np.round(3 * rng.standard_normal((2, 3, 9))).astype(np.float32)
    drafts = np.array([[int(logits[0, 0].argmax()), 0], [1, 2]])
    got = OURS.read(OURS.accept_greedy(OURS.tokens(drafts.tolist()), [2, 0], mx.array(logits)), mx.array(logits), 4)
    want = SPEC.read(SPEC.accept_greedy(drafts, [2, 0], logits), logits.astype(np.float64), 4)
    assert got.tokens == want.tokens
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token, a.top_tokens) == (b.token, b.top_tokens)
            assert [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=1e-5)
    zero = OURS.read(OURS.accept_greedy(OURS.tokens([[], []]), [0, 0], mx.array(logits[:, :1])), mx.array(logits[:, :1]), 0)
    assert zero.logprobs[0][0].top_tokens == ()
    with pytest.raises(ValueError, match="logits is None"):
        OURS.read(OURS.accept_greedy(OURS.tokens([[]]), [0], mx.zeros((1, 1, 3))), None, 1)


def test_rows_are_gathered_joined_and_padded() -> None:
    q = {3: mx.arange(24.0).reshape(2, 3, 2, 2)}
    for rows in ([2, 0], mx.array([2, 0])):
        assert mx.array_equal(OURS.gather_rows(q, rows)[3], mx.stack([q[3][0, 2], q[3][1, 0]])[:, None])
        both = OURS.gather_rows(q, rows, 2)[3]
        assert mx.array_equal(both, mx.stack([q[3][0, 1:3], q[3][1, mx.array([0, 0])]]))
    assert OURS.concat_queries([q, q])[3].shape == (2, 6, 2, 2)
    with pytest.raises(ValueError, match="layers"):
        OURS.concat_queries([q, {4: q[3]}])
    mixed = OURS.replace_rows(q, {3: -q[3]}, [True, False])[3]
    assert mx.array_equal(mixed[0], -q[3][0]) and mx.array_equal(mixed[1], q[3][1])
    a = mx.ones((2, 2, 5))
    assert OURS.stack_rows([a, a]).shape == (2, 4, 5)
    rows = OURS.ragged_rows([[(a, 1), (2 * a, 0)], []])
    assert rows.shape == (2, 2, 5) and rows[:, :, 0].tolist() == [[1, 2], [0, 0]]
    assert OURS.ragged_rows([[], []]).shape == (2, 0, 0)
    with pytest.raises(ValueError, match="row 2"):
        OURS.ragged_rows([[(a, 2)]])
    assert OURS.tokens([[1, 2], [3]]).tolist() == [[1, 2], [3, 0]]
    assert OURS.concat_tokens([OURS.tokens([[1]]), OURS.tokens([[2, 3]])]).tolist() == [[1, 2, 3]]
    assert OURS.peak_memory_bytes() > 2**20


def test_descending_is_stable_and_puts_nan_last() -> None:
    x = mx.array([[0.0, 2.0, -0.0, float("nan"), 2.0, -float("inf"), float("inf")]])
    assert descending(x).tolist() == [[6, 1, 4, 0, 2, 5, 3]]


def test_openblas_goes_before_mlx_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []

    def load(name: str, mode: int) -> object:
        loaded.append((name, mode))
        return object()

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(package.ctypes, "CDLL", load)
    assert not package.load_fast_blas() and not loaded  # MLX is imported: too late
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert package.load_fast_blas() and loaded == [("libopenblas.so.0", package.ctypes.RTLD_GLOBAL)]

    def absent(name: str, mode: int) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(package.ctypes, "CDLL", absent)
    assert not package.load_fast_blas()
