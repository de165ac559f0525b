"""Draft steps of the next round, begun on the device while the host still waits for this round's verdict.

The device knows what it kept; the host, which learns it later, asks for the next drafts only then. Meanwhile the device need not
wait. What was begun serves a round whose rows are as the verdict leaves them: it is dropped where the host cut a row otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dustin.interfaces import BegunDrafts, HostVerdict, TokenSet


@dataclass
class Ahead:
    """What was begun, and for which rounds it serves.

    Row b had known[b] tokens, the pending one with them, and `steps` drafts were judged by `verdict` (None: not yet read).
    `token_set`, chosen at `set_lengths`, is what the draft reads.
    """

    begun: BegunDrafts
    known: tuple[int, ...]
    active: tuple[bool, ...]
    steps: int
    token_set: TokenSet | None
    set_lengths: tuple[int, ...]
    verdict: HostVerdict | None = None

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
                and held[b] == self.known[b] + min(kept, self.steps - 1)
                and (token_set is None or set_lengths[b] == self.set_lengths[b])
            ):
                return False
        return True
