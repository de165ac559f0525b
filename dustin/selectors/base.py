"""What selectors share: options, scoring heads, and the count of what a selection reads."""

from __future__ import annotations

from dataclasses import replace

from dustin.config import EngineOptions
from dustin.interfaces import Array, Backend, SelectionContext, SelectionCost, Tap, TokenSet
from dustin.scoring import ReadBytes, Scoring


class BaseSelector:
    """Common ground of all selectors: no history, no lookahead, nothing read."""

    needs_history = False
    needs_lookahead = False
    history_rows = 1
    prompt_rows = 1

    def __init__(self, name: str, options: EngineOptions, scoring: Scoring) -> None:
        self.name = name
        self.tap: Tap = scoring.target
        self.cost = SelectionCost()
        self._options = options
        self._scoring = scoring
        self._restarted: set[int] = set()

    @property
    def scoring(self) -> Scoring:
        """What it scores with, options applied."""
        return self._scoring

    def describe(self, with_draft: bool) -> str:
        """What it scores with, in words for people; empty where it does not score."""
        return self.scoring.describe(with_draft)

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The set of this round, or None for dense attention."""
        raise NotImplementedError

    def resize(self, budget: int) -> None:
        """Sets have up to `budget` tokens from now on."""
        self._options = replace(self._options, budget=budget)

    def restart(self, rows: set[int]) -> None:
        """These rows hold new sequences from now on: what is remembered of them is forgotten."""
        self._restarted |= rows

    # Pieces.

    def _fits(self, context: SelectionContext) -> bool:
        """Whether every row fits the budget, so that dense attention reads no more."""
        self.cost = SelectionCost()
        return max(context.lengths) <= self._options.budget

    def _choose(
        self,
        backend: Backend,
        target: Array | None,
        draft: Array | None,
        lengths: tuple[int, ...],
        share: float = 0.0,
        budget: int | None = None,
        recent: int | None = None,
    ) -> TokenSet:
        """The quota rule with the options' windows; `share` of the unprotected budget goes by `draft`."""
        options = self._options
        budget = budget or options.budget
        recent = options.num_recent_tokens if recent is None else recent
        rest = budget - options.num_sink_tokens - recent
        return backend.select(
            target,
            draft,
            lengths,
            budget=budget,
            num_sink_tokens=options.num_sink_tokens,
            num_recent_tokens=recent,
            num_draft_selected=round(share * rest),
        )

    def _target_scores(self, context: SelectionContext, within: TokenSet | None = None, pool: int | None = None) -> Array | None:
        if not context.history or context.history_tap is None:
            return None
        read = sum(context.lengths) if pool is None else sum(min(n, pool) for n in context.lengths)
        self.cost.target_bytes += ReadBytes(context.target.spec).scoring(context.history_tap, read)
        return context.backend.score(
            context.history, context.history_tap, context.target, context.target_cache, context.lengths, within
        )

    def _draft_scores(self, context: SelectionContext, within: TokenSet | None = None, pool: int | None = None) -> Array | None:
        tap, draft, cache = context.lookahead_tap, context.draft, context.draft_cache
        if not context.lookahead or tap is None or draft is None or cache is None:
            return None
        read = sum(context.lengths) if pool is None else sum(min(n, pool) for n in context.lengths)
        self.cost.draft_bytes += ReadBytes(draft.spec).scoring(tap, read)
        return context.backend.score(context.lookahead, tap, draft, cache, context.lengths, within)
