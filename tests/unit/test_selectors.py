"""Every selector on caches with planted structure: each must find what its signal shows, and nothing else decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dustin import config, selection
from dustin.backends.numpy_reference.backend import NumpyBackend
from dustin.backends.numpy_reference.cache import Cache
from dustin.config import SELECTORS, EngineOptions
from dustin.errors import UsageError
from dustin.interfaces import ForwardResult, ModelSpec, SelectionContext, Tap, TokenSet
from dustin.scoring import Scoring
from dustin.selection import create_selector
from dustin.selectors.peers import OBSERVED_ROWS, QUEST_PAGE, OracleSelector
from dustin.selectors.quota import QuotaSelector

LAYERS, HEADS, DIM, LENGTH, BUDGET = 3, 2, 8, 400, 64
SPEC = ModelSpec("planted", "test", LAYERS, HEADS, 1, DIM, 50, 4096, "float64", "planted", bytes_per_kv_token=2 * LAYERS * DIM * 8)
PROTECTED = {*range(4), *range(LENGTH - 8, LENGTH)}


def direction(number: int) -> np.ndarray:
    """One of DIM orthogonal directions, long enough for a softmax of nearly all mass."""
    return 12.0 * np.eye(DIM)[number]


class Planted:
    """A model of which only the cache counts; `forward` answers with given queries."""

    spec, scale, softcap = SPEC, 1.0, None

    def __init__(self, tokens: dict[int, dict[int, int]]) -> None:
        """`tokens`: layer -> {token: direction of its key}; all other keys are small noise."""
        rng = np.random.default_rng(3)
        self.cache = Cache(LAYERS, 1, LENGTH + 40, 1, DIM)
        for layer in range(LAYERS):
            keys = 0.05 * rng.standard_normal((1, LENGTH + 40, 1, DIM))
            for token, number in tokens.get(layer, {}).items():
                keys[0, token, 0] = direction(number)
            self.cache.write(layer, [LENGTH + 40], keys, keys)
        self.cache.advance([LENGTH + 40])
        self.cache.rollback([LENGTH])
        self.answers: dict[int, np.ndarray] = {}

    def grow(self, count: int) -> None:
        """`count` more tokens whose keys are along nothing planted."""
        for layer in range(LAYERS):
            rows = np.full((1, count, 1, DIM), 0.01)
            self.cache.write(layer, [count], rows, rows)
        self.cache.advance([count])

    def forward(self, tokens, num_tokens, cache, *, token_set=None, tap=None, logits="all"):
        cache.advance(num_tokens)
        return ForwardResult(None, self.answers)


def asking(number: int | None, rows: int = 1, layers: range = range(LAYERS)) -> dict[int, np.ndarray]:
    """Queries of all heads along one direction in each layer (None: along none of those that are planted)."""
    value = direction(DIM - 1 if number is None else number) / 12
    return {layer: np.tile(value, (1, rows, HEADS, 1)) for layer in layers}


EVERY = Tap({layer: tuple(range(HEADS)) for layer in range(LAYERS)})
SCORING = Scoring(EVERY, EVERY, 0.5)


def options(name: str, **changes) -> EngineOptions:
    return EngineOptions(selector=name, budget=BUDGET, num_sink_tokens=4, num_recent_tokens=8, **changes)


def context(target: Planted, draft: Planted | None = None, history: int | None = 0, lookahead: int | None = None, **more):
    shown = asking(lookahead, 3) if draft is not None else None
    made = SelectionContext(
        NumpyBackend(), target, target.cache, (LENGTH,), asking(history), EVERY, draft, draft.cache if draft else None, shown, EVERY
    )  # type: ignore[arg-type]
    return replace(made, **more)


def chosen(token_set: TokenSet) -> set[int]:
    return set(token_set.indices[0, : int(token_set.counts[0])].tolist())


def made(name: str, scoring: Scoring = SCORING, **changes):
    return create_selector(options(name, **changes), scoring, SPEC)


SEEN = {50: 0, 51: 0, 120: 0}
AHEAD = {200: 1, 201: 1, 310: 1}


@pytest.fixture
def pair() -> tuple[Planted, Planted]:
    return Planted(dict.fromkeys(range(LAYERS), SEEN)), Planted(dict.fromkeys(range(LAYERS), AHEAD))


def test_every_name_makes_a_selector_of_that_name() -> None:
    for name in SELECTORS:
        assert made(name).name == name


@pytest.mark.parametrize(
    ("name", "words"),
    [("history", "target layers"), ("h2o", "target layers"), ("streaming", ""), ("dense", ""), ("quest", "all heads")],
)
def test_statistics_name_what_is_scored_with(name, words) -> None:
    """Scoring heads of a profile only where they score."""
    said = made(name).describe(True)
    assert (words in said if words else not said) and ("target layers" in said) == (words == "target layers"), said


def test_a_selector_of_someones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options know it by its name, and only after it was added."""
    monkeypatch.setattr(config, "ADDED_SELECTORS", added := {})
    monkeypatch.setattr(selection, "ADDED_SELECTORS", added)
    with pytest.raises(UsageError, match="selector is 'mine', expected one of dustin, .*, dense$"):
        options("mine")
    selection.add_selector("mine", QuotaSelector)
    assert isinstance(made("mine"), QuotaSelector) and made("mine").name == "mine"
    with pytest.raises(UsageError, match="expected one of dustin, .*, dense, mine$"):
        options("thine")


@pytest.mark.parametrize("name", ["dustin", "", "a,b", None])
def test_names_that_no_selector_may_have(name) -> None:
    with pytest.raises(UsageError, match="the added selector's name is"):
        selection.add_selector(name, QuotaSelector)
    with pytest.raises(UsageError, match="expected a class or a function"):
        selection.add_selector("mine", "QuotaSelector")


@pytest.mark.parametrize(
    ("name", "finds", "misses"),
    [
        ("dustin", {*SEEN, *AHEAD}, set()),
        ("history", set(SEEN), set()),
        ("lookahead", set(AHEAD), set()),
        ("streaming", set(), {*SEEN, *AHEAD}),
    ],
)
def test_signals(pair, name, finds, misses) -> None:
    token_set = made(name).select(context(*pair, history=0, lookahead=1))
    got = chosen(token_set)
    assert len(got) == BUDGET and got >= PROTECTED
    assert got >= finds and not got & misses


def test_nothing_is_chosen_where_all_fits(pair) -> None:
    for name in SELECTORS:
        assert create_selector(replace(options(name), budget=LENGTH), SCORING, SPEC).select(context(*pair, lookahead=1)) is None


def test_cost_counts_keys_of_the_kv_heads_that_score(pair) -> None:
    selector = made("dustin")
    selector.select(context(*pair, lookahead=1))
    keys = LENGTH * LAYERS * DIM * 8
    assert (selector.cost.target_bytes, selector.cost.draft_bytes) == (keys, keys)
    streaming = made("streaming")
    streaming.select(context(*pair, lookahead=1))
    assert (streaming.cost.target_bytes, streaming.cost.draft_bytes) == (0, 0)


def test_specattn_reads_no_more_than_the_mass_asks_for(pair) -> None:
    few = chosen(made("specattn").select(context(*pair, lookahead=1)))
    assert few >= set(AHEAD) | PROTECTED and len(few) < BUDGET
    spread = made("specattn").select(context(*pair, lookahead=None))
    assert len(chosen(spread)) == BUDGET  # mass all over the place: the budget is the most


def test_top_mass_shrinks_the_hybrid_too(pair) -> None:
    got = chosen(made("dustin", top_mass=0.5).select(context(*pair, lookahead=1)))
    assert got >= PROTECTED and len(got) < BUDGET and got & set(SEEN) and got & set(AHEAD)


def test_dense_layers_come_from_options_or_scoring(pair) -> None:
    ctx = context(*pair, lookahead=1)
    assert made("dustin").select(ctx).dense_layers == ()
    assert made("dustin", replace(SCORING, dense_layers=(1,))).select(ctx).dense_layers == (1,)
    assert made("dustin", replace(SCORING, dense_layers=(1,)), dense_layers=(0, 2)).select(ctx).dense_layers == (0, 2)
    assert made("dense").select(ctx) is None


def test_h2o_remembers_what_was_looked_at_long_ago(pair) -> None:
    target = Planted({layer: {40: 0, 90: 2, 91: 2} for layer in range(LAYERS)})
    selector = made("h2o")
    selector.select(context(target, history=2))
    for _ in range(3):
        got = chosen(selector.select(context(target, history=None)))
    assert got >= {90, 91} and 40 not in got
    assert got >= set(range(LENGTH - BUDGET // 2, LENGTH))
    plain = made("history")
    assert not {90, 91} & chosen(plain.select(context(target, history=None)))


def test_h2o_forgets_a_row_that_holds_a_new_sequence() -> None:
    target = Planted({layer: {90: 2} for layer in range(LAYERS)})
    selector = made("h2o")
    selector.select(context(target, history=2))
    selector.restart({0})
    assert 90 not in chosen(selector.select(context(target, history=None)))


def test_snapkv_is_fixed_by_the_prompts_end_and_grows() -> None:
    target = Planted({0: {60: 0}, 1: {160: 0}, 2: {260: 0}})
    selector = made("snapkv")
    assert selector.prompt_rows == OBSERVED_ROWS
    first = selector.select(context(target, history=None, prompt=asking(0, OBSERVED_ROWS)))
    assert [60 in chosen(first.by_layer[0]), 160 in chosen(first.by_layer[1]), 260 in chosen(first.by_layer[2])] == [True] * 3
    assert 60 not in chosen(first.by_layer[1])
    target.grow(5)
    later = selector.select(replace(context(target, history=2), lengths=(LENGTH + 5,)))
    assert chosen(later.by_layer[0]) == chosen(first.by_layer[0]) | set(range(LENGTH, LENGTH + 5))


def test_quest_takes_pages_layer_by_layer() -> None:
    target = Planted({0: {70: 0}, 1: {170: 0}, 2: {270: 0}})
    got = made("quest").select(context(target, history=0))
    for layer, token in ((0, 70), (1, 170), (2, 270)):
        page = set(range(token // QUEST_PAGE * QUEST_PAGE, token // QUEST_PAGE * QUEST_PAGE + QUEST_PAGE))
        assert page <= chosen(got.by_layer[layer])
    assert chosen(got.by_layer[0]) != chosen(got.by_layer[1])


def test_oracle_sees_what_the_window_will_look_at() -> None:
    target = Planted({0: {80: 0, 300: 2}, 1: {80: 0, 180: 2}, 2: {80: 0}})
    target.answers = asking(2, 4)
    selector = made("oracle")
    got = chosen(selector.select(context(target, history=0, inflight=np.zeros((1, 4), int), num_inflight=(4,))))
    assert got >= {180, 300} and 80 not in got
    assert target.cache.lengths == (LENGTH,)
    apart = OracleSelector("oracle", options("oracle"), SCORING, list(range(LAYERS)), HEADS, per_layer=True)
    sets = apart.select(context(target, history=0, inflight=np.zeros((1, 4), int), num_inflight=(4,))).by_layer
    assert 300 in chosen(sets[0]) and 180 in chosen(sets[1]) and 300 not in chosen(sets[1])


def test_history_decay_keeps_older_rounds_in_view() -> None:
    target = Planted({layer: {40: 0, 90: 2} for layer in range(LAYERS)})
    scoring = replace(SCORING, history_decay=0.8)
    selector = made("history", scoring)
    selector.select(context(target, history=2))
    got = chosen(selector.select(context(target, history=0)))
    assert {40, 90} <= got
    selector.restart({0})
    assert 90 not in chosen(selector.select(context(target, history=0)))


def test_lookahead_decay_keeps_what_older_drafts_looked_at() -> None:
    target, draft = (Planted({layer: {40: 0, 90: 2} for layer in range(LAYERS)}) for _ in range(2))
    for decay, kept in ((0.0, False), (0.8, True)):
        selector = made("lookahead", replace(SCORING, lookahead_decay=decay))
        selector.select(context(target, draft, lookahead=2))
        got = chosen(selector.select(context(target, draft, lookahead=0)))
        assert 40 in got and (90 in got) == kept
        selector.restart({0})
        assert 90 not in chosen(selector.select(context(target, draft, lookahead=0)))


def test_a_repeated_selection_changes_no_memory() -> None:
    target = Planted({layer: {40: 0, 90: 2} for layer in range(LAYERS)})
    selectors = [made("history", replace(SCORING, history_decay=0.5)) for _ in range(2)]
    for selector in selectors:
        selector.select(context(target, history=2))
    selectors[1].select(context(target, history=0, repeat=True))
    sets = [selector.select(context(target, history=None)) for selector in selectors]
    assert chosen(sets[0]) == chosen(sets[1])


def test_a_pool_is_scored_between_refreshes_and_new_tokens_are_in_it() -> None:
    target = Planted({layer: {40: 0, 300: 2} for layer in range(LAYERS)})
    selector = made("history", replace(SCORING, refresh=3, pool=80))
    selector.select(context(target, history=0))
    whole = selector.cost.target_bytes
    grown = replace(context(target, history=2), lengths=(LENGTH + 6,))
    target.grow(6)
    second = chosen(selector.select(grown))
    assert selector.cost.target_bytes < whole / 2
    assert 300 not in second  # outside the pool until the next refresh
    assert second >= set(range(LENGTH - 2, LENGTH + 6))
    selector.select(grown)
    assert 300 in chosen(selector.select(grown))


def test_a_new_sequence_is_scored_whole_once_and_pooled_again() -> None:
    target = Planted({layer: {40: 0, 300: 2} for layer in range(LAYERS)})
    selector = made("history", replace(SCORING, refresh=50, pool=80))
    costs = []
    for number in range(6):
        if number == 2:
            selector.restart({0})
        selector.select(context(target, history=0))
        costs.append(selector.cost.target_bytes)
    assert costs[0] == costs[2] and costs[1] == costs[3] == costs[4] == costs[5] < costs[0] / 2


def test_smoothing_lifts_the_neighbours_of_what_is_looked_at() -> None:
    target = Planted({layer: {100: 0, 200: 0} for layer in range(LAYERS)})
    got = chosen(made("history", replace(SCORING, smoothing=5)).select(context(target, history=0)))
    assert {98, 99, 100, 101, 102, 198, 199, 200, 201, 202} <= got


def test_dense_layers_that_are_not_there_are_named() -> None:
    with pytest.raises(UsageError, match="dense_layers names layer 3, expected 0 to 2"):
        made("dustin", dense_layers=(1, 3))


def test_every_layer_selectors_need_the_targets_shape() -> None:
    with pytest.raises(UsageError, match="needs the target's spec"):
        create_selector(options("quest"), SCORING)
