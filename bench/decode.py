"""Decoding speed on one GPU: Qwen2.5-7B shape with a 0.5B draft shape, random weights, against our own tuned plain decoding.

Random weights agree on nothing, so acceptance is replayed: every round and every dense check runs in full and then keeps
as many tokens as a table says, drawn from histograms that `bench decode_real` measured on a real pair, or geometric.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from bench import decode_acceptance, decode_checks, decode_exact, decode_own, decode_regimes
from bench import rows as result_rows
from bench.decode_acceptance import Acceptance, histogram
from bench.decode_peers import transformers_rate
from bench.decode_rounds import Reads, RoundOptions, Rounds, Side
from dustin.backends.torch_triton.compact_keys import CompactKeys
from dustin.backends.torch_triton.cuda_graphs import Captured
from dustin.backends.torch_triton.cuda_model import CudaModel
from dustin.backends.torch_triton.cuda_random import QWEN2_0_5B, QWEN2_1_5B, QWEN2_7B, random_weights
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.cost_model import shape_of
from dustin.interfaces import Tap
from dustin.selection import draft_tap, target_tap

# Rows that decoding may add before the lengths start over.
SLACK = 1024
RECTIFY_CHUNK = 160
TARGETS = {"7b": ("Qwen2.5-7B", QWEN2_7B), "1.5b": ("Qwen2.5-1.5B", QWEN2_1_5B)}


def gpu_ms(function: Callable[[], Any], repeats: int = 10) -> float:
    """Mean device time of a replay."""
    function()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


class DecodeBench:
    """Two random models on a device, and every way of decoding with them."""

    one_kv_head = False
    last_drafts = 0  # that end a block of mode exact (0: as many as in a round)
    check_rows = 0  # of all sequences in a dense check, packed (0: all that a block may have)
    rounds_class: type[Rounds] = Rounds

    def __init__(
        self, context: int, budget: int, paper_scoring: bool, num_drafts: int, acceptance: Acceptance, most_tokens: int,
        target: str = "7b", one_kv_head: bool = False,
    ) -> None:  # fmt: skip
        """`most_tokens`: rows of KV that all sequences of a measurement have together at most."""
        device = torch.device("cuda")
        self.num_drafts, self.acceptance = num_drafts, acceptance
        self.device, self.context, self.budget, self.paper = device, context, budget, paper_scoring or one_kv_head
        self.one_kv_head = one_kv_head
        name, config = TARGETS[target]
        self.model = f"{name} + Qwen2.5-0.5B shapes"
        self.target = CudaModel(config, random_weights(config, torch.bfloat16, device), f"{name.lower()}-shape")
        self.draft = CudaModel(QWEN2_0_5B, random_weights(QWEN2_0_5B, torch.bfloat16, device, 1), "qwen2.5-0.5b-shape")
        self.draft.limit_vocabulary(QWEN2_0_5B.vocab_size)
        self.target.limit_vocabulary(QWEN2_0_5B.vocab_size)
        for model in (self.target, self.draft):
            pool = model.new_cache(-(-most_tokens // 65536), 65536).pool
            for store in (*pool.keys, *pool.values):
                store.normal_()
        self.results: list[dict[str, Any]] = []
        self.baseline: dict[tuple[int, int], float] = {}
        self.compact: CompactKeys | None = None
        # Layers that choose in mode own for those after them too (0: all choose), or those alone that choose beside the shared set;
        # whether the target's history scores there too, for the draft's set.
        self.choosing, self.own_layers, self.history = 0, (), False
        self.capture_seconds = 0.0
        # Mode or "draft" -> relative RMS, see decode_checks.
        self.errors: dict[str, float | None] = {}

    def sides(self, batch: int) -> tuple[Side, Side]:
        """Target and draft with caches of `batch` rows."""
        taps = target_tap(self.target.spec), draft_tap(self.draft.spec)
        if self.paper:
            # One target layer and three draft layers, four heads each: spread (over the four kv heads of the 7B target), or the
            # first four, which lie in one kv head and read the keys of that one alone.
            spans = [4 if self.one_kv_head else model.spec.num_heads for model in (self.target, self.draft)]
            four = [tuple(i * span // 4 for i in range(4)) for span in spans]
            first = max(taps[0].heads)
            taps = Tap({first: four[0]}), Tap(dict.fromkeys(taps[1].heads, four[1]))
        caches = [model.new_cache(batch, self.context + SLACK) for model in (self.target, self.draft)]
        return Side(self.target, caches[0], taps[0]), Side(self.draft, caches[1], taps[1])

    @property
    def scoring(self) -> str:
        """Which heads score, in words."""
        if not self.paper:
            return "2 layers + 3 draft layers, all heads"
        return "1 layer x 4 heads + 3 draft layers x 4 heads" + (", one kv head each" if self.one_kv_head else "")

    def shapes(self) -> dict[str, Any]:
        """What the costs of this pair are keyed by."""
        return {"target": shape_of(self.target.spec), "draft": shape_of(self.draft.spec)}

    def rounds(
        self, batch: int, sparse: bool, sparse_draft: bool, num_drafts: int = 0, sides: tuple[Side, Side] | None = None,
        last_drafts: int = 0, again: Rechoice | None = None,
    ) -> Rounds:  # fmt: skip
        """Fresh state of one variant, over caches of its own or the given ones."""
        gamma = num_drafts or self.num_drafts
        options = RoundOptions(sparse, sparse_draft, gamma, self.budget, last_drafts=last_drafts, again=again)
        kind = "sparse" if sparse else "dense"
        if again is not None and not self.history:
            target, draft = sides or self.sides(batch)
            sides = Side(self.target, target.cache, Tap({})), draft
        accepted = self.acceptance.table(kind, options.num_draft_tokens, 256, batch, seed=batch).to(self.device)
        return self.rounds_class(*(sides or self.sides(batch)), options, self.context, accepted)

    def capture(self, function: Callable[[], Any]) -> Captured:
        """A graph of `function`; its seconds are added up."""
        captured = Captured(function, self.device)
        self.capture_seconds += captured.seconds
        return captured

    def record(self, batch: int, mode: str, tokens: int, seconds: float, **more: Any) -> None:
        """One row; `tokens` over all sequences."""
        rate = tokens / seconds
        cell = (self.context, batch)
        if mode == "ar":
            self.baseline[cell] = rate
        row = {
            "bench": "decode",
            "card": torch.cuda.get_device_name(),
            "model": self.model,
            "weights": "random",
            "dtype": "bfloat16",
            "context": self.context,
            "batch": batch,
            "mode": mode,
            "scoring": self.scoring if self.history or not mode.startswith("own") else "3 draft layers, all heads; own sets",
            "tokens_per_second": round(rate, 1),
            "tokens_per_second_per_sequence": round(rate / batch, 2),
            "reads": None if more.get("regime") else "one round behind",
            "baseline": "our dense autoregressive decoding with CUDA graphs",
            "acceptance": self.acceptance.label if "acceptance_length" in more else None,
            "relative_rms": self.errors.get(mode.split(" ")[0].strip(",")),
            "relative_rms_of": "the target's attention, against float32",
            "draft_logits_relative_rms": self.errors.get("draft") if "acceptance_length" in more else None,
            "ratio": round(rate / self.baseline[cell], 3) if cell in self.baseline else None,
            **more,
            "command": os.environ.get("BENCH_COMMAND") or result_rows.command(),
            "commit": os.environ.get("BENCH_COMMIT") or result_rows.commit(),
        }
        self.results.append(row)
        shown = {k: v for k, v in more.items() if k not in ("histogram", "parts_ms")}
        click.echo(f"{self.context:6d} x {batch:2d} {mode:28s} {rate:9.1f} tok/s  x{row['ratio'] or 0:.2f}  {shown}", err=True)

    def run(self, name: str, batch: int, blocks: list[int]) -> None:
        """Measure one of the modes that `--modes` names; few sequences get more rounds, so that the replay averages out."""
        more = 4 if batch < 8 else 1
        if name == "ar":
            self.plain(batch)
        elif name == "dense":
            self.speculative(batch, "dense", False, False, 24 * more)
        elif name == "dense-sparse":
            self.speculative(batch, "dense, sparse draft", False, True, 24 * more)
        elif name == "sparse":
            self.speculative(batch, "sparse, dense draft", True, False, 24 * more)
        elif name == "both":
            self.speculative(batch, "sparse, sparse draft", True, True, 40 * more)
        elif name == "own":
            label = f"own sets of {self.choosing} layers" if self.choosing else "own sets"
            if self.own_layers:
                label = f"own sets of layer {', '.join(map(str, self.own_layers))} beside the shared one"
            self.history = bool(self.own_layers)
            self.speculative(batch, f"{label}, sparse draft", True, True, 40 * more, decode_own.choice(self, self.budget))
            self.history = False
        elif name == "rectified":
            self.rectified(batch)
        elif name == "exact":
            for block in blocks:
                decode_exact.measure(self, batch, block, checks=min(32 * more, (SLACK - 64) // (block + 1)))
        else:
            raise click.UsageError(f"mode {name!r}: expected ar, dense, dense-sparse, sparse, both, own, rectified or exact")

    def plain(self, batch: int, steps: int = 24) -> None:
        """The baseline."""
        state = self.rounds(batch, False, False)
        self.errors["ar"] = self.errors["dense"] = decode_checks.attention_rms(state)
        step = self.capture(state.plain_step)
        state.reset()
        seconds = self._loop(step, state, steps)[0]
        state.reset()
        device, attention = 1e3 * gpu_ms(step), 1e3 * gpu_ms(self.capture(lambda: state.attend(1, False)))
        took = 1e6 * seconds / steps
        self.record(
            batch, "ar", steps * batch, seconds, query_rows=1, step_ms=round(took / 1e3, 3), round_us=round(took, 1),
            device_us=round(device, 1), host_us=round(took - device, 1),
            # One row back to back is slower than within a step: the difference to the step is no measure of its products.
            verify_attention_us=round(attention, 1),
        )  # fmt: skip

    def _loop(self, graph: Captured, state: Rounds, count: int) -> tuple[float, int]:
        """Seconds and tokens of `count` replays, with the one small read a round needs."""
        graph()
        reads = Reads(state.verdict)
        torch.cuda.synchronize()
        began, tokens = time.perf_counter(), 0
        for _ in range(count):
            graph()
            tokens += sum(row[0] + 1 for row in reads.ask())
        tokens += sum(row[0] + 1 for row in reads.last())
        return time.perf_counter() - began, tokens

    def speculative(
        self, batch: int, mode: str, sparse: bool, sparse_draft: bool, count: int = 40, again: Rechoice | None = None
    ) -> None:
        """Rounds of one variant, and where a round's time goes."""
        state = self.rounds(batch, sparse, sparse_draft, again=again)
        if sparse and again is None:
            error = decode_checks.attention_rms(state)
            self.errors.update(sparse=error, rectified=error, exact=error)
        self.errors["draft"] = decode_checks.fused_rms(state.draft, batch, self.context)
        whole = self.capture(state.whole)
        state.reset()
        seconds, tokens = self._loop(whole, state, count)
        state.reset()
        round_us = 1e3 * gpu_ms(whole)
        options = state.options
        self.record(
            batch, mode, tokens, seconds, query_rows=options.num_draft_tokens + 1, num_draft_tokens=options.num_draft_tokens,
            budget=options.budget if options.chooses else None, acceptance_length=round(tokens / count / batch, 3),
            histogram=histogram(state.accepted), round_us=round(1e6 * seconds / count, 1), device_us=round(round_us, 1),
            host_us=round(1e6 * seconds / count - round_us, 1), **self._breakdown(state),
        )  # fmt: skip

    def _breakdown(self, state: Rounds) -> dict[str, float]:
        """Device microseconds of each phase, captured and timed alone."""
        state.reset()
        draft = self.capture(state.propose)
        drafts, lookahead = draft.outputs
        times = {"draft_us": gpu_ms(draft)}
        if state.options.chooses:
            score = self.capture(lambda: state.score(lookahead))
            times["score_us"] = gpu_ms(score)
            times["select_us"] = gpu_ms(self.capture(lambda: state.select(*score.outputs)))
        verify = self.capture(lambda: state.verify(drafts))
        logits, queries = verify.outputs
        times["verify_us"] = gpu_ms(verify)
        attend = self.capture(lambda: state.attend(state.options.num_draft_tokens + 1, state.options.sparse))
        times["verify_attention_us"] = gpu_ms(attend)
        times["verify_gemms_us"] = times["verify_us"] - times["verify_attention_us"]
        accept = self.capture(lambda: state.accept(drafts, logits, queries))
        state.reset()
        times["accept_us"] = gpu_ms(accept)
        return {name: round(1e3 * value, 1) for name, value in times.items()}

    def rectified(self, batch: int, interval: int = 256, cycles: int = 1) -> None:
        """Sparse rounds; every `interval` tokens all rows since the last time are computed again densely."""
        state = self.rounds(batch, True, True)
        whole = self.capture(state.whole)
        tokens = torch.randint(0, 1000, (batch, RECTIFY_CHUNK), dtype=torch.int32, device=self.device)
        starts, counts = torch.zeros_like(state.pending), torch.full_like(state.pending, 1)
        chunk = self.capture(lambda: state.dense_pass(tokens, starts, counts, "none"))
        state.reset()
        rounds = math.ceil(interval / self.acceptance.expected("sparse", self.num_drafts))
        dense, made, passes = state.target_lengths.clone(), 0, 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(cycles):
            behind, reads = [0] * batch, Reads(state.verdict)
            for _ in range(rounds):
                whole()
                behind = [n + row[0] + 1 for n, row in zip(behind, reads.ask() or [[-1]] * batch, strict=True)]
            behind = [n + row[0] + 1 for n, row in zip(behind, reads.last(), strict=True)]
            made += sum(behind)
            for first in range(0, max(behind), RECTIFY_CHUNK):
                starts.copy_(dense + first)
                counts.copy_((state.target_lengths - starts).clamp(0, RECTIFY_CHUNK))
                _, queries = chunk()
                passes += 1
            for layer, q in queries.items():
                state.history[layer].copy_(q)
            dense.copy_(state.target_lengths)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        counts.fill_(RECTIFY_CHUNK)
        attention = gpu_ms(self.capture(lambda: state.attend(RECTIFY_CHUNK, False)), 1)
        self.record(
            batch, f"rectified {interval}", made, seconds, query_rows=self.num_drafts + 1,
            num_draft_tokens=self.num_drafts, budget=self.budget,
            acceptance_length=round(made / rounds / cycles / batch, 3), histogram=histogram(state.accepted),
            rectify_interval=interval, rectify_passes=passes, rectify_pass_ms=round(gpu_ms(chunk, 2), 2),
            rectify_attention_ms=round(attention, 2),
        )  # fmt: skip


@click.command()
@click.option("--batches", default="1,8,16,32", show_default=True, help="Batch sizes, in turn.")
@click.option("--context", default=32768 - SLACK, show_default=True, help="Tokens a sequence has when decoding starts.")
@click.option("--budget", default=512, show_default=True, help="Tokens of the sparse set.")
@click.option("--drafts", default=5, show_default=True, help="Draft tokens a round.")
@click.option("--modes", default="ar,dense,dense-sparse,sparse,both,own,rectified,exact", show_default=True,
              help="What to measure.")  # fmt: skip
@click.option("--blocks", default="32,16,8", show_default=True, help="Blocks of mode exact.")
@click.option("--last-drafts", default=0, type=click.IntRange(0), show_default=True,
              help="Drafts that end a block of mode exact; 0: --drafts.")  # fmt: skip
@click.option("--check-rows", default=0, type=click.IntRange(0), show_default=True,
              help="Rows of a dense check, packed; 0: all of every block.")  # fmt: skip
@click.option("--paper-scoring", is_flag=True, help="4 heads of 1 target layer and of 3 draft layers instead of the default.")
@click.option("--one-kv-head", is_flag=True, help="As --paper-scoring, the four heads of a layer in one kv head.")
@click.option("--target", default="7b", type=click.Choice(list(TARGETS)), show_default=True, help="Shape of the target.")
@click.option("--choosing", default=0, show_default=True, help="Layers that choose for those after them too, mode own; 0: all.")
@click.option("--own-layers", default="", help="Layers that choose beside the shared set, mode own: 7,12. Default: no shared set.")
@click.option("--regimes", default="", help="Also the best of every mode for these, as CONTEXTxBATCH,...; `all` is the table.")
@click.option("--acceptance", default="auto", type=click.Choice(["auto", "measured", "geometric"]), show_default=True)
@click.option("--text", default="", help="Kind of text of the measured histograms. Default: all.")
@click.option("--transformers", "peers", default="", help="Batch sizes for transformers' generate (sdpa).")
@click.option("--profile", default="", help="Batch sizes for a table of kernels of a whole round.")
@click.option("--output", type=click.Path(path_type=Path), default=result_rows.RESULTS / "decode.jsonl", show_default=True)
@click.option("--append", is_flag=True, help="Keep the rows that are in the file.")
def main(
    batches: str, context: int, budget: int, drafts: int, modes: str, blocks: str, last_drafts: int, check_rows: int,
    paper_scoring: bool, one_kv_head: bool, target: str, choosing: int, own_layers: str, regimes: str, acceptance: str, text: str,
    peers: str, profile: str, output: Path, append: bool,
) -> None:  # fmt: skip
    """Decoding speed on one GPU, random weights, acceptance replayed."""
    sizes = [int(b) for b in batches.split(",") if b]
    wanted = modes.split(",")
    replayed = decode_acceptance.choose(acceptance, result_rows.RESULTS / "acceptance.json", text)
    cells = decode_regimes.cells_of(regimes)
    earlier = result_rows.read(output) if append and output.exists() else []
    with torch.inference_mode():
        began = time.perf_counter()
        most = max(size * (length + SLACK + 64) for length, size in [(context, b) for b in sizes] + cells)
        bench = DecodeBench(context, budget, paper_scoring, drafts, replayed, most, target, one_kv_head)
        bench.last_drafts, bench.check_rows = last_drafts, check_rows
        bench.choosing, bench.own_layers = choosing, decode_own.layers_of(own_layers, bench.target.config.num_layers)
        torch.cuda.synchronize()
        plain = [row for row in earlier if row["mode"] == "ar" and row["model"] == bench.model]
        own = {(row["context"], row["batch"]): row["tokens_per_second"] for row in plain}
        bench.baseline.update(own)
        click.echo(f"models and caches made in {time.perf_counter() - began:.1f} s", err=True)
        for batch in sizes:
            for name in wanted:
                bench.run(name, batch, [int(block) for block in blocks.split(",")])
                gc.collect()
            result_rows.write(output, earlier + bench.results)
        for batch in (int(b) for b in profile.split(",") if b):
            decode_checks.show_profile(bench, batch)
        for length, batch in cells:
            decode_regimes.measure(bench, length, batch)
            result_rows.write(output, earlier + bench.results)
        results, baseline = bench.results, bench.baseline
        peak = torch.cuda.max_memory_allocated()
        click.echo(f"capture {bench.capture_seconds:.1f} s in all, peak memory {peak / 1e9:.1f} GB", err=True)
        for row in results:
            row["capture_seconds_in_all"] = round(bench.capture_seconds, 2)
        record = bench.record
        del bench.target, bench.draft
        gc.collect()
        torch.cuda.empty_cache()
        for batch in (int(b) for b in peers.split(",") if b):
            try:
                rate = transformers_rate(batch, context)
                record(batch, "transformers generate (sdpa)", round(rate), 1.0, query_rows=1)
            except Exception as error:  # A peer that does not run here is no reason to lose the rows above.
                click.echo(f"transformers at batch {batch}: {type(error).__name__}: {str(error)[:300]}", err=True)
            gc.collect()
            torch.cuda.empty_cache()
        if not baseline:
            click.echo("no ar rows: ratios are missing", err=True)
    result_rows.write(output, earlier + results)


if __name__ == "__main__":
    main()
