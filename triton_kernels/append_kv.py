"""Write the K and V rows of in-flight tokens into the paged cache, ragged (METHOD section 5, step 3)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_pools, check_tensor, power_of_two


@triton.jit
def append_kv_kernel(
    k_new, v_new, k_pool, v_pool, page_table, lengths, num_tokens,
    stride_kb, stride_kt, stride_vb, stride_vt, stride_pt, T,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, sequence): one row of Hkv * D."""
    begin_dependent(PDL)
    t = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    if t >= tl.load(num_tokens + b):
        return
    position = tl.load(lengths + b) + t
    page = tl.load(page_table + b * stride_pt + position // PAGE).to(tl.int64)
    base = (page * PAGE + position % PAGE) * ROW
    column = tl.arange(0, BLOCK)
    inside = column < HKV * D
    target = base + column // D * HEAD + column % D
    tl.store(k_pool + target, tl.load(k_new + b * stride_kb + t * stride_kt + column, mask=inside), mask=inside)
    tl.store(v_pool + target, tl.load(v_new + b * stride_vb + t * stride_vt + column, mask=inside), mask=inside)


def append_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Copy k_new, v_new [B, T, Hkv, D] rows t < num_tokens[b] to positions lengths[b] + t of the pools.

    k_pool, v_pool [pages, page_size, Hkv, D] (mutated); page_table [B, max_pages], lengths, num_tokens [B] int32. The
    last two axes of k_new and v_new must be contiguous. `lengths` is not changed. Pages must already be assigned.
    Raises ValueError on bad input.
    """
    check_tensor("k_new", k_new, (None, None, *k_pool.shape[2:]), (k_pool.dtype,), k_pool, contiguous=False)
    check_tensor("v_new", v_new, tuple(k_new.shape), (k_pool.dtype,), k_pool, contiguous=False)
    batch, tokens, heads, dim = k_new.shape
    check_pools(k_pool, v_pool, page_table, batch)
    check_counts(batch, k_pool, lengths=lengths, num_tokens=num_tokens)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if heads > 1 and tensor.stride(2) != dim:
            raise ValueError(f"{name}: expected contiguous [Hkv, D] rows, got strides {tensor.stride()}")
    options = {} if INTERPRETED else {"launch_pdl": True}
    append_kv_kernel[(tokens, batch)](
        k_new, v_new, k_pool, v_pool, page_table, lengths, num_tokens,
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1), page_table.stride(0), tokens,
        HKV=heads, D=dim, BLOCK=power_of_two(heads * dim), PAGE=k_pool.shape[1], ROW=k_pool.stride(1), HEAD=k_pool.stride(2),
        PDL=bool(options), num_warps=4, **options,
    )  # fmt: skip
