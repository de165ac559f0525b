"""Pages: allocation, reuse, rollback by length, copies. Pure Python and CPU tensors."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton")

from dustin.backends.torch_triton.cuda_cache import PageAllocator, PagedCache, PagePool
from dustin.errors import MemoryLimitError


def make_pool(pages: int = 8) -> PagePool:
    return PagePool(2, pages, 1, 4, dtype=torch.float32, device=torch.device("cpu"), page_size=4)


def test_allocator_reuses_pages_and_refuses_too_many():
    allocator = PageAllocator(4)
    first = allocator.allocate(3)
    assert first == [0, 1, 2]
    with pytest.raises(MemoryLimitError, match="2 KV pages asked for, 1 are free.*--max-kv-size"):
        allocator.allocate(2)
    allocator.free(first[:2])
    assert allocator.num_free == 3
    assert sorted(allocator.allocate(3)) == [0, 1, 3]
    with pytest.raises(ValueError, match="page 0 is not in use"):
        allocator.free([0])
        allocator.free([0])


def test_cache_takes_its_pages_and_gives_them_back_when_dropped():
    pool = make_pool()
    cache = PagedCache(pool, batch=2, capacity=10)
    assert cache.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cache.num_bytes == 6 * pool.page_bytes
    with pytest.raises(MemoryLimitError, match="lower --max-kv-size, or take fewer sequences at once .--slots, --batch."):
        PagedCache(pool, batch=1, capacity=12)
    assert pool.allocator.num_free == 2
    del cache
    gc.collect()
    assert pool.allocator.num_free == 8


def test_rollback_is_by_length_and_a_finished_row_frees_its_pages():
    cache = PagedCache(make_pool(), batch=2, capacity=8)
    cache.advance([5, 8])
    assert cache.rollback([3, 8]) == (2, 0)
    assert cache.lengths == (3, 8)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 4, expected 0 to 3"):
        cache.rollback([4, 8])
    with pytest.raises(ValueError, match=r"num_tokens\[1\] is 1, expected 0 to 0"):
        cache.check_room([1, 1])
    cache.free_row(1)
    assert cache.pool.allocator.num_free == 6
    with pytest.raises(ValueError, match=r"num_tokens\[1\]"):
        cache.check_room([1, 1])


def test_copy_row_copies_pages_and_leaves_the_rest():
    pool = make_pool(8)
    cache = PagedCache(pool, batch=2, capacity=12)
    cache.advance([11, 3])
    for store in (*pool.keys, *pool.values):
        store.copy_(torch.randn_like(store))
    rows = [[store[cache.page_table[b].long()].flatten(0, 1).clone() for store in (*pool.keys, *pool.values)] for b in range(2)]
    cache.copy_row(0, 1, 6)
    assert cache.lengths == (11, 6)
    for store, first in zip((*pool.keys, *pool.values), rows[0], strict=True):
        both = [store[cache.page_table[b].long()].flatten(0, 1) for b in range(2)]
        assert torch.equal(both[1][:6], first[:6]) and torch.equal(both[0][:11], first[:11])
    for arguments in ((0, 2, 1), (-1, 0, 1), (1, 0, 7)):
        with pytest.raises(ValueError, match="expected 0 to"):
            cache.copy_row(*arguments)


@pytest.mark.parametrize("pages", [4, 16])
def test_take_copies_rows_also_into_a_pool_of_its_own(pages):
    pool = make_pool(pages)
    cache = PagedCache(pool, batch=2, capacity=8)
    cache.advance([5, 2])
    for layer in range(2):
        for store in (pool.keys, pool.values):
            store[layer].copy_(torch.randn_like(store[layer]))
    other = cache.take([1, 0, 0], capacity=12)
    assert other.lengths == (2, 5, 5)
    assert other.capacity == 12
    for b, row in enumerate([1, 0, 0]):
        for layer in range(2):
            mine, its = (c.pool.keys[layer][c.page_table[i].long()].flatten(0, 1) for c, i in ((cache, row), (other, b)))
            assert torch.equal(mine[: other.lengths[b]], its[: other.lengths[b]])
    with pytest.raises(ValueError, match="lengths"):
        cache.take([0], capacity=4)


def test_a_shortage_names_what_was_asked_what_is_free_and_the_remedy(monkeypatch):
    from dustin.backends.torch_triton.cuda_memory import named_shortage

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 29, 8 << 30))
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB"
    with pytest.raises(MemoryLimitError, match=r"a step of 4 x 512 tokens: 2.50 GiB asked.*1.50 GiB are free.*--prefill-chunk"):
        with named_shortage("tiny, a step of 4 x 512 tokens", "lower --prefill-chunk"):
            raise torch.cuda.OutOfMemoryError(text)
