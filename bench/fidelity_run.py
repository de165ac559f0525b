"""One session of the fidelity bench: each part makes rows, written as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
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
)
from bench.fidelity_documents import TASKS, Document, suffix
from bench.fidelity_plan import ASKED, scoring_for

OUT = rows.RESULTS / "fidelity.jsonl"


def load_pair(opts: dict[str, Any]) -> Any:
    """The session of a command's models; its time counts from here (`opts["started"]`)."""
    import torch

    from dustin.generation import load

    torch.set_num_threads(opts["threads"])
    began = opts["started"] = time.perf_counter()
    session = load(opts["model"], opts["draft_model"] or None, device=opts["device"], dtype=opts["dtype"])
    click.echo(f"loaded in {time.perf_counter() - began:.1f} s", err=True)
    return session


def plain(backend: Any) -> None:
    """Cells try many budgets once: no kernel of the selection is compiled for each, and no graph of it is kept."""
    if hasattr(backend, "plain_selection"):
        backend.plain_selection = True
    if (replays := getattr(backend, "_replays", None)) is not None:
        replays.enabled = False


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
        plain(session.backend)
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
        scoring = scoring_for(cell.selector, named_scoring(cell.heads, self.session, self.profiles))
        budget = budget_of(cell, scoring, self.session, context, self.profiles)
        if not 64 <= budget < context:
            return
        measured = replay_cell(replay, cell, scoring, budget, self.session)
        row = {"context": context, "track": track, "selector": cell.selector, "heads": cell.heads, "budget": budget}
        extra: dict[str, Any] = {"bytes_of_budget": cell.bytes_of} if cell.bytes_of else {}
        extra |= {"top_mass": cell.top_mass} if cell.top_mass else {}
        extra |= {"lookahead_lag": cell.lag} if cell.lag else {}
        extra |= {"bytes_like": f"{cell.like}, k={cell.budget}"} if cell.like else {}
        kinds = [document.kind for document in self.documents]
        where = {"by_document": fidelity_stats.by_document(measured, kinds)} if cell.selector in ("dustin", "oracle") else {}
        self.emit(**row, **extra, scoring=scoring.describe(), **fidelity_stats.cell(measured), **where)

    def layers(self, replay: Any, context: int, heads: str, budget: int) -> None:
        """Each layer's recovery by the shared set and by a set of its own."""
        recovery = layer_recovery(replay, named_scoring(heads, self.session, self.profiles), budget, self.session)
        self.emit(context=context, track="layers", selector="dustin", heads=heads, budget=budget, recovery_by_layer=recovery)

    def tasks(self, pair: Pair, context: int, ways: list[Way], until: float) -> None:
        """Questions of all kinds, dense attention first."""
        for way in ways:
            way.scores.clear()
            way.texts.clear()
        asked = answer(pair, context, self.opts["questions"], ways, until)
        dense = ways[0].scores
        # What the first sparse way lost, in its own words.
        for (_, task), texts in zip(asked, zip(ways[0].texts, ways[1].texts, strict=False), strict=False):
            if task.score(texts[1]) < task.score(texts[0]):
                said = f"dense {texts[0]!r}, {ways[1].label} {texts[1]!r}"
                click.echo(f"{context} {task.kind}, expected {', '.join(task.answers)}: {said}", err=True)
        for way in ways:
            # Where time ran out, what was answered by then counts: dense attention answers each batch first.
            count = min(len(way.scores), len(dense))
            if count < len(asked):
                click.echo(f"out of time: {context} tasks {way.label}: {count} of {len(asked)} questions", err=True)
            for track, kinds in ASKED.items():
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
                    sparse_draft=way.sparse_draft, scoring=way.scoring.describe(), **numbers, by_kind=by_kind,
                    acceptance_length=round(way.stats.acceptance_length, 3),
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
