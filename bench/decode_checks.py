"""How far what is timed is from a reference: attention kernels from float32 torch, the draft's fused blocks from the plain path."""

from __future__ import annotations

from typing import Any

import click
import torch

from bench.decode_rounds import Rounds, Side
from dustin.backends.torch_triton.cuda_forward import Inputs, make_slots

# Sequences that the reference computes: it is slow.
CHECKED = 2


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def attention_rms(state: Rounds) -> float:
    """Relative RMS of the verification's attention (one row a sequence, layer 0) against float32 on the same rows of the cache."""
    side, config = state.target, state.target.forward.config
    pool, batch = side.cache.pool, state.batch
    tokens = torch.zeros(batch, 1, dtype=torch.int32, device=state.pending.device)
    table = side.cache.page_table
    slots = None
    if state.options.sparse:
        slots = make_slots(state.indices, state.counts, state.target_lengths, state.one, table, side.page_size, 1)
    shape = (batch, 1, config.num_heads, config.head_dim)
    q = torch.randn(shape, device=tokens.device).to(pool.keys[0].dtype)
    got = side.forward._attend(q, Inputs(tokens, state.target_lengths, state.one, table, slots), 0)
    worst = 0.0
    for b in range(min(CHECKED, batch)):
        length = int(state.target_lengths[b])
        place = torch.arange(length + 1, device=q.device)
        if slots is not None:
            place = torch.cat([state.indices[b, : int(state.counts[b])].long(), place[-1:]])
        rows = table[b].long()[place // side.page_size] * side.page_size + place % side.page_size
        k, v = (store[0].flatten(0, 1)[rows].float().transpose(0, 1) for store in (pool.keys, pool.values))
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        weights = torch.softmax((q[b, 0].float()[:, None] @ k.transpose(1, 2)) * config.head_dim**-0.5, -1)
        worst = max(worst, relative_rms(got[b, 0], (weights @ v)[:, 0]))
    return worst


def fused_rms(side: Side, batch: int, context: int) -> float | None:
    """Relative RMS of a draft step's logits, fused blocks against the plain path; None where the plain path is what runs."""
    blocks = side.forward.blocks
    if blocks is None or batch > blocks.max_rows:
        return None
    device = side.cache.page_table.device
    tokens = torch.randint(0, 1000, (batch, 1), device=device)
    lengths, one = (torch.full((batch,), n, dtype=torch.int32, device=device) for n in (context, 1))
    most = blocks.max_rows
    made = []
    for rows in (most, 0):
        blocks.max_rows = rows
        made.append(side.run(tokens, lengths, one, None, False, "last")[0])
    blocks.max_rows = most
    return None if made[0] is None or made[1] is None else relative_rms(made[0], made[1])


def show_profile(bench: Any, batch: int) -> None:
    """Kernels of a round with both sides sparse, by device time."""
    state = bench.rounds(batch, True, True)
    graph = bench.capture(state.whole)
    state.reset()
    graph()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph()
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60)
    click.echo(f"B={batch}\n{table}", err=True)
