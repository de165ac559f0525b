"""Relaxed acceptance and confidence routing: their exact laws, what refuses them, and draft length by confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from dustin.acceptance import RelaxedAcceptance, SpeculativeAcceptance
from dustin.backends.numpy_reference.sampling import warp_row
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.errors import UsageError
from dustin.generation import Session
from dustin.interfaces import Model
from tests.unit.engine_helpers import VOCAB, backend, draft, greedy, make_engine, run, target
from tests.unit.test_engine_sampling import chi_square

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 40)]
PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((61, 23, 47))]
# A set that holds everything: the sparse target's law is the dense one, and what is tested is the rule alone.
WHOLE = {"mode": "sparse", "budget": 400, "num_draft_tokens": 3, "sparse_draft": False}
Law = dict[tuple[int, ...], float]


def next_law(model: Model, tokens: list[int]) -> np.ndarray:
    """The warped distribution [V] after `tokens`, densely."""
    out = model.forward(backend.tokens([tokens]), [len(tokens)], model.new_cache(1, 128), logits="last")
    return warp_row(out.logits[0, -1], 0.8, 4, 1.0, 0.0)


def joint(second: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Law:
    """Law of three tokens: the first and the last are the target's own, the one in the middle was drafted.

    The first comes from the prompt's last row. Two remain, so one is drafted; kept or not, the last is never a draft.
    """
    law: Law = {}
    first = next_law(target(), PROMPT)
    for a in np.flatnonzero(first):
        known = [*PROMPT, int(a)]
        middle = second(next_law(target(), known), next_law(draft(), known))
        for b in np.flatnonzero(middle):
            last = next_law(target(), [*known, int(b)])
            for c in np.flatnonzero(last):
                law[(int(a), int(b), int(c))] = float(first[a] * middle[b] * last[c])
    return law


def observed(weight: float, route: float, draws: int = 1200) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    options = EngineOptions(relaxed_weight=weight, route_confidence=route, **WHOLE)  # type: ignore[arg-type]
    for start in range(0, draws, 200):
        requests = [
            RequestOptions(max_tokens=3, sampling=SamplingOptions(seed=start + i, temperature=0.8, top_k=4)) for i in range(200)
        ]
        engine = make_engine(options, "draft")
        engine.rule = RelaxedAcceptance(weight, route)
        counts.update(tuple(row.generated) for row in run(engine, [PROMPT] * 200, requests)[0])
    return counts


def fits(counts: Counter[tuple[int, ...]], law: Law) -> bool:
    statistic, freedom = chi_square(counts, law, sum(counts.values()))
    return statistic < freedom * (1 - 2 / (9 * freedom) + 4.3 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("weight", [0.3, 0.8])
def test_relaxed_drafted_positions_follow_the_mixture(weight: float) -> None:
    counts = observed(weight, 0.0)
    mixture = joint(lambda p, q: (1 - weight) * p + weight * q)
    assert set(counts) <= set(mixture) and fits(counts, mixture)
    assert not fits(counts, joint(lambda p, q: p))  # The test sees the difference.


def test_routing_takes_the_draft_where_it_is_sure_and_the_target_elsewhere() -> None:
    # Between the draft's confidences after the four first tokens that occur, so that some are routed and some are not.
    peaks = sorted(next_law(draft(), [*PROMPT, int(a)]).max() for a in np.flatnonzero(next_law(target(), PROMPT)))
    threshold = float(np.mean(peaks[1:3]))
    counts = observed(0.0, threshold)
    routed = joint(lambda p, q: q if q.max() >= threshold else p)
    assert set(counts) <= set(routed) and fits(counts, routed)
    assert not fits(counts, joint(lambda p, q: p)) and not fits(counts, joint(lambda p, q: q))


def test_both_numbers_zero_is_the_lossless_rule() -> None:
    for temperature in (0.0, 0.9):
        request = RequestOptions(max_tokens=30, sampling=SamplingOptions(temperature=temperature, seed=2))
        texts = []
        for rule in (SpeculativeAcceptance(), RelaxedAcceptance()):
            engine = make_engine(EngineOptions(mode="sparse", budget=24, num_sink_tokens=2, num_recent_tokens=6), "draft")
            engine.rule = rule
            texts.append([row.generated for row in run(engine, PROMPTS, request)[0]])
        assert texts[0] == texts[1]


def test_routing_everything_greedily_gives_the_drafts_text() -> None:
    engine = make_engine(EngineOptions(route_confidence=1e-9, **WHOLE), "draft")  # type: ignore[arg-type]
    engine.rule = RelaxedAcceptance(0.0, 1e-9)
    rows, _ = run(engine, PROMPTS[:1], RequestOptions(max_tokens=13))
    assert engine.stats.accepted == engine.stats.drafted > 0
    tokens = [*PROMPTS[0], rows[0].generated[0]]
    for token in rows[0].generated[1:4]:
        out = draft().forward(backend.tokens([tokens]), [len(tokens)], draft().new_cache(1, 128), logits="last")
        assert token == int(out.logits[0, -1].argmax())
        tokens.append(token)
    assert tuple(rows[0].generated) != greedy(PROMPTS[0], 13)


@pytest.mark.parametrize(("name", "mode"), [*product(("relaxed_weight", "route_confidence"), ("auto", "ar", "dense", "exact"))])
def test_lossless_modes_refuse_them(name: str, mode: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0.5.*mode '{mode}'.*--mode sparse"):
        EngineOptions(mode=mode, **{name: 0.5})  # type: ignore[arg-type]


def session(**options: object) -> Session:
    return Session(backend, target(), None, EngineOptions(**(WHOLE | options)), draft())  # type: ignore[arg-type]


def test_combinations_without_effect_are_refused() -> None:
    with pytest.raises(UsageError, match="temperature 0 has none"):
        session(relaxed_weight=0.5).generate(list(PROMPT))
    with pytest.raises(UsageError, match="needs a draft model"):
        session(route_confidence=0.5, drafter="lookup").generate(list(PROMPT))
    with pytest.raises(UsageError, match="needs a drafter with probabilities"):
        session(min_draft_confidence=0.5, drafter="lookup").generate(list(PROMPT))


def test_a_session_uses_the_rule_of_its_options() -> None:
    request = RequestOptions(max_tokens=12, sampling=SamplingOptions(temperature=0.9))
    plain, relaxed = session().generate(list(PROMPT), request), session(relaxed_weight=0.95).generate(list(PROMPT), request)
    assert relaxed.stats.acceptance_rate > plain.stats.acceptance_rate


@pytest.mark.parametrize("mode", ["dense", "exact", "sparse"])
@pytest.mark.parametrize("drafter", ["draft", "self"])
def test_draft_length_by_confidence_changes_no_greedy_token(mode: str, drafter: str) -> None:
    if drafter == "self" and mode != "dense":
        pytest.skip("the self drafter drafts for dense rounds")
    made = {}
    for least in (0.0, 0.02, 0.3):
        options = EngineOptions(
            mode=mode, budget=24 if mode != "sparse" else 400, num_sink_tokens=2, num_recent_tokens=6, min_draft_confidence=least
        )
        engine = make_engine(options, drafter)
        rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=30))
        assert [tuple(row.generated) for row in rows] == [greedy(prompt, 30) for prompt in PROMPTS]
        made[least] = engine.stats.drafted
    assert made[0.3] < made[0.02] < made[0.0]


@pytest.mark.parametrize("drafter", ["draft", "self"])
def test_draft_length_by_confidence_keeps_the_sampled_law(drafter: str) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    options = EngineOptions(
        mode="dense", budget=12, num_sink_tokens=1, num_recent_tokens=3, num_draft_tokens=3, min_draft_confidence=0.3
    )
    stopped = 0
    for start in range(0, 600, 200):
        requests = [
            RequestOptions(max_tokens=4, sampling=SamplingOptions(seed=start + i, temperature=0.8, top_k=4)) for i in range(200)
        ]
        engine = make_engine(options, drafter)
        counts.update(tuple(row.generated[:3]) for row in run(engine, [PROMPT] * 200, requests)[0])
        stopped += 3 * engine.stats.rounds * 200 - engine.stats.drafted
    assert stopped > 0
    assert fits(counts, joint(lambda p, q: p))


def test_a_batch_drafts_by_confidence_as_its_singles_do() -> None:
    options = EngineOptions(mode="dense", min_draft_confidence=0.1)
    requests = [RequestOptions(max_tokens=20, sampling=SamplingOptions(temperature=0.9, seed=i)) for i in range(3)]
    together, _ = run(make_engine(options, "draft"), PROMPTS, requests)
    for row, prompt, request in zip(together, PROMPTS, requests, strict=True):
        assert run(make_engine(options, "draft"), [prompt], request)[0][0].generated == row.generated


def test_without_host_values_the_acceptance_of_late_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "peek", lambda values: None)
    drafted = []
    for least in (0.0, 0.2):
        engine = make_engine(EngineOptions(mode="dense", min_draft_confidence=least), "draft")
        rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=40))
        assert [tuple(row.generated) for row in rows] == [greedy(prompt, 40) for prompt in PROMPTS]
        drafted.append(engine.stats.drafted)
    assert drafted[1] < 0.6 * drafted[0]


def test_a_server_may_start_with_relaxed_acceptance_before_any_request() -> None:
    assert session(relaxed_weight=0.5).resolve().relaxed_weight == 0.5


@pytest.mark.parametrize("route", [0.4, 1.0])
def test_a_greedy_row_is_routed_as_when_alone(route: float) -> None:
    """Beside a row that samples, or with a penalty, the law of a greedy row is one-hot: that is no confidence."""
    options = EngineOptions(route_confidence=route, **WHOLE)  # type: ignore[arg-type]
    requests = [RequestOptions(max_tokens=24), RequestOptions(max_tokens=24, sampling=SamplingOptions(temperature=1.0, seed=2))]

    def generated(rows: list[int]) -> list[list[int]]:
        engine = make_engine(options, "draft")
        engine.rule = RelaxedAcceptance(0.0, route)
        return [row.generated for row in run(engine, [PROMPTS[row] for row in rows], [requests[row] for row in rows])[0]]

    assert generated([0, 1]) == generated([0]) + generated([1])
    penalty = SamplingOptions(repetition_penalty=1.0 + 1e-9)
    requests.append(RequestOptions(max_tokens=24, sampling=penalty))
    engine = make_engine(options, "draft")
    engine.rule = RelaxedAcceptance(0.0, route)
    assert [row.generated for row in run(engine, [PROMPTS[0]], requests[2:])[0]] == generated([0])
