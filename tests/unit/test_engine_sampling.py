"""Sampling laws of the whole engine: speculation and the two-level rule draw from the dense distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from dustin import exact
from dustin.acceptance import SpeculativeAcceptance
from dustin.backends.numpy_reference.sampling import warp_row
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from tests.unit.engine_helpers import VOCAB, backend, make_engine, run, target

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 40)]
WARP = {"temperature": 0.7, "top_k": 4}


def joint_law(length: int) -> dict[tuple[int, ...], float]:
    """Exact probabilities of all continuations of `length` tokens, by enumeration with dense attention."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            store = target().new_cache(1, 64)
            tokens = [*PROMPT, *prefix]
            logits = target().forward(backend.tokens([tokens]), [len(tokens)], store, logits="last").logits[0, -1]
            warped = logits / WARP["temperature"]
            kept = np.argsort(-warped, kind="stable")[: int(WARP["top_k"])]
            weights = np.exp(warped[kept] - warped[kept].max())
            for token, weight in zip(kept, weights / weights.sum(), strict=True):
                grown[(*prefix, int(token))] = mass * float(weight)
        law = grown
    return law


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], draws: int) -> tuple[float, int]:
    """Pearson's statistic with small cells pooled, and its degrees of freedom."""
    big = {key: p for key, p in law.items() if p * draws >= 5}
    cells = [(counts[key], p * draws) for key, p in big.items()]
    rest = draws - sum(seen for seen, _ in cells), draws - sum(want for _, want in cells)
    if rest[1] >= 5:
        cells.append(rest)
    return sum((seen - want) ** 2 / want for seen, want in cells), len(cells) - 1


@pytest.mark.parametrize(
    ("mode", "drafter"), [("dense", "draft"), ("dense", "self"), ("exact", "draft"), ("exact", "lookup"), ("exact", "none")]
)
def test_sampled_text_has_the_dense_law(mode: str, drafter: str) -> None:
    draws, length = 1200, 3
    options = EngineOptions(
        mode=mode,
        budget=12,
        num_sink_tokens=1,
        num_recent_tokens=3,
        num_draft_tokens=2,
        exact_block=3,
        lookahead_lag=1,
    )
    law = joint_law(length)
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, 100):
        requests = [
            RequestOptions(max_tokens=length, sampling=SamplingOptions(seed=start + i, **WARP))  # type: ignore[arg-type]
            for i in range(100)
        ]
        rows, _ = run(make_engine(options, drafter), [PROMPT] * 100, requests)
        counts.update(tuple(row.generated) for row in rows)
    assert set(counts) <= set(law)
    statistic, freedom = chi_square(counts, law, draws)
    # Far in the tail (about 1e-5) of chi-square by the Wilson-Hilferty cube: seeds are fixed, so this never flakes.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.3 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def law_with_end(length: int, eos: int, temperature: float, top_p: float) -> dict[tuple[int, ...], float]:
    """As `joint_law`, with a nucleus, and texts that end at `eos`."""
    law: dict[tuple[int, ...], float] = {}
    open_ends: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for prefix, mass in open_ends.items():
            store, tokens = target().new_cache(1, 64), [*PROMPT, *prefix]
            logits = target().forward(backend.tokens([tokens]), [len(tokens)], store, logits="last").logits[0, -1]
            p = warp_row(logits, temperature, 0, top_p, 0.0)
            for token in np.flatnonzero(p):
                (law if token == eos else grown)[(*prefix, int(token))] = mass * float(p[token])
        open_ends = grown
    return law | open_ends


@pytest.mark.parametrize(("mode", "drafter"), [("dense", "draft"), ("exact", "draft"), ("exact", "none")])
def test_a_nucleus_and_an_end_token_keep_the_dense_law(mode: str, drafter: str) -> None:
    draws, length = 750, 4
    sampling = {"temperature": 0.45, "top_p": 0.6}
    eos = max(law_with_end(2, -1, **sampling).items(), key=lambda item: item[1])[0][1]
    law = law_with_end(length, eos, **sampling)
    assert 0.05 < sum(mass for text, mass in law.items() if eos in text) < 0.95
    options = EngineOptions(
        mode=mode, budget=12, num_sink_tokens=1, num_recent_tokens=3, num_draft_tokens=2, exact_block=3, lookahead_lag=1
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, 250):
        requests = [
            RequestOptions(max_tokens=length, sampling=SamplingOptions(seed=start + i, **sampling))  # type: ignore[arg-type]
            for i in range(250)
        ]
        rows, _ = run(make_engine(options, drafter), [PROMPT] * 250, requests, frozenset({int(eos)}))
        counts.update(tuple(row.generated) for row in rows)
        assert {row.finish_reason for row in rows} == {"stop", "length"}
    assert set(counts) <= set(law)
    statistic, freedom = chi_square(counts, law, draws)
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.3 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_the_check_above_can_fail() -> None:
    law = joint_law(2)
    skewed = Counter({key: 0 for key in law})
    keys = sorted(law, key=lambda key: -law[key])
    draws = 1200
    for key in keys:
        skewed[key] = round(draws * law[key])
    skewed[keys[0]] += 100
    skewed[keys[1]] -= 100
    statistic, freedom = chi_square(skewed, law, draws)
    assert statistic > freedom * (1 - 2 / (9 * freedom) + 4.3 * (2 / (9 * freedom)) ** 0.5) ** 3


class WrongRule(SpeculativeAcceptance):
    """The rule with other uniforms: those of `change`."""

    def __init__(self, change: Callable[[float], float]) -> None:
        self._change = change

    def judge(self, backend, drafts, logits, warp, context, accept_uniforms, next_uniforms):
        wrong = [[self._change(u) for u in row] for row in accept_uniforms]
        return super().judge(backend, drafts, logits, warp, context, wrong, next_uniforms)


@pytest.mark.parametrize(
    "change", [lambda u: 0.0, lambda u: 1 - (1 - u) / 8], ids=["keeps every sparse token", "refuses too often"]
)
def test_a_wrong_dense_check_is_seen(change: Callable[[float], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The two-level law above fails where the dense check alone is wrong: sparse rounds stay as they are."""
    right = exact._dense_check

    def wrong(engine, *rest):
        rule, engine.rule = engine.rule, WrongRule(change)
        try:
            return right(engine, *rest)
        finally:
            engine.rule = rule

    monkeypatch.setattr(exact, "_dense_check", wrong)
    draws, length = 1200, 3
    options = EngineOptions(
        mode="exact", budget=12, num_sink_tokens=1, num_recent_tokens=3, num_draft_tokens=2, exact_block=3, lookahead_lag=1
    )
    law, counts = joint_law(length), Counter()
    for start in range(0, draws, 100):
        requests = [
            RequestOptions(max_tokens=length, sampling=SamplingOptions(seed=start + i, **WARP))  # type: ignore[arg-type]
            for i in range(100)
        ]
        rows, _ = run(make_engine(options, "none"), [PROMPT] * 100, requests)
        counts.update(tuple(row.generated) for row in rows)
    statistic, freedom = chi_square(counts, law, draws)
    assert statistic > freedom * (1 - 2 / (9 * freedom) + 4.3 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    options = EngineOptions(mode="dense", num_draft_tokens=3)

    def text(seed: int) -> list[int]:
        request = RequestOptions(max_tokens=20, sampling=SamplingOptions(temperature=1.0, seed=seed))
        return run(make_engine(options, "draft"), [PROMPT], request)[0][0].generated

    assert text(3) == text(3) != text(4)
