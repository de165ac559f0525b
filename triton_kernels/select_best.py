"""The best tokens of many rows of scores at once: what select_tokens chooses by target scores alone, with fewer rounds of counting.

Scores fall into bins of equal ratio (a sixteenth of a power of two). One launch counts the bins of every row, the next lists what
lies in the bin that holds the last wanted score or above it, the last one settles that bin exactly, ties to the lower index. A
list is a little longer than the set, where select_tokens' chunks each list as many as the whole row may want.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_tensor, power_of_two
from .select_tokens import ordered_key, take_top

BINS = tl.constexpr(512)
# Bits below a bin's, keys of a bin, and the first bin: 2^-32 and less, of scores up to 1.
SHIFT, WIDTH = tl.constexpr(19), tl.constexpr(1 << 19)
FIRST = tl.constexpr((0xBF800000 >> 19) - 511)


@triton.jit
def bin_of(key):
    """The bin [N] int32 of ordered keys [N] uint32."""
    return tl.minimum(tl.maximum((key >> SHIFT).to(tl.int32) - FIRST, 0), BINS - 1)


@triton.jit
def keys_at(row, position, length, columns, sinks, recent):
    """(ordered keys, 0 where a position is protected or beyond the length; which are protected)."""
    score = tl.load(row + position, mask=position < columns, other=0.0)
    inside = position < length
    protected = inside & ((position < sinks) | (position >= length - recent))
    return tl.where(inside & (protected == 0), ordered_key(score), tl.full(position.shape, 0, tl.uint32)), protected


@triton.jit
def count_bins_kernel(
    scores, lengths, bins, stride, columns, budget, sinks, recent, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (chunk, row): adds its scores to the row's bins [BINS]; what does not count falls into the first."""
    begin_dependent(PDL)
    start = tl.program_id(0) * BLOCK
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    if (length <= budget) | (start >= length):
        return
    key, _ = keys_at(scores + row * stride, start + tl.arange(0, BLOCK), length, columns, sinks, recent)
    counts = tl.histogram(bin_of(key), BINS)
    at = tl.arange(0, BINS)
    tl.atomic_add(bins + row * BINS + at, counts, mask=(counts > 0) & (at > 0), sem="relaxed")


@triton.jit
def last_bin(bins, row, want):
    """(the bin that holds the `want`th best score of a row, how many scores lie above it)."""
    at = tl.arange(0, BINS)
    counts = tl.load(bins + row * BINS + at)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    # The first bin has no count of its own: it holds whatever is missing.
    last = tl.sum(((above + counts >= want) & (at > 0)).to(tl.int32), 0)
    return last, tl.sum(tl.where(at == last, above, 0), 0)


@triton.jit
def list_best_kernel(
    scores, lengths, bins, lists, sizes, stride, columns, budget, sinks, recent, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (chunk, row): the positions of its protected tokens and of all scores from the last wanted bin on, ascending."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    slot = row * tl.num_programs(0) + chunk
    if (length <= budget) | (chunk * BLOCK >= length):
        tl.store(sizes + slot, 0)
        return
    last, _ = last_bin(bins, row, budget - sinks - recent)
    position = chunk * BLOCK + tl.arange(0, BLOCK)
    key, protected = keys_at(scores + row * stride, position, length, columns, sinks, recent)
    chosen = protected | ((key != 0) & (bin_of(key) >= last))
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(lists + slot * BLOCK + rank - 1, position, mask=chosen)
    tl.store(sizes + slot, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def listed(lists, sizes, row, first, chunks, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(positions [TILE] of a row's lists, put together, from entry `first` on; which exist)."""
    entry = first + tl.arange(0, TILE)
    position = tl.zeros([TILE], tl.int32)
    begin = 0
    for chunk in range(chunks):
        size = tl.load(sizes + row * chunks + chunk)
        mine = (entry >= begin) & (entry < begin + size)
        got = tl.load(lists + (row * chunks + chunk) * BLOCK + entry - begin, mask=mine, other=0)
        position = tl.where(mine, got, position)
        begin += size
    return position, entry < begin


@triton.jit(do_not_specialize=["chunks"])
def settle_kernel(
    scores, lengths, bins, lists, sizes, indices, counts, stride, columns, budget, sinks, recent, chunks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the set."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    target = indices + row * budget
    if length <= budget:
        column = tl.arange(0, BLOCK_K)
        tl.store(target + column, tl.where(column < length, column, 0), mask=column < budget)
        tl.store(counts + row, length)
        return
    tl.store(counts + row, budget)
    want = budget - sinks - recent
    last, above = last_bin(bins, row, want)
    left = want - above
    mine = scores + row * stride
    total = 0
    for chunk in range(chunks):
        total += tl.load(sizes + row * chunks + chunk)
    if total <= TILE:
        position, there = listed(lists, sizes, row, 0, chunks, BLOCK, TILE)
        key, protected = keys_at(mine, position, length, columns, sinks, recent)
        which = bin_of(key)
        open = there & (key != 0) & (which == last)
        best = take_top(tl.where(open, key, tl.full([TILE], 0, tl.uint32)), left, 0)
        chosen = there & (protected | ((key != 0) & (which > last)) | best)
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(target + rank - 1, position, mask=chosen & (rank <= budget))
    else:
        # Many scores alike. The threshold among them by halves of their bin, tile after tile; then all once more, in order.
        edge = (last + FIRST).to(tl.int64) * WIDTH
        low = tl.where(last > 0, edge, tl.full([], 1, tl.int64))
        high = tl.where(last < BINS - 1, edge + WIDTH, tl.full([], 1 << 32, tl.int64))
        while high - low > 1:
            middle = (low + high) // 2
            at_least = 0
            for first in range(0, total, TILE):
                position, there = listed(lists, sizes, row, first, chunks, BLOCK, TILE)
                key, _ = keys_at(mine, position, length, columns, sinks, recent)
                at_least += tl.sum((there & (bin_of(key) == last) & (key.to(tl.int64) >= middle)).to(tl.int32), 0)
            enough = at_least >= left
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        more = 0
        for first in range(0, total, TILE):
            position, there = listed(lists, sizes, row, first, chunks, BLOCK, TILE)
            key, _ = keys_at(mine, position, length, columns, sinks, recent)
            more += tl.sum((there & (bin_of(key) == last) & (key.to(tl.int64) > low)).to(tl.int32), 0)
        missing = left - more
        made = 0
        alike = 0
        for first in range(0, total, TILE):
            position, there = listed(lists, sizes, row, first, chunks, BLOCK, TILE)
            key, protected = keys_at(mine, position, length, columns, sinks, recent)
            which = bin_of(key)
            equal = there & (which == last) & (key.to(tl.int64) == low)
            rank_equal = alike + tl.cumsum(equal.to(tl.int32), 0)
            above_low = (which > last) | ((which == last) & (key.to(tl.int64) > low))
            chosen = there & (protected | ((key != 0) & above_low) | (equal & (rank_equal <= missing)))
            rank = made + tl.cumsum(chosen.to(tl.int32), 0)
            tl.store(target + rank - 1, position, mask=chosen & (rank <= budget))
            made += tl.sum(chosen.to(tl.int32), 0)
            alike += tl.sum(equal.to(tl.int32), 0)


def select_best(
    scores: torch.Tensor, lengths: torch.Tensor, *, budget: int, num_sink_tokens: int, num_recent_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens of [0, lengths[s]): protected ones, then the best by scores, ties to the lower index.

    Scores [S, Nmax] fp32 (NaN-free), lengths [S] int32. Returns indices [S, budget] int32 ascending and counts [S] int32 (budget,
    or lengths[s] where that is no larger: then all of [0, lengths[s])); entries beyond the count are 0. The same sets as
    select_tokens without draft scores. Raises ValueError on bad input.
    """
    check_tensor("scores", scores, (len(lengths), None), (torch.float32,), lengths, contiguous=False)
    check_counts(len(lengths), lengths, lengths=lengths)
    if min(num_sink_tokens, num_recent_tokens) < 0 or budget < max(1, num_sink_tokens + num_recent_tokens):
        least = max(1, num_sink_tokens + num_recent_tokens)
        raise ValueError(f"budget: expected at least {least} (sinks and recent tokens, none below 0), got {budget}")
    rows, columns = scores.shape
    block = 64 if INTERPRETED else 2048
    chunks = triton.cdiv(columns, block)
    device = scores.device
    bins = torch.zeros(rows * BINS.value, dtype=torch.int32, device=device)
    lists = torch.empty(rows * chunks * block, dtype=torch.int32, device=device)
    sizes = torch.empty(rows * chunks, dtype=torch.int32, device=device)
    indices = torch.empty((rows, budget), dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    options = {} if INTERPRETED else {"launch_pdl": True}
    quota = (scores.stride(0), columns, budget, num_sink_tokens, num_recent_tokens)
    common = {"BLOCK": block, "PDL": bool(options), **options}
    count_bins_kernel[(chunks, rows)](scores, lengths, bins, *quota, num_warps=4, **common)
    list_best_kernel[(chunks, rows)](scores, lengths, bins, lists, sizes, *quota, num_warps=4, **common)
    # Room for a bin beside the set: as many scores again as the set has, at most, before the slow way.
    tile = power_of_two(budget + budget // 4, 64)
    settle_kernel[(rows,)](
        scores, lengths, bins, lists, sizes, indices, counts, *quota, chunks,
        TILE=tile, BLOCK_K=power_of_two(budget), num_warps=min(16, max(4, tile // 256)), **common,
    )  # fmt: skip
    return indices, counts
