"""What `--mode auto` does: lossless modes only, chosen by size first and by measured speed after."""

from __future__ import annotations

from collections.abc import Sequence

from dustin.interfaces import ModelSpec

# A speculative round must promise this much before it is tried at all: KV bytes of a plain step over weight bytes.
_MIN_KV_SHARE = 0.4
_PROBES = 3
_MEASURED_STEPS = 4
_RETRY_STEPS = 128


class AutoPlanner:
    """Chooses `ar` or `dense` (classic lossless speculation) before each round.

    Plain decoding is measured first; speculation is tried where the KV cache weighs enough (or a draft model was given) and
    kept only while it is measured faster. On a CPU a 5-row verification costs about two decodes, so short contexts stay
    with plain decoding.
    """

    def __init__(self, spec: ModelSpec, drafter: str, budget: int) -> None:
        self._spec = spec
        self._drafter = drafter
        self._budget = budget
        self._rates: dict[str, list[float]] = {"ar": [], "dense": []}
        self._steps = 0
        self._retry_at = 0

    def choose(self, lengths: Sequence[int]) -> str:
        """The mode of the next round for rows with these committed lengths (tokens)."""
        if not self._worth_trying(lengths):
            return "ar"
        self._steps += 1
        if len(self._rates["ar"]) < _PROBES:
            return "ar"
        if len(self._rates["dense"]) < _PROBES:
            return "dense"
        if self._rate("dense") > self._rate("ar"):
            return "dense"
        if self._steps >= self._retry_at:
            # Text changes along the way; a short second look costs a few rounds in a hundred.
            self._retry_at = self._steps + _RETRY_STEPS
            self._rates["dense"] = self._rates["dense"][:1]
        return "ar"

    def record(self, mode: str, tokens: int, seconds: float) -> None:
        """What the last round brought."""
        if seconds > 0:
            self._rates[mode] = [*self._rates[mode], tokens / seconds][-_MEASURED_STEPS:]

    def _rate(self, mode: str) -> float:
        # The best of the last few: the first round of a mode pays for warm-up.
        rates = self._rates[mode]
        return sorted(rates)[len(rates) // 2]

    def _worth_trying(self, lengths: Sequence[int]) -> bool:
        if self._drafter == "draft":
            return True
        if self._drafter == "none" or not lengths:
            return False
        if self._drafter == "self" and max(lengths) < 2 * self._budget:
            return False
        return sum(lengths) * self._spec.bytes_per_kv_token >= _MIN_KV_SHARE * self._spec.weight_bytes
