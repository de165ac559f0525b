"""The product that ends attention and MLP: added to the residual stream, which it makes ready for the next RMS norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_linear import (
    LinearConfig,
    Stream,
    check_linear,
    launch_options,
    load_rows,
    load_weights,
    prefetch_options,
    prefetch_weights,
    sum_splits,
    swapped_product,
)
from .runtime import begin_dependent, check_tensor, power_of_two


@triton.jit
def add_kernel(
    x, w, bias, residual, norm, scaled, squares, partials, counters, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, THREADS: tl.constexpr,
    BYTES: tl.constexpr, INSTRUCTION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, part of the depth): residual += x w + bias, and the tile's sums of squares of the new rows."""
    tile, split = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK_N)
    columns = tile * BLOCK_N + lane
    inside = columns < N
    ragged: tl.constexpr = N % BLOCK_N != 0
    begin = split * DEPTH
    once: tl.constexpr = PARTS * BLOCK_K >= DEPTH and not SWAP
    stop = tl.minimum(begin + DEPTH, K)
    if once:
        b = load_weights(w, columns, inside, begin, K, BLOCK_K, PARTS, ragged)
    elif BYTES > 0:
        safe = tl.minimum(tile * BLOCK_N, N - BLOCK_N) if ragged else tile * BLOCK_N
        prefetch_weights(w, safe, 0, begin, stop, K, BLOCK_N, 1, THREADS, BYTES, INSTRUCTION)
    rows = tl.arange(0, BLOCK_M)
    fed = rows < M
    stored = fed[:, None] & inside[None, :]
    # What the end needs is asked for here, so that no load waits for another there.
    weight = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    begin_dependent(PDL)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    old = tl.load(residual + place, mask=stored, other=0.0)
    if once:
        acc = tl.dot(load_rows(x, rows, fed, begin, K, BLOCK_K, PARTS), b)
        if PARTS > 1:
            acc = tl.sum(acc, 0)
    elif SWAP:
        acc = tl.trans(swapped_product(w, x, columns, inside, rows, begin, stop, M, K, BLOCK_M, BLOCK_K, ragged, STAGES))
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(begin, stop, BLOCK_K, num_stages=STAGES):
            a = load_rows(x, rows, fed, k, K, BLOCK_K, 1)
            acc = tl.dot(a, load_weights(w, columns, inside, k, K, BLOCK_K, 1, ragged), acc)
    last = True
    if SPLITS > 1:
        part = partials + (tile * SPLITS * BLOCK_M + rows[:, None]) * BLOCK_N + lane[None, :]
        acc, last = sum_splits(acc, part, counters + tile, split, SPLITS, BLOCK_M * BLOCK_N)
    if last:
        if BIAS:
            acc += shift
        new = (acc.to(old.dtype).to(tl.float32) + old.to(tl.float32)).to(old.dtype)
        tl.store(residual + place, new, mask=stored)
        value = tl.where(stored, new.to(tl.float32), 0.0)
        tl.store(scaled + place, (value * weight).to(old.dtype), mask=stored)
        tl.store(squares + tile * M + rows, tl.sum(value * value, 1), mask=fed)


def depth_of_split(depth: int, config: LinearConfig) -> int:
    """How much of `depth` one program sums: whole pieces, so that no two programs share one."""
    piece = config.parts * config.block_k
    return depth if config.splits == 1 else triton.cdiv(triton.cdiv(depth, config.splits), piece) * piece


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: Stream, norm: torch.Tensor, *, config: LinearConfig
) -> None:
    """residual [M, N] of the stream += x [M, K] weight [N, K] + bias, in place and ready for the RMS norm `norm` [N].

    Raise ValueError on bad input.
    """
    check_linear(x, weight, bias)
    rows, depth = x.shape
    columns = weight.shape[0]
    scratch = stream.scratch
    check_tensor("residual", stream.residual, (rows, columns), (x.dtype,), x)
    check_tensor("scaled", stream.scaled, (rows, columns), (x.dtype,), x)
    check_tensor("norm", norm, (columns,), (x.dtype,), x)
    tiles = triton.cdiv(columns, config.block_n)
    span = depth_of_split(depth, config)
    splits = triton.cdiv(depth, span)
    block_m = power_of_two(rows, 16)
    needs = (("squares", tiles * rows), ("partials", tiles * splits * block_m * config.block_n), ("counters", tiles))
    for name, need in needs if splits > 1 else needs[:1]:
        if getattr(scratch, name).numel() < need:
            raise ValueError(f"scratch.{name}: expected at least {need} elements, got {getattr(scratch, name).numel()}")
    line, instruction = prefetch_options(config.block_n, min(span, depth - (splits - 1) * span), tiles * splits, config)
    options = launch_options(config.num_warps)
    add_kernel[(tiles, splits)](
        x, weight, x if bias is None else bias, stream.residual, norm, stream.scaled, scratch.squares, scratch.partials,
        scratch.counters, rows,
        N=columns, K=depth, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PARTS=config.parts, SPLITS=splits,
        DEPTH=span, BIAS=bias is not None, SWAP=config.swap, STAGES=config.num_stages, THREADS=32 * config.num_warps,
        BYTES=line, INSTRUCTION=instruction,
        PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    stream.tiles = tiles
