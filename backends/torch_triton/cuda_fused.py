"""Small fused kernels of a decoder block: residual add with RMS norm, SiLU gate, and the extension of a token set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dustin.triton_kernels.runtime import INTERPRETED, begin_dependent, power_of_two


def _options(num_warps: int) -> dict[str, object]:
    """Launch options; on a device the kernel starts while the one before drains (programmatic dependent launch)."""
    return {"num_warps": num_warps, "PDL": False} if INTERPRETED else {"num_warps": num_warps, "PDL": True, "launch_pdl": True}


@triton.jit
def add_norm_kernel(x, residual, weight, out, eps, ADD: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row): residual += x, rounded to its dtype; out = residual / rms(residual) * weight."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row + column, value.to(residual.dtype.element_ty), mask=inside)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (value * inverse).to(out.dtype.element_ty).to(tl.float32) * scale, mask=inside)


def add_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm [R, H] of residual + x; residual [R, H] is updated in place (x None: it is normed as it is)."""
    rows, size = residual.shape
    out = torch.empty_like(residual)
    block = power_of_two(size)
    add_norm_kernel[(rows,)](
        residual if x is None else x, residual, weight, out, eps, ADD=x is not None, H=size, BLOCK=block,
        **_options(8 if block > 2048 else 4),
    )  # fmt: skip
    return out


@triton.jit
def silu_gate_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (block of columns, row): out = silu(gate) * up."""
    begin_dependent(PDL)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, silu * up, mask=inside)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of gate_up [R, 2 I]: [R, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    silu_gate_kernel[(triton.cdiv(size, block), rows)](gate_up, out, SIZE=size, BLOCK=block, **_options(4))
    return out


# Widths grow from call to call: a kernel compiled for each would stop the rounds.
@triton.jit(do_not_specialize=["stride_i", "width", "out_width"])
def extend_set_kernel(indices, counts, starts, stops, out, out_counts, stride_i, width, out_width, BLOCK: tl.constexpr):
    """Program (sequence): entries below min(start, stop) stay in place, start .. stop-1 follow them."""
    b = tl.program_id(0).to(tl.int64)
    start, stop, count = tl.load(starts + b), tl.load(stops + b), tl.load(counts + b)
    entry = tl.arange(0, BLOCK)
    index = tl.load(indices + b * stride_i + entry, mask=entry < tl.minimum(count, width), other=2147483647)
    stays = index < tl.minimum(start, stop)
    # Ascending entries: those that stay are a prefix.
    kept = tl.sum(stays.to(tl.int32), 0)
    total = kept + tl.maximum(stop - start, 0)
    value = tl.where(stays, index, start + entry - kept)
    tl.store(out + b * out_width + entry, tl.where(entry < total, value, 0), mask=entry < out_width)
    tl.store(out_counts + b, total)


def extend_set(
    indices: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Backend.extend` on device tensors: indices [B, k] ascending, counts, starts, stops [B] int32 -> [B, width], [B] int32."""
    batch, k = indices.shape
    out = torch.empty((batch, width), dtype=torch.int32, device=indices.device)
    out_counts = torch.empty_like(counts)
    extend_set_kernel[(batch,)](
        indices, counts, starts, stops, out, out_counts, indices.stride(0),
        k, width, BLOCK=power_of_two(max(k, width)), num_warps=4,
    )  # fmt: skip
    return out, out_counts


@triton.jit
def end_step_kernel(token, fed, at, held, step, following, drafts, batch, room, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: the token of each sequence joins its drafts and is fed next; lengths and the step go on."""
    begin_dependent(PDL)
    b = tl.arange(0, BLOCK)
    inside = b < batch
    now = tl.load(step)
    value, count = tl.load(token + b, mask=inside, other=0), tl.load(fed + b, mask=inside, other=0)
    tl.store(drafts + b * room + now, value, mask=inside)
    tl.store(following + b, value, mask=inside)
    tl.store(at + b, tl.load(at + b, mask=inside, other=0) + count, mask=inside)
    tl.store(held + b, tl.load(held + b, mask=inside, other=0) + count, mask=inside)
    tl.store(step, now + 1)


def end_step(
    token: torch.Tensor, fed: torch.Tensor, at: torch.Tensor, held: torch.Tensor, step: torch.Tensor, following: torch.Tensor,
    drafts: torch.Tensor,
) -> None:  # fmt: skip
    """After a draft step that fed fed[b] rows: its token [B] goes to drafts [B, room] at column step [1] and to `following`
    [B, 1]; lengths `at` [B] and sizes `held` [B] grow by `fed`, the step by one. All int32 but the step (int64)."""
    batch = token.shape[0]
    end_step_kernel[(1,)](
        token, fed, at, held, step, following, drafts, batch, drafts.shape[1], BLOCK=power_of_two(batch), **_options(4)
    )


# Verdicts of rounds and of checks differ in width.
@triton.jit(do_not_specialize=["batch", "width"])
def feed_verdict_kernel(accepted, verdict, control, tokens, batch, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: what a draft has not seen after a verdict, and how many rows it holds then."""
    begin_dependent(PDL)
    b = tl.arange(0, BLOCK)
    inside = b < batch
    kept = tl.load(accepted + b, mask=inside, other=0)
    known, on = tl.load(control + b, mask=inside, other=0), tl.load(control + batch + b, mask=inside, other=0)
    held = tl.load(control + 3 * batch + b, mask=inside, other=0)
    # The last draft was never fed: where all were kept it comes before the target's own token.
    both = ((on > 0) & (held < known + kept)).to(tl.int32)
    tl.store(control + b, tl.where(on > 0, known + kept - both, held), mask=inside)
    tl.store(control + batch + b, tl.where(on > 0, 1 + both, 0), mask=inside)
    own = verdict + b * width + kept
    tl.store(tokens + 2 * b, tl.load(own - both, mask=inside, other=0).to(tokens.dtype.element_ty), mask=inside)
    tl.store(tokens + 2 * b + 1, tl.load(own, mask=inside, other=0).to(tokens.dtype.element_ty), mask=inside)


def feed_verdict(accepted: torch.Tensor, verdict: torch.Tensor, control: torch.Tensor, tokens: torch.Tensor) -> None:
    """For the draft steps after a verdict: accepted [B] tokens were kept, verdict [B, any] has these and the target's own.

    control [4, B] comes with the tokens that each sequence had with its pending one, 1 where it takes part, and (its last line)
    the rows that the draft holds now, at most one fewer than any outcome leaves it to hold. It leaves with the rows that the
    draft then holds and the tokens to feed, one or two, which go to tokens [B, 2]."""
    batch, width = verdict.shape
    feed_verdict_kernel[(1,)](accepted, verdict, control, tokens, batch, width, BLOCK=power_of_two(batch), **_options(4))
