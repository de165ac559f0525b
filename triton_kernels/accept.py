"""The acceptance step on the device (METHOD section 5, step 4): no host read, uniforms passed in.

Sums over the vocabulary run in float64 in a fixed order, so that the same uniforms give the same tokens everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, begin_dependent, check_counts, check_tensor, power_of_two

_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def accept_greedy_kernel(
    drafts, num_drafts, best, finite, num_accepted, tokens, row_finite, stride_d, G, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (sequence): length of the matching prefix, then copy drafts and the next token."""
    begin_dependent(PDL)
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    limit = tl.minimum(tl.load(num_drafts + b), G)
    draft = tl.load(drafts + b * stride_d + i, mask=i < limit, other=-1).to(tl.int32)
    wanted = tl.load(best + b * (G + 1) + i, mask=i <= G, other=-2)
    accepted = tl.minimum(tl.min(tl.where(draft != wanted, i, BLOCK), 0), limit)
    tl.store(num_accepted + b, accepted)
    tl.store(tokens + b * (G + 1) + i, tl.where(i < accepted, draft, tl.where(i == accepted, wanted, 0)), mask=i <= G)
    good = tl.load(finite + b * (G + 1) + i, mask=i <= limit, other=1).to(tl.int32)
    tl.store(row_finite + b, tl.min(good, 0) != 0)


@triton.jit
def count_accepted(
    drafts, num_drafts, p, q, uniforms, b, stride_d, G, V, BLOCK: tl.constexpr, HAS_Q: tl.constexpr
):  # fmt: skip
    """(accepted, limit) of one sequence: drafts are kept while u * q(d) < p(d)."""
    i = tl.arange(0, BLOCK)
    limit = tl.minimum(tl.load(num_drafts + b), G)
    used = i < limit
    draft = tl.load(drafts + b * stride_d + i, mask=used, other=0).to(tl.int64)
    u = tl.load(uniforms + b * G + i, mask=used, other=0.0).to(tl.float64)
    p_d = tl.load(p + (b * (G + 1) + i) * V + draft, mask=used, other=0.0).to(tl.float64)
    q_d = tl.load(q + (b * G + i) * V + draft, mask=used, other=1.0).to(tl.float64) if HAS_Q else tl.full([BLOCK], 1.0, tl.float64)
    kept = used & (u * q_d < p_d)
    return tl.min(tl.where(kept, BLOCK, i), 0), limit, draft


@triton.jit
def residual(p, q, draft, b, n, limit, column, G, V, HAS_Q: tl.constexpr, PLAIN: tl.constexpr):
    """The distribution (not normalised) that the next token is drawn from, at `column`: max(p - q, 0), or p."""
    mask = column < V
    mass = tl.load(p + (b * (G + 1) + n) * V + column, mask=mask, other=0.0).to(tl.float64)
    if PLAIN:
        return mass
    rejected = n < limit
    if HAS_Q:
        other = tl.load(q + (b * G + n) * V + column, mask=mask & rejected, other=0.0).to(tl.float64)
    else:
        other = tl.where(rejected & (column == draft), 1.0, 0.0).to(tl.float64)
    return tl.maximum(mass - other, 0.0)


@triton.jit
def residual_sums_kernel(
    drafts, num_drafts, p, q, uniforms, sums, stride_d, G, V,
    BLOCK_G: tl.constexpr, BLOCK: tl.constexpr, HAS_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk of BLOCK tokens, sequence): the chunk's mass of the residual and of p."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    n, limit, draft = count_accepted(drafts, num_drafts, p, q, uniforms, b, stride_d, G, V, BLOCK_G, HAS_Q)
    rejected = tl.sum(tl.where(tl.arange(0, BLOCK_G) == n, draft, 0), 0)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    slot = (b * tl.num_programs(0) + chunk) * 2
    tl.store(sums + slot, tl.sum(residual(p, q, rejected, b, n, limit, column, G, V, HAS_Q, False), 0))
    tl.store(sums + slot + 1, tl.sum(residual(p, q, rejected, b, n, limit, column, G, V, HAS_Q, True), 0))


@triton.jit
def draw_kernel(
    drafts, num_drafts, p, q, uniforms, next_uniforms, sums, num_accepted, tokens, stride_d, G, V, chunks,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, HAS_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): the first token whose cumulative mass exceeds u times the total."""
    begin_dependent(PDL)
    b = tl.program_id(0).to(tl.int64)
    n, limit, draft = count_accepted(drafts, num_drafts, p, q, uniforms, b, stride_d, G, V, BLOCK_G, HAS_Q)
    i = tl.arange(0, BLOCK_G)
    rejected = tl.sum(tl.where(i == n, draft, 0), 0)
    c = tl.arange(0, BLOCK_C)
    slot = (b * chunks + c) * 2
    mass = tl.load(sums + slot, mask=c < chunks, other=0.0)
    plain = tl.load(sums + slot + 1, mask=c < chunks, other=0.0)
    # An all-zero residual means p equals q: draw from p then.
    empty = tl.sum(mass, 0) <= 0.0
    mass = tl.where(empty, plain, mass)
    before = tl.cumsum(mass, 0) - mass
    goal = tl.load(next_uniforms + b).to(tl.float64) * tl.sum(mass, 0)
    # The last chunk with mass that starts at or below the goal holds the token, whatever the rounding of the sums.
    chunk = tl.max(tl.where((before <= goal) & (mass > 0.0), c, 0), 0)
    goal -= tl.sum(tl.where(c == chunk, before, 0.0), 0)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    if empty:
        weights = residual(p, q, rejected, b, n, limit, column, G, V, HAS_Q, True)
    else:
        weights = residual(p, q, rejected, b, n, limit, column, G, V, HAS_Q, False)
    last = tl.max(tl.where(weights > 0.0, column, 0), 0)
    drawn = tl.minimum(tl.min(tl.where(tl.cumsum(weights, 0) > goal, column, 2147483647), 0), last)
    tl.store(num_accepted + b, n)
    tl.store(tokens + b * (G + 1) + i, tl.where(i < n, draft.to(tl.int32), tl.where(i == n, drawn, 0)), mask=i <= G)


def _outputs(
    drafts: torch.Tensor, num_drafts: torch.Tensor, num_accepted: torch.Tensor | None, tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor("drafts", drafts, (None, None), _INTEGERS, contiguous=False)
    batch, num = drafts.shape
    check_counts(batch, drafts, num_drafts=num_drafts)
    if num_accepted is None:
        num_accepted = torch.empty(batch, dtype=torch.int32, device=drafts.device)
    if tokens is None:
        tokens = torch.empty((batch, num + 1), dtype=torch.int32, device=drafts.device)
    check_counts(batch, drafts, num_accepted=num_accepted)
    check_tensor("tokens", tokens, (batch, num + 1), (torch.int32,), drafts)
    return num_accepted, tokens


def accept_greedy(
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    best: torch.Tensor,
    finite: torch.Tensor,
    *,
    num_accepted: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    row_finite: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the longest prefix of drafts [B, G] (first num_drafts[b] valid) equal to the target's argmax.

    best [B, G+1] int32 and finite [B, G+1] bool come from argmax_rows. Returns num_accepted [B] int32, tokens [B, G+1]
    int32 (accepted drafts, then the next token, then zeros) and row_finite [B] bool over rows 0..num_drafts[b].
    Raises ValueError on bad input.
    """
    num_accepted, tokens = _outputs(drafts, num_drafts, num_accepted, tokens)
    batch, num = drafts.shape
    check_tensor("best", best, (batch, num + 1), (torch.int32,), drafts)
    check_tensor("finite", finite, (batch, num + 1), (torch.bool,), drafts)
    if row_finite is None:
        row_finite = torch.empty(batch, dtype=torch.bool, device=drafts.device)
    check_tensor("row_finite", row_finite, (batch,), (torch.bool,), drafts)
    options = {} if INTERPRETED else {"launch_pdl": True}
    accept_greedy_kernel[(batch,)](
        drafts, num_drafts, best, finite, num_accepted, tokens, row_finite, drafts.stride(0), num,
        BLOCK=power_of_two(num + 1, 2), PDL=bool(options), num_warps=1, **options,
    )  # fmt: skip
    return num_accepted, tokens, row_finite


def accept_sampled(
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probabilities: torch.Tensor | None,
    target_probabilities: torch.Tensor,
    accept_uniforms: torch.Tensor,
    next_uniforms: torch.Tensor,
    *,
    num_accepted: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: keep d_i while u_i < p_i(d)/q_i(d); then draw from max(p - q, 0), or from p after all drafts.

    drafts [B, G]; num_drafts [B] int32; draft_probabilities q [B, G, V] fp32 or None (one-hot drafts);
    target_probabilities p [B, G+1, V] fp32; accept_uniforms [B, G], next_uniforms [B] fp64 or fp32 in [0, 1). The draw is
    by inverse CDF in token order. Returns num_accepted [B] and tokens [B, G+1] int32 (accepted, next, zeros). `sums`
    float64 [B * ceil(V / 2048) * 2] avoids the allocation. Raises ValueError on bad input.
    """
    num_accepted, tokens = _outputs(drafts, num_drafts, num_accepted, tokens)
    batch, num = drafts.shape
    check_tensor("target_probabilities", target_probabilities, (batch, num + 1, None), (torch.float32,), drafts)
    vocabulary = target_probabilities.shape[2]
    if draft_probabilities is not None:
        check_tensor("draft_probabilities", draft_probabilities, (batch, num, vocabulary), (torch.float32,), drafts)
    uniform_types = (torch.float64, torch.float32)
    check_tensor("accept_uniforms", accept_uniforms, (batch, num), uniform_types, drafts)
    check_tensor("next_uniforms", next_uniforms, (batch,), uniform_types, drafts)
    block = 64 if INTERPRETED else 2048
    chunks = triton.cdiv(vocabulary, block)
    if sums is None:
        sums = torch.empty(batch * chunks * 2, dtype=torch.float64, device=drafts.device)
    check_tensor("sums", sums, (None,), (torch.float64,), drafts)
    if sums.numel() < batch * chunks * 2:
        raise ValueError(f"sums: expected at least {batch * chunks * 2} elements, got {sums.numel()}")
    q = target_probabilities if draft_probabilities is None else draft_probabilities
    options = {} if INTERPRETED else {"launch_pdl": True}
    common = {
        "BLOCK_G": power_of_two(num + 1, 2), "BLOCK": block, "HAS_Q": draft_probabilities is not None,
        "PDL": bool(options), "num_warps": 4, **options,
    }  # fmt: skip
    inputs = (drafts, num_drafts, target_probabilities, q, accept_uniforms)
    shape = (drafts.stride(0), num, vocabulary)
    residual_sums_kernel[(chunks, batch)](*inputs, sums, *shape, **common)
    draw_kernel[(batch,)](
        *inputs, next_uniforms, sums, num_accepted, tokens, *shape, chunks, BLOCK_C=power_of_two(chunks), **common
    )
    return num_accepted, tokens
