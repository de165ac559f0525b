"""One draft step by itself: the token it gives, and how sure the draft is of its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dustin.config import EngineOptions
from dustin.interfaces import Array, Backend, RoundState


def next_token(backend: Backend, logits: Array, state: RoundState, step: int, drafted: list[Array]) -> tuple[Array, Array | None]:
    """The draft token of one step [B, 1] and its distribution (None = greedy), under the target's own warps."""
    warp = state.warp
    if warp.greedy and not warp.penalised:
        return backend.argmax(logits), None
    inflight = backend.concat_tokens(drafted) if drafted else None
    probabilities = backend.probabilities(logits, warp, state.context, inflight)
    return backend.sample(probabilities, [row[step] for row in state.uniforms]), probabilities


class Confidence:
    """How sure the draft is of its run, step by step, where an option asks for it.

    A row's run ends before the draft that brings the product of top probabilities below `min_draft_confidence`. That looks at
    distributions only, never at the tokens drawn from them, so what is drafted is judged by the law it was drawn from and
    sampling stays exact. It needs values on the host; on a device that would wait, the row's acceptance of late decides alone.
    """

    def __init__(self, backend: Backend, options: EngineOptions, state: RoundState) -> None:
        self.num_drafts = state.num_drafts
        self._backend = backend
        self._least, self._kept = options.min_draft_confidence, options.route_confidence > 0
        self._may_stop = state.may_stop
        warp = state.warp
        self._context, self._soft = state.context, None
        if not warp.greedy or warp.penalised:
            # The one-hot law of a greedy row is sure of everything: its confidence is that of the softmax, as in a greedy batch.
            fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            cold: dict[str, Any] = {
                name: tuple(neutral if t == 0 else own for t, own in zip(warp.temperature, getattr(warp, name), strict=True))
                for name, neutral in fields.items()
            }
            self._soft = replace(warp, **cold) if 0 in warp.temperature else None
        self._parts: list[Array] = []
        self._product = [1.0] * len(state.active)

    def stops(self, logits: Array, distribution: Array | None, step: int, drafted: list[Array]) -> bool:
        """Account for the draft of `step`, which follows `drafted`; True when no row wants it, nor any after it."""
        if not self._least and not self._kept:
            return False
        if self._soft is not None:
            inflight = self._backend.concat_tokens(drafted) if drafted else None
            distribution = self._backend.probabilities(logits, self._soft, self._context, inflight)
        sureness = self._backend.confidence(logits, distribution)
        seen = self._backend.peek(sureness) if self._least else None
        if seen is not None:
            self._product = [before * now for before, now in zip(self._product, seen, strict=True)]
            pairs = zip(self.num_drafts, self._product, strict=True)
            self.num_drafts = tuple(min(most, step) if product < self._least else most for most, product in pairs)
            if self._may_stop and max(self.num_drafts) <= step:
                return True
        self._parts.append(sureness)
        return False

    def joined(self) -> Array | None:
        """[B, G] confidence of each draft, for routing."""
        return self._backend.concat_tokens(self._parts) if self._kept and self._parts else None
