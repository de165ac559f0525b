"""Where the loss of sparse attention comes from: one shared set against sets that layers choose for themselves in the forward.

The documents, traces and rows are those of `python -m bench fidelity` (tracks chat, text and, by whole engines, questions); the
cells go from the method's shared set over what any shared set could reach to own sets by whole and by compact keys, at equal
budgets and at equal bytes. Rows go to bench/results/own_sets.jsonl.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import partial
from typing import Any

import click

from bench import rows
from bench.fidelity_cells import Cell, Pair, Way, chat_replay, named_scoring, text_replay
from bench.fidelity_documents import make
from bench.fidelity_plan import SHORT, fitting, shares
from bench.fidelity_run import Bench, load_pair

OUT = rows.RESULTS / "own_sets.jsonl"
# The longest context of the drift track.
DRIFT_CONTEXT = 8192
# What is measured first, and on the text track.
CELLS = (
    Cell("dustin", "heuristic", 1024),
    Cell("dustin", "none+every1c64kv", 1024),
    Cell("dustin", "none+every1c64", 1024),
    Cell("dustin", "none+every1c32kv", 0, bytes_of=1536),
    Cell("dustin", "none+every1kv", 1024),
    Cell("oracle", "heuristic", 1024),
    Cell("dustin", "none+every1", 1024),
    Cell("dustin", "none+every1c32kv", 1024),
)
FURTHER = (
    Cell("dustin", "none+at{}c64kv", 1024),
    Cell("dustin", "none+every1c64kv", 2048),
    Cell("dustin", "none+at{}c64kv", 2048),
    Cell("dustin", "none+every1c64kv", 4096),
    Cell("dustin", "heuristic", 2048),
    Cell("dustin", "heuristic", 4096),
    Cell("dustin", "none+every1c64r4kv", 1024),
    Cell("dustin", "none+every1c64r5kv", 1024),
    Cell("dustin", "none+every1c64kv", 512),
    Cell("oracle by layer", "heuristic", 1024),
    Cell("dustin", "heuristic+every2c64kv", 1024),
)
# Half of the layers of the pair's target, which choose for those after them too (see `dustin calibrate --own-sets`).
CHOOSING = "0-2,4,5,8,10,12,14-16,20,23,27"
ASKED = (("heuristic", 512), ("heuristic+every1c64kv", 512), ("heuristic+every1c64kv", 1024), ("heuristic+at{}c64kv", 512))
PARTS = {"chat": CELLS, "text": CELLS[:6], "further": FURTHER}
TRACKS = ("chat", "text", "further", "questions", "acceptance", "drift")
# Shares of a context's time; none for `drift`, which runs at one context.
WEIGHTS = {"chat": 0.25, "text": 0.15, "further": 0.4, "questions": 0.4, "acceptance": 0.15, "drift": 0.3}
OWN = "heuristic+every1c64kv"
AHEAD = "ahead+every1c64kv"


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--contexts", default="8192,16384,32000", show_default=True, help="Tokens of the documents' prefixes.")
@click.option("--documents", type=click.IntRange(1), default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True, help="Continuation of a document.")
@click.option("--questions", default=8, show_default=True, help="Questions a document and context.")
@click.option("--at-once", type=click.IntRange(1), default=24, show_default=True, help="Questions of a batch, longest context.")
@click.option("--drift-tokens", default=1025, show_default=True, help="Tokens of the drift track.")
@click.option("--choosing", default=CHOOSING, show_default=True, help="Layers that choose for those after them too.")
@click.option("--gamma", type=click.IntRange(1, 15), default=5, show_default=True)
@click.option("--tracks", default=",".join(TRACKS), show_default=True, help="Parts to run, in this order.")
@click.option("--seconds", default=3600.0, show_default=True, help="Leave out what does not fit in this time, loading included.")
@click.option("--seed", default=0, show_default=True)
@click.option("--prefill-chunk", default=512, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", default=str(OUT), show_default="bench/results/own_sets.jsonl")
@click.option("--append/--replace", default=False)
@click.option("--debug", is_flag=True, help="Stop at the first cell that fails.")
def main(**opts: Any) -> None:
    """Shared sets against sets of the layers' own, on long documents."""
    run(load_pair(opts), opts)


def run(session: Any, opts: dict[str, Any]) -> None:
    """All parts on a loaded session, the longest context first. Exit code 1 when a cell failed."""
    tracks = opts["tracks"].split(",")
    if unknown := [name for name in tracks if name not in TRACKS]:
        raise click.UsageError(f"--tracks {unknown[0]!r}: expected some of {', '.join(TRACKS)}")
    contexts = sorted(int(part) for part in opts["contexts"].split(","))
    bench = Bench(session, opts, {})
    documents = make(session.tokenizer, contexts, opts["documents"], opts["tokens"] + 8, opts["seed"])
    drifts = max((n for n in contexts if n <= DRIFT_CONTEXT), default=0) if "drift" in tracks else 0
    # Long answers are written where the documents' own rows are, from the context on.
    room = max(opts["tokens"], drifts + opts["drift_tokens"] - contexts[-1] if drifts else 0) + 192
    copies = opts["at_once"] if "questions" in tracks and opts["questions"] else 0
    pair = Pair(session, documents, contexts[-1], room, opts["prefill_chunk"], copies)
    bench.documents = documents
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] {len(documents)} documents of {contexts[-1]} tokens read", err=True)
    for context, until in shares(contexts, time.perf_counter(), bench.deadline - time.perf_counter()):
        known: list[Any] = []
        began, wanted = time.perf_counter(), [name for name in tracks if name != "drift" or context == drifts]
        whole, done = sum(WEIGHTS[name] for name in wanted), 0.0
        for name in wanted:
            done += WEIGHTS[name]
            end = began + (until - began) * done / whole
            bench.guarded(f"{context} {name}", partial(_part, bench, pair, context, name, end, known))
            gc.collect()
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] peak {session.backend.peak_memory_bytes() / 2**30:.1f} GiB", err=True)
    if bench.failed:
        raise click.ClickException("some cells failed: see FAILED above")


def _part(bench: Bench, pair: Pair, context: int, name: str, until: float, known: list[Any]) -> None:
    """One part at one context; `known` keeps dense attention's answers there."""
    opts, gamma = bench.opts, bench.opts["gamma"]
    if time.perf_counter() > until:
        click.echo(f"out of time: {context} {name}", err=True)
        return
    budget = 1024 if context > SHORT else 256
    if name == "questions":
        _questions(bench, pair, context, until)
    elif name == "acceptance":
        _acceptance(bench, pair, context, budget, until)
    elif name == "drift":
        bench.drift(pair, context, OWN, budget, opts["drift_tokens"], until)
    else:
        if name == "text":
            replay = text_replay(pair, context, opts["tokens"], gamma)
        else:
            replay, texts = chat_replay(pair, context, opts["tokens"], gamma, known[0] if known else None)
            known.append(texts)
        cells = [replace(cell, heads=cell.heads.format(opts["choosing"])) for cell in PARTS[name]]
        bench.replays(replay, context, "text" if name == "text" else "chat", fitting(cells, context), until)
        replay.close()


def _questions(bench: Bench, pair: Pair, context: int, until: float) -> None:
    """Questions by whole engines, dense attention first."""
    ways, part = [], 1 if context > SHORT else 4
    for mode, heads, budget in (("dense", *ASKED[0]), *(("sparse", *way) for way in ASKED)):
        heads = heads.format(bench.opts["choosing"])
        scoring = named_scoring(heads, bench.session, {})
        ways.append(Way(f"{mode} {heads} {budget // part}", mode, "dustin", scoring, heads, budget // part))
    bench.tasks(pair, context, ways, until)


def _acceptance(bench: Bench, pair: Pair, context: int, budget: int, until: float) -> None:
    """Tokens a round of dense speculation, of one shared set and of own sets, the draft sparse and dense."""
    shared, own, ahead = (named_scoring(name, bench.session, {}) for name in ("heuristic", OWN, AHEAD))
    forms: list[tuple[str, Any, str, bool]] = [
        ("dense", shared, "heuristic", True), ("sparse", own, OWN, True), ("sparse", own, OWN, False),
        ("sparse", ahead, AHEAD, True), ("sparse", shared, "heuristic", True),
    ]  # fmt: skip
    ways: list[Any] = [
        (Way(f"{mode} {heads}", mode, "dustin", scoring, heads, budget), {} if mode == "dense" else {"sparse_draft": sparse})
        for mode, scoring, heads, sparse in forms
    ]
    bench.acceptance(pair, context, ways, bench.opts["tokens"] - 1, until)
