"""Rotary embedding of q and k, optional QK-norm, and the append to the paged cache in one kernel.

It replaces about eight elementwise launches a layer, each of which costs more than its bytes at a few rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_pools, check_tensor, power_of_two


@triton.jit(do_not_specialize_on_alignment=["T"])
def rope_append_kernel(
    q, k, v, q_out, k_pool, v_pool, page_table, lengths, num_tokens, starts, cos, sin, q_norm, k_norm,
    stride_qb, stride_qt, stride_kb, stride_kt, stride_vb, stride_vt, stride_pt, T, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Program (token, sequence, block of BLOCK_H heads); blocks run over query heads, then over kv heads."""
    begin_dependent(PDL)
    t = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    if t >= tl.load(num_tokens + b):
        return
    position = tl.load(lengths + b).to(tl.int64) + t
    # Where a sequence's rows begin, in strides between sequences; of packed rows those between rows.
    of_b = tl.load(starts + b).to(tl.int64) if PACKED else b
    half: tl.constexpr = ROTARY // 2
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    rotated = d < ROTARY
    first = d < half
    angle = position * half + tl.where(first, d, d - half)
    c = tl.load(cos + angle, mask=rotated, other=1.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    partner = tl.where(first, d + half, d - half)
    sign = tl.where(first, -1.0, 1.0)

    query_blocks: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(2)
    if block < query_blocks:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        source = q + of_b * stride_qb + t * stride_qt
        mask = (heads < HQ)[:, None] & in_head[None, :]
        x = tl.load(source + heads[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + heads[:, None] * D + partner[None, :], mask=mask & rotated[None, :], other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x = x * inverse * tl.load(q_norm + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
            y = y * inverse * tl.load(q_norm + partner, mask=rotated, other=0.0).to(tl.float32)[None, :]
        target = q_out + ((b * T + t) * HQ + heads)[:, None] * D + d[None, :]
        tl.store(target, (x * c[None, :] + y * (sign * s)[None, :]).to(q_out.dtype.element_ty), mask=mask)
    else:
        heads = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (heads < HKV)[:, None] & in_head[None, :]
        source = k + of_b * stride_kb + t * stride_kt
        x = tl.load(source + heads[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + heads[:, None] * D + partner[None, :], mask=mask & rotated[None, :], other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x = x * inverse * tl.load(k_norm + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
            y = y * inverse * tl.load(k_norm + partner, mask=rotated, other=0.0).to(tl.float32)[None, :]
        page = tl.load(page_table + b * stride_pt + position // PAGE).to(tl.int64)
        row = ((page * PAGE + position % PAGE) * ROW + heads * HEAD)[:, None] + d[None, :]
        tl.store(k_pool + row, (x * c[None, :] + y * (sign * s)[None, :]).to(k_pool.dtype.element_ty), mask=mask)
        values = v + of_b * stride_vb + t * stride_vt + heads[:, None] * D + d[None, :]
        tl.store(v_pool + row, tl.load(values, mask=mask), mask=mask)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    max_tokens: int = 0,
) -> torch.Tensor:
    """Rotate q [B, T, Hq, D] and k [B, T, Hkv, D] at positions lengths[b] + t; append k and v; return q rotated.

    q, k, v may be slices of one packed projection: only their last two axes must be contiguous. cos, sin
    [max_positions, R/2] fp32 (R <= D rotary dims; halves rotate against each other; any YaRN factor is already in
    them). q_norm, k_norm [D] apply an RMS norm over D first (QK-norm). Rows at or beyond num_tokens[b] are skipped and
    their output is undefined. With `starts` [B] int32 q, k, v are [R, H, D], the fed rows of all sequences, those of b from
    starts[b] on, and T is `max_tokens`. Pools, page_table, lengths, num_tokens as in append_kv. Raises ValueError on bad input.
    """
    batch = len(page_table)
    if starts is not None:
        # A row of one token each: strides between sequences are those between rows.
        q, k, v = (x[:, None] for x in (q, k, v))
        check_tensor("starts", starts, (batch,), (torch.int32,), q)
    rows = None if starts is not None else batch
    check_tensor("q", q, (rows, None, None, k_pool.shape[3]), (k_pool.dtype,), k_pool, contiguous=False)
    rows, tokens, num_heads, dim = q.shape
    num_kv_heads = k_pool.shape[2]
    check_pools(k_pool, v_pool, page_table, batch)
    for name, tensor in (("k", k), ("v", v)):
        check_tensor(name, tensor, (rows, tokens, num_kv_heads, dim), (k_pool.dtype,), q, contiguous=False)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[2] > 1 and tensor.stride(2) != dim:
            raise ValueError(f"{name}: expected contiguous [H, D] rows, got strides {tensor.stride()}")
    check_counts(batch, q, lengths=lengths, num_tokens=num_tokens)
    check_tensor("cos", cos, (None, None), (torch.float32,), q)
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,), q)
    rotary = 2 * cos.shape[1]
    if rotary > dim:
        raise ValueError(f"cos: expected at most {dim // 2} columns, got {cos.shape[1]}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm, k_norm: expected both or neither")
    for name, tensor in (("q_norm", q_norm), ("k_norm", k_norm)):
        if tensor is not None:
            check_tensor(name, tensor, (dim,), (torch.bfloat16, torch.float16, torch.float32), q)
    strides = [(x.stride(0), x.stride(0) if starts is not None else x.stride(1)) for x in (q, k, v)]
    tokens = max_tokens if starts is not None else tokens
    shape = (batch, tokens, num_heads, dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    check_tensor("out", out, shape, (q.dtype,), q)
    block = 8
    options = {} if INTERPRETED else {"launch_pdl": True}
    rope_append_kernel[(tokens, batch, triton.cdiv(num_heads, block) + triton.cdiv(num_kv_heads, block))](
        q, k, v, out, k_pool, v_pool, page_table, lengths, num_tokens, lengths if starts is None else starts,
        cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
        *strides[0], *strides[1], *strides[2], page_table.stride(0), tokens, norm_eps,
        HQ=num_heads, HKV=num_kv_heads, D=dim, BLOCK_D=power_of_two(dim), ROTARY=rotary, BLOCK_H=block,
        PAGE=k_pool.shape[1], ROW=k_pool.stride(1), HEAD=k_pool.stride(2), NORM=q_norm is not None, PDL=bool(options),
        PACKED=starts is not None, num_warps=4, **options,
    )  # fmt: skip
    return out
