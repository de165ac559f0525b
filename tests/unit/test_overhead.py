"""What a round costs when the arrays cost nothing: the engine's own work."""

from __future__ import annotations

import time
from typing import Any

from dustin.acceptance import SpeculativeAcceptance
from dustin.config import EngineOptions, RequestOptions
from dustin.drafting import ModelDrafter
from dustin.engine import Engine
from dustin.interfaces import ForwardResult, HostVerdict, ModelSpec, TokenSet, Verdict
from dustin.selection import create_selector, draft_tap, heuristic, target_tap
from dustin.sequence import Sequence
from dustin.stats import Stats

SPEC = ModelSpec("null", "null", 8, 8, 2, 64, 100, 1 << 30, "none", "null", bytes_per_kv_token=1, weight_bytes=1)


class NullCache:
    capacity = 1 << 30
    num_bytes = 0

    def __init__(self, batch: int) -> None:
        self.lengths: tuple[int, ...] = (0,) * batch

    def rollback(self, lengths: Any) -> tuple[int, ...]:
        self.lengths = tuple(lengths)
        return self.lengths


class NullModel:
    spec = SPEC

    def new_cache(self, batch: int, capacity: int) -> NullCache:
        return NullCache(batch)

    def forward(self, tokens: Any, num_tokens: Any, cache: NullCache, **_: Any) -> ForwardResult:
        cache.lengths = tuple(a + b for a, b in zip(cache.lengths, num_tokens, strict=True))
        return ForwardResult(0, {0: 0})


class NullBackend:
    """Every array is 0; half of the drafts are accepted."""

    capture_seconds = 0.0
    prompt_rows = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0

    def select(self, *args: Any, **kwargs: Any) -> TokenSet:
        return TokenSet(0, 0)

    extend = select

    def accept_greedy(self, *args: Any) -> Verdict:
        return Verdict(0, 0, None, 0)

    def read(self, *args: Any, **kwargs: Any) -> HostVerdict:
        return HostVerdict((2,), ((1, 2, 3),), (True,))


def microseconds_a_round(rounds: int) -> float:
    """Fastest of five stretches, so that a busy machine does not decide."""
    options = EngineOptions(mode="sparse", budget=64)
    backend: Any = NullBackend()
    target: Any = NullModel()
    stats = Stats()
    drafter = ModelDrafter(backend, target, draft_tap(SPEC), options, stats)
    selector = create_selector(options, heuristic(SPEC, SPEC))
    engine = Engine(backend, target, drafter, selector, SpeculativeAcceptance(), target_tap(SPEC), options, stats)
    row = Sequence(0, [1] * 4096, RequestOptions(max_tokens=1 << 20), 1 << 20, frozenset(), None)
    engine.start([row], target.new_cache(1, 0))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(rounds):
            engine.step()
        best = min(best, (time.perf_counter() - began) / rounds)
    assert stats.rounds >= 5 * rounds
    return best * 1e6


def test_a_sparse_round_with_a_draft_model_costs_at_most_300_microseconds() -> None:
    assert microseconds_a_round(200) <= 300
