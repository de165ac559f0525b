"""Keys and values in pages: one pool a model, a page table a cache, token-major rows [pages, page_size, Hkv, D] a layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dustin.backends.common.checks import SMALLER, check_copy, check_restored
from dustin.backends.common.ragged import RaggedLengths
from dustin.backends.torch_triton.cache import available_bytes, check_lengths, from_host, host_dtype, to_host
from dustin.errors import MemoryLimitError

# 64 rows: a page is one tile of the attention kernels, whose address then needs a single table entry.
PAGE_SIZE = 64


class PageAllocator:
    """Which pages of a pool are free. Lower numbers first, so that runs are reproducible."""

    def __init__(self, num_pages: int) -> None:
        """All of 0..num_pages-1 are free. Raise ValueError when num_pages is below 1."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, expected 1 or more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages that nobody else holds. Raise MemoryLimitError when fewer are free."""
        if count < 0:
            raise ValueError(f"count is {count}, expected 0 or more pages")
        if count > self.num_free:
            raise MemoryLimitError(f"{count} KV pages asked for, {self.num_free} are free: {SMALLER}")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raise ValueError on a page that is not in use."""
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use, expected one that allocate returned")
            self._used.remove(page)
        self._free += sorted(pages, reverse=True)


class PagePool:
    """The memory of one model's caches: for each layer K and V [pages, page_size, Hkv, D]. Never grows or moves."""

    default_page_size = PAGE_SIZE

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """Raise MemoryLimitError, naming asked and free bytes, where the pages do not fit."""
        self.page_size = page_size
        self.page_bytes = 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
        asked, free = num_pages * self.page_bytes, available_bytes(device)
        if free is not None and asked > free:
            raise MemoryLimitError(
                f"the KV cache asks for {asked} bytes ({num_pages} pages of {page_size} tokens), {free} are free: {SMALLER}"
            )
        self.allocator = PageAllocator(num_pages)
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        try:
            self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"the KV cache asks for {asked} bytes, {free} are free but not in one piece: {SMALLER}"
            ) from error
        self.device = device
        # Who encodes compact keys -> layer -> codes beside the keys (see compact_keys).
        self.compact: dict[Any, dict[int, torch.Tensor]] = {}


class PagedCache(RaggedLengths):
    """The KVCache of dustin.interfaces over pages of a pool. Rows at and beyond `lengths[b]` hold anything.

    Pages of all B * capacity rows are taken at once, so no append can fail and the table stays as it is; they go back to
    the pool when the cache is dropped, and a finished sequence's with `free_row`.
    """

    def __init__(self, pool: PagePool, batch: int, capacity: int) -> None:
        """Raise ValueError on a size below 1, MemoryLimitError when the pool has too few free pages."""
        super().__init__(batch, capacity)
        self.pool = pool
        per_row = -(-capacity // pool.page_size)
        self._pages = [pool.allocator.allocate(per_row) for _ in range(batch)] if self._fits(batch * per_row) else []
        self.num_bytes = batch * per_row * pool.page_bytes
        self.page_table = torch.tensor(self._pages, dtype=torch.int32).to(pool.device)
        self._finalizer = weakref.finalize(self, _release, pool.allocator, self._pages)

    def _fits(self, count: int) -> bool:
        free = self.pool.allocator.num_free
        if count > free:
            raise MemoryLimitError(
                f"the KV cache asks for {count * self.pool.page_bytes} bytes ({count} pages), "
                f"{free * self.pool.page_bytes} are free in the pool: {SMALLER}"
            )
        return True

    def check_room(self, num_tokens: Sequence[int]) -> tuple[int, ...]:
        """num_tokens as ints if each sequence has room for its share; raise ValueError if not."""
        rooms = [(self.capacity if pages else 0) - n for pages, n in zip(self._pages, self._lengths, strict=True)]
        return check_lengths("num_tokens", num_tokens, [0] * self.batch, rooms)

    def free_row(self, row: int) -> None:
        """Give a finished sequence's pages back; it can feed no more tokens."""
        pages, self._pages[row] = self._pages[row], []
        self.pool.allocator.free(pages)
        self._replace_row(row, 0)

    def flat_keys(self, layer: int) -> torch.Tensor:
        """A layer's keys as rows [pages * page_size, Hkv, D] (a view); see `places`."""
        return self.pool.keys[layer].flatten(0, 1)

    def places(self, indices: torch.Tensor) -> torch.Tensor:
        """Where tokens [B, n] of each sequence lie in `flat_keys`."""
        at, size = indices.long(), self.pool.page_size
        return self.page_table.long().gather(1, at // size) * size + at % size

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`. Raise ValueError on a sequence or length out of range."""
        check_copy(source, target, length, self._lengths)
        used = -(-length // self.pool.page_size)
        if used and not self._pages[target]:
            raise ValueError(f"target is {target}, expected a sequence whose pages were not given back")
        old, new = (torch.tensor(self._pages[row][:used], device=self.pool.device) for row in (source, target))
        for store in (*self.pool.keys, *self.pool.values):
            if used:
                store[new] = store[old]
        self._replace_row(target, length)

    def dump(self, row: int) -> list[np.ndarray]:
        """See PortableCache.dump."""
        where = self._where(row, self._lengths[row])
        return [to_host(torch.stack([k[where], v[where]])) for k, v in zip(self.pool.keys, self.pool.values, strict=True)]

    @torch.inference_mode()
    def restore(self, row: int, layers: Sequence[np.ndarray]) -> None:
        """See PortableCache.restore."""
        pool, capacity = self.pool, self.capacity if self._pages[row] else 0
        shape, dtype = (len(pool.keys), *pool.keys[0].shape[2:]), pool.keys[0].dtype
        count = check_restored(layers, shape, host_dtype(dtype), self._lengths[row], capacity)
        where = self._where(row, count)
        for keys, values, rows in zip(pool.keys, pool.values, layers, strict=True):
            keys[where], values[where] = from_host(rows, dtype).to(pool.device)
        self._replace_row(row, count)

    def _where(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and place in it of a sequence's first `count` rows."""
        at = torch.arange(count, device=self.pool.device)
        pages = torch.tensor(self._pages[row], device=self.pool.device)
        return pages[at // self.pool.page_size], at % self.pool.page_size

    def take(self, rows: Sequence[int], capacity: int | None = None) -> PagedCache:
        """A new cache with copies of the given sequences (repeats allowed). Raise ValueError where `capacity` is too small."""
        check_lengths("rows", rows, [0] * len(rows), [self.batch - 1] * len(rows))
        size = self.capacity if capacity is None else capacity
        lengths = check_lengths("lengths", [self._lengths[row] for row in rows], [0] * len(rows), [size] * len(rows))
        per_row = -(-size // self.pool.page_size)
        pool = self.pool
        if len(rows) * per_row > pool.allocator.num_free:
            like = pool.keys[0]
            pool = PagePool(
                len(pool.keys), len(rows) * per_row, *like.shape[2:], dtype=like.dtype, device=pool.device, page_size=pool.page_size
            )
        other = PagedCache(pool, len(rows), size)
        old, new = [], []
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            used = -(-length // pool.page_size)
            old += self._pages[row][:used]
            new += other._pages[b][:used]
        if old:
            source, target = (torch.tensor(pages, device=pool.device) for pages in (old, new))
            pairs = zip((*self.pool.keys, *self.pool.values), (*pool.keys, *pool.values), strict=True)
            for mine, its in pairs:
                its[target] = mine[source]
        other._lengths = lengths
        return other


def _release(allocator: PageAllocator, pages: list[list[int]]) -> None:
    for row in pages:
        allocator.free(row)
