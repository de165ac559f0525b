"""The gated product of an MLP at few rows of a wide model: bound by its weights, which are read once, the gate inside.

Weights are the left operand of the matrix instructions, whose 64 rows they fill whatever the number of inputs, and come by the
copy engine. Tiles are small, so that all programs are resident at once and the copies of one run while another one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .decode_linear import DTYPES, MAX_ROWS, launch_options
from .runtime import begin_dependent, check_tensor, num_multiprocessors, power_of_two


@dataclass(frozen=True)
class GatedConfig:
    """Tile of one program: `block_n` rows of either half of the weights, `block_k` deep at a time."""

    block_n: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def gated_linear_kernel(
    x, weights, out, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns): out [M, N] = silu(x w of the first half) * (x w of the second); x [M, K] and weights [2 N, K]
    are tensor descriptors."""
    begin_dependent(PDL)
    n = tl.program_id(0) * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        rows_t = tl.trans(x.load([0, k]))
        gate = tl.dot(weights.load([n, k]), rows_t, gate)
        up = tl.dot(weights.load([n + N, k]), rows_t, up)
    # Rounded where separate launches would round.
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    y = tl.trans((silu * up.to(dtype).to(tl.float32)).to(dtype))
    rows, columns = tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    tl.store(out + rows[:, None] * N + columns[None, :], y, mask=(rows < M)[:, None] & (columns < N)[None, :])


def gates_inside(weight: torch.Tensor) -> bool:
    """Whether a weight [2 N, K] is one that this product was found faster for: 16-bit, and programs for half to all of the places
    that the processors have for them, so that none waits for a place."""
    columns, config = weight.shape[0] // 2, GatedConfig()
    programs, processors = columns // config.block_n, num_multiprocessors(weight.device)
    fits = weight.dtype in DTYPES and columns % config.block_n == 0 and weight.shape[1] % 8 == 0
    return fits and 3 * processors <= 2 * programs <= 6 * processors


def gated_linear(x: torch.Tensor, weight: torch.Tensor, *, config: GatedConfig | None = None) -> torch.Tensor:
    """silu(x gate) * (x up) [M, N] of x [M, K] and weight [2 N, K], the gate's rows first; bf16 or fp16, K a multiple of 8.

    Raise ValueError on bad input.
    """
    check_tensor("x", x, (None, None), DTYPES)
    rows, depth = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x: expected 1 to {MAX_ROWS} rows (axis 0), got {rows}")
    check_tensor("weight", weight, (None, depth), (x.dtype,), x)
    config = config or GatedConfig()
    columns = weight.shape[0] // 2
    # A tile that reached over the gate's end would read of the other half.
    if weight.shape[0] % 2 or columns % config.block_n or depth % 8:
        raise ValueError(
            f"weight: expected two halves of a multiple of {config.block_n} rows of a multiple of 8, got {list(weight.shape)}"
        )
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block_m = power_of_two(rows, 16)
    described = [
        TensorDescriptor(t, list(t.shape), [depth, 1], [block, config.block_k])
        for t, block in ((x, block_m), (weight, config.block_n))
    ]
    options = launch_options(config.num_warps)
    gated_linear_kernel[(columns // config.block_n,)](
        *described, out, rows,
        N=columns, K=depth, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages,
        PDL="launch_pdl" in options, **options,
    )  # fmt: skip
    return out
