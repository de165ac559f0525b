"""Decoding over several GPUs: the rounds of `bench decode` with the target split over ranks, both sides in one run.

Every rank captures the same graphs, collectives in them. The draft runs on each rank; its tokens and the chosen set are
those of rank 0. Start it with `torchrun --nproc-per-node 2 -m bench tensor_parallel`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench import decode_acceptance
from bench import rows as result_rows
from bench.decode import SLACK, DecodeBench, gpu_ms
from bench.decode_acceptance import Acceptance
from bench.decode_rounds import Queries, Rounds, Side
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_forward import Inputs
from dustin.backends.torch_triton.cuda_model import CudaModel
from dustin.backends.torch_triton.cuda_random import QWEN2_0_5B, QWEN2_7B, qwen2_config, random_weights
from dustin.backends.torch_triton.ranks import Ranks, join, leave
from dustin.backends.torch_triton.sharding import Shard
from dustin.backends.torch_triton.symmetric import Sums
from dustin.interfaces import Tap
from dustin.selection import draft_tap, target_tap

SHAPES = {"7b": ("Qwen2.5-7B", QWEN2_7B), "72b": ("Qwen2.5-72B", qwen2_config(8192, 29568, 80, 64, 8, 152064))}
DRAFT = QWEN2_0_5B
# Of a card's memory for all but weights and keys: libraries, graphs, and what a pass of many rows computes.
REST_BYTES = 6 << 30


def bytes_needed(config: ModelConfig, size: int, rows: int) -> int:
    """Memory of one of `size` cards: its shard of the weights and of `rows` rows of keys and values, the draft's, and the rest."""
    total = 0
    for model, share in ((config, size), (DRAFT, 1)):
        c = model
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        layer = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
        ends = c.vocab_size * c.hidden_size * (1 if c.tied_embeddings else 2)
        total += 2 * (c.num_layers * layer + ends) // share
        total += 2 * 2 * c.num_layers * kv * rows // min(share, c.num_kv_heads)
    return total + REST_BYTES


class AllRanks(Sums):
    """Peers of a shard whose logits every rank gets whole. `quiet` leaves the collectives out, to see what they cost."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size, self.variant = ranks.rank, ranks.size, None
        self.group, self._gather, self.symmetric = ranks._data, ranks.gather, ranks.symmetric
        self.quiet = False

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if not self.quiet:
            dist.all_reduce(x, group=self.group)
        return x

    def linear_sum(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See Sums.linear_sum."""
        return F.linear(x, weight, bias) if self.quiet else super().linear_sum(x, weight, bias)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[R, size * n] from every rank's [R, n]."""
        parts = x.expand(self.size, *x.shape) if self.quiet else self._gather(x)
        return parts.transpose(0, 1).reshape(len(x), -1)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x."""
        if not self.quiet:
            dist.broadcast(x, 0, group=self.group)
        return x


class SplitSide(Side):
    """A target of which this rank holds a shard: it scores with its own heads, and the scores are summed."""

    def __init__(self, model: CudaModel, cache: Any, tap: Tap, own: Tap, peers: AllRanks) -> None:
        super().__init__(model, cache, own)
        self._peers = peers
        total = sum(len(heads) for heads in tap.heads.values())
        # Side.score means over the rank's own layers and heads; each rank counts by its share of them.
        self._share = sum(len(heads) for heads in own.heads.values()) / total

    def score(self, queries: Queries, lengths: torch.Tensor, num_rows: torch.Tensor, columns: int) -> torch.Tensor:
        """[B, columns] fp32, -inf beyond the lengths."""
        if queries:
            mine = super().score(queries, lengths, num_rows, columns) * self._share
        else:
            mine = torch.zeros(len(lengths), columns, device=lengths.device)
        return self._peers.sum(mine)


class SplitRounds(Rounds):
    """Rounds whose drafts and sets are rank 0's on every rank."""

    peers: AllRanks

    def propose(self, last: bool = False) -> tuple[torch.Tensor, Queries]:
        """See Rounds.propose."""
        drafts, queries = super().propose(last)
        return self.peers.from_first(drafts.contiguous()), queries

    def select(self, by_target: torch.Tensor | None, by_draft: torch.Tensor) -> None:
        """See Rounds.select."""
        super().select(by_target, by_draft)
        self.peers.from_first(self.indices)
        self.peers.from_first(self.counts)


class SplitBench(DecodeBench):
    """`DecodeBench` on one rank of several."""

    rounds_class = SplitRounds

    def __init__(
        self, ranks: Ranks, shape: str, context: int, budget: int, paper: bool, acceptance: Acceptance, largest: int
    ) -> None:
        """`largest` is the largest batch. Raise UsageError where a card is too small for it."""
        device = ranks.device
        self.ranks, self.peers = ranks, AllRanks(ranks)
        self.num_drafts, self.acceptance = 0, acceptance
        self.device, self.context, self.budget, self.paper = device, context, budget, paper
        self.name, whole = SHAPES[shape]
        self.whole, self.model = whole, f"{self.name} + Qwen2.5-0.5B shapes"
        length = context + SLACK + 64
        asked, has = bytes_needed(whole, ranks.size, largest * length), torch.cuda.get_device_properties(device).total_memory
        if asked > has:
            raise click.UsageError(
                f"batch {largest} needs {asked / 1e9:.0f} GB on each of {ranks.size} cards of {has / 1e9:.0f} GB: lower --batches "
                "or --context, or take more cards"
            )
        click.echo(f"{asked / 1e9:.0f} of {has / 1e9:.0f} GB a card reckoned", err=True)
        shard = Shard(ranks.rank, ranks.size)
        local = shard.config(whole)
        _, share = shard.vocabulary(whole.vocab_size)
        weights = random_weights(dataclasses.replace(local, vocab_size=share), torch.bfloat16, device, 1 + ranks.rank)
        self.target = CudaModel(local, weights, f"{self.name} shard {ranks.rank}", self.peers)
        self.draft = CudaModel(DRAFT, random_weights(DRAFT, torch.bfloat16, device, 99), "qwen2.5-0.5b-shape")
        for model in (self.target, self.draft):
            model.limit_vocabulary(DRAFT.vocab_size)
            pool = model.new_cache(largest, length).pool
            for store in (*pool.keys, *pool.values):
                store.normal_(generator=torch.Generator(device).manual_seed(3))
        self.results: list[dict[str, Any]] = []
        self.errors: dict[str, float | None] = {}
        self.baseline: dict[tuple[int, int], float] = {}
        self.capture_seconds = 0.0

    def sides(self, batch: int) -> tuple[Side, Side]:
        """This rank's shard of the target, and the draft."""
        spec = dataclasses.replace(self.target.spec, num_heads=self.whole.num_heads, num_kv_heads=self.whole.num_kv_heads)
        tap, drafts = target_tap(spec), draft_tap(self.draft.spec)
        if self.paper:
            four = [tuple(i * heads // 4 for i in range(4)) for heads in (self.whole.num_heads, DRAFT.num_heads)]
            tap, drafts = Tap({max(tap.heads): four[0]}), Tap(dict.fromkeys(drafts.heads, four[1]))
        held = self.whole.num_heads // self.ranks.size
        first = self.ranks.rank * held
        own = Tap({i: tuple(h - first for h in heads if first <= h < first + held) for i, heads in tap.heads.items()})
        caches = [model.new_cache(batch, self.context + SLACK) for model in (self.target, self.draft)]
        return SplitSide(self.target, caches[0], tap, own, self.peers), Side(self.draft, caches[1], drafts)

    def rounds(self, *args: Any, **options: Any) -> Rounds:
        """See DecodeBench.rounds."""
        state = super().rounds(*args, **options)
        state.peers = self.peers
        return state

    def plain(self, batch: int, steps: int = 24) -> None:
        """The baseline, and what its attention takes."""
        super().plain(batch, steps)
        state = self.rounds(batch, False, False)
        one = torch.zeros(batch, 1, dtype=torch.int32, device=self.device)
        inputs = Inputs(one, state.target_lengths, state.one, state.target.cache.page_table)
        self.results[-1]["attention_us"] = round(1e3 * gpu_ms(self.capture(lambda: self._layers(state, inputs))), 1)

    def _layers(self, state: Rounds, inputs: Inputs) -> None:
        """The attention of all layers alone."""
        forward, config = state.target.forward, state.target.forward.config
        shape = (*inputs.tokens.shape, config.num_heads, config.head_dim)
        q = torch.randn(shape, device=self.device).to(state.target.cache.pool.keys[0].dtype)
        for layer in range(config.num_layers):
            forward._attend(q, inputs, layer)

    def record(self, batch: int, mode: str, tokens: int, seconds: float, **more: Any) -> None:
        """One row, with the number of ranks, a card's memory, and what a dense check's attention takes to that of a sparse one."""
        super().record(batch, mode, tokens, seconds, **more, tensor_parallel=self.ranks.size)
        row = self.results[-1]
        row["card"] = f"{self.ranks.size} x {row['card']}"
        row["baseline"] = f"our dense autoregressive decoding with CUDA graphs on the same {self.ranks.size} cards"
        row["sums"] = "symmetric memory" if self.peers.symmetric is not None else "NCCL"
        row["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        same = ("batch", "num_draft_tokens", "context")
        dense = [r for r in self.results if r["mode"] == "dense" and all(r.get(key) == row.get(key) for key in same)]
        if dense and mode.startswith("sparse"):
            taken = row["verify_attention_us"] + row["score_us"] + row["select_us"]
            row["attention_ratio"] = round(dense[0]["verify_attention_us"] / taken, 2)
            click.echo(f"        attention with scoring and selection: {row['attention_ratio']}x of dense", err=True)

    def _breakdown(self, state: Rounds) -> dict[str, float]:
        """The phases, and what the verification's collectives take: its time with them less its time without."""
        times = super()._breakdown(state)
        state.reset()
        drafts = torch.ones(state.batch, state.options.num_draft_tokens, dtype=torch.int32, device=self.device)
        with self._quiet():
            alone = gpu_ms(self.capture(lambda: state.verify(drafts)))
        state.reset()
        collectives = max(0.0, times["verify_us"] - 1e3 * alone)
        round_us = sum(times.get(name, 0.0) for name in ("draft_us", "score_us", "select_us", "verify_us", "accept_us"))
        return times | {"collectives_us": round(collectives, 1), "collectives_share": round(collectives / round_us, 4)}

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self.peers.quiet = True
        try:
            yield
        finally:
            self.peers.quiet = False


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="7b", show_default=True)
@click.option("--batches", default="32", show_default=True, help="Batch sizes, in turn.")
@click.option("--context", default=32768 - SLACK, show_default=True, help="Tokens a sequence has when decoding starts.")
@click.option("--budget", default=512, show_default=True, help="Tokens of the sparse set.")
@click.option("--drafts", default="5", show_default=True, help="Draft tokens a round, in turn.")
@click.option("--modes", default="ar,dense,sparse,both,rectified,exact", show_default=True, help="What to measure.")
@click.option("--blocks", default="8", show_default=True, help="Blocks of mode exact.")
@click.option("--paper-scoring", is_flag=True, help="4 heads of 1 target layer and of 3 draft layers instead of the default.")
@click.option("--acceptance", default="auto", type=click.Choice(["auto", "measured", "geometric"]), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=result_rows.RESULTS / "decode.jsonl", show_default=True)
def main(
    shape: str, batches: str, context: int, budget: int, drafts: str, modes: str, blocks: str, paper_scoring: bool, acceptance: str,
    output: Path,
) -> None:  # fmt: skip
    """Decoding speed over the GPUs of torchrun's ranks, random weights, acceptance replayed; rows are appended."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise click.UsageError("one rank is running, expected two or more: torchrun --nproc-per-node 2 -m bench tensor_parallel")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        raise click.UsageError(f"{torch.cuda.device_count()} GPUs are here, expected one for each rank")
    ranks = join()
    ranks.open(torch.device("cuda", number))
    if ranks.rank:
        # One rank tells, but none fails in silence.
        sys.stderr, sys.excepthook = open(os.devnull, "w"), lambda *error: traceback.print_exception(*error, file=sys.__stderr__)
    sizes, gammas = ([int(n) for n in text.split(",") if n] for text in (batches, drafts))
    replayed = decode_acceptance.choose(acceptance, result_rows.RESULTS / "acceptance.json", "")
    if acceptance == "auto" and min(replayed.most("sparse"), replayed.most("dense")) < max(gammas):
        replayed = decode_acceptance.geometric()
    earlier = result_rows.read(output) if output.exists() else []
    with torch.inference_mode():
        began = time.perf_counter()
        bench = SplitBench(ranks, shape, context, budget, paper_scoring, replayed, max(sizes))
        torch.cuda.synchronize()
        click.echo(f"shards and caches made in {time.perf_counter() - began:.1f} s", err=True)
        for batch, bench.num_drafts in itertools.product(sizes, gammas):
            for name in modes.split(","):
                if name == "ar" and bench.num_drafts != gammas[0]:
                    continue
                bench.run(name, batch, [int(block) for block in blocks.split(",")])
                gc.collect()
                if ranks.rank == 0:
                    result_rows.write(output, earlier + bench.results)
    leave()


if __name__ == "__main__":
    main()
