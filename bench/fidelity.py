"""What sparse attention changes: perplexity, agreement, KL, recovery, acceptance and tasks against dense attention, row by row.

Documents are novels, a speech and code (bench/data), read once at the longest context; shorter contexts are their prefixes.
`chat`: a document and a task, continued by dense attention's own answer. `text`: the text itself goes on. `needle` and `qa`:
questions with checkable answers, answered by whole engines. `drift`: the chat track over many tokens, by quarters, with and
without rectification. Every row is written as it is made, to bench/results/fidelity.jsonl.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import click

from bench.fidelity_cells import BY_LAYER, Cell, Pair, Way, by_layer, chat_replay, named_scoring, text_replay
from bench.fidelity_documents import make, word_lists
from bench.fidelity_plan import SHORT, TRACKS, best_heads, compared_profiles, fitting, further, of_text, required, shares, ways_of
from bench.fidelity_run import Bench, load_pair, plain
from dustin import add_selector
from dustin.interfaces import CompactModel


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--contexts", default="4096,8192,16384,32000", show_default=True, help="Tokens of the documents' prefixes.")
@click.option("--documents", type=click.IntRange(1), default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True, help="Continuation of a document, for chat and text.")
@click.option("--questions", default=8, show_default=True, help="Questions a document and context.")
@click.option("--ways", type=click.IntRange(0), default=0, help="Ways to answer them, dense attention's first. Default: all.")
@click.option("--at-once", type=click.IntRange(1), default=36, show_default=True, help="Questions of a batch, longest context.")
@click.option("--drift-tokens", default=1025, show_default=True, help="0: no drift track.")
@click.option("--gamma", type=click.IntRange(1, 15), default=5, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="Leave out what does not fit in this time, loading included.")
@click.option("--tracks", default=",".join(TRACKS), show_default=True, help="Parts to run.")
@click.option("--regions", default="", help="Contexts whose regions have questions planted, besides --contexts.")
@click.option("--lists", type=click.IntRange(1), default=12, show_default=True, help="Lists of words (track words).")
@click.option("--calibrate/--no-calibrate", default=False, help="Calibrate first; its profile joins the comparison.")
@click.option("--calibration-seconds", default=90.0, show_default=True)
@click.option(
    "--profile", multiple=True, default=("auto",), show_default=True,
    help="Profile to compare: auto (the pair's own), none or a file; further ones as NAME=FILE.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--prefill-chunk", default=512, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", help="Default: bench/results/fidelity.jsonl.")
@click.option("--profile-out", help="Where --calibrate writes its profile.")
@click.option("--append/--replace", default=False)
@click.option("--debug", is_flag=True, help="Stop at the first cell that fails.")
def main(**opts: Any) -> None:
    """Sparse attention against dense attention on long documents; rows to bench/results/fidelity.jsonl."""
    run(load_pair(opts), opts)


def run(session: Any, opts: dict[str, Any]) -> None:
    """All parts on a loaded session. Exit code 1 when a cell failed."""
    tracks = opts["tracks"].split(",")
    if unknown := [name for name in tracks if name not in TRACKS]:
        raise click.UsageError(f"--tracks {unknown[0]!r}: expected some of {', '.join(TRACKS)}")
    contexts = _lengths("--contexts", opts["contexts"])
    regions = sorted({*contexts, *(_lengths("--regions", opts["regions"]) if opts["regions"] else ())})
    longest, lists = max(contexts), ["words"] if "words" in tracks else []
    # Room for a question before them too.
    long_answers = opts["drift_tokens"] + 80 if opts["drift_tokens"] and "drift" in tracks and min(contexts) == longest else 0
    room = max(opts["tokens"], long_answers, 160) + 128
    most = session.target.spec.context_length
    if max(regions) + room > most:
        raise click.UsageError(f"context {max(regions)} and {room} tokens more do not fit the model's {most}")
    add_selector(BY_LAYER, partial(by_layer, session))
    plain(session.backend)
    profiles = compared_profiles(session, opts)
    bench = Bench(session, opts, profiles)
    end = time.perf_counter() + (bench.deadline - time.perf_counter()) * (0.88 if lists and len(tracks) > 1 else 1.0)
    if [name for name in tracks if name != "words"]:
        _books(bench, contexts, regions, room, tracks, end)
    if lists:
        gc.collect()
        bench.guarded("words", lambda: _lists(bench, contexts, room))
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] peak {session.backend.peak_memory_bytes() / 2**30:.1f} GiB", err=True)
    if bench.failed:
        raise click.ClickException("some cells failed: see FAILED above")


def _lengths(name: str, text: str) -> list[int]:
    """Token counts with commas between them. Raise UsageError on anything else."""
    try:
        made = [int(part) for part in text.split(",")]
    except ValueError:
        made = [0]
    if min(made) < 1:
        raise click.UsageError(f"{name} is {text!r}, expected numbers of tokens with commas between them, as 8192,16384")
    return made


def _books(bench: Bench, contexts: list[int], regions: list[int], room: int, tracks: list[str], end: float) -> None:
    """The documents, context by context, the longest first."""
    opts, session = bench.opts, bench.session
    documents = make(session.tokenizer, regions, opts["documents"], opts["tokens"] + 8, opts["seed"])
    pair = Pair(session, documents, max(contexts), room, opts["prefill_chunk"], opts["at_once"])
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] {len(documents)} documents of {max(contexts)} tokens read", err=True)
    bench.documents = documents
    tokens = opts["drift_tokens"] if "drift" in tracks else 0
    # Long answers at the longest context of up to 8k that has room for them.
    roomy = [c for c in contexts if c <= 8192 and c + tokens + 200 < max(contexts) + room]
    for context, until in shares(contexts, time.perf_counter(), end - time.perf_counter()):
        _one_context(bench, pair, context, until, [name for name in tracks if name in WEIGHTS])
        if tokens and roomy and context == max(roomy):
            budget = min(1024, context // 4)
            bench.guarded("drift", partial(bench.drift, pair, context, best_heads(bench.profiles), budget, tokens, until + 25))


def _lists(bench: Bench, contexts: list[int], room: int) -> None:
    """Lists of words, read once at the longest context: the question for their common words at every one."""
    opts = bench.opts
    documents = word_lists(bench.session.tokenizer, max(contexts), opts["lists"], opts["seed"])
    pair = Pair(bench.session, documents, max(contexts), room, opts["prefill_chunk"], len(documents))
    for context, until in shares(contexts, time.perf_counter(), bench.deadline - time.perf_counter()):
        bench.tasks(pair, context, ways_of(bench.session, bench.profiles, context, few=True), until)


# Shares of a context's time.
WEIGHTS = {"tasks": 0.4, "chat": 0.28, "text": 0.14, "acceptance": 0.05, "further": 0.13}


def _one_context(bench: Bench, pair: Pair, context: int, until: float, tracks: list[str]) -> None:
    """The questions, the chat cells, the text, then acceptance and further cells: each has its share of the time."""
    began = time.perf_counter()
    opts, gamma, profiles = bench.opts, bench.opts["gamma"], bench.profiles
    cells, known, heads = required(profiles), list[Any](), best_heads(profiles)
    budget = 1024 if context > SHORT else 256

    def possible(wanted: list[Cell]) -> list[Cell]:
        # Without a draft there is no lookahead: these would be the history alone. Without compact keys no layer chooses.
        alone, compact = bench.session.draft is None, isinstance(bench.session.target, CompactModel)
        kept = [cell for cell in wanted if compact or cell.heads != "high"]
        return [cell for cell in kept if not alone or cell.selector not in ("lookahead", "specattn") and not cell.lag]

    def chat(wanted: list[Cell], end: float, study: bool = False) -> None:
        replay, texts = chat_replay(pair, context, opts["tokens"], gamma, known[0] if known else None)
        if not known:
            for document, tokens in zip(pair.documents, texts[0], strict=True):
                said = bench.session.tokenizer.decode(tokens)[:160]
                click.echo(f"{context} {document.kind}: {said!r}", err=True)
        known.append(texts)
        if study:
            bench.guarded(f"{context} layers", lambda: bench.layers(replay, context, heads, budget))
        bench.replays(replay, context, "chat", fitting(possible(wanted), context), end)

    def text(end: float) -> None:
        replay = text_replay(pair, context, opts["tokens"], gamma)
        bench.replays(replay, context, "text", fitting(possible(of_text(cells)), context), end)

    def accepted(end: float) -> None:
        scoring = named_scoring(heads, bench.session, profiles)
        forms = [("dense", {}), ("sparse", {"sparse_draft": False}), ("sparse", {"sparse_draft": True})]
        ways: list[Any] = [(Way(mode, mode, "dustin", scoring, heads, budget), extra) for mode, extra in forms]
        bench.acceptance(pair, context, ways, opts["tokens"] - 1, end)

    def tasks(end: float) -> None:
        ways = ways_of(bench.session, profiles, context)
        bench.tasks(pair, context, ways[: opts["ways"] or len(ways)], end)

    parts = {
        "tasks": tasks, "chat": lambda end: chat(cells, end), "text": text, "acceptance": accepted,
        "further": lambda end: chat(further(profiles), end, study=True),
    }  # fmt: skip
    chosen = [name for name in WEIGHTS if name in tracks]
    if bench.session.draft is None:
        chosen = [name for name in chosen if name != "acceptance"]
    if not opts["questions"]:
        chosen = [name for name in chosen if name != "tasks"]
    whole, done = sum(WEIGHTS[name] for name in chosen), 0.0
    for name in chosen:
        done += WEIGHTS[name]
        end = began + (until - began) * done / whole
        bench.guarded(f"{context} {name}", lambda name=name, end=end: parts[name](end))  # type: ignore[misc]
        gc.collect()

