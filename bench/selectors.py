"""Every selector on the same traces, in one table: agreement, KL, recovery and bytes against dense attention.

A short form of `bench fidelity`: the chat track of one context (documents and tasks, dense attention's own answers).
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import click

from bench import rows
from bench.fidelity_cells import Cell, Pair, chat_replay
from bench.fidelity_documents import make
from bench.fidelity_plan import compared_profiles
from bench.fidelity_run import Bench
from bench.tables import markdown
from dustin.config import ADDED_SELECTORS, SELECTORS

SHOWN = ("agreement", "hard_flips", "kl", "perplexity_ratio", "recovery_mean", "recovery_p5", "share_of_dense_bytes")


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--context", default=8192, show_default=True)
@click.option("--documents", default=8, show_default=True)
@click.option("--tokens", default=97, show_default=True)
@click.option("--budget", default=512, show_default=True)
@click.option("--select", default=",".join(SELECTORS), show_default=True, help="Selectors, with commas between them.")
@click.option(
    "--plugin", type=click.Path(exists=True, dir_okay=False), multiple=True,
    help="Run this Python file first: a selector that it adds (dustin.add_selector) may be named in --select.",
)  # fmt: skip
@click.option("--profile", default="auto", show_default=True, help="auto, none or a file.")
@click.option("--gamma", default=5, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", help="Default: bench/results/selectors.jsonl.")
def main(**opts: Any) -> None:
    """All selectors on the same traces; a table on stdout, rows to bench/results/selectors.jsonl."""
    import torch

    from dustin.generation import load

    torch.set_num_threads(opts["threads"])
    opts |= {"out": opts["out"] or str(rows.RESULTS / "selectors.jsonl"), "append": False, "seconds": 1e9, "debug": False}
    opts["calibrate"] = False
    for file in opts.pop("plugin"):
        runpy.run_path(file)
    names, known = opts["select"].split(","), (*SELECTORS, *ADDED_SELECTORS)
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"--select {unknown[0]!r}: expected some of {', '.join(known)}")
    session = load(opts["model"], opts["draft_model"] or None, device=opts["device"], dtype=opts["dtype"])
    if session.draft is None and (left_out := {"dustin", "lookahead", "specattn"} & set(names)):
        click.echo(f"without a draft model there is no lookahead: {', '.join(sorted(left_out))} left out", err=True)
        names = [name for name in names if name not in left_out]
    profiles = compared_profiles(session, opts | {"profile": [opts["profile"]]})
    bench = Bench(session, opts, profiles)
    documents = make(session.tokenizer, [opts["context"]], opts["documents"], opts["tokens"] + 8, opts["seed"])
    bench.documents = documents
    pair = Pair(session, documents, opts["context"], opts["tokens"] + 128, 512, 0)
    replay, _ = chat_replay(pair, opts["context"], opts["tokens"], opts["gamma"])
    heads = "profile" if profiles else "heuristic"
    cells = [Cell(name, heads, opts["budget"]) for name in names]
    bench.replays(replay, opts["context"], "chat", cells, float("inf"))
    made = rows.read(Path(opts["out"]))
    lines = [[row["selector"], *(f"{row[name]:.4g}" for name in SHOWN)] for row in made]
    click.echo(markdown(["selector", *SHOWN], lines))
    if bench.failed:
        raise click.ClickException("some selectors failed: see FAILED above")
