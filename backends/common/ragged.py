"""What the caches of torch and MLX share: how many rows each sequence has, as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dustin.backends.common.checks import check_lengths


class RaggedLengths:
    """Lengths of B sequences in a cache of `capacity` rows each. Rows are dropped by length only."""

    def __init__(self, batch: int, capacity: int) -> None:
        """All sequences are empty. Raise ValueError on a size below 1."""
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        self.capacity = capacity
        self._lengths: tuple[int, ...] = (0,) * batch
        self._encoded: tuple[Any, tuple[int, ...]] = (None, self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid rows of each sequence (host values)."""
        return self._lengths

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    def check_room(self, num_tokens: Sequence[int]) -> tuple[int, ...]:
        """num_tokens as ints if each sequence has room for its share; raise ValueError if not."""
        return check_lengths("num_tokens", num_tokens, [0] * self.batch, [self.capacity - n for n in self._lengths])

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Count the rows that every layer has written."""
        self._lengths = tuple(have + n for have, n in zip(self._lengths, self.check_room(num_tokens), strict=True))

    def rollback(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shorten to lengths[b]; return how many rows each dropped. Raise ValueError on a longer length."""
        new = check_lengths("lengths", lengths, [0] * self.batch, self._lengths)
        dropped = tuple(old - length for old, length in zip(self._lengths, new, strict=True))
        self._lengths = new
        owner, known = self._encoded
        self._encoded = owner, tuple(min(a, b) for a, b in zip(known, new, strict=True))
        return dropped

    def encoded_by(self, owner: object) -> tuple[int, ...]:
        """Leading rows of each sequence that nobody has written since `owner` last marked them (0: it never did)."""
        return self._encoded[1] if self._encoded[0] == owner else (0,) * self.batch

    def mark_encoded(self, owner: object) -> None:
        """`owner` has seen all committed rows."""
        self._encoded = owner, self._lengths

    def _replace_row(self, row: int, length: int) -> None:
        """Sequence `row` has `length` rows from elsewhere now."""
        self._lengths = tuple(length if b == row else n for b, n in enumerate(self._lengths))
        owner, known = self._encoded
        self._encoded = owner, tuple(0 if b == row else n for b, n in enumerate(known))
