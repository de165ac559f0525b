"""Which options mean together what: every `auto` but the mode's replaced, and combinations that cannot work refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dustin.config import EngineOptions, RequestOptions
from dustin.errors import UsageError


def resolve(options: EngineOptions, has_draft: bool, requests: Sequence[RequestOptions]) -> EngineOptions:
    """Options with every `auto` of drafter and lag replaced, for a session with or without a draft model and these requests.

    Raise UsageError for a combination that cannot work.
    """
    drafter = options.drafter
    if drafter == "auto":
        if has_draft:
            drafter = "draft"
        else:
            drafter = {"auto": "self", "dense": "self", "ar": "none", "exact": "none"}.get(options.mode, "lookup")
    if drafter == "draft" and not has_draft:
        raise UsageError("drafter is 'draft' but no draft model is loaded: give --draft-model, or --drafter lookup or self")
    if options.mode == "ar":
        drafter = "none"
    if drafter == "none" and options.mode in ("dense", "auto"):
        raise UsageError(f"mode {options.mode!r} needs a drafter, got 'none': use --mode ar for plain decoding")
    if drafter == "self" and options.mode == "exact":
        drafter = "none"  # In exact mode the sparse target proposes the block itself, one token a round.
    if drafter == "self" and options.mode in ("sparse", "rectified"):
        raise UsageError(
            f"drafter 'self' drafts with the attention that mode {options.mode!r} verifies with, so it gains nothing: "
            "use --mode dense or exact, or --drafter lookup or a draft model"
        )
    by_draft = options.selector in ("lookahead", "specattn")
    if by_draft and drafter != "draft" and options.mode in ("sparse", "rectified", "exact"):
        raise UsageError(
            f"selector {options.selector!r} scores with a draft model's queries: give --draft-model or --select history"
        )
    if options.route_confidence and drafter != "draft":
        raise UsageError(f"route_confidence needs a draft model to be sure of its tokens, got drafter {drafter!r}")
    if options.min_draft_confidence and drafter in ("none", "lookup"):
        raise UsageError(f"min_draft_confidence needs a drafter with probabilities, got {drafter!r}: draft or self")
    lag = options.lookahead_lag
    sampled = any(request.sampling.temperature > 0 for request in requests)
    if options.mode == "exact" and sampled and drafter == "draft":
        if lag == 0:
            raise UsageError("exact sampling needs lookahead_lag 1, got 0: the set must not depend on the drafts it judges")
        lag = 1
    if options.relaxed_weight and requests and not sampled:
        raise UsageError("relaxed_weight mixes distributions, and temperature 0 has none: give --temp too, or leave it out")
    return replace(options, drafter=drafter, lookahead_lag=lag or 0)
