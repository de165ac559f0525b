"""The next round, begun on the device while the host still waits for this round's verdict: its draft steps, or its plain step.

The device knows what it kept; the host, which learns it later, asks for the next round only then. Meanwhile the device need not
wait. What was begun serves a round whose rows are as the verdict leaves them: it is dropped where the host cut a row otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dustin.interfaces import Backend, BegunDrafts, BegunForward, ForwardAhead, HostVerdict, KVCache, Tap, TokenSet, Verdict
from dustin.sequence import Sequence as Row


@dataclass
class Ahead:
    """What was begun, and for which rounds it serves.

    Row b had known[b] tokens, the pending one with them, and held[b] rows in the draft's cache, before what `verdict` judged (None:
    not yet read). `token_set`, chosen at `set_lengths`, is what the draft reads.
    """

    begun: BegunDrafts
    known: tuple[int, ...]
    active: tuple[bool, ...]
    held: tuple[int, ...]
    token_set: TokenSet | None
    set_lengths: tuple[int, ...]
    verdict: HostVerdict | None = None

    def those(self, active: set[int]) -> set[int]:
        """See PlainAhead.those."""
        return {b for b in active if self.active[b]} or active

    def without(self, row: int) -> Ahead:
        """The same for all rows but one, which begins a new sequence."""
        return replace(self, active=tuple(on and b != row for b, on in enumerate(self.active)))

    def serves(
        self,
        tokens: Sequence[Sequence[int]],
        active: Sequence[bool],
        held: Sequence[int],
        token_set: TokenSet | None,
        set_lengths: Sequence[int],
    ) -> bool:
        """Whether a round of these rows would begin the same steps: tokens[b] its tokens, held[b] rows in the draft's cache."""
        if self.verdict is None or token_set is not self.token_set:
            return False
        for b, on in enumerate(active):
            kept = self.verdict.num_accepted[b]
            if on and not (
                self.active[b]
                and len(tokens[b]) == self.known[b] + kept + 1
                # A dense check may have put another token here.
                and tokens[b][-1] == self.verdict.tokens[b][kept]
                and held[b] == min(self.held[b], self.known[b] + kept)
                and (token_set is None or set_lengths[b] == self.set_lengths[b])
            ):
                return False
        return True


@dataclass
class PlainAhead:
    """A plain step that was begun: row b, with known[b] tokens before, feeds the token that `verdict` (None: not yet read) gave it,
    or given[b], which the host had."""

    begun: BegunForward
    rows: tuple[Row | None, ...]
    known: tuple[int, ...]
    verdict: HostVerdict | None = None
    given: Mapping[int, int] = field(default_factory=dict)

    def those(self, rows: Sequence[Row], active: set[int]) -> set[int]:
        """Of the rows `active` those that the step was begun for: who has joined since waits for it rather than have it taken
        again for all. All of them where there are none."""
        return {b for b in active if self.rows[b] is rows[b]} or active

    def serves(self, rows: Sequence[Row], taking: set[int], held: Sequence[int]) -> bool:
        """Whether this is the step of the rows `taking`, held[b] rows of which are in the cache."""
        if self.verdict is None:
            return False
        for b in taking:
            row, before = rows[b], self.known[b]
            same = row is self.rows[b] and len(row.tokens) == before + 1 and held[b] == before
            if not same or row.tokens[-1] != (self.given[b] if b in self.given else self.verdict.tokens[b][0]):
                return False
        return True


def begin_plain(
    backend: Backend,
    model: ForwardAhead,
    cache: KVCache,
    tap: Tap,
    verdict: Verdict,
    rows: Sequence[Row],
    going: Sequence[bool],
    waiting: set[int],
) -> PlainAhead | None:
    """The plain step after `verdict` of the rows that are `going`; of those `waiting`, which took no part in what it judges, the
    host alone has the token to feed. None where the model cannot begin it."""
    fed, given = verdict.tokens, {b: rows[b].tokens[-1] for b in waiting}
    if waiting:
        mine = backend.tokens([[given.get(b, 0)] for b in range(len(rows))])
        fed = backend.insert_tokens(mine, [0] * len(rows), fed, [int(b not in waiting) for b in range(len(rows))])
    begun = model.forward_ahead(fed, [int(on) for on in going], cache, tap=tap)
    if begun is None:
        return None
    known = tuple(len(row.tokens) - (b in waiting) for b, row in enumerate(rows))
    return PlainAhead(begun, tuple(row if on else None for row, on in zip(rows, going, strict=True)), known, given=given)
