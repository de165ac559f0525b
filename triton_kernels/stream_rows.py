"""Row copies of a decoding step: embedding, the norm of each sequence's last row, and captured query heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_linear import DTYPES, LinearScratch, Stream, launch_options
from .runtime import begin_dependent, check_tensor, power_of_two


@triton.jit
def embed_kernel(
    tokens, embedding, norm, residual, scaled, squares, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row): residual = embedding[token], scaled = residual * norm, and the residual's sum of squares."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(embedding + token * H + column, mask=inside, other=0.0)
    tl.store(residual + row * H + column, value, mask=inside)
    wide = value.to(tl.float32)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * H + column, (wide * weight).to(value.dtype), mask=inside)
    tl.store(squares + row, tl.sum(wide * wide, 0))


@triton.jit
def last_norm_kernel(residual, num_tokens, weight, out, T, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (sequence): RMS norm of its last fed row (row 0 where none is)."""
    begin_dependent(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = b * T + tl.maximum(tl.load(num_tokens + b) - 1, 0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(residual + row * H + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + b * H + column, (value * inverse).to(out.dtype.element_ty).to(tl.float32) * scale, mask=inside)


@triton.jit
def capture_kernel(
    q, num_tokens, heads, out, T, stride_ob, stride_ot, S: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, sequence): the chosen heads of a query row, or of the last fed row of the sequence."""
    begin_dependent(PDL)
    t = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = tl.maximum(tl.load(num_tokens + b) - 1, 0) if LAST else t
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    head = tl.load(heads + s, mask=s < S, other=0)
    mask = (s < S)[:, None] & (d < D)[None, :]
    value = tl.load(q + ((b * T + row) * HQ + head)[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out + b * stride_ob + t * stride_ot + s[:, None] * D + d[None, :], value, mask=mask)


def embed_rows(tokens: torch.Tensor, embedding: torch.Tensor, norm: torch.Tensor, scratch: LinearScratch) -> Stream:
    """The stream of tokens [B, T] (M = B * T rows of the embedding [V, H]), ready for the RMS norm `norm` [H]."""
    check_tensor("tokens", tokens, (None, None), (torch.int64, torch.int32))
    check_tensor("embedding", embedding, (None, None), DTYPES, tokens)
    rows, size = tokens.numel(), embedding.shape[1]
    check_tensor("norm", norm, (size,), (embedding.dtype,), tokens)
    if scratch.squares.numel() < rows:
        raise ValueError(f"scratch.squares: expected at least {rows} elements, got {scratch.squares.numel()}")
    residual, scaled = (torch.empty((rows, size), dtype=embedding.dtype, device=tokens.device) for _ in range(2))
    options = launch_options(8 if size > 2048 else 4)
    embed_kernel[(rows,)](
        tokens, embedding, norm, residual, scaled, scratch.squares, H=size, BLOCK=power_of_two(size),
        PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    return Stream(residual, scaled, scratch, 1)


def last_norm(residual: torch.Tensor, num_tokens: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm [B, H] of each sequence's last fed row of residual [B * T, H]."""
    batch, size = num_tokens.shape[0], residual.shape[1]
    out = torch.empty((batch, size), dtype=residual.dtype, device=residual.device)
    options = launch_options(8 if size > 2048 else 4)
    last_norm_kernel[(batch,)](
        residual, num_tokens, weight, out, residual.shape[0] // batch, eps, H=size, BLOCK=power_of_two(size),
        PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    return out


def capture_heads(q: torch.Tensor, heads: torch.Tensor, num_tokens: torch.Tensor, last: bool) -> torch.Tensor:
    """[B, T, S, D] (or [B, 1, S, D] of the last fed rows) of the heads [S] int64 of q [B, T, Hq, D] contiguous."""
    batch, tokens, num_heads, dim = q.shape
    rows = 1 if last else tokens
    out = torch.empty((batch, rows, heads.shape[0], dim), dtype=q.dtype, device=q.device)
    options = launch_options(4)
    capture_kernel[(rows, batch)](
        q, num_tokens, heads, out, tokens, out.stride(0), out.stride(1), S=heads.shape[0], HQ=num_heads, D=dim,
        BLOCK_S=power_of_two(heads.shape[0]), BLOCK_D=power_of_two(dim), LAST=last, PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    return out
