"""Drafters: a draft model, the target itself on a sparse cache. Prompt lookup: `dustin.lookup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dustin.ahead import Ahead
from dustin.config import EngineOptions
from dustin.draft_steps import Confidence, next_token
from dustin.interfaces import (
    Array,
    Backend,
    Drafts,
    GreedyAhead,
    GreedyChain,
    HostVerdict,
    KVCache,
    Model,
    RoundState,
    Tap,
    TokenSet,
    Verdict,
)  # fmt: skip
from dustin.prefill import chunk_between, chunk_of, padded_tokens, prefill
from dustin.stats import Stats

Progress = Callable[[int, int], None]
# Tokens that a round leaves unseen: the last draft where it was kept, and the target's own. More are read apart, in few shapes:
# up to so many of a row at once, padded to one of few widths; where it is much more, in pieces as prompts are read.
_USUALLY_UNSEEN, _LEAST_READ, _MOST_READ, _MUCH = 2, 8, 64, 256


class NoDrafter:
    """Plain decoding: every round verifies the pending token alone."""

    name = "none"
    model: Model | None = None
    cache: KVCache | None = None
    tap: Tap | None = None
    cold = False
    foresees = False

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: Progress | None) -> None:
        """Nothing to prepare."""

    def admit(self, row: int, keep: int, source: int) -> None:
        """Row `row` of a running batch begins a new sequence whose first `keep` tokens are those of row `source`."""

    def read(self, prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[int]:
        """Read the first tokens of some rows (none of the others), at most most[b] new ones; how many tokens each row has then."""
        return [len(prompt) for prompt in prompts]

    def propose(self, state: RoundState) -> Drafts:
        """No drafts."""
        return Drafts(None, (0,) * len(state.active))

    def foresee(
        self,
        verdict: Verdict,
        judged: Sequence[int],
        known: Sequence[int],
        active: Sequence[bool],
        steps: int,
        draft_set: TokenSet | None,
        set_lengths: Sequence[int],
    ) -> None:
        """Nothing to begin."""

    def those(self, active: set[int]) -> set[int]:
        """All of them."""
        return active

    def settle(self, verdict: HostVerdict) -> None:
        """Nothing was begun."""

    def drop(self) -> bool:
        """Forget what `foresee` began; whether the device is still at it for nothing."""
        return False

    def commit(self, lengths: Sequence[int]) -> None:
        """Nothing to forget."""


class ModelDrafter(NoDrafter):
    """A small model of the same tokenizer. Its own KV is read sparsely too when `sparse_draft` is on (METHOD section 8).

    `dense_rows[b]` counts the leading KV rows that are what dense attention would have written.
    """

    name = "draft"

    def __init__(self, backend: Backend, model: Model, tap: Tap, options: EngineOptions, stats: Stats) -> None:
        self.model: Model | None = model
        self._draft = model
        self.cache: KVCache | None = None
        self.tap: Tap | None = tap
        self._last_row_tap = Tap(tap.heads, last_row_only=True)
        self._backend = backend
        self._options = options
        self.stats = stats
        self.dense_rows: list[int] = []
        # No step's confidence may be wanted before the next one.
        simple = not (options.min_draft_confidence or options.route_confidence)
        self._chain = model if simple and isinstance(model, GreedyChain) else None
        self._foresees = model if simple and isinstance(model, GreedyAhead) else None
        self.ahead: Ahead | None = None
        # Whether the last drafts could have been begun ahead and were not.
        self.cold = False

    def resume(self, cache: KVCache) -> None:
        """Before `start`: this cache holds leading rows of the prompts, read densely, which are not read again."""
        self.cache, self.dense_rows = cache, list(cache.lengths)

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: Progress | None) -> None:
        """Read all but the last prompt token of each row; that one is fed with the first token the target emits."""
        if self.cache is None:
            self.cache = self._draft.new_cache(len(prompts), min(capacity, self._draft.spec.context_length))
        unread = [row[known:-1] for row, known in zip(prompts, self.cache.lengths, strict=True)]
        try:
            chunk = chunk_of(self._options.prefill_chunk, self._backend, len(prompts))
            prefill(self._backend, self._draft, self.cache, unread, chunk, None, progress, logits=False)
        finally:
            # What was read so far is dense, also when the reader gave up in the middle.
            self.dense_rows = list(self.cache.lengths)

    def admit(self, row: int, keep: int, source: int) -> None:
        """Keep what is dense of the first `keep` rows of `source`."""
        self.ahead = self.ahead and self.ahead.without(row)
        if self.cache is None:
            raise RuntimeError("admit was called before start")
        kept = min(keep, self.dense_rows[source])
        if source == row:
            self.cache.rollback([kept if b == row else n for b, n in enumerate(self.cache.lengths)])
        else:
            self.cache.copy_row(source, row, kept)
        self.dense_rows[row] = kept

    def read(self, prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[int]:
        """Read what is new of them, dense."""
        cache = self.cache
        if cache is None:
            raise RuntimeError("read was called before start")
        known = cache.lengths
        unread = [row[n : n + limit] for row, n, limit in zip(prompts, known, most, strict=True)]
        if any(unread):
            self._draft.forward(padded_tokens(self._backend, unread), [len(row) for row in unread], cache, logits="none")
        self.dense_rows = [now if new else n for new, now, n in zip(unread, cache.lengths, self.dense_rows, strict=True)]
        return list(cache.lengths)

    def propose(self, state: RoundState) -> Drafts:
        """Feed what the draft has not seen, then one token a step; all active rows draft `max_drafts` tokens."""
        cache = self.cache
        if cache is None:
            raise RuntimeError("propose was called before start")
        backend = self._backend
        unseen = self._unseen(state, cache)
        begun = self._propose_begun(state, cache, [len(row) for row in unseen])
        self.cold = begun is None and self._foresees is not None
        if begun is not None:
            return begun
        longest = max(map(len, unseen))
        if longest > _MOST_READ or (self._chain is not None and longest > _USUALLY_UNSEEN and state.warp.greedy):
            self._catch_up([row[:-1] for row in unseen], cache)
            unseen = self._unseen(state, cache)
        fed, counts = backend.tokens(unseen), [len(row) for row in unseen]
        drafted: list[Array] = []
        distributions: list[Array] = []
        queries = []
        at_once = self._propose_at_once(state, cache, fed, counts)
        if at_once is not None:
            return at_once
        doubt = Confidence(backend, self._options, state)
        for step in range(state.max_drafts):
            token_set = None
            if self._options.sparse_draft and state.draft_set is not None:
                token_set = backend.extend(state.draft_set, state.set_lengths, cache.lengths)
            self._count_read(cache.lengths, state, token_set is not None)
            before = cache.lengths
            out = self._draft.forward(fed, counts, cache, token_set=token_set, tap=self._last_row_tap, logits="last")
            if token_set is None:
                self._read_densely(before, cache.lengths)
            token, distribution = next_token(backend, out.logits, state, step, drafted)
            if doubt.stops(out.logits, distribution, step, drafted):
                break
            drafted.append(token)
            queries.append(out.queries)
            if distribution is not None:
                distributions.append(distribution)
            fed, counts = token, [int(on) for on in state.active]
        if not drafted:
            return Drafts(None, doubt.num_drafts)
        return Drafts(
            backend.concat_tokens(drafted),
            doubt.num_drafts,
            backend.stack_rows(distributions) if distributions else None,
            backend.concat_queries(queries),
            doubt.joined(),
        )

    @staticmethod
    def _unseen(state: RoundState, cache: KVCache) -> list[list[int]]:
        """Tokens of each row that takes part that the draft has not seen."""
        rows = zip(state.tokens, cache.lengths, state.active, strict=True)
        return [list(tokens[seen:]) if on else [] for tokens, seen, on in rows]

    def _catch_up(self, behind: list[list[int]], cache: KVCache) -> None:
        """Read, densely, what rounds without a draft have brought: in few shapes, so that the steps after it are the usual ones."""
        longest = max(map(len, behind))
        # Each row alone where it is much: calls of prompts are of one row too.
        alone = [[row if b == own else [] for b, row in enumerate(behind)] for own in range(len(behind))]
        for rows in alone if longest > _MUCH else [behind]:
            self._catch_up_on(rows, cache, longest)

    def _catch_up_on(self, behind: list[list[int]], cache: KVCache, longest: int) -> None:
        size = _MOST_READ if longest <= _MUCH else chunk_between(self._options.prefill_chunk, self._backend, 1)
        for start in range(0, max(map(len, behind)), size):
            parts = [row[start : start + size] for row in behind]
            counts, before = [len(part) for part in parts], cache.lengths
            # Padding, of the first row alone, gives few widths.
            parts[0] = [*parts[0], *[0] * (_LEAST_READ - len(parts[0]))]
            self._draft.forward(padded_tokens(self._backend, parts), counts, cache, logits="none")
            self._read_densely(before, cache.lengths)

    def _read_densely(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Rows that were dense up to `before` are so up to `after`."""
        known = zip(self.dense_rows, before, after, strict=True)
        self.dense_rows = [now if dense == then else dense for dense, then, now in known]

    def _propose_at_once(self, state: RoundState, cache: KVCache, fed: Array, counts: list[int]) -> Drafts | None:
        """All greedy steps in one call of a model that can; None where it cannot, or draws."""
        if self._chain is None or not state.warp.greedy or state.warp.penalised:
            return None
        token_set, before, steps = self._set_read(state.draft_set), cache.lengths, self._steps(state, cache, counts)
        made = self._chain.draft_greedy(
            fed, counts, cache, steps, token_set=token_set, set_lengths=state.set_lengths, tap=self._last_row_tap
        )
        return None if made is None else self._drafts_of(made, state, before, counts, token_set is not None)

    def _propose_begun(self, state: RoundState, cache: KVCache, counts: list[int]) -> Drafts | None:
        """What `foresee` began, where it serves this round."""
        ahead, self.ahead = self.ahead, None
        token_set, before = self._set_read(state.draft_set), cache.lengths
        if ahead is None or not state.warp.greedy or state.warp.penalised:
            return None
        if not ahead.serves(state.tokens, state.active, before, token_set, state.set_lengths):
            return None
        made = ahead.begun.finish(counts, self._steps(state, cache, counts))
        return None if made is None else self._drafts_of(made, state, before, counts, token_set is not None)

    def foresee(
        self,
        verdict: Verdict,
        judged: Sequence[int],
        known: Sequence[int],
        active: Sequence[bool],
        steps: int,
        draft_set: TokenSet | None,
        set_lengths: Sequence[int],
    ) -> None:
        """Begin the next round's steps from what the device knows of the verdict."""
        self.ahead = None
        if self._foresees is None or self.cache is None:
            return
        held = self.cache.lengths
        for b, on in enumerate(active):
            # What the device feeds first it has from the verdict: of each row the last token or two.
            if on and held[b] < known[b] + max(1, judged[b]) - 1:
                return
        token_set = self._set_read(draft_set)
        begun = self._foresees.draft_ahead(
            verdict, known, active, self.cache, steps, token_set=token_set, set_lengths=set_lengths, tap=self._last_row_tap
        )
        if begun is not None:
            self.ahead = Ahead(begun, tuple(known), tuple(active), held, token_set, tuple(set_lengths))

    def those(self, active: set[int]) -> set[int]:
        """Those for whom drafts were begun: who has joined since waits a round rather than have them made again for all."""
        return active if self.ahead is None else self.ahead.those(active)

    @property
    def foresees(self) -> bool:  # type: ignore[override]
        """Whether the model can begin steps before the host has read what they follow."""
        return self._foresees is not None

    def settle(self, verdict: HostVerdict) -> None:
        """Now the host knows it too."""
        if self.ahead is not None:
            self.ahead.verdict = verdict

    def drop(self) -> bool:
        """A round without drafts comes: it waits for steps that nobody wants."""
        begun, self.ahead = self.ahead is not None, None
        return begun

    def _set_read(self, draft_set: TokenSet | None) -> TokenSet | None:
        return draft_set if self._options.sparse_draft else None

    @staticmethod
    def _steps(state: RoundState, cache: KVCache, counts: list[int]) -> int:
        """Steps to take at once. Fewer than usual would be another shape, to be recorded first; verification takes no more than
        it is told to."""
        longest = max(n + count for n, count in zip(cache.lengths, counts, strict=True) if count)
        return max(state.max_drafts, state.planned if longest + state.planned - 1 <= cache.capacity else 0)

    def _drafts_of(
        self, made: tuple[Array, Any], state: RoundState, before: Sequence[int], counts: list[int], sparse: bool
    ) -> Drafts:
        """Drafts of steps that were taken at once, counted."""
        for step in range(made[0].shape[1]):
            at = [n + (count + step - 1 if step and count else 0) for n, count in zip(before, counts, strict=True)]
            self._count_read(at, state, sparse)
        if not sparse and self.cache is not None:
            self._read_densely(before, self.cache.lengths)
        return Drafts(made[0], state.num_drafts, None, made[1])

    def commit(self, lengths: Sequence[int]) -> None:
        """Row b has lengths[b] tokens, the last of which the draft has not seen (M = L_old + min(n, gamma - 1))."""
        if self.cache is not None:
            self.cache.rollback([min(seen, length - 1) for seen, length in zip(self.cache.lengths, lengths, strict=True)])
            self.dense_rows = [min(dense, seen) for dense, seen in zip(self.dense_rows, self.cache.lengths, strict=True)]

    def _count_read(self, lengths: Sequence[int], state: RoundState, sparse: bool) -> None:
        rows = (min(n, self._options.budget) if sparse else n for n, on in zip(lengths, state.active, strict=True) if on)
        self.stats.draft_kv_bytes_read += sum(rows) * self._draft.spec.bytes_per_kv_token


class SelfDrafter(NoDrafter):
    """The target drafts for itself, reading only the selected rows of its own cache (MagicDec, TriForce)."""

    name = "self"

    def __init__(self, backend: Backend, model: Model, options: EngineOptions, stats: Stats) -> None:
        self._backend = backend
        self._target = model
        self._options = options
        self.stats = stats

    def propose(self, state: RoundState) -> Drafts:
        """`max_drafts` sparse steps on the target's cache, which is rolled back before verification."""
        backend, cache = self._backend, state.target_cache
        base = cache.lengths
        chosen = state.select()
        fed = backend.tokens([[row[-1]] if on else [] for row, on in zip(state.tokens, state.active, strict=True)])
        drafted: list[Array] = []
        distributions: list[Array] = []
        doubt = Confidence(backend, self._options, state)
        for step in range(max(state.num_drafts)):
            counts = [int(on and step < most) for on, most in zip(state.active, doubt.num_drafts, strict=True)]
            token_set = backend.extend(chosen, base, cache.lengths) if chosen is not None else None
            self._count_read(counts, cache, chosen is not None)
            out = self._target.forward(fed, counts, cache, token_set=token_set, logits="all")
            fed, distribution = next_token(backend, out.logits, state, step, drafted)
            if doubt.stops(out.logits, distribution, step, drafted):
                break
            drafted.append(fed)
            if distribution is not None:
                distributions.append(distribution)
        cache.rollback(base)
        if not drafted:
            return Drafts(None, doubt.num_drafts)
        rows = backend.stack_rows(distributions) if distributions else None
        return Drafts(backend.concat_tokens(drafted), doubt.num_drafts, rows)

    def _count_read(self, counts: Sequence[int], cache: KVCache, sparse: bool) -> None:
        budget = self._options.budget
        rows = sum(count * (min(n, budget) if sparse else n) for count, n in zip(counts, cache.lengths, strict=True))
        self.stats.kv_bytes_read += rows * self._target.spec.bytes_per_kv_token
