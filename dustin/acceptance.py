"""Acceptance rules: which drafts the target keeps (METHOD section 5, step 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dustin.interfaces import Array, Backend, Drafts, Verdict, WarpBatch


class SpeculativeAcceptance:
    """Lossless with respect to the distribution that the logits stand for: greedy match, or accept with min(1, p/q)."""

    name = "speculative"

    def judge(
        self,
        backend: Backend,
        drafts: Drafts,
        logits: Array,
        warp: WarpBatch,
        context: Sequence[Sequence[int]] | None,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """A Verdict; no host read."""
        tokens = drafts.tokens if drafts.tokens is not None else backend.tokens([[]] * len(drafts.num_drafts))
        if warp.greedy and not warp.penalised:
            return backend.accept_greedy(tokens, drafts.num_drafts, logits)
        target = backend.probabilities(logits, warp, context, drafts.tokens)
        return backend.accept_sampled(
            tokens, drafts.num_drafts, drafts.probabilities, target, logits, accept_uniforms, next_uniforms
        )


@dataclass(frozen=True)
class RelaxedAcceptance(SpeculativeAcceptance):
    """Lossy: lets the draft have a say. With both numbers 0 it is SpeculativeAcceptance.

    `weight` w (DIVERSED, 2604.07622): at drafted positions the law is (1 - w) p + w q. A draft is kept with probability
    min(1, ((1 - w) p + w q) / q), so u q < (1 - w) p + w q, which is u' q < p with u' = (u - w) / (1 - w): the ordinary test
    with other uniforms. What is drawn after a refusal is the same too: max((1 - w) p + w q - q, 0) = (1 - w) max(p - q, 0).
    Rows at temperature 0 are left alone. `route` P (R-Stitch, 2507.17307): a draft whose own distribution peaks at P or more
    is kept unchecked, so that position's law is q.
    """

    name = "relaxed"
    weight: float = 0.0
    route: float = 0.0

    def judge(
        self,
        backend: Backend,
        drafts: Drafts,
        logits: Array,
        warp: WarpBatch,
        context: Sequence[Sequence[int]] | None,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """A Verdict; no host read."""
        if self.route and drafts.tokens is not None and drafts.confidence is not None:
            logits = backend.favour(logits, drafts.tokens, drafts.num_drafts, drafts.confidence, self.route)
        if self.weight:
            accept_uniforms = [
                [(u - self.weight) / (1 - self.weight) for u in row] if temperature else row
                for row, temperature in zip(accept_uniforms, warp.temperature, strict=True)
            ]
        return super().judge(backend, drafts, logits, warp, context, accept_uniforms, next_uniforms)
