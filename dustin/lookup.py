"""The drafter that needs no model: prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence

from dustin.drafting import NoDrafter, Progress
from dustin.interfaces import Backend, Drafts, RoundState


class LookupDrafter(NoDrafter):
    """Prompt lookup: what followed the most recent earlier occurrence of the last few tokens. Needs no model."""

    name = "lookup"

    def __init__(self, backend: Backend, longest: int = 3) -> None:
        self._backend = backend
        self._longest = longest
        self._indices: list[dict[tuple[int, ...], int]] = []
        self._indexed: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: Progress | None) -> None:
        """Index the prompts' n-grams."""
        self._indices = [{} for _ in prompts]
        self._indexed = [0] * len(prompts)

    def admit(self, row: int, keep: int, source: int) -> None:
        """Forget the row's n-grams: they are indexed when it first drafts."""
        self._indices[row], self._indexed[row] = {}, 0

    def propose(self, state: RoundState) -> Drafts:
        """Drafts copied from the text; rows without a match draft nothing."""
        found = [
            self._continuation(row, tokens)[:most] if on else []
            for row, (tokens, most, on) in enumerate(zip(state.tokens, state.num_drafts, state.active, strict=True))
        ]
        counts = tuple(len(tokens) for tokens in found)
        return Drafts(self._backend.tokens(found) if any(counts) else None, counts)

    def commit(self, lengths: Sequence[int]) -> None:
        """Entries of provisional tokens that were cut are dropped when they turn out not to match."""
        self._indexed = [min(seen, length - 1) for seen, length in zip(self._indexed, lengths, strict=True)]

    def _continuation(self, row: int, tokens: Sequence[int]) -> list[int]:
        index = self._indices[row]
        # Every n-gram that ends before the last token, by the position after it; later occurrences replace earlier ones.
        for end in range(max(self._indexed[row], 1), len(tokens)):
            for size in range(1, min(self._longest, end) + 1):
                index[tuple(tokens[end - size : end])] = end
        self._indexed[row] = len(tokens)
        for size in range(min(self._longest, len(tokens)), 0, -1):
            key = tuple(tokens[-size:])
            start = index.get(key)
            if start is not None and start < len(tokens) and tuple(tokens[start - size : start]) == key:
                return list(tokens[start : start + 16])
        return []
