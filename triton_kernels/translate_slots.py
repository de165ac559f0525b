"""The token set as pool rows: one translation a round serves every layer, and saves each layer two dependent loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_tensor


@triton.jit
def translate_slots_kernel(
    indices, counts, lengths, num_tokens, page_table, slots, slot_counts,
    stride_i, stride_pt, stride_s, T,
    PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, SETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk of BLOCK slots, set): SETS sets a sequence."""
    begin_dependent(PDL)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b // SETS)
    fed = tl.minimum(tl.load(num_tokens + b // SETS), T)
    count = tl.load(counts + b)
    if UNIT > 1:
        # Blocks ascend, so only the last one can reach past the committed length.
        last = tl.load(indices + b * stride_i + count - 1, mask=count > 0, other=0)
        count = tl.where(count > 0, (count - 1) * UNIT + tl.minimum(length - last * UNIT, UNIT), 0)
    if tl.program_id(0) == 0:
        tl.store(slot_counts + b, count)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = entry < count
    index = tl.load(indices + b * stride_i + entry // UNIT, mask=chosen, other=0)
    position = tl.where(chosen, index * UNIT + entry % UNIT, length + entry - count)
    used = entry < count + fed
    page = tl.load(page_table + b // SETS * stride_pt + position // PAGE, mask=used, other=0)
    tl.store(slots + b * stride_s + entry, page * PAGE + position % PAGE, mask=used & (entry < stride_s))


def translate_slots(
    indices: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_tokens: int,
    *,
    block_size: int = 1,
    sets: int = 1,
    slots: torch.Tensor | None = None,
    slot_counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool rows (page * page_size + offset) of the chosen tokens, then of the in-flight tokens.

    indices [B, k] int32 ascending, valid up to counts [B]: tokens, or blocks of `block_size` tokens (16, 32, 64; a last
    block past lengths[b] is cut). Returns slots [B, k * block_size + max_tokens] int32 and slot_counts [B] int32, the
    number of committed entries; in-flight entries follow at slot_counts[b] .. + num_tokens[b] - 1. Entries beyond are
    left as they were. All layers of a cache share one page table, so this runs once a round (METHOD section 3.3).
    With several `sets` a sequence, indices, counts and what is returned have B * sets rows, those of a sequence together.
    """
    check_tensor("indices", indices, (None, None), (torch.int32,), contiguous=False)
    batch, width = indices.shape
    if sets < 1 or batch % sets:
        raise ValueError(f"sets: expected a divisor of the {batch} rows of indices, got {sets}")
    check_counts(batch, indices, counts=counts)
    check_counts(batch // sets, indices, lengths=lengths, num_tokens=num_tokens)
    check_tensor("page_table", page_table, (batch // sets, None), (torch.int32,), indices, contiguous=False)
    if block_size < 1 or page_size < 1:
        raise ValueError(f"block_size, page_size: expected at least 1, got {block_size}, {page_size}")
    total = width * block_size + max_tokens
    if slots is None:
        slots = torch.zeros((batch, total), dtype=torch.int32, device=indices.device)
    if slot_counts is None:
        slot_counts = torch.empty(batch, dtype=torch.int32, device=indices.device)
    check_tensor("slots", slots, (batch, total), (torch.int32,), indices)
    check_counts(batch, indices, slot_counts=slot_counts)
    block = 1024
    options = {} if INTERPRETED else {"launch_pdl": True}
    translate_slots_kernel[(triton.cdiv(total, block), batch)](
        indices, counts, lengths, num_tokens, page_table, slots, slot_counts,
        indices.stride(0), page_table.stride(0), slots.stride(0), max_tokens,
        PAGE=page_size, UNIT=block_size, BLOCK=block, SETS=sets, PDL=bool(options), num_warps=4, **options,
    )  # fmt: skip
    return slots, slot_counts


def check_indices(indices: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, block_size: int = 1) -> None:
    """Debug check with a host read: every valid index lies in [0, length) and ascends strictly. Raises ValueError."""
    for b, (row, count, length) in enumerate(zip(indices.tolist(), counts.tolist(), lengths.tolist(), strict=True)):
        limit = -(-length // block_size)
        if not 0 <= count <= len(row):
            raise ValueError(f"counts[{b}]: expected 0 to {len(row)}, got {count}")
        for i in range(count):
            if not 0 <= row[i] < limit:
                raise ValueError(f"indices[{b}, {i}]: expected 0 to {limit - 1}, got {row[i]}")
            if i and row[i] <= row[i - 1]:
                raise ValueError(f"indices[{b}, {i}]: expected more than {row[i - 1]} (ascending), got {row[i]}")
