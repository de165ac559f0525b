"""Mode exact on the device for bench/decode.py: sparse rounds propose a block, one dense pass checks it and the drafts after it.

As in the engine (dustin/exact.py): rounds go on until half of the rows have `block` less the last drafts, then the draft
model goes on from there, and the dense pass judges provisional tokens and drafts together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import torch

from bench.decode_acceptance import histogram, rounds_until
from bench.decode_rounds import Reads
from dustin.backends.torch_triton.cuda_forward import pack
from dustin.triton_kernels.argmax_rows import argmax_rows

if TYPE_CHECKING:
    from bench.decode import DecodeBench


def cut_drafts(wanted: torch.Tensor, size: int, turn: torch.Tensor) -> torch.Tensor:
    """How many of its last drafts each sequence goes without, in turn, where wanted [B] rows are more than `size` in all."""
    batch = len(wanted)
    over = (wanted.sum() - size).clamp_(min=0)
    return ((over + (torch.arange(batch, device=wanted.device) + turn) % batch) // batch).to(torch.int32)


def measure(bench: DecodeBench, batch: int, block: int, checks: int) -> None:
    """One row: `checks` blocks of up to `block` checked tokens each."""
    from bench.decode import gpu_ms

    gamma, device = bench.num_drafts, bench.device
    last = bench.last_drafts or gamma
    if block <= last:
        raise click.UsageError(f"--blocks: {block}, expected more than the {last} drafts that end a block (--last-drafts)")
    size = bench.check_rows or batch * (block + 1)
    if not batch * (block + 1 - last) <= size <= batch * (block + 1):
        raise click.UsageError(
            f"--check-rows: {size}, expected {batch * (block + 1 - last)} (no drafts) to {batch * (block + 1)} (all of a block's "
            f"{block + 1} rows) for {batch} sequences"
        )
    state = bench.rounds(batch, True, True, last_drafts=last)
    whole = bench.capture(state.whole)
    tables = {
        kind: bench.acceptance.table(kind, most, 64, batch, seed=seed).to(device)
        for kind, most, seed in (("check", block - last, 7), ("dense", last, 8))
    }
    tokens = torch.randint(0, 1000, (batch, block + 1), dtype=torch.int32, device=device)
    base, made = state.target_lengths.clone(), torch.zeros(batch, dtype=torch.int32, device=device)
    turn = torch.zeros(1, dtype=torch.long, device=device)
    offsets = torch.arange(1, last + 1, device=device)[None]

    def check() -> None:
        drafts, _ = state.propose(last=True)
        provisional = (state.target_lengths - base).clamp_(max=block - last)
        tokens[:, :1].copy_(state.pending[:, None])
        tokens.scatter_(1, provisional.long()[:, None] + offsets, drafts)
        fed, packed, drafts_fed = provisional + (1 + last), None, last
        if size < tokens.numel():
            cut = cut_drafts(fed, size, turn)
            fed, drafts_fed = fed - cut, last - cut
            packed = pack(fed, block + 1, size)
        logits, queries = state.dense_pass(tokens, base, fed, "all", packed)
        best, _ = argmax_rows(logits.flatten(0, 1))
        if packed is not None:
            best = best[packed.places]
        agreed, drafted = (tables[kind].index_select(0, turn)[0] for kind in ("check", "dense"))
        # The drafts count where all provisional tokens passed.
        kept = torch.minimum(agreed, provisional) + torch.where(agreed >= provisional, drafted.clamp(max=drafts_fed), 0)
        at = kept.long()[:, None]
        state.pending.copy_(best.view(batch, block + 1).gather(1, at)[:, 0])
        for layer, q in queries.items():
            state.history[layer].copy_(q.gather(1, at[:, :, None, None].expand(-1, 1, *q.shape[2:])))
        state.draft_lengths.copy_(state.target_lengths + last)
        base.add_(kept + 1)
        state.target_lengths.copy_(base)
        # The draft keeps what it has; the replay spares it a third missing token where all of a block passed.
        torch.maximum(torch.minimum(state.draft_lengths, base), base - 1, out=state.draft_lengths)
        made.copy_(kept + 1)
        turn.add_(1).remainder_(64)

    graph = bench.capture(check)
    rounds = rounds_until(block - last, bench.acceptance.shares_of("sparse", gamma))

    def restart() -> None:
        state.reset()
        base.fill_(bench.context)
        turn.zero_()

    def run(count: int) -> tuple[float, int]:
        restart()
        total = 0
        provisional, checked = Reads(state.verdict), Reads(made)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            for _ in range(rounds):
                whole()
                provisional.ask()
            graph()
            total += sum(checked.ask())
        total += sum(checked.last())
        return time.perf_counter() - began, total

    run(1)
    seconds, total = run(checks)

    def fill() -> None:
        """As many provisional tokens as a block has at most."""
        restart()
        state.target_lengths.fill_(bench.context + block - last)
        state.set_lengths.copy_(state.target_lengths - 1)
        state.draft_lengths.copy_(state.target_lengths)

    # Each check moves the lengths on; what sets them back is timed with it, and alone.
    checked = gpu_ms(lambda: (fill(), graph()), 3) - gpu_ms(fill, 3)
    drafted, attention = (
        gpu_ms(bench.capture(part)) for part in (lambda: state.propose(last=True), lambda: state.attend(block + 1, False))
    )
    bench.record(
        batch, f"exact {block}", total, seconds, query_rows=block + 1, num_draft_tokens=gamma, budget=bench.budget,
        acceptance_length=round(total / checks / batch, 3), histogram=histogram(tables["check"]), exact_block=block,
        rounds_per_check=rounds, drafts_in_check=last, check_rows=size,
        check_ms=round(checked, 2), block_ms=round(1e3 * seconds / checks, 2),
        draft_us=round(1e3 * drafted, 1), verify_attention_us=round(1e3 * attention, 1),
        verify_gemms_us=round(1e3 * (checked - drafted - attention), 1),
    )  # fmt: skip
