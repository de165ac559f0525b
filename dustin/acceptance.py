"""Acceptance rules: which drafts the target keeps (METHOD section 5, step 4)."""

from __future__ import annotations

from collections.abc import Sequence

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
