"""Who joins slots beside rounds that were begun ahead: no step is taken again for it, and no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dustin.acceptance import SpeculativeAcceptance
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.drafting import NoDrafter
from dustin.interfaces import ForwardResult, KVCache, Tap
from dustin.selection import create_selector, target_tap
from dustin.sequence import Sequence as Row
from dustin.slots import SlotEngine
from dustin.stats import Stats
from tests.unit.engine_helpers import VOCAB, backend, greedy, target

PROMPTS = [tuple((7 * i + 3 * n) % VOCAB for i in range(n)) for n in (21, 9, 14)]


@dataclass
class Begun:
    """A step that is taken when it is finished."""

    model: Any
    tokens: Any
    cache: KVCache
    finished: bool = False

    def finish(self, num_tokens: Sequence[int]) -> ForwardResult:
        self.finished = True
        return self.model.plain.forward(self.tokens, num_tokens, self.cache, logits="all")


class Ahead:
    """The random model, whose plain steps can be begun ahead."""

    def __init__(self) -> None:
        self.plain = target()
        self.spec, self.scale = self.plain.spec, self.plain.scale
        self.begun: list[Begun] = []
        self.steps = 0

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return self.plain.new_cache(batch, capacity)

    def forward(self, tokens: Any, num_tokens: Sequence[int], cache: KVCache, **more: Any) -> ForwardResult:
        self.steps += more.get("logits") == "all"
        return self.plain.forward(tokens, num_tokens, cache, **more)

    def forward_ahead(self, tokens: Any, num_tokens: Sequence[int], cache: KVCache, *, tap: Tap | None = None) -> Begun:
        self.begun.append(Begun(self, tokens, cache))
        return self.begun[-1]


def opened(model: Ahead, slots: int = 3) -> SlotEngine:
    options = EngineOptions(mode="ar", budget=20, num_sink_tokens=2, num_recent_tokens=5, prefill_chunk=16)
    engine = SlotEngine(
        backend, model, NoDrafter(), create_selector(options), SpeculativeAcceptance(), target_tap(model.spec), options, Stats()
    )
    engine.open(model.new_cache(slots, 64), slots)
    return engine


def join(engine: SlotEngine, slot: int, count: int, temperature: float = 0.0) -> Row:
    request = RequestOptions(max_tokens=count, sampling=SamplingOptions(temperature=temperature, seed=5))
    row = Row(slot, PROMPTS[slot], request, count, frozenset(), None)
    engine.admit(row)
    while row.reading:
        engine.read_chunk(16)
    return row


def test_a_step_that_was_begun_is_not_taken_again_for_who_joins() -> None:
    model = Ahead()
    engine = opened(model)
    rows = [join(engine, 0, 20)]
    for _ in range(3):
        engine.step()
    rows.append(join(engine, 1, 12))
    given = [len(engine.step()) for _ in range(3)]
    # It waits while the step begun before it is used, and takes part from then on.
    assert given == [1, 2, 2]
    rows.append(join(engine, 2, 9))
    while engine.active:
        engine.step()
    assert [tuple(row.generated) for row in rows] == [greedy(p, n) for p, n in zip(PROMPTS, (20, 12, 9), strict=True)]
    assert all(begun.finished for begun in model.begun)
    # The first round alone.
    assert model.steps == 1


def test_one_who_samples_joins_greedy_rows() -> None:
    def answer(others: int) -> tuple[int, ...]:
        engine = opened(Ahead())
        for slot in range(1, 1 + others):
            join(engine, slot, 14)
        for _ in range(2 if others else 0):
            engine.step()
        row = join(engine, 0, 10, temperature=0.9)
        while engine.active:
            engine.step()
        return tuple(row.generated)

    assert answer(0) == answer(1) == answer(2)
