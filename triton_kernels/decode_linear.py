"""What the products of a decoding step share (up to 64 rows, everything around a product inside it): four launches a block.

At a few rows a block of a small model is bound by launches and latency, not by bytes. So the RMS norm comes from sums of
squares that the kernel before left, RoPE, the append, the gate and the residual add are epilogues, and each kernel asks
for its weights before it waits for its input. Every weight is read once; partial sums merge in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, check_tensor

MAX_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LinearConfig:
    """Tile of one program: `block_n` columns (twice that where columns come in pairs), `parts` pieces of depth `block_k` at a
    time (the warps share the pieces), `splits` programs over the depth."""

    block_n: int
    block_k: int
    parts: int = 1
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    # Weights are the left operand, whose 64 rows the larger matrix instructions want (`block_n` 32 in pairs, else 64).
    swap: bool = False
    prefetch_bytes: int = 24 << 20  # ask the L2 for the weights before the kernel before has ended, up to so many in all


class LinearScratch:
    """Sums of squares of a residual stream [tiles, M], and the partial products and arrival counters of split products."""

    def __init__(self, num_squares: int, num_partials: int, num_tiles: int, device: torch.device) -> None:
        self.squares = torch.zeros(num_squares, dtype=torch.float32, device=device)
        self.partials = torch.empty(max(num_partials, 1), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(num_tiles, 1), dtype=torch.int32, device=device)


@dataclass
class Stream:
    """The residual stream between two blocks: `residual` [M, H]; `scaled` = residual * the weight of the next RMS norm, and
    per `tiles` of columns the sums of squares of each row, which together give that norm."""

    residual: torch.Tensor
    scaled: torch.Tensor
    scratch: LinearScratch
    tiles: int


@triton.jit
def prefetch_weights(
    w, first, offset, begin, limit, K: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, THREADS: tl.constexpr,
    BYTES: tl.constexpr, INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for columns from `begin` on of the BLOCK_N weight rows from `first` on (HALVES 2: and of those `offset` later).

    Each request takes about 12 ns of its multiprocessor whatever its size, so a thread makes one, of BYTES; requests that
    would pass `limit` end there.
    """
    rows: tl.constexpr = BLOCK_N * HALVES
    i = tl.arange(0, THREADS)
    for start in range(0, rows, THREADS):
        at = start + i
        row = at % rows
        column = tl.minimum(begin + (at // rows) * (BYTES // 2), limit - BYTES // 2)
        line = first + row % BLOCK_N + (row // BLOCK_N) * offset
        address = w + line.to(tl.int64) * K + column
        tl.inline_asm_elementwise(INSTRUCTION, "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_splits(acc, part, counter, split, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """(sum of all programs' `acc` in their order, True) in the program that ends last, which leaves `counter` at zero; anything
    and False in the others. `part` is where the tile's partials lie, STEP elements apart."""
    tl.store(part + split * STEP, acc)
    # All stores precede the release of the counter; its acquire precedes the reads of the last to arrive.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        acc = tl.zeros(acc.shape, tl.float32)
        for other in tl.static_range(SPLITS):
            acc += tl.load(part + other * STEP, cache_modifier=".cg")
        tl.store(counter, 0)
    return acc, last


@triton.jit
def load_weights(w, columns, inside, k, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, MASK_N: tl.constexpr):
    """Weight tile [BLOCK_K, N], or [PARTS, BLOCK_K, N], of the given columns (rows of w) and depths from k on."""
    if PARTS == 1:
        depth = k + tl.arange(0, BLOCK_K)
        mask = (depth < K)[:, None]
        if MASK_N:
            mask = mask & inside[None, :]
        return tl.load(w + columns.to(tl.int64)[None, :] * K + depth[:, None], mask=mask, other=0.0)
    else:
        depth = k + tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = (depth < K)[:, :, None]
        if MASK_N:
            mask = mask & inside[None, None, :]
        return tl.load(w + columns.to(tl.int64)[None, None, :] * K + depth[:, :, None], mask=mask, other=0.0)


@triton.jit
def load_rows(x, rows, fed, k, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """Input tile [BLOCK_M, BLOCK_K], or [PARTS, BLOCK_M, BLOCK_K]."""
    if PARTS == 1:
        depth = k + tl.arange(0, BLOCK_K)
        return tl.load(x + rows[:, None] * K + depth[None, :], mask=fed[:, None] & (depth < K)[None, :], other=0.0)
    else:
        depth = k + tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = fed[None, :, None] & (depth < K)[:, None, :]
        return tl.load(x + rows[None, :, None] * K + depth[:, None, :], mask=mask, other=0.0)


@triton.jit
def swapped_product(w, x, columns, inside, rows, begin, stop, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                    MASK_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """[N, BLOCK_M] fp32: the weight rows `columns` times x over depths begin .. stop-1. Rows beyond M repeat the last one."""
    source = tl.minimum(rows, M - 1)
    acc = tl.zeros([columns.shape[0], BLOCK_M], tl.float32)
    for k in tl.range(begin, stop, BLOCK_K, num_stages=STAGES):
        depth = k + tl.arange(0, BLOCK_K)
        left = w + columns.to(tl.int64)[:, None] * K + depth[None, :]
        right = x + source[None, :] * K + depth[:, None]
        if K % BLOCK_K == 0 and not MASK_N:
            acc = tl.dot(tl.load(left), tl.load(right), acc)
        else:
            valid = depth < K
            a = tl.load(left, mask=valid[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, tl.load(right, mask=valid[:, None], other=0.0), acc)
    return acc


def launch_options(num_warps: int) -> dict[str, object]:
    """Launch options; on a device with programmatic dependent launch."""
    return {"num_warps": num_warps} if INTERPRETED else {"num_warps": num_warps, "launch_pdl": True}


def prefetch_options(rows: int, depth: int, programs: int, config: LinearConfig) -> tuple[int, str]:
    """Bytes and instruction of a request when `programs` programs ask for `rows` weight rows of `depth` elements each.

    No bytes where rows are too short, the interpreter runs, or all programs together would ask for more than
    config.prefetch_bytes: what is asked for too early is out of the L2 again before it is read.
    """
    if INTERPRETED or depth % 8 or programs * rows * depth * 2 > config.prefetch_bytes:
        return 0, ""
    pieces = max(1, 32 * config.num_warps // rows)
    size = triton.cdiv(triton.cdiv(depth * 2, pieces), 16) * 16
    return size, f"cp.async.bulk.prefetch.L2.global [$1], {size}; mov.u32 $0, 0;"


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check x [M, K], weight [N, K], bias [N]: same 16-bit dtype, M up to MAX_ROWS. Raise ValueError naming what is wrong."""
    check_tensor("x", x, (None, None), DTYPES)
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x: expected 1 to {MAX_ROWS} rows (axis 0), got {x.shape[0]}")
    check_tensor("weight", weight, (None, x.shape[1]), (x.dtype,), x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), (x.dtype,), x)
