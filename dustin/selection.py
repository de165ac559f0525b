"""The selectors by name (policy; array work goes through the backend), with the scoring heads they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dustin.config import ADDED_SELECTORS, SELECTORS, EngineOptions
from dustin.errors import UsageError
from dustin.interfaces import CompactModel, Model, ModelSpec, Selector, Tap
from dustin.scoring import (
    Scoring,
    default_tap,
    draft_tap,
    full_layers,
    heuristic,
    target_tap,
    with_own_sets,
    without_own_sets,
)
from dustin.selectors import peers
from dustin.selectors.quota import QuotaSelector
from dustin.text import Tokenizer

__all__ = ["add_selector", "create_selector", "default_tap", "draft_tap", "heuristic", "prepare", "target_tap", "with_fidelity"]

# Tokens of the language reference that compact keys are fitted to.
FITTING_TOKENS = 2048
# Numbers of a compact key.
COMPACT_RANKS = (32, 64)

_SCORING_LAYERS = {
    "streaming": peers.StreamingSelector,
    "h2o": peers.HeavyHitterSelector,
    "dense": peers.DenseSelector,
}
_EVERY_LAYER = {"quest": peers.QuestSelector, "snapkv": peers.SnapKVSelector, "oracle": peers.OracleSelector}


def add_selector(name: str, make: Callable[[str, EngineOptions, Scoring], Selector]) -> None:
    """Know another selector: `EngineOptions(selector=name)` then calls make(name, options, scoring) once for each batch; a class
    below dustin.selectors.base.BaseSelector is such a `make`. A name added before is replaced. Raise UsageError on a name of ours.
    """
    if not isinstance(name, str) or not name.strip() or "," in name or name in SELECTORS:
        raise UsageError(
            f"the added selector's name is {name!r}, expected a string without commas, other than {', '.join(SELECTORS)}"
        )
    if not callable(make):
        raise UsageError(f"selector {name!r} is made by {make!r}, expected a class or a function of name, options and scoring")
    ADDED_SELECTORS[name] = make


def create_selector(options: EngineOptions, scoring: Scoring | None = None, spec: ModelSpec | None = None) -> Selector:
    """The selector named in the options, for one batch. Those that look at every layer need the target's `spec`."""
    name = options.selector
    scoring = scoring or Scoring(Tap({}), Tap({}))
    for field in ("dense_layers", "reselection_layers"):
        for layer in getattr(options, field) or ():
            if spec is not None and layer >= spec.num_layers:
                raise UsageError(f"{field} names layer {layer}, expected 0 to {spec.num_layers - 1}: {spec.name} has no more")
            if spec is not None and field == "reselection_layers" and layer in spec.sliding_layers:
                raise UsageError(f"reselection_layers names layer {layer}, which has a sliding window: it reads no set")
    if options.dense_layers is not None:
        scoring = replace(scoring, dense_layers=tuple(sorted(set(options.dense_layers))))
    if options.reselection_layers is not None:
        heads = tuple(range(spec.num_heads)) if spec is not None else ()
        scoring = replace(scoring, reselection=Tap(dict.fromkeys(sorted(options.reselection_layers), heads)))
    if options.reselection_rank is not None:
        scoring = replace(scoring, reselection_rank=options.reselection_rank)
    if options.reselection_by_kv_head is not None:
        scoring = replace(scoring, reselection_by_kv_head=options.reselection_by_kv_head)
    if options.reselection_reuse is not None:
        scoring = replace(scoring, reselection_reuse=options.reselection_reuse)
    # A layer that reads everything chooses nothing.
    choosing = {layer: heads for layer, heads in scoring.reselection.heads.items() if layer not in scoring.dense_layers}
    scoring = replace(scoring, reselection=Tap(choosing))
    _check_use(options, scoring)
    if spec is not None and options.drafter in ("none", "lookup", "self") and set(choosing) >= set(full_layers(spec)) > set():
        # Without a draft model nothing reads the set that is chosen before the forward.
        scoring = replace(scoring, target=Tap({}), draft=Tap({}), refresh=1)
    if name in ADDED_SELECTORS:
        return ADDED_SELECTORS[name](name, options, scoring)
    if name in _EVERY_LAYER:
        if spec is None:
            raise UsageError(f"selector {name!r} looks at every layer: create_selector needs the target's spec")
        return _EVERY_LAYER[name](name, options, scoring, full_layers(spec), spec.num_heads)
    return _SCORING_LAYERS.get(name, QuotaSelector)(name, options, scoring)


def _check_use(options: EngineOptions, scoring: Scoring) -> None:
    """Raise UsageError for options of sets that no layer chooses."""
    if options.mode in ("ar", "dense") or scoring.reselection.heads:
        return
    for name in ("reselection_rank", "reselection_by_kv_head", "reselection_reuse"):
        if getattr(options, name):
            raise UsageError(
                f"{name} is {getattr(options, name)}, but no layer chooses a set of its own: name some in reselection_layers, or "
                "use fidelity high"
            )


def largest_rank(spec: ModelSpec) -> int:
    """Numbers of the largest compact keys that a model's keys make; 0: whole keys."""
    return max((rank for rank in COMPACT_RANKS if rank <= spec.head_dim), default=0)


def fitting_text(tokenizer: Tokenizer, spec: ModelSpec) -> list[int]:
    """The tokens that a model's compact keys are fitted to."""
    from dustin.calibration_texts import reference_text  # Few sessions need its text.

    return reference_text(tokenizer, min(FITTING_TOKENS, spec.context_length))


def usable(scoring: Scoring, target: Model, tokenizer: Tokenizer | None) -> Scoring:
    """A profile's scoring, one set for all layers where this target cannot choose others: it keeps no compact keys, there is no
    text to fit them to, or its ranks share a kv head (`own_sets`)."""
    if not scoring.reselection.heads or not scoring.reselection_rank:
        return scoring
    able = isinstance(target, CompactModel) and tokenizer is not None and getattr(target, "own_sets", True)
    return scoring if able else without_own_sets(scoring)


def with_fidelity(options: EngineOptions, scoring: Scoring, target: Model) -> Scoring:
    """The scoring, with sets of the layers' own where `--fidelity high` asks for them and neither options nor profile say which:
    of every full layer, by kv head and the largest compact keys. Raise UsageError where the model keeps none."""
    # The few layers of a shared set's profile are no answer to what is asked for.
    spec, chosen = target.spec, options.reselection_layers is not None or scoring.of_own_sets
    if options.fidelity != "high" or chosen:
        return scoring
    if not isinstance(target, CompactModel):
        raise UsageError("fidelity is 'high', but this backend keeps no compact keys: leave --fidelity out, or use --backend torch")
    # The set chosen before the forward is the draft's alone: it is served as well by its own scores (bench own_sets, acceptance).
    by_draft = options.drafter == "draft" and scoring.draft.heads and options.selector in ("dustin", "lookahead", "specattn")
    scoring = replace(scoring, target=Tap({})) if by_draft else scoring
    return with_own_sets(scoring, spec, full_layers(spec), largest_rank(spec))


def prepare(selector: Selector, target: Model, tokenizer: Tokenizer | None) -> None:
    """Fit the target's compact keys where the selector chooses by them. Raise UsageError where target or tokenizer cannot."""
    rank = getattr(selector, "compact_rank", 0)
    if not rank:
        return
    if not isinstance(target, CompactModel):
        raise UsageError(f"reselection_rank is {rank}, but this backend keeps no compact keys: use --reselection-rank 0")
    if rank > target.spec.head_dim:
        most = target.spec.head_dim
        raise UsageError(f"reselection_rank is {rank}, expected at most the {most} numbers of a key of {target.spec.name}")
    if tokenizer is None:
        raise UsageError(f"reselection_rank is {rank}, and a session without tokenizer has no text to fit compact keys to: use 0")
    target.fit_compact_keys(fitting_text(tokenizer, target.spec), rank)
