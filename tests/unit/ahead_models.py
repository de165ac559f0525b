"""The random numpy models, with steps that can be begun ahead: what was begun is computed at once on a copy of the cache, and must
be what the same call gives when it is finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dustin.backends.numpy_reference.model import NumpyModel
from dustin.interfaces import ForwardResult, Tap, TokenSet, Verdict
from tests.unit.engine_helpers import backend

# What was begun, and what of it was finished, by kind.
COUNTS: Counter[str] = Counter()


class AheadModel(NumpyModel):
    """A GreedyAhead and a ForwardAhead over the weights of another model."""

    def __init__(self, model: NumpyModel) -> None:
        self.__dict__.update(model.__dict__)

    def draft_greedy(
        self,
        tokens: Any,
        num_tokens: Sequence[int],
        cache: Any,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> tuple[Any, Mapping[int, Any]]:
        """See GreedyChain.draft_greedy."""
        fed, counts, drafted, queries = tokens, list(num_tokens), [], []
        for _ in range(steps):
            wider = backend.extend(token_set, tuple(set_lengths), cache.lengths) if token_set is not None else None
            out = self.forward(fed, counts, cache, token_set=wider, tap=tap, logits="last")
            fed, counts = backend.argmax(out.logits), [int(count > 0) for count in num_tokens]
            drafted.append(fed)
            queries.append(out.queries)
        return backend.concat_tokens(drafted), backend.concat_queries(queries)

    def draft_ahead(
        self,
        verdict: Verdict,
        known: Sequence[int],
        active: Sequence[bool],
        cache: Any,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> BegunDrafts | None:
        """See GreedyAhead.draft_ahead."""
        if any(on and n + steps + 2 > cache.capacity for on, n in zip(active, cache.lengths, strict=True)):
            return None
        more = {"token_set": token_set, "set_lengths": tuple(set_lengths), "tap": tap}
        return BegunDrafts(self, verdict, known, active, cache, steps, more)

    def forward_ahead(self, tokens: Any, num_tokens: Sequence[int], cache: Any, *, tap: Tap | None = None) -> BegunStep | None:
        """See ForwardAhead.forward_ahead."""
        if any(n and length >= cache.capacity for n, length in zip(num_tokens, cache.lengths, strict=True)):
            return None
        return BegunStep(self, np.array(tokens)[:, :1], num_tokens, cache, tap)


class BegunDrafts:
    """Draft steps, begun."""

    def __init__(
        self, model: AheadModel, verdict: Verdict, known: Sequence[int], active: Sequence[bool], cache: Any, steps: int,
        more: dict[str, Any],
    ) -> None:  # fmt: skip
        self._model, self._cache, self._steps, self._more = model, cache, steps, more
        self._fed: list[list[int]] = []
        lengths = list(cache.lengths)
        for b, on in enumerate(active):
            kept = int(verdict.num_accepted[b])
            lengths[b] = min(lengths[b], known[b] + kept) if on else lengths[b]
            unseen = known[b] + kept + 1 - lengths[b] if on else 0
            # The device has no other tokens than the verdict's.
            assert not on or 1 <= unseen <= min(2, kept + 1), (unseen, kept)
            self._fed.append([int(token) for token in verdict.tokens[b][kept + 1 - unseen : kept + 1]])
        copy = cache.take(range(len(lengths)))
        copy.rollback(lengths)
        self._lengths = lengths
        self._early = model.draft_greedy(backend.tokens(self._fed), [len(row) for row in self._fed], copy, steps, **more)
        COUNTS["drafts begun"] += 1

    def finish(self, num_tokens: Sequence[int], steps: int) -> tuple[Any, Mapping[int, Any]] | None:
        """See interfaces.BegunDrafts.finish."""
        if steps > self._steps:
            return None
        fed = [row if count else [] for row, count in zip(self._fed, num_tokens, strict=True)]
        taking = [b for b, count in enumerate(num_tokens) if count]
        assert [num_tokens[b] for b in taking] == [len(self._fed[b]) for b in taking]
        assert [self._cache.lengths[b] for b in taking] == [self._lengths[b] for b in taking]
        tokens, queries = self._model.draft_greedy(backend.tokens(fed), num_tokens, self._cache, steps, **self._more)
        assert np.array_equal(tokens[taking], self._early[0][taking, :steps])
        for layer, rows in queries.items():
            np.testing.assert_allclose(rows[taking], self._early[1][layer][taking, :steps], atol=1e-9)
        COUNTS["drafts finished"] += 1
        return tokens, queries


class BegunStep:
    """A plain step, begun."""

    def __init__(self, model: AheadModel, tokens: Any, num_tokens: Sequence[int], cache: Any, tap: Tap | None) -> None:
        self._model, self._tokens, self._cache, self._tap = model, tokens, cache, tap
        self._counts, self._lengths = list(num_tokens), cache.lengths
        self._early = self._step(self._counts, cache.take(range(len(self._counts))))
        COUNTS["steps begun"] += 1

    def _step(self, counts: Sequence[int], cache: Any) -> ForwardResult:
        return self._model.forward(self._tokens, counts, cache, tap=self._tap, logits="all")

    def finish(self, num_tokens: Sequence[int]) -> ForwardResult:
        """See interfaces.BegunForward.finish."""
        taking = [b for b, count in enumerate(num_tokens) if count]
        assert all(self._counts[b] and self._cache.lengths[b] == self._lengths[b] for b in taking)
        out = self._step(num_tokens, self._cache)
        np.testing.assert_allclose(out.logits[taking], self._early.logits[taking], atol=1e-9)
        COUNTS["steps finished"] += 1
        return out
