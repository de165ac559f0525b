"""The paper's selector and its halves: sinks and recent tokens protected, m of the rest by draft scores, then target scores."""

from __future__ import annotations

from dataclasses import replace

from dustin.config import EngineOptions
from dustin.interfaces import Array, Reselection, SelectionContext, TokenSet
from dustin.scoring import ReadBytes, Scoring
from dustin.selectors.base import BaseSelector


class QuotaSelector(BaseSelector):
    """`dustin`, `history` (m = 0), `lookahead` (m = 1) and `specattn` (m = 1, cut by mass).

    Beyond the paper, where the scoring asks for it: history over several rows and rounds, smoothed scores, scoring within a
    pool between refreshes, layers kept dense, layers that choose anew in the middle of the forward, and sets cut to the
    smallest that holds `top_mass` of the scores.
    """

    def __init__(self, name: str, options: EngineOptions, scoring: Scoring) -> None:
        super().__init__(name, options, scoring)
        chosen = options.lookahead_share
        shares = {"history": 0.0, "lookahead": 1.0, "specattn": 1.0}
        self._share = shares.get(name, scoring.lookahead_share if chosen is None else chosen)
        self._mass = options.top_mass if options.top_mass is not None or name != "specattn" else SPECATTN_MASS
        self.needs_history = self._share != 1.0
        self.needs_lookahead = self._share != 0.0
        self.history_rows = scoring.history_rows
        self._dense = scoring.dense_layers
        self._rounds = 0
        self._pool: TokenSet | None = None
        self._pool_lengths: tuple[int, ...] = ()
        self._totals: dict[str, Array] = {}

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The set of this round; None (dense) when every row fits the budget."""
        if self._fits(context):
            return None
        within, size = self._candidates(context)
        target = self._history_scores(context, within, size)
        draft = self._lookahead_scores(context, within, size)
        backend, smooth = context.backend, self._scoring.smoothing
        if smooth > 1:
            target, draft = (x if x is None else backend.smooth(x, smooth) for x in (target, draft))
        chosen = self._choose(backend, target, draft, context.lengths, self._share)
        if self._scoring.refresh > 1 and within is None:
            pool = self._scoring.pool_for(self._options.budget)
            self._pool = self._choose(backend, target, draft, context.lengths, self._share, pool)
            self._pool_lengths = context.lengths
        if not context.repeat:
            self._restarted = set()
        chosen = self._cut(context, chosen, target, draft)
        return replace(chosen, dense_layers=self._dense, reselection=self._again(context))

    def _again(self, context: SelectionContext) -> Reselection | None:
        """The layers at which the rows in flight choose anew; what that reads is counted."""
        tap, options = self._scoring.reselection, self._options
        if not tap.heads:
            return None
        self.cost.own_bytes = ReadBytes(context.target.spec).reselection(self._scoring, sum(context.lengths))
        # With the lag, no set may depend on the drafts that it will judge: the pending token's queries alone choose.
        rows = 1 if options.lookahead_lag == 1 else self._scoring.reselection_rows
        windows = (options.num_sink_tokens, options.num_recent_tokens)
        scoring = self._scoring
        by_kv_head, reuse = scoring.reselection_by_kv_head, scoring.reselection_reuse
        return Reselection(tap.heads, options.budget, *windows, rows, scoring.reselection_rank, by_kv_head, reuse)

    @property
    def compact_rank(self) -> int:
        """Numbers of the compact keys that it chooses by; 0: none."""
        return self._scoring.reselection_rank if self._scoring.reselection.heads else 0

    def _candidates(self, context: SelectionContext) -> tuple[TokenSet | None, int | None]:
        """The pool of this round with the tokens that came since, or None where all tokens are scored."""
        refresh = self._scoring.refresh
        if refresh <= 1:
            return None, None
        if self._restarted or self._pool is None or self._rounds % refresh == 0:
            self._rounds = 1
            return None, None
        if not context.repeat:
            self._rounds += 1
        grown = max(0, *(now - then for now, then in zip(context.lengths, self._pool_lengths, strict=True)))
        pool = context.backend.extend(self._pool, self._pool_lengths, context.lengths)
        return pool, self._scoring.pool_for(self._options.budget) + grown

    def _history_scores(self, context: SelectionContext, within: TokenSet | None, size: int | None) -> Array | None:
        # A lookahead-only selector without lookahead (first lagged round, or no draft model) falls back on history.
        if not self.needs_history and (context.lookahead or not self.needs_lookahead):
            return None
        fresh = self._target_scores(context, within, size)
        return self._remembered(context, "history", fresh, self._scoring.history_decay)

    def _lookahead_scores(self, context: SelectionContext, within: TokenSet | None, size: int | None) -> Array | None:
        fresh = self._draft_scores(context, within, size) if self.needs_lookahead else None
        return self._remembered(context, "lookahead", fresh, self._scoring.lookahead_decay)

    def _remembered(self, context: SelectionContext, name: str, fresh: Array | None, decay: float) -> Array | None:
        """`fresh` plus `decay` times what there was of the rounds before; nothing of them in rows that hold new sequences."""
        if fresh is None or not decay:
            return fresh
        before = self._totals.get(name)
        if before is None:
            total = fresh
        else:
            decays = tuple(0.0 if row in self._restarted else decay for row in range(len(context.lengths)))
            total = context.backend.accumulate(before, fresh, decays)
        if not context.repeat:
            self._totals[name] = total
        return total

    def _cut(self, context: SelectionContext, chosen: TokenSet, target: Array | None, draft: Array | None) -> TokenSet:
        """An adaptive budget: per round and sequence no more than `top_mass` of what the scores see asks for."""
        if self._mass is None or (target is None and draft is None):
            return chosen
        both = target if draft is None else draft
        if target is not None and draft is not None:
            both = context.backend.accumulate(target, draft, 1.0)
        options = self._options
        return context.backend.keep_mass(
            chosen,
            both,
            context.lengths,
            mass=self._mass,
            num_sink_tokens=options.num_sink_tokens,
            num_recent_tokens=options.num_recent_tokens,
        )


# SpecAttn's top-p of the draft's attention mass (arXiv 2510.27641) where --top-mass does not say otherwise.
SPECATTN_MASS = 0.95
