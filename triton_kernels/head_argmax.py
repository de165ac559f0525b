"""The most likely token of a few rows straight from the head's weights: no logits [rows, V] are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .argmax_rows import combine_maxima_kernel
from .decode_linear import LinearConfig, check_linear, launch_options, swapped_product
from .runtime import begin_dependent, power_of_two


@triton.jit
def head_maxima_kernel(
    x, w, values, positions, nans, M, V,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N tokens): each row's best logit among them, its first token, and its number of NaN."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    column = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < V
    rows = tl.arange(0, BLOCK_M)
    # The last chunk reads its last token again in place of those beyond the vocabulary, so that no copy needs a mask.
    source = tl.minimum(column, V - 1)
    acc = swapped_product(w, x, source, inside, rows, 0, K, M, K, BLOCK_M, BLOCK_K, False, STAGES)
    # Rounded as stored logits would be, so that ties are the same.
    acc = acc.to(x.dtype.element_ty).to(tl.float32)
    bad = (acc != acc) & inside[:, None]
    acc = tl.where(bad | (column >= V)[:, None], float("-inf"), acc)
    best = tl.max(acc, 0)
    first = tl.min(tl.where((acc == best[None, :]) & inside[:, None], column[:, None], 2147483647), 0)
    slot = rows * tl.num_programs(0) + chunk
    fed = rows < M
    tl.store(values + slot, best, mask=fed)
    tl.store(positions + slot, first, mask=fed)
    tl.store(nans + slot, tl.sum(bad.to(tl.int32), 0), mask=fed)


def head_argmax(
    x: torch.Tensor, weight: torch.Tensor, *, vocabulary: int, config: LinearConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [M] int32 and finite [M] bool of the logits x [M, K] weight [V, K], as argmax_rows gives them for stored logits.

    Only the first `vocabulary` tokens are considered. Raise ValueError on bad input.
    """
    check_linear(x, weight, None)
    rows, depth = x.shape
    if not 1 <= vocabulary <= weight.shape[0]:
        raise ValueError(f"vocabulary is {vocabulary}, expected 1 to {weight.shape[0]}")
    config = config or LinearConfig(64 if rows > 16 else 128, 64, num_stages=6, swap=True)
    chunks = triton.cdiv(vocabulary, config.block_n)
    values = torch.empty(rows * chunks, dtype=torch.float32, device=x.device)
    positions, nans = (torch.empty(rows * chunks, dtype=torch.int32, device=x.device) for _ in range(2))
    tokens = torch.empty(rows, dtype=torch.int32, device=x.device)
    finite = torch.empty(rows, dtype=torch.bool, device=x.device)
    options = launch_options(config.num_warps)
    pdl = "launch_pdl" in options
    head_maxima_kernel[(chunks,)](
        x, weight, values, positions, nans, rows, vocabulary,
        K=depth, BLOCK_M=power_of_two(rows, 16), BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages,
        PDL=pdl, **options,
    )  # fmt: skip
    options = launch_options(4)
    combine_maxima_kernel[(rows,)](
        values, positions, nans, tokens, finite, chunks, BLOCK=power_of_two(chunks), PDL=pdl, **options
    )
    return tokens, finite
