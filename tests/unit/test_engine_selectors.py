"""Whole engines with every selector: a batch equals its singles, a roomy budget equals dense decoding, layers can stay dense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dustin.config import SELECTORS, EngineOptions, RequestOptions
from dustin.engine import Engine
from dustin.generation import Session
from dustin.interfaces import TokenSet
from dustin.plans import Plan
from dustin.scoring import all_heads, heuristic
from dustin.sequence import Sequence as Row
from dustin.stats import Stats
from tests.unit.engine_helpers import backend, draft, greedy, make_engine, run, target

PROMPTS = [[(5 * i + 11 * j) % 47 for i in range(52 + 9 * j)] for j in range(3)]
REQUEST = RequestOptions(max_tokens=9)
SPARSE = EngineOptions(
    mode="sparse", drafter="draft", budget=24, num_sink_tokens=2, num_recent_tokens=6, num_draft_tokens=3, prefill_chunk=32,
    lookahead_lag=0,
)  # fmt: skip


def decode(options: EngineOptions, prompts=PROMPTS, scoring=None) -> tuple[list[list[int]], Stats]:
    stats = Stats()
    session = Session(backend, target(), None, options, draft())
    if scoring is not None:
        session._scorings = {("auto", True): scoring}
    rows, _ = run(session.make_engine(Engine, options, stats), prompts, REQUEST)
    return [list(row.generated) for row in rows], stats


@pytest.mark.parametrize("name", SELECTORS)
def test_a_batch_equals_its_singles(name: str) -> None:
    options = replace(SPARSE, selector=name)
    together, stats = decode(options)
    assert together == [decode(options, [prompt])[0][0] for prompt in PROMPTS]
    assert stats.kv_bytes_read > 0


@pytest.mark.parametrize("name", SELECTORS)
def test_a_budget_as_large_as_the_context_equals_dense_decoding(name: str) -> None:
    made, _ = decode(replace(SPARSE, selector=name, budget=200))
    assert made == [list(greedy(tuple(prompt), 9)) for prompt in PROMPTS]


def test_all_layers_dense_equals_dense_decoding_whatever_the_budget() -> None:
    made, stats = decode(replace(SPARSE, dense_layers=(0, 1, 2)))
    assert made == [list(greedy(tuple(prompt), 9)) for prompt in PROMPTS]
    fewer = decode(replace(SPARSE, dense_layers=(1,)))[1]
    assert decode(SPARSE)[1].kv_bytes_read < fewer.kv_bytes_read < stats.kv_bytes_read


def test_layers_that_choose_anew_are_counted_where_they_do() -> None:
    """In a dense round the set is the draft's alone, and no layer of the target chooses."""
    shared = heuristic(target().spec, draft().spec)
    own = replace(shared, reselection=all_heads(target().spec, [1]))
    read = {
        (mode, scoring is own): decode(replace(SPARSE, mode=mode), scoring=scoring)[1].kv_bytes_read
        for mode in ("sparse", "dense")
        for scoring in (shared, own)
    }
    assert read["dense", True] == read["dense", False] and read["sparse", True] > read["sparse", False]


@pytest.mark.parametrize("budget", [0, 12])
def test_dense_layers_are_counted_beyond_the_budget_in_use(budget: int) -> None:
    engine = make_engine(SPARSE, "none")
    engine.start([Row(0, PROMPTS[0], RequestOptions(max_tokens=4), 4, frozenset(), None)], target().new_cache(1, 200))
    engine.chosen, before = Plan("exact", 0, 4, budget), engine.stats.kv_bytes_read
    engine.count_verification([1], TokenSet(None, None, dense_layers=(1,)))
    token, layers, used = target().spec.bytes_per_kv_token, target().spec.num_layers, budget or SPARSE.budget
    assert engine.stats.kv_bytes_read - before == used * token + (len(PROMPTS[0]) - used) * token // layers


@pytest.mark.parametrize(
    "changes",
    [
        {"history_rows": 3},
        {"history_decay": 0.6},
        {"lookahead_decay": 0.7},
        {"smoothing": 3},
        {"refresh": 3, "pool": 32},
        {"history_rows": 2, "history_decay": 0.3, "smoothing": 5, "refresh": 2, "pool": 30, "dense_layers": (0,)},
    ],
)
def test_scoring_beyond_the_paper_keeps_batches_equal_to_singles(changes: dict) -> None:
    scoring = replace(heuristic(target().spec, draft().spec), **changes)
    together, _ = decode(SPARSE, scoring=scoring)
    assert together == [decode(SPARSE, [prompt], scoring)[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
@pytest.mark.parametrize("mode", ["exact", "rectified"])
def test_other_modes_run_with_every_selector(name: str, mode: str) -> None:
    options = replace(SPARSE, selector=name, mode=mode, exact_block=5, rectify_interval=4)
    made, _ = decode(options)
    if mode == "exact":
        assert made == [list(greedy(tuple(prompt), 9)) for prompt in PROMPTS]
    assert made == [decode(options, [prompt])[0][0] for prompt in PROMPTS]
