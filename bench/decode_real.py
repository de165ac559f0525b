"""A real pair on one GPU through the engine: tokens a second, acceptance as measured, and where a round's time goes.

Qwen2.5-Coder 1.5B with its 0.5B as draft over passages of novels and code. The prompts of a cell are read once; every mode
starts from copies of that KV cache, first shortly (graphs are captured then), then for the row. Mode auto runs once before all
others, after Session.warm_up: its first use.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from bench import rows as result_rows
from bench.texts import prompts as text_prompts
from dustin.config import EngineOptions, RequestOptions
from dustin.drafting import ModelDrafter
from dustin.generation import Session
from dustin.prefill import prefill

OUT = result_rows.RESULTS / "decode.jsonl"
CELLS = "8192x1,8192x4,8192x16,32000x1,32000x4,32000x16"
LOSSLESS = ("ar", "dense", "exact", "auto")
# A first, uncounted run of a mode records its graphs; modes whose rounds differ in size need more of it. Mode auto learns in
# a session's first runs what its plans cost: the row is of the last of them, and has every run's speed beside it.
WARM_TOKENS = {"exact": 128}
FEW_TOKENS, AUTO_RUNS = 24, 4
# What the histograms are taken at, and with how many tokens a row: a block has one entry, a round several.
HISTOGRAM_DRAFTS, HISTOGRAM_BLOCK = 8, 32
HISTOGRAM_TOKENS = {"dense": 160, "sparse": 160, "exact": 512}


@dataclass
class Cell:
    """Prompts of one text, context and batch, read by both models."""

    text: str
    context: int
    prompts: list[list[int]]
    caches: dict[str, Any] = field(default_factory=dict)
    reference: list[list[int]] = field(default_factory=list)
    baseline: float = 0.0
    full_baseline: float = 0.0

    @property
    def batch(self) -> int:
        return len(self.prompts)


def read_prompts(session: Session, cell: Cell, tokens: int, gamma: int) -> None:
    """Prefill both models on all but the last prompt token; their pools have room for one working copy more."""
    room = max(len(prompt) for prompt in cell.prompts) + tokens
    for side, model, rest in (("target", session.target, 0), ("draft", session.draft, gamma)):
        capacity = min(room + rest, model.spec.context_length)
        # A pool for the prompts and a copy: caches of later calls then lie in the same pool, and its graphs are found again.
        whole = model.new_cache(2 * cell.batch, capacity)
        del whole
        cache = model.new_cache(cell.batch, capacity)
        prefill(session.backend, model, cache, [prompt[:-1] for prompt in cell.prompts], 2048, None, logits=False)
        cell.caches[side] = cache


@dataclass
class Outcome:
    """What a run made and took. `per_step` counts the tokens of every row in every engine step (a block in mode exact).

    `full_tokens` were made in the first `full_seconds`, until the first row was done: what a server sees that fills free rows.
    """

    texts: list[list[int]]
    stats: Any
    per_step: Counter[int]
    steps: int
    seconds: float
    full_tokens: int
    full_seconds: float


def decode(inner: Session, cell: Cell, tokens: int, probe: Any = None) -> Outcome:
    """Generate `tokens` tokens for every prompt from copies of the cell's caches."""
    # Pages of the run before, or the copies would need a pool of their own.
    gc.collect()
    order = list(range(cell.batch))
    target = cell.caches["target"].take(order)
    run = inner._start(cell.prompts, [RequestOptions(max_tokens=tokens, ignore_eos=True)] * cell.batch, target)
    if isinstance(run.engine.drafter, ModelDrafter):
        run.engine.drafter.resume(cell.caches["draft"].take(order))
    run.engine.start(run.rows, run.cache)
    per_step: Counter[int] = Counter()
    steps, seconds, full_tokens, full_seconds = 0, 0.0, 0, 0.0
    while run.engine.active:
        began, spent = time.perf_counter(), run.stats.decode_seconds
        events = probe(run.engine.step) if probe is not None and steps == 4 else run.engine.step()
        if steps != 4:
            seconds += time.perf_counter() - began
        per_step.update(Counter(event.row for event in events).values())
        steps += 1
        if all(row.active for row in run.rows):
            full_tokens, full_seconds = full_tokens + len(events), full_seconds + run.stats.decode_seconds - spent
    run.finish()
    texts = [row.generated for row in run.rows]
    return Outcome(texts, run.stats, per_step, steps, seconds, full_tokens, full_seconds)


def tokens_made(outcome: Outcome) -> int:
    """Tokens of all rows, without those of the prefill."""
    return sum(count * size for size, count in outcome.per_step.items())


class DeviceTime:
    """Device milliseconds of one engine step: the graphs that it replayed, replayed again without the host in between."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.replays = 0
        self.seconds = 0.0

    def __call__(self, step: Any) -> Any:
        from dustin.backends.torch_triton.cuda_graphs import Captured

        replayed: list[Any] = []
        plain = Captured.__call__

        def noted(graph: Captured) -> Any:
            replayed.append(graph)
            return plain(graph)

        began = time.perf_counter()
        Captured.__call__ = noted  # type: ignore[method-assign]
        try:
            events = step()
        finally:
            Captured.__call__ = plain  # type: ignore[method-assign]
        self.seconds = time.perf_counter() - began
        if not replayed:
            return events
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for graph in replayed:
            graph()
        stop.record()
        torch.cuda.synchronize()
        self.ms, self.replays = start.elapsed_time(stop), len(replayed)
        return events


def leading(a: list[int], b: list[int]) -> int:
    """Tokens that two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def gap_at(session: Session, cell: Cell, row: int, count: int) -> float:
    """Dense top-2 logit gap of the token after `count` generated ones of the reference: how near a tie a difference was."""
    fed = [cell.prompts[row][-1], *cell.reference[row][:count]]
    cache = cell.caches["target"].take([row])
    out = session.target.forward(session.backend.tokens([fed]), [len(fed)], cache, logits="last")
    best = out.logits[0, 0].float().topk(2).values
    return float(best[0] - best[1])


def rate_of(outcome: Outcome) -> float:
    """Tokens a second of all rows."""
    return tokens_made(outcome) / outcome.stats.decode_seconds


def full_rate_of(outcome: Outcome) -> float:
    """Tokens a second while no row was done."""
    return outcome.full_tokens / outcome.full_seconds if outcome.full_seconds else rate_of(outcome)


def measure(inner: Session, cell: Cell, mode: str, tokens: int, first: Outcome | None = None) -> dict[str, Any]:
    """One row. `inner` has the options; mode auto keeps in it what costs are, and `first` is its first run."""
    session, options = inner, inner.options
    runs = [] if first is None else [first]
    if mode == "auto":
        runs += [decode(inner, cell, tokens) for _ in range(AUTO_RUNS - len(runs))]
    else:
        decode(inner, cell, min(tokens, WARM_TOKENS.get(mode, FEW_TOKENS)))
    torch.cuda.reset_peak_memory_stats()
    probe = DeviceTime()
    outcome = decode(inner, cell, tokens, probe if mode != "auto" else None)
    runs.append(outcome)
    stats = outcome.stats
    made, rate = tokens_made(outcome), rate_of(outcome)
    if mode == "ar":
        cell.baseline, cell.full_baseline, cell.reference = rate, full_rate_of(outcome), outcome.texts
    equal = [leading(text, expected) for text, expected in zip(outcome.texts, cell.reference, strict=True)]
    differ = [b for b, n in enumerate(equal) if n < len(cell.reference[b])]
    gaps = [round(gap_at(session, cell, b, equal[b]), 4) for b in differ] if mode in LOSSLESS else None
    speculative = stats.spec_steps > 0
    config = session.target.spec
    return {
        "bench": "decode", "card": torch.cuda.get_device_name(), "model": f"{config.name} + {session.draft.spec.name}",
        "weights": "real", "dtype": config.dtype, "text": cell.text, "context": cell.context, "batch": cell.batch,
        "mode": mode, "budget": options.budget if mode not in ("ar", "dense") else None,
        "num_draft_tokens": options.num_draft_tokens if speculative else None,
        "exact_block": options.exact_block if mode == "exact" else None,
        "scoring": stats.scoring or None, "acceptance": "measured",
        "acceptance_length": round(stats.acceptance_length, 3) if speculative else None,
        "histogram": shares(stats.acceptance_histogram) if speculative else None,
        "tokens_per_step": round(made / outcome.steps / cell.batch, 3),
        "tokens_per_check": round(stats.check_accepted_tokens / stats.dense_checks + 1, 2) if stats.dense_checks else None,
        "mode_rounds": dict(stats.mode_rounds) if mode == "auto" else None,
        "runs_tokens_per_second": [round(rate_of(run), 1) for run in runs] if mode == "auto" else None,
        "plan": getattr(stats, "plan", None) if mode == "auto" else None,
        "tokens_per_second": round(rate, 1), "tokens_per_second_per_sequence": round(rate / cell.batch, 2),
        "baseline": "our dense autoregressive decoding with CUDA graphs, same engine", "ratio": round(rate / cell.baseline, 3),
        # Rows that are done early leave their places empty here, which a server fills.
        "full_batch_tokens_per_second": round(full_rate_of(outcome), 1),
        "full_batch_ratio": round(full_rate_of(outcome) / cell.full_baseline, 3),
        "step_ms": round(1e3 * stats.decode_seconds / outcome.steps, 3),
        "probed_step_ms": round(1e3 * probe.seconds, 3) if probe.replays else None,
        "probed_graphs_ms": round(probe.ms, 3) if probe.replays else None, "graph_replays": probe.replays or None,
        "sequences_identical_to_ar": cell.batch - len(differ), "leading_tokens_equal_to_ar": equal,
        "top2_gaps_where_lossless_differs": gaps, "generated_tokens": made, "kv_read_share": round(stats.kv_read_share, 4),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "command": os.environ.get("BENCH_COMMAND") or result_rows.command(),
        "commit": os.environ.get("BENCH_COMMIT") or result_rows.commit(),
    }  # fmt: skip


def peer(session: Session, cell: Cell, plain: dict[str, Any], output: Path) -> None:
    """A row of transformers on the same pair's target, beside `plain`, that of `ar`."""
    from bench.decode_real_peer import transformers_model, transformers_run

    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        rate, made = transformers_run(transformers_model(session.target), session.target, cell)
    equal = [leading(text, expected) for text, expected in zip(made, cell.reference, strict=True)]
    names = ("bench", "card", "model", "weights", "dtype", "text", "context", "batch", "baseline", "command", "commit")
    row = {
        **{name: plain[name] for name in names}, "mode": "transformers generate (sdpa)",
        "tokens_per_second": round(rate, 1), "tokens_per_second_per_sequence": round(rate / cell.batch, 2),
        "ratio": round(rate / cell.baseline, 3), "step_ms": round(1e3 * cell.batch / rate, 3),
        # Of prompts that were cut to the shortest, other tokens follow.
        "leading_tokens_equal_to_ar": equal[:1] if cell.batch == 1 else None, "generated_tokens": sum(map(len, made)),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }  # fmt: skip
    result_rows.write(output, [row], append=True)
    click.echo(f"  {row['mode']} {rate:.1f} tok/s x{row['ratio']} leading {equal}", err=True)
    gc.collect()
    torch.cuda.empty_cache()


def shares(histogram: Counter[int]) -> dict[str, float]:
    """Counts as shares of their sum."""
    total = sum(histogram.values())
    return {str(n): round(histogram[n] / total, 4) for n in sorted(histogram)}


def remember_acceptance(path: Path, cell: Cell, mode: str, outcome: Outcome, row: dict[str, Any]) -> None:
    """Add a measured histogram to the file that `bench decode` replays from."""
    known = json.loads(path.read_text()) if path.exists() else {"entries": []}
    most, histogram = HISTOGRAM_DRAFTS, outcome.stats.acceptance_histogram
    if mode == "exact":
        # The drafts that end a block are the draft model's: what was kept of them says nothing of sparse attention.
        most = HISTOGRAM_BLOCK - HISTOGRAM_DRAFTS
        histogram = Counter()
        for made, count in outcome.per_step.items():
            histogram[min(made - 1, most)] += count
    known["entries"].append({
        "kind": "check" if mode == "exact" else "round", "mode": mode, "model": row["model"], "text": cell.text,
        "context": cell.context, "batch": cell.batch, "most": most, "budget": row["budget"],
        "counts": {str(n): histogram[n] for n in sorted(histogram)}, "command": row["command"], "commit": row["commit"],
    })  # fmt: skip
    path.write_text(json.dumps(known, indent=1) + "\n")


@click.command()
@click.option("--model", required=True, help="The target: folder, .gguf file or name.")
@click.option("--draft-model", required=True)
@click.option("--cells", default=CELLS, show_default=True, help="CONTEXTxBATCH or TEXT:CONTEXTxBATCH in turn.")
@click.option("--texts", default="code,novel", show_default=True, help="Kinds of bench/texts.py for cells that name none.")
@click.option("--modes", default="ar,dense,sparse,rectified,exact,auto", show_default=True, help="sparse+high: fidelity high.")
@click.option("--tokens", default=160, show_default=True)
@click.option("--budget", default=1024, show_default=True)
@click.option("--gamma", default=4, show_default=True, help="Draft tokens a round.")
@click.option("--block", default=15, show_default=True, help="Block of mode exact.")
@click.option("--stagger", default=13, show_default=True, help="Tokens by which the prompts of a batch differ in length.")
@click.option("--cold", is_flag=True, help="Mode auto without a warm-up: its first run records and compiles.")
@click.option("--transformers", is_flag=True, help="Also transformers' generate (sdpa), on the same weights, keys and values.")
@click.option("--histograms", type=click.Path(path_type=Path), help="Also measure 8 drafts and block 32, for this file.")
@click.option("--limit", default=3600.0, help="Begin no cell after this many seconds.")
@click.option("--output", type=click.Path(path_type=Path), default=OUT, show_default=True, help="Rows are added to this file.")
def main(**opts: Any) -> None:
    """A real pair on one GPU, acceptance measured."""
    import dustin

    began = time.perf_counter()
    session = dustin.load(opts["model"], opts["draft_model"], device="cuda")
    click.echo(f"loaded in {time.perf_counter() - began:.1f} s", err=True)
    named = [place for place in opts["cells"].split(",") if ":" in place]
    sizes = [place for place in opts["cells"].split(",") if ":" not in place]
    for place in [*named, *(f"{text}:{size}" for text in opts["texts"].split(",") for size in sizes)]:
        if time.perf_counter() - began > opts["limit"]:
            click.echo(f"left out: {place}", err=True)
            continue
        text, _, size = place.partition(":")
        context, batch = (int(n) for n in size.split("x"))
        try:
            _cell(session, text, context, batch, opts)
        except Exception as error:  # One cell that fails is no reason to lose the others.
            click.echo(f"{place}: {type(error).__name__}: {str(error)[:400]}", err=True)
        gc.collect()


def _cell(session: Session, text: str, context: int, batch: int, opts: dict[str, Any]) -> None:
    began = time.perf_counter()
    stagger, tokens = opts["stagger"], opts["tokens"]
    # `context` is what the longest prompt has.
    cell = Cell(text, context, text_prompts(session.tokenizer, text, batch, context - stagger * (batch - 1), stagger))
    # Blocks end early in a batch, where half of the rows are done: what a check keeps is counted for single rows.
    counted = [mode for mode in ("dense", "sparse", "exact") if opts["histograms"] and (mode != "exact" or batch == 1)]
    read_prompts(session, cell, max(tokens, *(HISTOGRAM_TOKENS[mode] for mode in counted), 0), HISTOGRAM_DRAFTS)
    click.echo(f"{text} {context} x {batch}: read in {time.perf_counter() - began:.1f} s", err=True)
    base = EngineOptions(budget=opts["budget"], num_draft_tokens=opts["gamma"], exact_block=opts["block"])
    plain: dict[str, Any] | None = None

    def with_options(options: EngineOptions) -> Session:
        return Session(session.backend, session.target, session.tokenizer, options, session.draft)

    wide = replace(base, num_draft_tokens=HISTOGRAM_DRAFTS, exact_block=HISTOGRAM_BLOCK)
    auto = with_options(replace(wide, mode="auto", drafter="draft"))
    warm_up_seconds, first = None, None
    if "auto" in opts["modes"].split(","):
        if not opts["cold"]:
            # Pages of this size lie in the cell's own pools, so what it records serves the runs.
            warm_up_seconds = round(auto.warm_up(batch, cell.caches["target"].capacity), 2)
            click.echo(f"  warmed up in {warm_up_seconds} s", err=True)
        first = decode(auto, cell, tokens)
    for name in opts["modes"].split(","):
        mode, _, fidelity = name.partition("+")
        options = replace(base, mode=mode, fidelity=fidelity or "standard", drafter="none" if mode == "ar" else "draft")
        inner = auto if mode == "auto" else with_options(options)
        row = measure(inner, cell, mode, tokens, first if mode == "auto" else None)
        if mode == "auto":
            row["warm_up_seconds"] = warm_up_seconds
        if fidelity:
            row["mode"] = f"{mode}, fidelity {fidelity}"
        plain = row if mode == "ar" else plain
        result_rows.write(opts["output"], [row], append=True)
        keys = ("tokens_per_second", "ratio", "full_batch_ratio", "acceptance_length", "tokens_per_check", "step_ms",
                "probed_step_ms", "probed_graphs_ms", "graph_replays", "sequences_identical_to_ar",
                "top2_gaps_where_lossless_differs", "mode_rounds", "runs_tokens_per_second", "peak_memory_gb")  # fmt: skip
        click.echo(f"  {name:10s} " + " ".join(f"{k}={row[k]}" for k in keys if row[k] is not None), err=True)
        if mode in counted:
            inner = with_options(replace(wide, mode=mode, drafter="draft"))
            remember_acceptance(opts["histograms"], cell, mode, decode(inner, cell, HISTOGRAM_TOKENS[mode]), row)
    if opts["transformers"] and plain is not None:
        peer(session, cell, plain, opts["output"])


if __name__ == "__main__":
    main()
