"""Replayed continuations: dense against dense is exact, sets change rows as an engine would, numbers are what hands compute."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench import fidelity_stats
from dustin.backends.numpy_reference.set_ops import compare_logits
from dustin.config import EngineOptions
from dustin.reading import continue_greedily, read_prompts
from dustin.replay import Measured, Reading, Replay
from dustin.scoring import heuristic
from dustin.selection import create_selector
from tests.unit.engine_helpers import backend, draft, greedy, target

PROMPTS = [[(7 * i + 3 * j) % 48 for i in range(60 + 5 * j)] for j in range(2)]
SCORING = heuristic(target().spec, draft().spec)


def make_replay(count: int = 13, gamma: int = 3, valid=None) -> Replay:
    readings, prompts = [], []
    for model in (target(), draft()):
        reading = Reading(model, model.new_cache(2, 120))
        prompts.append(read_prompts(backend, model, reading.cache, PROMPTS, reading.tap, 16))
        readings.append(reading)
    texts, _ = continue_greedily(backend, target(), readings[0].cache, prompts[0].logits, count, frozenset())
    return Replay(backend, *readings, texts, gamma, prompts[0].last, prompts[0].rows, valid)


def selector(name: str, budget: int = 44, **changes):
    options = EngineOptions(selector=name, budget=budget, num_sink_tokens=2, num_recent_tokens=8, **changes)
    return create_selector(options, SCORING, target().spec)


def test_greedy_continuations_are_those_of_single_steps() -> None:
    cache = target().new_cache(2, 120)
    reading = Reading(target(), cache)
    prompts = read_prompts(backend, target(), cache, PROMPTS, reading.tap, 16)
    texts, ends = continue_greedily(backend, target(), cache, prompts.logits, 6, frozenset())
    assert texts == [list(greedy(tuple(row), 6)) for row in PROMPTS]
    assert ends == [6, 6] and cache.lengths == tuple(len(row) for row in PROMPTS)
    _, ends = continue_greedily(backend, target(), cache, prompts.logits, 6, frozenset([texts[0][2]]))
    assert ends[0] == texts[0].index(texts[0][2])


def test_dense_against_dense_differs_in_nothing() -> None:
    replay = make_replay()
    got = replay.run(selector("dense"), SCORING.draft)
    assert got.kl.shape == (3, 2, 4) and got.same.all()
    assert np.abs(got.kl).max() < 1e-12 and got.recovery.min() == 1.0
    assert got.summary()["perplexity_ratio"] == pytest.approx(1.0)
    assert got.bytes_per_round == got.dense_bytes_per_round


def test_a_sets_rows_are_those_of_the_model_with_that_set() -> None:
    replay = make_replay()
    got = replay.run(selector("streaming"), SCORING.draft)
    cache = replay.target.cache
    cache.rollback(replay.start)
    first = replay.rounds[0]
    chosen = backend.select(None, None, cache.lengths, budget=44, num_sink_tokens=2, num_recent_tokens=8, num_draft_selected=0)
    out = target().forward(first.tokens, [4, 4], cache, token_set=chosen)
    want = compare_logits(first.logits, out.logits, first.following)
    assert np.allclose(got.kl[0], want.kl) and got.kl[0].max() > 0


def test_every_run_starts_from_the_same_rows() -> None:
    replay = make_replay()
    first = replay.run(selector("dustin"), SCORING.draft)
    replay.run(selector("streaming"), SCORING.draft)
    again = replay.run(selector("dustin"), SCORING.draft)
    assert np.array_equal(first.kl, again.kl)
    replay.close()
    assert replay.target.cache.lengths == replay.start


@pytest.mark.parametrize("name", ["dustin", "history", "lookahead", "specattn", "streaming", "h2o", "snapkv", "quest", "oracle"])
def test_every_selector_replays(name: str) -> None:
    got = make_replay().run(selector(name), SCORING.draft)
    assert np.isfinite(got.kl).all() and (got.kl > -1e-9).all()
    assert 0 < got.recovery.min() and got.recovery.max() < 1
    assert got.bytes_per_round > 0


def test_the_oracle_recovers_most() -> None:
    replay = make_replay(count=25)
    names = ("oracle", "dustin", "history", "streaming")
    recovery = {name: replay.run(selector(name), SCORING.draft).recovery.mean() for name in names}
    assert max(recovery, key=recovery.__getitem__) == "oracle"


def test_bytes_count_sets_dense_layers_and_scoring() -> None:
    replay = make_replay(count=5)
    spec = target().spec
    plain = replay.run(selector("streaming"), SCORING.draft)
    assert plain.bytes_per_round == 44 * spec.bytes_per_kv_token and plain.scoring_bytes_per_round == 0
    one = replay.run(selector("history", dense_layers=(1,)), SCORING.draft)
    mean = sum(replay.start) / 2
    scored = len(SCORING.target.heads) * mean * spec.bytes_per_kv_token / spec.num_layers / 2
    layers = (44 * 2 + mean) * spec.bytes_per_kv_token / spec.num_layers
    assert one.bytes_per_round == pytest.approx(scored + layers, rel=1e-3)


def test_rectified_rows_are_dense_again() -> None:
    replay = make_replay(count=25)
    loose = replay.run(selector("streaming"), SCORING.draft)
    tight = replay.run(selector("streaming"), SCORING.draft, rectify=4)
    assert np.array_equal(loose.kl[0], tight.kl[0]) and not np.array_equal(loose.kl[1:], tight.kl[1:])
    cache = replay.target.cache
    dense = target().new_cache(2, 120)
    rows = [[*p, *np.concatenate([r.tokens[b] for r in replay.rounds]).tolist()] for b, p in enumerate(PROMPTS)]
    target().forward(backend.tokens(rows), [len(row) for row in rows], dense, logits="none")
    for b, row in enumerate(rows):
        assert np.allclose(cache.keys[2][b, : len(row)], dense.keys[2][b, : len(row)])


def test_a_lagged_lookahead_starts_with_history_alone() -> None:
    replay = make_replay(count=13)
    now, late = (replay.run(selector("dustin"), SCORING.draft, lag=lag) for lag in (0, 1))
    history = replay.run(selector("history"), SCORING.draft)
    assert np.array_equal(late.kl[0], history.kl[0])
    assert not np.array_equal(now.kl, late.kl)


def test_rows_after_the_end_of_an_answer_are_left_out() -> None:
    got = make_replay(count=13, valid=[13, 6]).run(selector("streaming"), SCORING.draft)
    assert got.valid[:, 0].all() and got.valid[:, 1].sum() == 5


def measured(kl, same, gap, reference, other, recovery) -> Measured:
    arrays = [np.array(x, dtype=float).reshape(2, 1, 2) for x in (kl, same, gap, reference, other)]
    valid = np.array([True, True, True, False]).reshape(2, 1, 2)
    return Measured(arrays[0], arrays[1] > 0, *arrays[2:], np.array(recovery).reshape(2, 1), valid, 10.0, 1.0, 100.0)


def test_numbers_by_hand() -> None:
    """Four rows, the last one not valid: agreement 1/3, one hard flip (gap 0.6), one near tie (gap 0.5)."""
    got = measured([0.1, 0.2, 0.3, 9], [1, 0, 0, 0], [5, 0.6, 0.5, 9], [-1, -2, -3, 0], [-1.5, -2, -2.8, -9], [0.9, 0.7])
    numbers = got.summary()
    assert numbers["agreement"] == pytest.approx(1 / 3) and numbers["hard_flips"] == pytest.approx(1 / 3)
    assert numbers["kl"] == pytest.approx(0.2) and numbers["recovery_mean"] == pytest.approx(0.8)
    assert numbers["perplexity_ratio"] == pytest.approx(math.exp((0.5 + 0 - 0.2) / 3))
    assert numbers["run_length"] == pytest.approx(1.5) and numbers["rows"] == 3
    assert fidelity_stats.first_disagreement(got) == 1.0


def test_logits_are_compared_by_hand() -> None:
    p, q = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
    rows = compare_logits((p + 4.0)[None, None], (q - 2.0)[None, None], np.array([[2]]))
    assert rows.kl[0, 0] == pytest.approx(0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.5) + 0.2 * math.log(0.2 / 0.3))
    assert not rows.same[0, 0] and rows.gap[0, 0] == pytest.approx(math.log(0.5 / 0.3))
    assert rows.reference_logprob[0, 0] == pytest.approx(math.log(0.2)) and rows.logprob[0, 0] == pytest.approx(math.log(0.3))


def test_intervals_hold_the_mean_and_need_two_documents() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(1.0, 0.1, 50) for _ in range(8)]
    low, high = fidelity_stats.interval(parts, lambda x: float(x.mean()))
    assert low < 1.0 < high and high - low < 0.2
    assert fidelity_stats.interval(parts[:1], lambda x: float(x.mean())) == []


def test_accuracy_beside_dense() -> None:
    got = fidelity_stats.accuracy([1, 1, 0, 0.5], [1, 0, 1, 1], [0, 0, 1, 1])
    assert got["accuracy"] == 0.625 and got["accuracy_dense"] == 0.75
    assert got["accuracy_of_dense"] == pytest.approx(2.5 / 3, abs=1e-4) and got["kept_of_dense"] == pytest.approx(1 / 3, abs=1e-4)
