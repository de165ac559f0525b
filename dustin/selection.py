"""Selectors: which committed tokens verification reads (METHOD section 3). Policy only; arrays stay opaque."""

from __future__ import annotations

from dustin.config import EngineOptions
from dustin.interfaces import Array, ModelSpec, SelectionContext, Selector, Tap, TokenSet


def default_tap(spec: ModelSpec, depths: tuple[float, ...]) -> Tap:
    """All heads of the layers at the given shares of depth, moved off sliding-window layers (which are never scored)."""
    full = [layer for layer in range(spec.num_layers) if layer not in set(spec.sliding_layers)]
    if not full:
        return Tap({})
    layers = sorted({min(full, key=lambda layer: abs(layer - depth * (spec.num_layers - 1))) for depth in depths})
    return Tap({layer: tuple(range(spec.num_heads)) for layer in layers})


def target_tap(spec: ModelSpec) -> Tap:
    """Scoring heads of a target without a profile: all heads of two layers at 0.65 and 0.75 of depth (METHOD section 4)."""
    return default_tap(spec, (0.65, 0.75))


def draft_tap(spec: ModelSpec) -> Tap:
    """Scoring heads of a draft without a profile: all heads of three layers at 0.5 to 0.7 of depth (METHOD section 4)."""
    return default_tap(spec, (0.5, 0.6, 0.7))


class QuotaSelector:
    """Sinks and recent tokens protected, a share of the rest by draft scores, the remainder by target scores."""

    def __init__(self, name: str, options: EngineOptions, lookahead_share: float | None, streaming: bool = False) -> None:
        self.name = name
        self.needs_history = not streaming and lookahead_share != 1.0
        self.needs_lookahead = not streaming and lookahead_share != 0.0
        self._options = options
        self._share = lookahead_share or 0.0

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The set of this round; None (dense) when every row fits the budget."""
        options = self._options
        if max(context.lengths) <= options.budget:
            return None
        rest = options.budget - options.num_sink_tokens - options.num_recent_tokens
        return context.backend.select(
            self._target_scores(context),
            self._draft_scores(context),
            context.lengths,
            budget=options.budget,
            num_sink_tokens=options.num_sink_tokens,
            num_recent_tokens=options.num_recent_tokens,
            num_draft_selected=round(self._share * rest),
        )

    def _target_scores(self, context: SelectionContext) -> Array | None:
        # A lookahead-only selector without lookahead (first lagged round, or no draft model) falls back on history.
        if context.history is None or context.history_tap is None:
            return None
        if not self.needs_history and (context.lookahead is not None or not self.needs_lookahead):
            return None
        return context.backend.score(context.history, context.history_tap, context.target, context.target_cache, context.lengths)

    def _draft_scores(self, context: SelectionContext) -> Array | None:
        if not self.needs_lookahead or context.lookahead is None or context.lookahead_tap is None:
            return None
        if context.draft is None or context.draft_cache is None:
            return None
        return context.backend.score(context.lookahead, context.lookahead_tap, context.draft, context.draft_cache, context.lengths)


def create_selector(options: EngineOptions) -> Selector:
    """The selector named in the options."""
    shares = {"dustin": options.lookahead_share, "history": 0.0, "lookahead": 1.0, "streaming": None}
    return QuotaSelector(options.selector, options, shares[options.selector], streaming=options.selector == "streaming")
