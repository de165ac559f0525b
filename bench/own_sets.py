"""Where the loss of sparse attention comes from: one shared set against sets that layers choose for themselves in the forward.

The documents, traces and rows are those of `python -m bench fidelity` (tracks chat, text and, by whole engines, questions); the
cells go from the method's shared set over what any shared set could reach to own sets by whole and by compact keys, at equal
budgets and at equal bytes. Rows go to bench/results/own_sets.jsonl.
"""

from __future__ import annotations

import time
from typing import Any

import click

from bench import rows
from bench.fidelity_cells import Cell, Pair, Way, chat_replay, named_scoring, text_replay
from bench.fidelity_documents import make
from bench.fidelity_plan import fitting
from bench.fidelity_run import Bench, load_pair

OUT = rows.RESULTS / "own_sets.jsonl"
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
    Cell("dustin", "none+every1c64kv", 512),
    Cell("dustin", "none+every1c64kv", 0, bytes_of=3072),
    Cell("dustin", "heuristic", 0, bytes_of=3072),
    Cell("oracle by layer", "heuristic", 1024),
    Cell("dustin", "none+every1c64kv", 2048),
    Cell("dustin", "heuristic", 2048),
    Cell("dustin", "heuristic+every2c64kv", 1024),
)
ASKED = ("heuristic", "heuristic+every1c64", "heuristic+every1c64kv")


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--contexts", default="8192,16384,32000", show_default=True, help="Tokens of the documents' prefixes.")
@click.option("--documents", type=click.IntRange(1), default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True, help="Continuation of a document.")
@click.option("--questions", default=0, show_default=True, help="Questions a document and context; 0: none.")
@click.option("--gamma", type=click.IntRange(1, 15), default=5, show_default=True)
@click.option("--tracks", default="chat,text", show_default=True)
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
    session = load_pair(opts)
    contexts = sorted(int(part) for part in opts["contexts"].split(","))
    bench = Bench(session, opts, {})
    documents = make(session.tokenizer, contexts, opts["documents"], opts["tokens"] + 8, opts["seed"])
    copies = opts["at_once"] = min(24, 4 * len(documents)) if opts["questions"] else 0
    pair = Pair(session, documents, contexts[-1], opts["tokens"] + 192, opts["prefill_chunk"], copies)
    bench.documents = documents
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] {len(documents)} documents of {contexts[-1]} tokens read", err=True)
    # The middle one, then from the longest on: where the time ends, the most telling is there.
    order = sorted(contexts, key=lambda n: (n != contexts[len(contexts) // 2], -n))
    known: dict[int, Any] = {}
    parts = [(track, track) for track in opts["tracks"].split(",")]
    parts += [("further", "chat")] if "chat" in opts["tracks"] else []
    for part, track in parts:
        for context in order:
            bench.guarded(f"{context} {part}", lambda c=context, p=part, t=track: _track(bench, pair, c, p, t, known))  # type: ignore[misc]
    if opts["questions"]:
        for context in order:
            bench.guarded(f"{context} questions", lambda c=context: _questions(bench, pair, c))  # type: ignore[misc]
    if bench.failed:
        raise click.ClickException("some cells failed: see FAILED above")


def _track(bench: Bench, pair: Pair, context: int, part: str, track: str, known: dict[int, Any]) -> None:
    """The cells of one part on one track; `known` keeps dense attention's answers by context."""
    tokens, gamma = bench.opts["tokens"], bench.opts["gamma"]
    if time.perf_counter() > bench.deadline:
        click.echo(f"out of time: {context} {part}", err=True)
        return
    if track == "chat":
        replay, known[context] = chat_replay(pair, context, tokens, gamma, known.get(context))
    else:
        replay = text_replay(pair, context, tokens, gamma)
    cells = {"chat": CELLS, "text": CELLS[:6], "further": FURTHER}[part]
    bench.replays(replay, context, track, fitting(list(cells), context), bench.deadline)
    replay.close()


def _questions(bench: Bench, pair: Pair, context: int) -> None:
    """Questions by whole engines, dense attention first."""
    budget = 512 if context > 4096 else 128
    ways = []
    for mode, heads in (("dense", "heuristic"), *(("sparse", name) for name in ASKED)):
        scoring = named_scoring(heads, bench.session, {})
        ways.append(Way(f"{mode} {heads}", mode, "dustin", scoring, heads, budget))
    bench.tasks(pair, context, ways, bench.deadline)
