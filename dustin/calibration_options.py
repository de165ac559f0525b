"""What a calibration is asked for, and what is refused before prompts are read for minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dustin.errors import UsageError
from dustin.interfaces import CompactModel, Measures, Model, ModelSpec
from dustin.scoring import ReadBytes, Scoring, budget_within, heuristic
from dustin.selection import COMPACT_RANKS, largest_rank

# Budgets at equal bytes go in these steps, so that a backend that keeps a graph a shape finds it again.
STEP = 64


@dataclass(frozen=True)
class CalibrationOptions:
    """`context` and `tokens` are tokens a document; a round of any candidate may read the bytes of `allowance` tokens' keys and
    values, scoring and dense layers included; `seconds` bounds the search. With `own_sets` the profile is one of sets that layers
    choose themselves."""

    context: int = 16384
    documents: int = 12
    tokens: int = 192
    allowance: int = 1536
    num_draft_tokens: int = 5
    seconds: float = 240.0
    seed: int = 0
    prefill_chunk: int = 512
    own_sets: bool = False


def starts(target: ModelSpec, draft: ModelSpec | None, context: int) -> list[Scoring]:
    """The heuristic, and its forms that score within a pool, which read less."""
    base = heuristic(target, draft)
    return [replace(base, refresh=refresh, pool=min(base.pool, context // 4)) for refresh in (1, 4, 8, 16)]


def too_few_bytes(options: CalibrationOptions, context: int) -> UsageError:
    """The error that says so."""
    return UsageError(
        f"the bytes of {options.allowance} tokens leave nothing to read at context {context}: raise --allowance, or calibrate at a "
        "shorter --context"
    )


def check(options: CalibrationOptions, backend: Measures, target: Model, draft: Model | None) -> None:
    """Raise UsageError for what backend and models cannot do, and for bytes that leave nothing to read."""
    if lacking := [name for name in ("compare_logits", "set_mass", "narrow_queries") if not hasattr(backend, name)]:
        raise UsageError(f"backend {backend.name!r} cannot calibrate, it lacks {', '.join(lacking)}: use --backend torch")
    longest = min([target.spec.context_length, *([draft.spec.context_length] if draft else [])])
    if options.context + options.tokens + 8 > longest:
        raise UsageError(f"context is {options.context} tokens and {options.tokens} more, expected at most {longest} in all")
    specs = target.spec, draft.spec if draft else None
    allowed = ReadBytes(target.spec).tokens(options.allowance)
    budgets = [budget_within(allowed, start, *specs, options.context, STEP) for start in starts(*specs, options.context)]
    if max(budgets) < 2 * STEP:
        raise too_few_bytes(options, options.context)
    if options.own_sets and not isinstance(target, CompactModel):
        raise UsageError(f"backend {backend.name!r} keeps no compact keys, which --own-sets calibrates: use --backend torch")
    if options.own_sets and not largest_rank(target.spec):
        raise UsageError(
            f"a key of {target.spec.name} has {target.spec.head_dim} numbers, expected {min(COMPACT_RANKS)} or more for the "
            "compact keys that --own-sets calibrates: leave it out"
        )
