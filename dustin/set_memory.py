"""What selection carries from round to round: the queries that score, and the set a draft model reads (METHOD section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from dustin.config import EngineOptions
from dustin.interfaces import Array, Backend, Drafter, Drafts, SelectionContext, Selector, TokenSet
from dustin.sequence import Sequence

Queries = Mapping[int, Array]
# KV bytes of a draft model over its weights from which a dense round's draft reads a set too: below, its launches cost more.
_SPARSE_DRAFT_SHARE = 0.25
# Mode -> tokens that a draft's set may lag and still be worth extending: with a round's drafts, within what the usual shape of a
# draft step leaves room for. After a check that cut a block the set lags by the recent tokens.
_FAR_BEHIND = {"dense": 48, "exact": 256}


class SetMemory:
    """History and lagged lookahead queries, the prompt's, and the last set with the target's lengths it was chosen at.

    `rows` is the engine's own list: what it replaces in there is replaced here. `taking` are the rows of a round; the others
    keep what is remembered of them.
    """

    def __init__(self, backend: Backend, selector: Selector, options: EngineOptions) -> None:
        self.backend = backend
        self.selector = selector
        self.options = options
        self.rows: list[Sequence] = []
        self.set: TokenSet | None = None
        self.set_lengths: tuple[int, ...] = ()
        self._history: Queries | None = None
        self._prompt: Queries | None = None
        self._lagged: Queries | None = None
        self._lagged_steps = 0
        self._unlagged: set[int] = set()  # rows that joined a running batch: the lagged queries in their place are not theirs

    # Learning queries.

    def learn_prompt(self, queries: Queries, last: Seq[int]) -> None:
        """Queries of the rows of a prompt's last chunk, which ends for sequence b at row last[b]."""
        if queries and self.selector.prompt_rows > 1:
            self._prompt = self.backend.gather_rows(queries, last, self.selector.prompt_rows)
            self._history = self.backend.gather_rows(queries, last, self.selector.history_rows)
        elif queries:
            self._history = self._repeated(queries)

    def learn_verified(self, queries: Queries, num_accepted: Array, taking: set[int]) -> None:
        """Queries of the verified rows: history are those of the last one kept, and of the rows before it."""
        if queries:
            self._history = self._merged(
                self._history, self.backend.gather_rows(queries, num_accepted, self.selector.history_rows), taking
            )

    def learn_last(self, queries: Queries, taking: set[int]) -> None:
        """Queries of one row a sequence, [B, 1, S, D], as a dense pass over many rows gives."""
        if queries:
            self._history = self._merged(self._history, self._repeated(queries), taking)

    def join(self, joining: set[int]) -> None:
        """These rows hold new sequences: nothing is in their set yet."""
        self.set_lengths = tuple(0 if b in joining else n for b, n in enumerate(self.set_lengths))
        if self.options.lookahead_lag == 1:
            self._unlagged |= joining
        self.selector.restart(joining)

    # Choosing.

    def select(self, context: SelectionContext, drafts: Drafts, taking: set[int]) -> TokenSet | None:
        """The set of this round. `context` comes without queries: history is what was learned, lookahead what the drafts bring."""
        lookahead = drafts.queries
        if self.options.lookahead_lag == 1:
            # The set must not depend on drafts it will judge (exact sampling): use the previous round's.
            lookahead = self._lagged
            self._learn_drafts(drafts, taking)
            read = context.draft_cache.lengths if context.draft_cache is not None else context.lengths
            if any(have < n for have, n in zip(read, context.lengths, strict=True)):
                lookahead = None  # A round without drafts: there are no keys of the newest tokens to score.
        context = replace(context, history=self._history, lookahead=lookahead, prompt=self._prompt)
        chosen = self.selector.select(context)
        if chosen is not None and lookahead is not None and self.selector.needs_lookahead and self._unlagged & taking:
            # Their first round has history alone, as a batch's first round has.
            alone = self.selector.select(replace(context, lookahead=None, repeat=True))
            if alone is not None:
                rows = [row.row in self._unlagged for row in self.rows]
                chosen = replace(self.backend.replace_set_rows(chosen, alone, rows), reselection=alone.reselection)
        if drafts.queries:
            self._unlagged -= taking
        self._prompt = None
        self._keep(chosen, context.lengths, taking)
        return chosen

    def _learn_drafts(self, drafts: Drafts, taking: set[int]) -> None:
        """The drafts' queries, for the next round's lookahead."""
        if not drafts.queries or drafts.tokens is None:
            return
        steps = drafts.tokens.shape[1]
        if steps == self._lagged_steps:
            self._lagged = self._merged(self._lagged, drafts.queries, taking)
            return
        # Beside another number of drafts nothing can be kept of the rows that take no part.
        self._lagged, self._lagged_steps = drafts.queries, steps
        self._unlagged |= {row.row for row in self.rows if row.active and row.row not in taking}

    def roll_back(self, lengths: Seq[int]) -> None:
        """The target's cache holds lengths[b] rows now."""
        if self.set is not None:
            # After a cut the set's recent window lies beyond the end: let the draft see the rows before the cut instead.
            recent = self.options.num_recent_tokens
            self.set_lengths = tuple(
                then if now >= then else max(0, now - recent) for then, now in zip(self.set_lengths, lengths, strict=True)
            )

    def worth_for_draft(self, drafter: Drafter, greedy: bool) -> bool:
        """Whether a set is chosen for the draft of a dense round alone: where reading all of its KV costs more than the scores.

        Greedy only: what is drawn from a seed may not depend on who else is in the batch.
        """
        model, lengths = drafter.model, [row.committed for row in self.rows if row.active]
        if model is None or drafter.tap is None or not self.options.sparse_draft or not greedy or not lengths:
            return False
        # Where scores are a kernel's, a set costs less than dense draft steps in every cell measured (docs/results.md).
        share = 0.0 if getattr(self.backend, "scores_all", False) else _SPARSE_DRAFT_SHARE
        heavy = sum(lengths) * model.spec.bytes_per_kv_token >= share * model.spec.weight_bytes
        return heavy and max(lengths) >= 2 * self.options.budget

    def recede(self, lengths: Seq[int]) -> None:
        """The rows from lengths[b] on are written anew, by a pass that may cut them anywhere: let the draft see those, and the
        recent ones before them, whatever the set holds of them."""
        if self.set is not None:
            recent = self.options.num_recent_tokens
            self.set_lengths = tuple(min(then, max(0, n - recent)) for then, n in zip(self.set_lengths, lengths, strict=True))

    def for_draft(self, lossless: str, lengths: Seq[int], taking: set[int]) -> TokenSet | None:
        """The set that a draft reads, None for everything; `lossless` is the mode where the set changes no token, lengths[b] the
        target's rows.

        Everything, where rounds without a set, or a long prompt that joined, have left one far behind: widening that of all rows
        costs more, and on a GPU a recording for each length.
        """
        most = _FAR_BEHIND.get(lossless)
        if self.set is None or most is None:
            return self.set
        behind = [lengths[b] - self.set_lengths[b] for b in taking]
        return None if max(behind, default=0) > most else self.set

    def _keep(self, chosen: TokenSet | None, lengths: tuple[int, ...], taking: set[int]) -> None:
        """For the draft's next round; rows that took no part keep their older set."""
        if chosen is not None:
            # Layers are the target's own matter: the draft reads the shared set in all of its.
            chosen = TokenSet(chosen.indices, chosen.counts)
        waiting = [row.active and row.row not in taking for row in self.rows]
        if self.set is None or not any(waiting):
            self.set, self.set_lengths = chosen, lengths
            return
        old = zip(waiting, self.set_lengths, lengths, strict=True)
        if chosen is None:
            # The rows of this round fit the budget: from length 0 on, everything joins their set.
            self.set_lengths = tuple(then if waits else 0 for waits, then, _ in old)
        else:
            self.set = self.backend.replace_set_rows(self.set, chosen, [not waits for waits in waiting])
            self.set_lengths = tuple(then if waits else now for waits, then, now in old)

    def _merged(self, old: Queries | None, new: Queries | None, taking: set[int]) -> Queries | None:
        """Fresh queries of the rows that took part; the others keep theirs."""
        if not new or not old:
            return new or old
        if all(row.row in taking or not row.active for row in self.rows):
            return new
        return self.backend.replace_rows(old, new, [row.row in taking for row in self.rows])

    def _repeated(self, queries: Queries) -> Queries:
        """A single row a sequence, repeated where the selector wants several."""
        rows = self.selector.history_rows
        return queries if rows == 1 else self.backend.gather_rows(queries, [0] * len(self.rows), rows)
