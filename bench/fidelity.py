"""What sparse attention changes: perplexity, agreement, KL, recovery, acceptance and tasks against dense attention, row by row.

Documents are novels, a speech and code (bench/data), read once at the longest context; shorter contexts are their prefixes.
`chat`: a document and a task, continued by dense attention's own answer. `text`: the text itself goes on. `needle` and `qa`:
questions with checkable answers, answered by whole engines. `drift`: the chat track over many tokens, by quarters, with and
without rectification. Every row is written as it is made, to bench/results/fidelity.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench import fidelity_stats, rows
from bench.cpu import repetition
from bench.fidelity_cells import (
    Cell,
    Pair,
    Way,
    answer,
    budget_of,
    chat_replay,
    generate,
    layer_recovery,
    named_scoring,
    replay_cell,
    text_replay,
)
from bench.fidelity_documents import TASKS, Document, make, suffix
from dustin.interfaces import Tap
from dustin.scoring import Scoring

OUT = rows.RESULTS / "fidelity.jsonl"
NEEDLES = ("single", "multikey", "multivalue", "variables")


def required(profiles: Collection[str]) -> list[Cell]:
    """What the tables need first: the paper's budgets, and equal bytes (scoring included)."""
    heads = ["profile"] if "profile" in profiles else []
    srh = ["srh"] if "srh" in profiles else []
    best = "profile" if profiles else "heuristic"
    cells = [Cell("dense", "heuristic", 1024)]
    cells += [Cell("dustin", name, 1024) for name in [*heads, "heuristic", "mid"]]
    cells += [Cell("dustin", name, 0, bytes_of=1536) for name in [*heads, "heuristic", "one", *srh]]
    cells += [Cell("dustin", name, 512) for name in [*heads, "heuristic", "mid", "one", *srh]]
    cells += [Cell("dustin", name, 0, bytes_of=3072) for name in (best, "heuristic", "mid")]
    for budget in (1024, 512):
        cells += [Cell("oracle", "heuristic", budget)]
        cells += [Cell(name, best, budget) for name in ("history", "lookahead", "streaming", "snapkv", "h2o", "quest")]
    return cells


def further(profiles: Collection[str]) -> list[Cell]:
    """Budgets, and options beyond the paper."""
    best = "profile" if profiles else "heuristic"
    cells = [Cell("dustin", best, budget) for budget in (2048, 256, 128)]
    cells += [Cell("oracle by layer", "heuristic", 1024), Cell("oracle", "heuristic", 2048), Cell("dustin", best, 0, bytes_of=4800)]
    cells += [Cell("oracle by layer", "heuristic", 512), Cell("oracle by layer", "heuristic", 2048)]
    cells += [Cell("dustin", name, 2048) for name in ("heuristic", "mid")] + [Cell("dustin", "heuristic/8", 0, bytes_of=1536)]
    cells += [Cell("dustin", name, 1024) for name in ("heuristic/8", "one", "mid/8")]
    cells += [Cell("dustin", best, 1024, lag=1)]
    cells += [Cell("specattn", best, 1024), Cell("dustin", best, 2048, top_mass=0.9), Cell("dustin", best, 2048, top_mass=0.8)]
    return cells


class Bench:
    """One session's rows."""

    def __init__(self, session: Any, opts: dict[str, Any], profiles: dict[str, Any]) -> None:
        self.session, self.opts, self.profiles = session, opts, profiles
        self.command, self.commit = rows.command(), rows.commit()
        self.card = _card(session.backend.device)
        self.began = opts.get("started") or time.perf_counter()
        self.deadline = self.began + opts["seconds"]
        self.failed = False
        self.documents: list[Document] = []
        # Cells try many budgets once: no kernel of the selection is compiled for each.
        if hasattr(session.backend, "plain_selection"):
            session.backend.plain_selection = True
        self.out = Path(opts["out"] or OUT)
        if not opts["append"]:
            self.out.unlink(missing_ok=True)

    def guarded(self, what: str, part: Callable[[], Any]) -> None:
        """Run one part. One that fails must not lose the others: it is named here, and the exit code says so."""
        try:
            part()
        except Exception as error:
            if self.opts["debug"]:
                raise
            click.echo(f"FAILED {what}: {type(error).__name__}: {error}", err=True)
            self.failed = True

    def emit(self, **row: Any) -> None:
        """Write and print one row."""
        draft = self.session.draft
        base = {
            "bench": "fidelity", "device": self.session.backend.device, "card": self.card, "model": self.session.target.spec.name,
            "draft": draft.spec.name if draft else None, "dtype": self.session.target.spec.dtype,
            "num_draft_tokens": self.opts["gamma"], "seed": self.opts["seed"],
        }  # fmt: skip
        rows.write(self.out, [base | row | {"command": self.command, "commit": self.commit}], append=True)
        shown = ("agreement", "hard_flips", "kl", "perplexity_ratio", "recovery_mean", "share_of_dense_bytes", "accuracy",
                 "accuracy_dense", "accuracy_of_dense", "acceptance_length")  # fmt: skip
        numbers = " ".join(f"{name}={row[name]:.4g}" for name in shown if isinstance(row.get(name), float))
        label = f"{row['context']:>6} {row['track']:<7} {row['selector']:<15} {row['heads']:<10} k={row['budget']:<5}"
        click.echo(f"[{time.perf_counter() - self.began:5.0f}s] {label} {numbers} {row.get('mode', '')}", err=True)

    def replays(self, replay: Any, context: int, track: str, cells: list[Cell], until: float) -> None:
        """Each cell on the same traces."""
        for cell in cells:
            if time.perf_counter() > until:
                click.echo(f"out of time: {context} {track} {cell} and what follows is left out", err=True)
                return
            self.guarded(f"{context} {track} {cell}", lambda cell=cell: self._replay(replay, context, track, cell))  # type: ignore[misc]

    def _replay(self, replay: Any, context: int, track: str, cell: Cell) -> None:
        scoring = named_scoring(cell.heads, self.session, self.profiles)
        budget = budget_of(cell, scoring, self.session, context)
        if not 64 <= budget < context:
            return
        measured = replay_cell(replay, cell, scoring, budget, self.session)
        row = {"context": context, "track": track, "selector": cell.selector, "heads": cell.heads, "budget": budget}
        extra: dict[str, Any] = {"bytes_of_budget": cell.bytes_of} if cell.bytes_of else {}
        extra |= {"top_mass": cell.top_mass} if cell.top_mass else {}
        extra |= {"lookahead_lag": cell.lag} if cell.lag else {}
        kinds = [document.kind for document in self.documents]
        where = {"by_document": fidelity_stats.by_document(measured, kinds)} if cell.selector in ("dustin", "oracle") else {}
        self.emit(**row, **extra, scoring=scoring.describe(), **fidelity_stats.cell(measured), **where)

    def tasks(self, pair: Pair, context: int, ways: list[Way], until: float) -> None:
        """Questions of all kinds, dense attention first."""
        for way in ways:
            way.scores.clear()
        asked = answer(pair, context, self.opts["questions"], self.opts["at_once"], ways, until)
        dense = ways[0].scores
        for way in ways:
            # Where time ran out, what was answered by then counts: dense attention answers each batch first.
            count = min(len(way.scores), len(dense))
            if count < len(asked):
                click.echo(f"out of time: {context} tasks {way.label}: {count} of {len(asked)} questions", err=True)
            for track, kinds in (("needle", NEEDLES), ("qa", ("qa",)), ("tasks", (*NEEDLES, "qa"))):
                take = [i for i, (_, task) in enumerate(asked[:count]) if task.kind in kinds]
                if not take:
                    continue
                numbers = fidelity_stats.accuracy(
                    [way.scores[i] for i in take], [dense[i] for i in take], [asked[i][0] for i in take]
                )
                by_kind = {
                    kind: round(sum(way.scores[i] for i in at) / len(at), 3)
                    for kind in kinds
                    if (at := [i for i in take if asked[i][1].kind == kind])
                }
                self.emit(
                    context=context, track=track, selector=way.selector, heads=way.heads, budget=way.budget, mode=way.mode,
                    **numbers, by_kind=by_kind, acceptance_length=round(way.stats.acceptance_length, 3),
                )  # fmt: skip

    def acceptance(self, pair: Pair, context: int, ways: list[tuple[Way, dict[str, Any]]], tokens: int, until: float) -> None:
        """Acceptance length of whole engines on the chat track."""
        prompts = [
            [*document.prefix(context), *suffix(self.session.tokenizer, TASKS[document.kind])] for document in pair.documents
        ]
        reference = None
        for way, extra in ways:
            if time.perf_counter() > until:
                return
            pair.settle(context)
            caches = [reading.cache for reading in pair.readings]
            extra |= {"num_draft_tokens": self.opts["gamma"]}
            _, made = generate(self.session, prompts, caches, way, tokens, pair.chunk, ignore_eos=True, **extra)
            reference = reference or made
            pairs = [list(zip(x, y, strict=True)) for x, y in zip(made, reference, strict=True)]
            same = [next((i for i, (a, b) in enumerate(both) if a != b), tokens) for both in pairs]
            self.emit(
                context=context, track="chat", selector=way.selector, heads=way.heads, budget=way.budget, mode=way.mode,
                sparse_draft=extra.get("sparse_draft", True), acceptance_length=round(way.stats.acceptance_length, 4),
                tokens=tokens, equal_leading_tokens=round(sum(same) / len(same), 1),
                repeated_4grams=round(sum(repetition(x) for x in made) / len(made), 3), what="acceptance",
            )  # fmt: skip

    def drift(self, pair: Pair, context: int, heads: str, budget: int, tokens: int, until: float) -> None:
        """The chat track over `tokens` tokens, by quarters, with and without rectification."""
        replay, (made, _) = chat_replay(pair, context, tokens, self.opts["gamma"])
        repeated = round(sum(repetition(x) for x in made) / len(made), 3)
        for rectify in (None, 256):
            if time.perf_counter() > until:
                break
            scoring = named_scoring(heads, self.session, self.profiles)
            measured = replay_cell(replay, Cell("dustin", heads, budget), scoring, budget, self.session, rectify=rectify)
            self.emit(
                context=context, track="drift", selector="dustin", heads=heads, budget=budget, rectify=rectify, tokens=tokens,
                quarters=fidelity_stats.quarters(measured), repeated_4grams=repeated, **fidelity_stats.cell(measured),
            )  # fmt: skip
        replay.close()


def _card(device: str) -> str:
    """The GPU's name, or the processor's."""
    if device != "cuda":
        return rows.processor()
    import torch

    return torch.cuda.get_device_name()


def ways_of(bench: Bench, heads: list[str], context: int) -> list[Way]:
    """Dense attention, then the selectors at a budget of 512 (128 for short documents)."""
    scoring = {name: named_scoring(name, bench.session, bench.profiles) for name in heads}
    best, budget = heads[0], 512 if context > 4096 else 128
    made = [Way("dense", "dense", "dustin", scoring[best], best, budget)]
    made += [Way(f"dustin {name}", "sparse", "dustin", scoring[name], name, budget) for name in heads]
    others = ("history", "lookahead", "streaming", "snapkv", "quest", "h2o")
    made += [Way(name, "sparse", name, scoring[best], best, budget) for name in others]
    small = [Way("dustin, small", "sparse", "dustin", scoring[best], best, budget // 4)] if budget // 4 > 64 else []
    return [*made, *small]


def shares(contexts: list[int], began: float, seconds: float) -> Iterator[tuple[int, float]]:
    """Contexts from the longest on, each with the time at which it must make room for the next."""
    weights = [1.6 if i == 0 else 1.0 for i in range(len(contexts))]
    done = 0.0
    for context, weight in zip(sorted(contexts, reverse=True), weights, strict=True):
        done += weight
        yield context, began + seconds * done / sum(weights)


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--contexts", default="8192,16384,32000", show_default=True, help="Tokens of the documents' prefixes.")
@click.option("--documents", default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True, help="Continuation of a document, for chat and text.")
@click.option("--questions", default=6, show_default=True, help="Questions a document and context.")
@click.option("--at-once", default=36, show_default=True, help="Questions of one batch.")
@click.option("--drift-tokens", default=1025, show_default=True, help="0: no drift track.")
@click.option("--gamma", default=5, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="Leave out what does not fit in this time, loading included.")
@click.option("--calibrate/--no-calibrate", default=False, help="Calibrate first; its profile joins the comparison.")
@click.option("--calibration-seconds", default=90.0, show_default=True)
@click.option("--profile", help="A profile to compare; auto: the pair's own.")
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
    import torch

    from dustin.generation import load

    torch.set_num_threads(opts["threads"])
    began = opts["started"] = time.perf_counter()
    session = load(opts["model"], opts["draft_model"] or None, device=opts["device"], dtype=opts["dtype"])
    click.echo(f"loaded in {time.perf_counter() - began:.1f} s", err=True)
    run(session, opts)


def run(session: Any, opts: dict[str, Any]) -> None:
    """All parts on a loaded session. Exit code 1 when a cell failed."""
    profiles = _profiles(session, opts)
    bench = Bench(session, opts, profiles)
    contexts = [int(c) for c in opts["contexts"].split(",")]
    room = max(opts["tokens"], opts["drift_tokens"] if min(contexts) == max(contexts) else 0, 160) + 128
    most = session.target.spec.context_length
    if max(contexts) + room > most:
        raise click.UsageError(f"context {max(contexts)} and {room} tokens more do not fit the model's {most}")
    documents = make(session.tokenizer, contexts, opts["documents"], opts["tokens"] + 8, opts["seed"])
    pair = Pair(session, documents, max(contexts), room, opts["prefill_chunk"], opts["at_once"])
    click.echo(f"[{time.perf_counter() - bench.began:.0f}s] {len(documents)} documents of {max(contexts)} tokens read", err=True)
    heads = ["profile", "heuristic"] if profiles else ["heuristic"]
    bench.documents = documents
    for context, until in shares(contexts, time.perf_counter(), bench.deadline - time.perf_counter()):
        _one_context(bench, pair, context, until, heads)
    shortest, tokens = min(contexts), opts["drift_tokens"]
    if tokens and shortest + tokens + 200 < max(contexts) + room:
        budget = min(1024, shortest // 4)
        bench.guarded("drift", lambda: bench.drift(pair, shortest, heads[0], budget, tokens, bench.deadline + 15))
    if bench.failed:
        raise click.ClickException("some cells failed: see FAILED above")


def _one_context(bench: Bench, pair: Pair, context: int, until: float, heads: list[str]) -> None:
    """Most valuable first: the required chat cells, the tasks, the text; then acceptance and further cells."""
    began = time.perf_counter()
    opts, gamma, profiles = bench.opts, bench.opts["gamma"], bench.profiles

    def share(of: float) -> float:
        return began + of * (until - began)

    def fitting(cells: list[Cell]) -> list[Cell]:
        # Short documents (small models, CPUs) get a quarter of the budgets.
        return cells if context > 4096 else [replace(c, budget=c.budget // 4, bytes_of=c.bytes_of // 4) for c in cells]

    def layers(replay: Any) -> None:
        scoring, budget = named_scoring(heads[0], bench.session, bench.profiles), 1024 if context > 4096 else 256
        recovery = layer_recovery(replay, scoring, budget, bench.session)
        bench.emit(context=context, track="layers", selector="dustin", heads=heads[0], budget=budget, recovery_by_layer=recovery)

    def chat(cells: list[Cell], end: float, study: bool = False) -> None:
        replay, texts = chat_replay(pair, context, opts["tokens"], gamma, known[0] if known else None)
        if not known:
            for document, tokens in zip(pair.documents, texts[0], strict=True):
                said = bench.session.tokenizer.decode(tokens)[:160]
                click.echo(f"{context} {document.kind}: {said!r}", err=True)
        known.append(texts)
        if study:
            bench.guarded(f"{context} layers", lambda: layers(replay))
        bench.replays(replay, context, "chat", fitting(cells), end)

    def text(end: float) -> None:
        kept = ("dense", "dustin", "oracle", "streaming", "history", "lookahead")
        replay = text_replay(pair, context, opts["tokens"], gamma)
        bench.replays(replay, context, "text", fitting([cell for cell in cells if cell.selector in kept]), end)

    def accepted(end: float) -> None:
        scoring = named_scoring(heads[0], bench.session, bench.profiles)
        budget = 1024 if context > 4096 else 256
        ways = [
            (Way("dense", "dense", "dustin", scoring, heads[0], budget), {}),
            (Way("sparse", "sparse", "dustin", scoring, heads[0], budget), {"sparse_draft": False}),
            (Way("sparse", "sparse", "dustin", scoring, heads[0], budget), {"sparse_draft": True}),
        ]
        bench.acceptance(pair, context, ways, opts["tokens"] - 1, end)

    cells = required(profiles)
    known: list[Any] = []
    bench.guarded(f"{context} chat", lambda: chat(cells, share(0.32)))
    if opts["questions"]:
        bench.guarded(f"{context} tasks", lambda: bench.tasks(pair, context, ways_of(bench, heads, context), share(0.7)))
    bench.guarded(f"{context} text", lambda: text(share(0.82)))
    if bench.session.draft is not None:
        bench.guarded(f"{context} acceptance", lambda: accepted(share(0.89)))
    bench.guarded(f"{context} further", lambda: chat(further(profiles), until, study=True))


def _profiles(session: Any, opts: dict[str, Any]) -> dict[str, Any]:
    """name -> scoring of the profile to compare, calibrated here where that is asked for."""
    from dustin import calibration, profile_file
    from dustin.config import EngineOptions

    if opts["calibrate"]:
        longest = max(c for c in (int(c) for c in opts["contexts"].split(",")) if c <= 16384 or "," not in opts["contexts"])
        short = longest <= 4096
        options = calibration.CalibrationOptions(
            context=longest, seconds=opts["calibration_seconds"], num_draft_tokens=opts["gamma"],
            allowance=384 if short else 1536, prefill_chunk=opts["prefill_chunk"], documents=2 if short else 12,
            tokens=31 if short else 193,
        )  # fmt: skip
        profile = calibration.calibrate(
            session.backend, session.target, session.draft, session.tokenizer, options, lambda line: click.echo(line, err=True)
        )
        profile_file.write(profile, Path(opts["profile_out"]) if opts["profile_out"] else profile_file.default_path(profile))
        return {"profile": profile.scoring} | _retrieval(profile)
    if opts["profile"]:
        draft = session.draft.spec if session.draft else None
        scoring = profile_file.scoring_of(EngineOptions(profile=opts["profile"]), session.target.spec, draft)
        return {} if scoring.source == "heuristic" else {"profile": scoring}
    return {}


def _retrieval(profile: Any) -> dict[str, Any]:
    """The paper's form: retrieval heads alone, four of one target layer and of three draft layers."""
    found = profile.retrieval_heads
    if "draft" not in found:
        return {}
    taps = [Tap({layer: tuple(heads) for layer, *heads in sorted(found[side][:n])}) for side, n in (("target", 1), ("draft", 3))]
    return {"srh": Scoring(taps[0], taps[1], source="retrieval heads")}
