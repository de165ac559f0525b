"""Slots whose rounds are begun ahead, on the reference models, over random arrivals, cancellations and plans of mode auto: what was
begun is what is finished, and every text is plain decoding's, or in mode sparse that of a sequence alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dustin.backends.numpy_reference.model import NumpyModel, random_model
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.generation import Session
from dustin.plans import Plan
from dustin.sequence import Sequence as Row
from dustin.slots import SlotEngine
from dustin.stats import Stats
from tests.unit.ahead_models import COUNTS, AheadModel
from tests.unit.engine_helpers import VOCAB, backend, greedy, target, tiny

CAPACITY, TEXTS = 90, 5


def near_target() -> NumpyModel:
    """The target's weights, disturbed: a draft that is often right."""
    model, rng = target(), np.random.default_rng(1)
    noisy = {name: w + 0.08 * w.std() * rng.standard_normal(w.shape) for name, w in model.weights.items()}  # type: ignore[attr-defined]
    return NumpyModel(tiny(), noisy, name="near")


NEAR, FAR = near_target(), random_model(tiny(2), seed=2)


def plan_at_random(engine: SlotEngine, rng: random.Random, options: EngineOptions) -> None:
    """Mode auto does what comes, for a few rounds each."""
    planner = engine.planner
    if planner is None:
        return
    now = [Plan("ar"), 0]

    def choose(*_: object) -> Plan:
        if now[1] <= 0:
            drafts = rng.randint(1, options.num_draft_tokens)
            block = Plan("exact", rng.choice([0, drafts]), rng.choice([1, 2, 5, 9]), rng.choice([options.budget, 9]))
            now[:] = [rng.choice([Plan("ar"), Plan("dense", drafts), block]), rng.choice([1, 2, 4])]
        now[1] -= 1
        planner._plan = planner._home = now[0]
        return now[0]

    planner.choose, planner.drafts_soon = choose, lambda *_: rng.random() < 0.5  # type: ignore[assignment]
    planner.record = lambda *_: None  # type: ignore[assignment]
    planner.as_dict = dict  # type: ignore[assignment]


def run(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    draft = rng.choice([NEAR, NEAR, FAR]) if mode != "ar" else None
    options = EngineOptions(
        mode=mode, budget=rng.choice([12, 24]), num_sink_tokens=2, num_recent_tokens=4, num_draft_tokens=rng.choice([1, 3, 5]),
        exact_block=rng.choice([1, 4, 9]), sparse_draft=rng.random() < 0.7, lookahead_lag=rng.choice([None, None, 0, 1]),
        prefill_chunk=16,
    )  # fmt: skip
    base = [rng.randrange(VOCAB) for _ in range(60)]
    prompts = [tuple(base[: rng.randrange(1, 50)] + [rng.randrange(VOCAB)] * rng.choice([0, 2])) for _ in range(TEXTS)]
    # One of a text of some schedules samples: what is begun for the others must not serve it.
    warm = rng.random() < 0.2 and mode in ("ar", "dense")
    samplings = [SamplingOptions(temperature=0.8 * (warm and not i), seed=i) for i in range(TEXTS)]
    asked = [RequestOptions(max_tokens=rng.choice([1, 2, 6, 15]), sampling=sampling) for sampling in samplings]
    session = Session(backend, AheadModel(target()), None, options, AheadModel(draft) if draft is not None else None)
    engine = session.make_engine(SlotEngine, session.resolve(), Stats())
    engine.open(target().new_cache(3, CAPACITY), 3)
    plan_at_random(engine, rng, options)
    rows: list[Row] = []
    while len(rows) < TEXTS or engine.active or engine.reading:
        while len(rows) < TEXTS and engine.free and rng.random() < 0.7:
            request = asked[len(rows)]
            rows.append(Row(rng.choice(engine.free), prompts[len(rows)], request, request.max_tokens, frozenset(), None))
            engine.admit(rows[-1])
        live = [row for row in rows if engine.rows[row.row] is row and (row.active or row.reading)]
        if live and rng.random() < 0.1:
            engine.release(rng.choice(live).row)
        engine.read_chunk(rng.choice([3, 7, 40]))
        if engine.active:
            engine.step()
    alone = Session(backend, target(), None, options, draft)
    for row, prompt, request in zip(rows, prompts, asked, strict=True):
        lossless = mode != "sparse" and not request.sampling.temperature
        want = greedy(prompt, request.max_tokens) if lossless else tuple(alone.generate(prompt, request).tokens)
        assert tuple(row.generated) == want[: len(row.generated)], (seed, options)
        assert row.finish_reason == "cancelled" or len(row.generated) == request.max_tokens


@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "exact", "auto"])
def test_what_is_begun_is_what_is_finished(mode: str) -> None:
    COUNTS.clear()
    for seed in range(12 if mode == "auto" else 6):
        run(seed, mode)
    kind = "steps" if mode == "ar" else "drafts"
    assert COUNTS[f"{kind} finished"] > 10 and COUNTS[f"{kind} begun"] >= COUNTS[f"{kind} finished"]
