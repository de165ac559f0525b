"""Matrix products of a few rows with everything around them: RMS norm before, bias, SiLU gate or residual add after.

A small model at a few rows is bound by launches and latency, not by bytes: a block of separate kernels takes five times
the time of its weights. Here a block is six launches, and each asks for its weights before it waits for its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dustin.backends.torch_triton.weights import Linear
from dustin.triton_kernels.runtime import INTERPRETED, num_multiprocessors, power_of_two, precision_of

# Beyond this many rows the library's products win.
MAX_ROWS = 64
# Wider models are bound by the bytes of their weights, which the library reads as fast.
MAX_HIDDEN = 2048


@dataclass(frozen=True)
class GemmConfig:
    """Tile of columns and of depth, and into how many parts the depth is split."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


class GemmScratch:
    """Partial products and arrival counters of split products, shared by all layers of a model. Counters stay zero."""

    def __init__(self, num_partials: int, num_tiles: int, device: torch.device) -> None:
        self.partials = torch.empty(max(num_partials, 1), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(num_tiles, 1), dtype=torch.int32, device=device)


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at `pointers`; nothing is loaded into registers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def gemm_kernel(
    x, w, norm, bias, out, partials, counters, M, stride_x, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, part of the depth). GATE: w holds 2 N rows, out = silu(x w[:N]) * (x w[N:])."""
    tile, split = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    depth: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    begin = split * depth
    if PDL:
        # Weights do not depend on the kernel before: their lines travel while it finishes. 64 elements are one line.
        line = begin + tl.arange(0, LINES) * 64
        wanted = (inside[:, None]) & (line < tl.minimum(begin + depth, K))[None, :]
        first = w + tl.where(wanted, columns[:, None].to(tl.int64) * K + line[None, :], 0)
        prefetch(first)
        if GATE:
            prefetch(first + tl.where(wanted, N * K, 0))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_M)
    fed = rows < M
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, tl.minimum(begin + depth, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + rows[:, None] * stride_x + k[None, :], mask=fed[:, None] & (k < K)[None, :], other=0.0)
        at = columns[None, :].to(tl.int64) * K + k[:, None]
        mask = inside[None, :] & (k < K)[:, None]
        b = tl.load(w + at, mask=mask, other=0.0)
        if NORM:
            raw = a.to(tl.float32)
            squares += tl.sum(raw * raw, 1)
            a = (raw * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(b.dtype)
        if GATE:
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            acc = tl.dot(a, tl.load(w + N * K + at, mask=mask, other=0.0), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if NORM:
        inverse = tl.rsqrt(squares / K + eps)[:, None]
        acc *= inverse
        gate *= inverse
    target = out + rows[:, None] * N + columns[None, :]
    stored = fed[:, None] & inside[None, :]
    if SPLITS > 1:
        part = (tile * SPLITS * BLOCK_M + rows[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(partials + part + split * BLOCK_M * BLOCK_N, acc)
        # All stores precede the release of the counter; its acquire precedes the reads of the last to arrive.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(SPLITS):
                total += tl.load(partials + part + other * BLOCK_M * BLOCK_N, cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            if ADD:
                total += tl.load(target, mask=stored, other=0.0).to(tl.float32)
            tl.store(target, total.to(out.dtype.element_ty), mask=stored)
            tl.store(counters + tile, 0)
    else:
        if BIAS:
            acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATE:
            acc *= gate / (1.0 + tl.exp(-gate))
        if ADD:
            acc += tl.load(target, mask=stored, other=0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask=stored)


def choose_config(columns: int, depth: int, gate: bool, normed: bool, device: torch.device) -> GemmConfig:
    """About two programs a multiprocessor: narrow tiles first, then a split of the depth (not where the norm needs all of it)."""
    programs = 2 * num_multiprocessors(device)
    block_n = 16
    while block_n < 64 and -(-columns // block_n) > programs:
        block_n *= 2
    splits = 1 if gate or normed else max(1, min(programs // -(-columns // block_n), depth // 512, 8))
    return GemmConfig(block_n, 128, splits)


def fused_linear(
    x: torch.Tensor,
    layer: Linear,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: torch.Tensor | None = None,
    scratch: GemmScratch | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """x [M, K], M <= 64, times layer.weight [N, K] plus its bias: [M, N].

    `norm` [K] applies an RMS norm to x first. `gate`: the weight holds gate and up, [2 N, K], and the result is
    silu(gate) * up (no bias). `residual` [M, N] is added and updated in place, and returned. Raise ValueError on bad input.
    """
    rows, depth = x.shape
    weight = layer.weight
    columns = weight.shape[0] // 2 if gate else weight.shape[0]
    if rows > MAX_ROWS or weight.shape[1] != depth or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x {list(x.shape)} by weight {list(weight.shape)}: expected at most {MAX_ROWS} rows and equal depths")
    if gate and layer.bias is not None:
        raise ValueError("bias: expected none with gate")
    config = config or choose_config(columns, depth, gate, norm is not None, x.device)
    if config.splits > 1 and (gate or norm is not None):
        raise ValueError(f"splits is {config.splits}, expected 1 with gate or norm")
    block_m = power_of_two(rows, 16)
    tiles = triton.cdiv(columns, config.block_n)
    if scratch is None:
        scratch = GemmScratch(tiles * config.splits * block_m * config.block_n, tiles, x.device)
    if config.splits > 1 and scratch.partials.numel() < tiles * config.splits * block_m * config.block_n:
        raise ValueError(f"scratch: expected {tiles * config.splits * block_m * config.block_n} partials, got fewer")
    out = residual if residual is not None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    options = {} if INTERPRETED else {"launch_pdl": True}
    span = triton.cdiv(depth, config.splits * config.block_k) * config.block_k
    gemm_kernel[(tiles, config.splits)](
        x, weight, x if norm is None else norm, x if layer.bias is None else layer.bias, out,
        scratch.partials, scratch.counters, rows, x.stride(0), eps,
        N=columns, K=depth, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        LINES=power_of_two(triton.cdiv(span, 64)), NORM=norm is not None, BIAS=layer.bias is not None, GATE=gate,
        ADD=residual is not None, PRECISION=precision_of(x.dtype), PDL=bool(options),
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return out


def scratch_for(hidden: int, intermediate: int, query_size: int, device: torch.device) -> GemmScratch:
    """Scratch that serves every split product of a model at up to MAX_ROWS rows."""
    partials = tiles = 1
    for columns, depth in ((hidden, intermediate), (hidden, query_size)):
        config = choose_config(columns, depth, False, False, device)
        count = triton.cdiv(columns, config.block_n)
        tiles = max(tiles, count)
        partials = max(partials, count * config.splits * MAX_ROWS * config.block_n)
    return GemmScratch(partials, tiles, device)
