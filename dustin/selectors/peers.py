"""Selectors of other systems behind the same interface, per layer where theirs are: for comparison in one harness.

All of them keep the whole KV and choose what is read, at token granularity; per query head sets have no place here, so a
layer's heads share one. The shared set that comes with theirs (for a sparse draft) is the mean over layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from dustin.config import EngineOptions
from dustin.interfaces import Array, SelectionContext, Tap, TokenSet
from dustin.scoring import ReadBytes, Scoring
from dustin.selectors.base import BaseSelector

# Last prompt rows that SnapKV and H2O score the prompt with.
OBSERVED_ROWS = 16
SNAPKV_SMOOTHING = 7
QUEST_PAGE = 16


class StreamingSelector(BaseSelector):
    """StreamingLLM: sinks and the newest tokens (`streaming` of the quota rule without scores)."""

    def select(self, context: SelectionContext) -> TokenSet | None:
        """Sinks and as many recent tokens as the budget holds."""
        return None if self._fits(context) else self._choose(context.backend, None, None, context.lengths)

    def describe(self, with_draft: bool) -> str:
        """Nothing is scored."""
        return ""


class HeavyHitterSelector(BaseSelector):
    """H2O: half the budget to the newest tokens, half to those with the most attention so far, of the scoring layers.

    Attention adds up over the prompt's last rows and every confirmed row since (a round's rows count by their mean).
    """

    needs_history = True
    prompt_rows = OBSERVED_ROWS

    def __init__(self, name: str, options: EngineOptions, scoring: Scoring) -> None:
        super().__init__(name, options, scoring)
        self.history_rows = options.num_draft_tokens + 1
        self._total: Array | None = None

    def select(self, context: SelectionContext) -> TokenSet | None:
        """Heavy hitters and recent tokens, half the budget each; the accumulated scores grow by this round's."""
        backend = context.backend
        fresh = self._target_scores(context)
        if self._total is None:
            if context.prompt is not None and context.history_tap is not None:
                tap = context.history_tap
                fresh = backend.score(context.prompt, tap, context.target, context.target_cache, context.lengths)
            total = fresh
        elif fresh is None:
            total = self._total
        else:
            decays = tuple(float(row not in self._restarted) for row in range(len(context.lengths)))
            total = backend.accumulate(self._total, fresh, decays)
        if not context.repeat:
            self._total, self._restarted = total, set()
        if max(context.lengths) <= self._options.budget:
            return None
        return self._choose(backend, total, None, context.lengths, recent=self._options.budget // 2)


class PerLayerSelector(BaseSelector):
    """A set for each layer from that layer's own scores."""

    needs_history = True

    def __init__(self, name: str, options: EngineOptions, scoring: Scoring, layers: list[int], num_heads: int) -> None:
        super().__init__(name, options, scoring)
        self.tap = Tap({layer: tuple(range(num_heads)) for layer in layers})

    def describe(self, with_draft: bool) -> str:
        """Profiles have no part in it."""
        return "all heads of each layer"

    def _scores(self, context: SelectionContext, queries: Mapping[int, Array], tap: Tap) -> Array:
        raise NotImplementedError

    def _by_layer(self, context: SelectionContext, queries: Mapping[int, Array]) -> TokenSet:
        sets = {}
        for layer, heads in self.tap.heads.items():
            scores = self._scores(context, {layer: queries[layer]}, Tap({layer: heads}))
            sets[layer] = self._choose(context.backend, scores, None, context.lengths)
        shared = self._choose(context.backend, self._scores(context, queries, self.tap), None, context.lengths)
        return TokenSet(shared.indices, shared.counts, (), sets)


class QuestSelector(PerLayerSelector):
    """Quest: each layer reads the pages of 16 tokens whose key bounds promise most to its last confirmed query.

    What it costs is counted as an index kept up to date reads it: two rows a page. (Here the bounds are made anew.)
    """

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The best pages of each layer, cut at the budget."""
        if self._fits(context) or context.history is None:
            return None
        pages = sum(-(-n // QUEST_PAGE) for n in context.lengths)
        self.cost.target_bytes = ReadBytes(context.target.spec).scoring(self.tap, 2 * pages)
        return self._by_layer(context, context.history)

    def _scores(self, context: SelectionContext, queries: Mapping[int, Array], tap: Tap) -> Array:
        cache, lengths = context.target_cache, context.lengths
        return context.backend.page_scores(queries, tap, context.target, cache, lengths, QUEST_PAGE)


class SnapKVSelector(PerLayerSelector):
    """SnapKV: each layer's set is chosen once, by the prompt's last rows, and grows by every token after it."""

    prompt_rows = OBSERVED_ROWS

    def __init__(self, name: str, options: EngineOptions, scoring: Scoring, layers: list[int], num_heads: int) -> None:
        super().__init__(name, options, scoring, layers, num_heads)
        self._frozen: TokenSet | None = None
        self._frozen_lengths: tuple[int, ...] = ()

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The prompt's sets, made at the first call, and the rows since."""
        self.cost.target_bytes = 0
        observed = context.prompt or context.history
        if observed is not None and (self._frozen is None or self._restarted):
            new = self._by_layer(context, observed)
            self._frozen, self._frozen_lengths = self._joined(context, new)
            self._restarted = set()
        if self._frozen is None or max(context.lengths) <= self._options.budget:
            return None
        return context.backend.extend(self._frozen, self._frozen_lengths, context.lengths)

    def _joined(self, context: SelectionContext, new: TokenSet) -> tuple[TokenSet, tuple[int, ...]]:
        """The new sets of restarted rows among the frozen ones of the others."""
        self.cost.target_bytes = ReadBytes(context.target.spec).scoring(self.tap, sum(context.lengths))
        if self._frozen is None:
            return new, context.lengths
        fresh = [row in self._restarted for row in range(len(context.lengths))]
        swap = context.backend.replace_set_rows
        old = self._frozen
        sets = {layer: swap(old.by_layer[layer], part, fresh) for layer, part in new.by_layer.items()}
        shared = swap(TokenSet(old.indices, old.counts), TokenSet(new.indices, new.counts), fresh)
        both = zip(fresh, context.lengths, self._frozen_lengths, strict=True)
        return TokenSet(shared.indices, shared.counts, (), sets), tuple(now if is_new else then for is_new, now, then in both)

    def _scores(self, context: SelectionContext, queries: Mapping[int, Array], tap: Tap) -> Array:
        backend = context.backend
        scores = backend.score(queries, tap, context.target, context.target_cache, context.lengths)
        return backend.smooth(scores, SNAPKV_SMOOTHING)


class OracleSelector(BaseSelector):
    """For study: the set that the window's own dense attention would choose, shared by all layers, or one for each layer.

    It runs the rows to be verified densely first, so it saves nothing; it bounds what any prediction can reach.
    """

    def __init__(
        self, name: str, options: EngineOptions, scoring: Scoring, layers: list[int], num_heads: int, per_layer: bool = False
    ) -> None:
        super().__init__(name, options, scoring)
        self._every = Tap({layer: tuple(range(num_heads)) for layer in layers})
        self._per_layer = per_layer

    def select(self, context: SelectionContext) -> TokenSet | None:
        """Top tokens by the true attention of the in-flight rows."""
        if self._fits(context) or context.inflight is None:
            return None
        cache, backend, model = context.target_cache, context.backend, context.target
        before = cache.lengths
        out = model.forward(context.inflight, context.num_inflight, cache, tap=self._every, logits="none")
        cache.rollback(before)
        spec = ReadBytes(model.spec)
        self.cost.target_bytes = spec.tokens(sum(context.lengths)) + spec.scoring(self._every, sum(context.lengths))
        scores = backend.score(out.queries, self._every, model, cache, context.lengths)
        shared = self._choose(backend, scores, None, context.lengths)
        if not self._per_layer:
            return shared
        sets = {}
        for layer, heads in self._every.heads.items():
            one = backend.score({layer: out.queries[layer]}, Tap({layer: heads}), model, cache, context.lengths)
            sets[layer] = self._choose(backend, one, None, context.lengths)
        return TokenSet(shared.indices, shared.counts, (), sets)


class DenseSelector(BaseSelector):
    """Everything: verification reads the whole prefix."""

    def select(self, context: SelectionContext) -> TokenSet | None:
        """No set."""
        self.cost.target_bytes = 0
        return None

    def describe(self, with_draft: bool) -> str:
        """Nothing is scored."""
        return ""
