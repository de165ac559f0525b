"""Products of a wide model at few rows: bound by weights, which are read once; the MLP's gate inside its first product.

Weights are the left operand of the matrix instructions, whose 64 rows they fill whatever the number of inputs, and come by the
copy engine. Tiles are small, so that all programs are resident at once and the copies of one run while another one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .decode_linear import DTYPES, MAX_ROWS, launch_options, sum_splits
from .runtime import begin_dependent, check_tensor, num_multiprocessors, power_of_two


@dataclass(frozen=True)
class WideConfig:
    """Tile of one program: `block_n` rows of the weights (of either half with a gate), `block_k` deep at a time; `splits`
    programs over the depth, whose sums merge in order."""

    block_n: int = 64
    block_k: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


class WideScratch:
    """Partial sums and arrival counters of split products, for all products of a stream; kernels leave the counters at zero."""

    def __init__(self, num_partials: int, num_tiles: int, device: torch.device | str) -> None:
        self.partials = torch.empty(max(num_partials, 1), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(num_tiles, 1), dtype=torch.int32, device=device)


@triton.jit
def wide_linear_kernel(
    x, weights, bias, out, partials, counters, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    DEPTH: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns, part of the depth): out [M, N] = x w + bias, or silu(x w of the first half) * (x w of the second);
    x [M, K] and weights [N, K], with GATE [2 N, K], are tensor descriptors."""
    tile, split = tl.program_id(0), tl.program_id(1)
    begin_dependent(PDL)
    n = tile * BLOCK_N
    begin = split * DEPTH
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATE:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(begin, tl.minimum(begin + DEPTH, K), BLOCK_K, num_stages=STAGES):
        rows_t = tl.trans(x.load([0, k]))
        acc = tl.dot(weights.load([n, k]), rows_t, acc)
        if GATE:
            up = tl.dot(weights.load([n + N, k]), rows_t, up)
    rows, lane = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    columns = n + lane
    last = True
    if SPLITS > 1:
        part = partials + (tile * SPLITS * BLOCK_N + lane[:, None]) * BLOCK_M + rows[None, :]
        acc, last = sum_splits(acc, part, counters + tile, split, SPLITS, BLOCK_N * BLOCK_M)
    if last:
        dtype = out.dtype.element_ty
        if BIAS:
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
        if GATE:
            # Rounded where separate launches would round.
            gate = acc.to(dtype).to(tl.float32)
            acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        stored = (rows < M)[:, None] & (columns < N)[None, :]
        tl.store(out + rows[:, None] * N + columns[None, :], tl.trans(acc.to(dtype)), mask=stored)


def few_programs(weight: torch.Tensor) -> bool:
    """Whether a gated weight [2 N, K] is of a size that these products were found faster at: 16-bit, and programs for half to all
    of the places that the processors have for them, so that none waits for a place."""
    columns, config = weight.shape[0] // 2, WideConfig()
    programs, processors = columns // config.block_n, num_multiprocessors(weight.device)
    fits = weight.dtype in DTYPES and columns % config.block_n == 0 and weight.shape[1] % 8 == 0
    return fits and 3 * processors <= 2 * programs <= 6 * processors


def depth_of_split(depth: int, config: WideConfig) -> int:
    """How much of `depth` one program sums: whole pieces, so that no two programs share one."""
    return triton.cdiv(triton.cdiv(depth, config.splits), config.block_k) * config.block_k


def scratch_sizes(rows: int, columns: int, depth: int, config: WideConfig) -> tuple[int, int]:
    """Partial sums and counters that a product [rows, depth] -> [rows, columns] needs."""
    tiles, splits = triton.cdiv(columns, config.block_n), triton.cdiv(depth, depth_of_split(depth, config))
    return (tiles * splits * config.block_n * power_of_two(rows, 16), tiles) if splits > 1 else (0, 0)


def wide_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    config: WideConfig | None = None,
    scratch: WideScratch | None = None,
) -> torch.Tensor:
    """x [M, K] weight [N, K] + bias [N] as [M, N]; with `gate` silu of the first N/2 columns times the others, [M, N/2].

    bf16 or fp16, K a multiple of 8. Nothing but the output is allocated when `scratch` is passed. Raise ValueError on bad input.
    """
    config = config or WideConfig()
    check_tensor("x", x, (None, None), DTYPES)
    rows, depth = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x: expected 1 to {MAX_ROWS} rows (axis 0), got {rows}")
    check_tensor("weight", weight, (None, depth), (x.dtype,), x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), (x.dtype,), x)
    if depth % 8:
        raise ValueError(f"weight: expected rows of a multiple of 8, got {list(weight.shape)}")
    columns = weight.shape[0] // 2 if gate else weight.shape[0]
    # A tile that reached over the gate's end would read of the other half.
    if gate and (weight.shape[0] % 2 or columns % config.block_n):
        raise ValueError(f"weight: expected two halves of a multiple of {config.block_n} rows, got {list(weight.shape)}")
    if gate and (bias is not None or config.splits > 1):
        raise ValueError(f"gate: expected no bias and one split, got {config.splits} splits, bias {bias is not None}")
    need = scratch_sizes(rows, columns, depth, config)
    scratch = scratch or WideScratch(*need, x.device)
    for name, least in zip(("partials", "counters"), need, strict=True):
        if getattr(scratch, name).numel() < least:
            raise ValueError(f"scratch.{name}: expected at least {least} elements, got {getattr(scratch, name).numel()}")
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block_m, span = power_of_two(rows, 16), depth_of_split(depth, config)
    splits = triton.cdiv(depth, span)
    described = [
        TensorDescriptor(t, list(t.shape), [depth, 1], [block, config.block_k])
        for t, block in ((x, block_m), (weight, config.block_n))
    ]
    options = launch_options(config.num_warps)
    wide_linear_kernel[(triton.cdiv(columns, config.block_n), splits)](
        *described, x if bias is None else bias, out, scratch.partials, scratch.counters, rows,
        N=columns, K=depth, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=splits, DEPTH=span, GATE=gate,
        BIAS=bias is not None, STAGES=config.num_stages, PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    return out
