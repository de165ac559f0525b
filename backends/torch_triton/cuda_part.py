"""Calls of a paged model in parts: some sequences of a cache alone, and calls whose tokens are counted later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.interfaces import ForwardResult


class CachePart:
    """Rows `rows` of a cache with their page table, as a call without sets sees a cache."""

    def __init__(self, cache: PagedCache, rows: Sequence[int], page_table: torch.Tensor) -> None:
        self.pool, self.page_table, self.batch = cache.pool, page_table, len(rows)
        self._cache, self._rows = cache, rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each."""
        return tuple(self._cache.lengths[row] for row in self._rows)

    def check_room(self, num_tokens: Sequence[int]) -> tuple[int, ...]:
        """See PagedCache.check_room."""
        return tuple(self._cache.check_room(self._all(num_tokens))[row] for row in self._rows)

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Count what was appended."""
        self._cache.advance(self._all(num_tokens))

    def _all(self, num_tokens: Sequence[int]) -> list[int]:
        given = dict(zip(self._rows, num_tokens, strict=True))
        return [given.get(b, 0) for b in range(self._cache.batch)]


@dataclass
class BegunCall:
    """See BegunForward."""

    result: ForwardResult
    cache: PagedCache

    def finish(self, num_tokens: Sequence[int]) -> ForwardResult:
        """The result; the cache grows."""
        self.cache.advance(num_tokens)
        return self.result
