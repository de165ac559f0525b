"""The quota rule (METHOD section 3.2): protect, top m by the draft, fill by the target, ties to the lower index.

Exact selection by counting: the threshold is bisected on the order-preserving integers of the scores, keys held in
registers, until it separates exactly the wanted number. Long rows first reduce to candidates, chunk by chunk, and the lists of
chunks again while they are long: a chunk's own top m by draft and top k by target contain every token of that chunk the
whole row can choose. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_tensor, power_of_two

# What one program holds in registers without spilling.
BLOCK_COLUMNS = 64 if INTERPRETED else 8192
# Candidate lists may hold 1/SLACK more than a quota asks for: an exact threshold takes twice the steps.
SLACK = 8


@triton.jit
def ordered_key(score):
    """Order-preserving uint32 of a float32, above 0 for every number (0 marks "out of the running")."""
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    # -0.0 and 0.0 must tie.
    return tl.where((bits << 1) == 0, tl.full(bits.shape, 0x80000000, tl.uint32), flipped)


@triton.jit
def _join_extents(high_a, low_a, count_a, high_b, low_b, count_b):
    return tl.maximum(high_a, high_b), tl.minimum(low_a, low_b), count_a + count_b


@triton.jit
def extent(key):
    """(one above the largest key, the smallest key above 0, number of keys above 0) of key [N] uint32."""
    lowest = tl.where(key == 0, tl.full(key.shape, 0xFFFFFFFF, tl.uint32), key)
    high, low, count = tl.reduce((key, lowest, (key != 0).to(tl.int32)), 0, _join_extents)
    return high + 1, low, count


@triton.jit
def above_threshold(key, low, at_low, want, slack):
    """Mask of the keys >= low when there are at most want + slack; else `want` of them, among equal keys the lower positions."""
    chosen = (key >= low) & (key != 0)
    if at_low > want + slack:
        above = key > low
        equal = key == low
        missing = want - tl.sum(above.to(tl.int32), 0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    return chosen & (want > 0)


@triton.jit
def take_top(key, want, slack):
    """Mask of the largest keys [N] uint32, never a key of 0: at least `want` of them (or all), at most `slack` more. Without
    slack exactly `want`, among equal keys the lower positions."""
    # At least `want` keys are >= low (or all are), fewer are >= high. One sum counts at two places: a third remains.
    high, low, at_low = extent(key)
    while (high - low > 1) & (at_low > want + slack) & (want > 0):
        first = low + tl.maximum((high - low) // 3, 1)
        second = low + tl.maximum((high - low) // 3 * 2, 1)
        if key.shape[0] < 65536:
            both = (key >= first).to(tl.uint32) + ((key >= second).to(tl.uint32) << 16)
            counts = tl.sum(both, 0)
            at_first, at_second = (counts & 0xFFFF).to(tl.int32), (counts >> 16).to(tl.int32)
        else:
            at_first, at_second = tl.sum((key >= first).to(tl.int32), 0), tl.sum((key >= second).to(tl.int32), 0)
        high = tl.where(at_second >= want, high, tl.where(at_first >= want, second, first))
        low = tl.where(at_second >= want, second, tl.where(at_first >= want, first, low))
        at_low = tl.where(at_second >= want, at_second, tl.where(at_first >= want, at_first, at_low))
    return above_threshold(key, low, at_low, want, slack)


@triton.jit
def take_two(key_a, want_a, slack_a, key_b, want_b, slack_b):
    """Masks of the top of two key rows [N], N < 65536: at least `want` (or all), at most `slack` more. One search for both."""
    high_a, low_a, at_a = extent(key_a)
    high_b, low_b, at_b = extent(key_b)
    open_a = (high_a - low_a > 1) & (at_a > want_a + slack_a) & (want_a > 0)
    open_b = (high_b - low_b > 1) & (at_b > want_b + slack_b) & (want_b > 0)
    while open_a | open_b:
        middle_a = low_a + (high_a - low_a) // 2
        middle_b = low_b + (high_b - low_b) // 2
        both = (key_a >= middle_a).to(tl.uint32) + ((key_b >= middle_b).to(tl.uint32) << 16)
        counts = tl.sum(both, 0)
        count_a, count_b = (counts & 0xFFFF).to(tl.int32), (counts >> 16).to(tl.int32)
        up_a, up_b = open_a & (count_a >= want_a), open_b & (count_b >= want_b)
        at_a, at_b = tl.where(up_a, count_a, at_a), tl.where(up_b, count_b, at_b)
        high_a = tl.where(open_a & (count_a < want_a), middle_a, high_a)
        high_b = tl.where(open_b & (count_b < want_b), middle_b, high_b)
        low_a, low_b = tl.where(up_a, middle_a, low_a), tl.where(up_b, middle_b, low_b)
        open_a = (high_a - low_a > 1) & (at_a > want_a + slack_a) & (want_a > 0)
        open_b = (high_b - low_b > 1) & (at_b > want_b + slack_b) & (want_b > 0)
    return above_threshold(key_a, low_a, at_a, want_a, slack_a), above_threshold(key_b, low_b, at_b, want_b, slack_b)


@triton.jit
def load_keys(row, position, there, free):
    """Keys of the scores at `position` of a row, 0 unless `free`. Memory is read where `there`: a mask that is true or false
    for whole vectors lets the loads be wide."""
    key = ordered_key(tl.load(row + position, mask=there, other=0.0))
    return tl.where(free, key, tl.full(key.shape, 0, tl.uint32))


@triton.jit
def positions_of(
    candidates, num_candidates, b, first, length, columns, lists,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(token positions [BLOCK], which of them exist, which may be read): from GROUP candidate lists of a sequence, or a run
    of the row of `columns` scores."""
    entry = tl.arange(0, BLOCK)
    if GROUP > 0:
        which = entry // CAPACITY
        listed = (which < GROUP) & (first * GROUP + which < lists)
        start = b * lists + first * GROUP
        filled = tl.load(num_candidates + start + which, mask=listed, other=0)
        stored = entry % CAPACITY < filled
        return tl.load((candidates + start * CAPACITY) + entry, mask=stored, other=0), stored, stored
    position = first * BLOCK + entry
    return position, position < length, position < columns


@triton.jit
def candidates_kernel(
    target, draft, lengths, listed, num_listed, candidates, num_candidates, stride_t, stride_d, columns, budget, sinks,
    recent, by_draft, lists,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, GROUP: tl.constexpr, SLACK: tl.constexpr, HAS_DRAFT: tl.constexpr,
    HAS_TARGET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk or group of lists, sequence): its candidates, ascending."""
    begin_dependent(PDL)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    slot = b * tl.num_programs(0) + tl.program_id(0)
    if (length <= budget) | ((GROUP == 0) & (tl.program_id(0) * BLOCK >= length)):
        tl.store(num_candidates + slot, 0)
        return
    position, stored, there = positions_of(
        listed, num_listed, b, tl.program_id(0), length, columns, lists, BLOCK, CAPACITY, GROUP
    )  # fmt: skip
    protected = stored & ((position < sinks) | (position >= length - recent))
    free = stored & (protected == 0)
    # The counts of both searches share 32 bits. Joined lists need the registers.
    if HAS_DRAFT and HAS_TARGET and BLOCK < 65536 and GROUP == 0:
        by_target = budget - sinks - recent
        key_d = load_keys(draft + b * stride_d, position, there, free)
        key_t = load_keys(target + b * stride_t, position, there, free)
        top_d, top_t = take_two(key_d, by_draft, by_draft // SLACK, key_t, by_target, by_target // SLACK)
        chosen = protected | top_d | top_t
    else:
        chosen = protected
        if HAS_DRAFT:
            chosen = chosen | take_top(load_keys(draft + b * stride_d, position, there, free), by_draft, by_draft // SLACK)
        if HAS_TARGET:
            by_target = budget - sinks - recent
            chosen = chosen | take_top(load_keys(target + b * stride_t, position, there, free), by_target, by_target // SLACK)
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store((candidates + slot * CAPACITY) + (rank - 1), position, mask=chosen & (rank <= CAPACITY))
    tl.store(num_candidates + slot, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def choose_kernel(
    target, draft, lengths, listed, num_listed, indices, counts,
    stride_t, stride_d, columns, stride_i, budget, sinks, recent, by_draft, lists,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, CAPACITY: tl.constexpr, GROUP: tl.constexpr,
    HAS_DRAFT: tl.constexpr, HAS_TARGET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): the final choice, from the last candidate lists or (GROUP 0) from the whole row."""
    b = tl.program_id(0).to(tl.int64)
    if GROUP > 0:
        # Older than the candidates, whose kernel waited for all before it.
        length = tl.load(lengths + b)
        begin_dependent(PDL)
    else:
        begin_dependent(PDL)
        length = tl.load(lengths + b)
    column = tl.arange(0, BLOCK_K)
    if length <= budget:
        tl.store(indices + b * stride_i + column, tl.where(column < length, column, 0), mask=column < budget)
        tl.store(counts + b, length)
        return
    position, stored, there = positions_of(listed, num_listed, b, 0, length, columns, lists, BLOCK, CAPACITY, GROUP)
    chosen = stored & ((position < sinks) | (position >= length - recent))
    if HAS_DRAFT:
        free = stored & (chosen == 0)
        chosen = chosen | take_top(load_keys(draft + b * stride_d, position, there, free), by_draft, 0)
    if HAS_TARGET:
        free = stored & (chosen == 0)
        left = budget - tl.sum(chosen.to(tl.int32), 0)
        chosen = chosen | take_top(load_keys(target + b * stride_t, position, there, free), left, 0)
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store((indices + b * stride_i) + (rank - 1), position, mask=chosen & (rank <= budget))
    tl.store(counts + b, budget)


@dataclass(frozen=True)
class _Shape:
    """`levels`: (programs, lists joined by each) of every candidate launch; `group` lists reach the final choice."""

    levels: tuple[tuple[int, int], ...]
    capacity: int
    group: int
    block: int


def _shape(columns: int, budget: int, by_draft: int) -> _Shape:
    """Chunks of BLOCK_COLUMNS, then lists joined while they do not fit one program."""
    if columns <= BLOCK_COLUMNS:
        return _Shape((), 1, 0, power_of_two(columns, 16))
    capacity = budget + budget // SLACK + by_draft + by_draft // SLACK
    # Two lists must fit, or joining would never end: budgets above half a block use a larger one.
    block = max(BLOCK_COLUMNS, power_of_two(2 * capacity))
    if columns <= block:
        return _Shape((), 1, 0, power_of_two(columns, 16))
    lists = triton.cdiv(columns, block)
    levels = [(lists, 0)]
    join = block // capacity
    while lists > join:
        # Even groups keep every program equally long.
        lists = triton.cdiv(lists, join)
        levels.append((lists, triton.cdiv(levels[-1][0], lists)))
    return _Shape(tuple(levels), capacity, lists, block)


class SelectWorkspace:
    """Two buffers of candidate lists for select_tokens on [B, Nmax] scores."""

    def __init__(self, batch: int, columns: int, budget: int, by_draft: int, device: torch.device | str) -> None:
        shape = _shape(columns, budget, by_draft)
        lists = batch * max([programs for programs, _ in shape.levels], default=1)
        self.candidates = torch.empty((2, lists * shape.capacity), dtype=torch.int32, device=device)
        self.num_candidates = torch.empty((2, lists), dtype=torch.int32, device=device)


def _warps(block: int, each: int = 512) -> int:
    return min(16, max(4, block // each))


def select_tokens(
    target_scores: torch.Tensor | None,
    draft_scores: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    workspace: SelectWorkspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens of [0, lengths[b]): protected, then top num_draft_selected by draft, then the best by target.

    Scores [B, Nmax] fp32 (NaN-free), lengths [B] int32. Returns indices [B, budget] int32 ascending and counts [B] int32
    (budget, or lengths[b] when that is no larger: then all of [0, lengths[b])). Entries beyond the count are 0. A score
    of None gives its share to the other; without both the recent window grows to fill the budget. num_draft_selected
    above the free budget takes all of it. Raises ValueError, also when budget < sinks + recent.
    """
    given = [scores for scores in (target_scores, draft_scores) if scores is not None]
    if min(num_sink_tokens, num_recent_tokens, num_draft_selected) < 0:
        raise ValueError("num_sink_tokens, num_recent_tokens, num_draft_selected: expected 0 or more")
    if budget < max(1, num_sink_tokens + num_recent_tokens):
        raise ValueError(
            f"budget: expected at least {num_sink_tokens + num_recent_tokens} (sinks and recent tokens), got {budget}"
        )
    batch = lengths.shape[0]
    check_counts(batch, lengths, lengths=lengths)
    columns = given[0].shape[-1] if given else budget
    for name, scores in (("target_scores", target_scores), ("draft_scores", draft_scores)):
        if scores is not None:
            check_tensor(name, scores, (batch, columns), (torch.float32,), lengths, contiguous=False)
    if indices is None:
        indices = torch.empty((batch, budget), dtype=torch.int32, device=lengths.device)
    if counts is None:
        counts = torch.empty(batch, dtype=torch.int32, device=lengths.device)
    check_tensor("indices", indices, (batch, budget), (torch.int32,), lengths)
    check_counts(batch, lengths, counts=counts)
    options = {} if INTERPRETED else {"launch_pdl": True}
    if not given:
        window_kernel[(triton.cdiv(budget, 1024), batch)](
            lengths, indices, counts, budget, num_sink_tokens, BLOCK=1024, PDL=bool(options), **options
        )
        return indices, counts
    free = budget - num_sink_tokens - num_recent_tokens
    by_draft = free if target_scores is None else 0 if draft_scores is None else min(num_draft_selected, free)
    shape = _shape(columns, budget, by_draft)
    if workspace is None:
        workspace = SelectWorkspace(batch, columns, budget, by_draft, lengths.device)
    size = batch * max([programs for programs, _ in shape.levels], default=1)
    if workspace.num_candidates.shape[1] < size or workspace.candidates.shape[1] < size * shape.capacity:
        raise ValueError(
            f"workspace: expected {size} lists of {shape.capacity} candidates, "
            f"got {workspace.num_candidates.shape[1]} lists and {workspace.candidates.shape[1]} candidates"
        )
    target = given[0] if target_scores is None else target_scores
    draft = given[0] if draft_scores is None else draft_scores
    common = {
        "HAS_DRAFT": draft_scores is not None and by_draft > 0, "HAS_TARGET": target_scores is not None,
        "PDL": bool(options), **options,
    }  # fmt: skip
    strides = (target.stride(0), draft.stride(0), columns)
    quota = (budget, num_sink_tokens, num_recent_tokens, by_draft)
    lists = 0
    for level, (programs, group) in enumerate(shape.levels):
        source, result = (level + 1) % 2, level % 2
        candidates_kernel[(programs, batch)](
            target, draft, lengths, workspace.candidates[source], workspace.num_candidates[source],
            workspace.candidates[result], workspace.num_candidates[result], *strides, *quota, lists,
            BLOCK=shape.block, CAPACITY=shape.capacity, GROUP=group, SLACK=SLACK, num_warps=_warps(shape.block), **common,
        )  # fmt: skip
        lists = programs
    source = (len(shape.levels) + 1) % 2
    block = power_of_two(shape.group * shape.capacity, 16) if shape.levels else shape.block
    choose_kernel[(batch,)](
        target, draft, lengths, workspace.candidates[source], workspace.num_candidates[source], indices, counts,
        *strides, indices.stride(0), *quota, lists,
        BLOCK=block, BLOCK_K=power_of_two(budget), CAPACITY=shape.capacity, GROUP=shape.group,
        num_warps=_warps(block, 256 if shape.levels else 512), **common,
    )  # fmt: skip
    return indices, counts


@triton.jit
def window_kernel(lengths, indices, counts, budget, sinks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sinks and the newest tokens (streaming), program (chunk of entries, sequence)."""
    begin_dependent(PDL)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moved = tl.where(entry < sinks, entry, length - budget + entry)
    index = tl.where(length <= budget, tl.where(entry < length, entry, 0), moved)
    tl.store(indices + b * budget + entry, index, mask=entry < budget)
    if tl.program_id(0) == 0:
        tl.store(counts + b, tl.minimum(length, budget))
