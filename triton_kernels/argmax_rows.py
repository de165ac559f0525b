"""Argmax of logit rows with the lower index winning ties, and whether a row holds no NaN or infinity above."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import FLOAT_DTYPES, INTERPRETED, begin_dependent, check_tensor, power_of_two


@triton.jit
def row_maxima_kernel(logits, values, positions, nans, stride, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (chunk of BLOCK columns, row): the chunk's best value, its first position, and its number of NaN."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
    bad = x != x
    x = tl.where(bad, float("-inf"), x)
    best = tl.max(x, 0)
    slot = row * tl.num_programs(0) + chunk
    tl.store(values + slot, best)
    tl.store(positions + slot, tl.min(tl.where((x == best) & (column < V), column, 2147483647), 0))
    tl.store(nans + slot, tl.sum(bad.to(tl.int32), 0))


@triton.jit
def combine_maxima_kernel(values, positions, nans, tokens, finite, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row): the first best chunk."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    used = chunk < chunks
    x = tl.load(values + row * chunks + chunk, mask=used, other=float("-inf"))
    position = tl.load(positions + row * chunks + chunk, mask=used, other=2147483647)
    best = tl.max(x, 0)
    tl.store(tokens + row, tl.min(tl.where(x == best, position, 2147483647), 0))
    total = tl.sum(tl.load(nans + row * chunks + chunk, mask=used, other=0), 0)
    tl.store(finite + row, (total == 0) & (best < float("inf")))


def argmax_rows(
    logits: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] int32 and finite [R] bool of logits [R, V] (bf16, fp16 or fp32; any row stride).

    Ties go to the lower index. A NaN is never chosen; finite[r] is False when row r holds a NaN or +infinity. `scratch`
    int32 with at least 3 * R * ceil(V / 4096) elements avoids the allocation. Raises ValueError on bad input.
    """
    check_tensor("logits", logits, (None, None), FLOAT_DTYPES, contiguous=False)
    rows, vocabulary = logits.shape
    block = 64 if INTERPRETED else 4096
    chunks = triton.cdiv(vocabulary, block)
    need = 3 * rows * chunks
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if finite is None:
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if scratch is None:
        scratch = torch.empty(need, dtype=torch.int32, device=logits.device)
    check_tensor("tokens", tokens, (rows,), (torch.int32,), logits)
    check_tensor("finite", finite, (rows,), (torch.bool,), logits)
    check_tensor("scratch", scratch, (None,), (torch.int32,), logits)
    if scratch.numel() < need:
        raise ValueError(f"scratch: expected at least {need} elements, got {scratch.numel()}")
    values, positions, nans = scratch[: need // 3].view(torch.float32), scratch[need // 3 :], scratch[2 * need // 3 :]
    options = {} if INTERPRETED else {"launch_pdl": True}
    row_maxima_kernel[(chunks, rows)](
        logits, values, positions, nans, logits.stride(0), vocabulary, BLOCK=block, PDL=bool(options), num_warps=4, **options
    )
    combine_maxima_kernel[(rows,)](
        values, positions, nans, tokens, finite, chunks, BLOCK=power_of_two(chunks), PDL=bool(options), num_warps=1, **options
    )
    return tokens, finite
