"""Forms of the selector at one budget on the same questions and traces: what chooses better, and what no choice would mend.

Questions are answered by whole engines; dense attention answers all of them first, and once more at the end, which shows the noise.
Chat and text are replayed as in `python -m bench fidelity`. Rows go to bench/results/variants.jsonl.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import click

from bench import fidelity_cells, fidelity_stats, rows
from bench.fidelity_cells import Cell, Pair, Way, chat_replay, generate, named_scoring, replay_cell, text_replay
from bench.fidelity_documents import make
from bench.fidelity_plan import ASKED, compared_profiles
from bench.fidelity_run import Bench, load_pair
from dustin import add_selector
from dustin.config import EngineOptions
from dustin.interfaces import Array, KVCache, Model, SelectionContext, Tap, TokenSet
from dustin.scoring import Scoring, full_layers, with_own_sets
from dustin.selection import largest_rank
from dustin.selectors.peers import OracleSelector
from dustin.selectors.quota import QuotaSelector

OUT = rows.RESULTS / "variants.jsonl"
# Rows of a prompt's end that hold its question.
QUESTION_ROWS = 32


@dataclass(frozen=True)
class Variant:
    """`heads` name the scoring, `changes` what is replaced in it, `options` those of the engine. `maxima`: scores are maxima
    over the draft's rows (`rows`), over layers and kv heads (`heads`) or both, not means. `question`: the scores of the
    prompt's last rows are added to the history in every round (`kept`) or where it begins (`start`). Layers `own` choose sets of
    their own by kv head and compact keys."""

    name: str
    heads: str = "heuristic"
    changes: dict[str, Any] = field(default_factory=dict)
    budget: int = 1
    mode: str = "sparse"
    maxima: str = ""
    question: str = ""
    oracle: str = ""
    own: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


# `budget` is a multiple of --budget.
VARIANTS = (
    Variant("profile", "profile"),
    Variant("heuristic"),
    Variant("profile without own sets", "shared set"),
    Variant("oracle", oracle="shared"),
    Variant("oracle by layer", oracle="by layer"),
    Variant("own sets (compact keys)", "heuristic+every1c64kv"),
    Variant("rectified every 12 tokens", mode="rectified", options={"rectify_interval": 12}),
    Variant("twice the budget", budget=2),
    Variant("four times the budget", budget=4),
    Variant("eight times the budget", budget=8),
    Variant("layer 7 dense", changes={"dense_layers": (7,)}),
    Variant("own sets of layer 7", own=(7,)),
    Variant("own sets of layers 7 and 14", own=(7, 14)),
    Variant("own sets of layers 1 and 7 and 14 and 19", own=(1, 7, 14, 19)),
    Variant("own sets of layer 19", own=(19,)),
    Variant("own sets (compact keys) with twice the budget", "heuristic+every1c64kv", budget=2),
    Variant("own sets (whole keys)", "heuristic+every1kv"),
    Variant("lookahead decay .85", changes={"lookahead_decay": 0.85}),
    Variant("history decay .85", changes={"history_decay": 0.85}),
    Variant("both decays .85", changes={"history_decay": 0.85, "lookahead_decay": 0.85}),
    Variant("lookahead decay .6", changes={"lookahead_decay": 0.6}),
    Variant("both decays .5", changes={"history_decay": 0.5, "lookahead_decay": 0.5}),
    Variant("m = .45", changes={"lookahead_share": 0.45}),
    Variant("m = .8", changes={"lookahead_share": 0.8}),
    Variant("neighbours: mean of 3", changes={"smoothing": 3}),
    Variant("neighbours: mean of 5", changes={"smoothing": 5}),
    Variant("history of 6 rows", changes={"history_rows": 6}),
    Variant("128 recent tokens", options={"num_recent_tokens": 128}),
    Variant("maxima over drafted rows", maxima="rows"),
    Variant("maxima over rows and layers and kv heads", maxima="rows heads"),
    Variant("the question's scores at the start", question="start", changes={"history_decay": 0.85}),
    Variant("the question's scores kept", question="kept"),
    Variant("mid", "mid"),
    Variant("mid with lookahead decay .6", "mid", changes={"lookahead_decay": 0.6}),
    Variant("retrieval heads", "srh"),
)


class VariantSelector(QuotaSelector):
    """The paper's selector with a variant's maxima and question."""

    def __init__(self, variant: Variant, name: str, options: EngineOptions, scoring: Scoring) -> None:
        super().__init__(name, options, scoring)
        self._variant = variant
        self.prompt_rows = QUESTION_ROWS if variant.question else 1
        self._asked: Array | None = None

    def _target_scores(self, context: SelectionContext, within: TokenSet | None = None, pool: int | None = None) -> Array | None:
        found = super()._target_scores(context, within, pool)
        if found is None or "heads" not in self._variant.maxima:
            return found
        return self._strongest(context, context.history, context.history_tap, context.target, context.target_cache, False)

    def _draft_scores(self, context: SelectionContext, within: TokenSet | None = None, pool: int | None = None) -> Array | None:
        found = super()._draft_scores(context, within, pool)
        if found is None or not self._variant.maxima:
            return found
        return self._strongest(context, context.lookahead, context.lookahead_tap, context.draft, context.draft_cache, True)

    def _history_scores(self, context: SelectionContext, within: TokenSet | None, size: int | None) -> Array | None:
        backend, how, tap = context.backend, self._variant.question, context.history_tap
        if how and context.prompt is not None and tap is not None and self._asked is None:
            self._asked = backend.score(context.prompt, tap, context.target, context.target_cache, context.lengths)
            if how == "start":
                self._totals["history"] = self._asked
        total = super()._history_scores(context, within, size)
        if how != "kept" or total is None or self._asked is None:
            return total
        return backend.accumulate(self._asked, total, 1.0)

    def _strongest(
        self, context: SelectionContext, queries: Any, tap: Tap | None, model: Model | None, cache: KVCache | None, by_row: bool
    ) -> Array:
        """The largest of the scores of single rows (`by_row`), and of single layers and kv heads where the variant says so."""
        import torch

        if tap is None or model is None or cache is None:
            raise ValueError("a score's model and heads are missing, expected those of the captured queries")
        group, best = model.spec.num_heads // model.spec.num_kv_heads, None
        for layer, q in queries.items():
            heads = list(tap.heads[layer])
            parts = [heads]
            if "heads" in self._variant.maxima:
                parts = [[head for head in heads if head // group == kv] for kv in sorted({head // group for head in heads})]
            for part in parts:
                at = [heads.index(head) for head in part]
                for rows_ in [slice(r, r + 1) for r in range(q.shape[1])] if by_row else [slice(None)]:
                    asked = {layer: q[:, rows_, at].contiguous()}
                    one = context.backend.score(asked, Tap({layer: tuple(part)}), model, cache, context.lengths)
                    best = one if best is None else torch.maximum(best, one)
        return best


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--context", default=16384, show_default=True)
@click.option("--regions", default="4096,8192", show_default=True, help="Contexts whose regions have questions planted, besides.")
@click.option("--documents", type=click.IntRange(1), default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True, help="Continuation of a document, for chat and text.")
@click.option("--questions", default=12, show_default=True, help="Questions a document.")
@click.option("--at-once", type=click.IntRange(1), default=24, show_default=True, help="Questions of a batch.")
@click.option("--budget", default=512, show_default=True)
@click.option("--variants", default="", help="Names with commas between them. Default: all.")
@click.option("--gamma", type=click.IntRange(1, 15), default=5, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="Leave out what does not fit in this time, loading included.")
@click.option("--profile", multiple=True, default=("auto",), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", default=str(OUT), show_default="bench/results/variants.jsonl")
@click.option("--append/--replace", default=False)
@click.option("--debug", is_flag=True, help="Stop at the first variant that fails.")
def main(**opts: Any) -> None:
    """Forms of the selector on the same questions and traces; rows to bench/results/variants.jsonl."""
    _chosen(opts)
    run(load_pair(opts), opts)


def run(session: Any, opts: dict[str, Any]) -> None:
    """All variants on a loaded session. Exit code 1 when one failed."""
    variants = _chosen(opts)
    profiles = compared_profiles(session, opts | {"calibrate": False, "contexts": str(opts["context"])})
    bench, context = Bench(session, opts, profiles), opts["context"]
    variants = [each for each in variants if each.heads in profiles or each.heads not in ("profile", "srh", "shared set")]
    for variant in variants:
        add_selector(_registered(variant), partial(_made, session, variant))
    regions = sorted({context, *(int(part) for part in opts["regions"].split(",") if part)})
    documents = make(session.tokenizer, regions, opts["documents"], opts["tokens"] + 8, opts["seed"])
    pair = Pair(session, documents, context, max(opts["tokens"], 160) + 128, 512, opts["at_once"])
    bench.documents = documents
    began, end = time.perf_counter(), bench.deadline
    bench.guarded("questions", lambda: _questions(bench, pair, variants, began + 0.6 * (end - began)))
    gc.collect()
    for track, until in (("chat", began + 0.85 * (end - began)), ("text", end)):
        bench.guarded(track, lambda track=track, until=until: _replays(bench, pair, variants, track, until))  # type: ignore[misc]
        gc.collect()
    if bench.failed:
        raise click.ClickException("some variants failed: see FAILED above")


def _chosen(opts: dict[str, Any]) -> list[Variant]:
    """The variants asked for. Raise UsageError on a name that is none."""
    known = {variant.name: variant for variant in VARIANTS}
    names = opts["variants"].split(",") if opts["variants"] else list(known)
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"--variants {unknown[0]!r}: expected some of {', '.join(known)}")
    return [known[name] for name in names]


def _registered(variant: Variant) -> str:
    """Its selector's name, which none of ours has."""
    return f"variant {variant.name}"


def _made(session: Any, variant: Variant, name: str, options: EngineOptions, scoring: Scoring) -> Any:
    """The variant's selector."""
    spec = session.target.spec
    if variant.oracle:
        return OracleSelector(name, options, scoring, full_layers(spec), spec.num_heads, per_layer=variant.oracle == "by layer")
    return VariantSelector(variant, name, options, scoring)


def _scoring(bench: Bench, variant: Variant) -> Scoring:
    scoring = replace(named_scoring(variant.heads, bench.session, bench.profiles), **variant.changes)
    spec = bench.session.target.spec
    return with_own_sets(scoring, spec, variant.own, largest_rank(spec)) if variant.own else scoring


def _questions(bench: Bench, pair: Pair, variants: list[Variant], until: float) -> None:
    """Dense attention on every question, then the variants, a few at a time, so that those first named are whole."""
    session, opts, context = bench.session, bench.opts, bench.opts["context"]
    pair.settle(context)
    asked = [(d, t) for d, document in enumerate(pair.documents) for t in document.tasks(context, opts["questions"], d)]
    if not asked:
        return
    plain = Variant("dense attention", mode="dense")
    again = replace(plain, name="dense attention once more")
    order = [plain, *variants[:4], again, *variants[4:]]
    ways = {}
    for each in order:
        selector = "dustin" if each.mode == "dense" else _registered(each)
        ways[each.name] = Way(each.name, each.mode, selector, _scoring(bench, each), each.heads, each.budget * opts["budget"])
    for first in range(0, len(order), 6):
        group = order[first : first + 6]
        if time.perf_counter() > until:
            click.echo(f"out of time: questions of {', '.join(each.name for each in order[first:])}", err=True)
            return
        for start in range(0, len(asked), opts["at_once"]):
            part = asked[start : start + opts["at_once"]]
            prompts, caches = fidelity_cells.opened(session, pair, part, context)
            for each in group:
                bench.guarded(each.name, partial(_answer, bench, ways[each.name], each, part, prompts, caches))
                fidelity_cells.reread(caches, context, len(part))
            del caches
            gc.collect()
        for each in group:
            # One that failed in a batch has fewer.
            if len(ways[each.name].scores) == len(asked):
                _tell(bench, each, ways[each.name], ways[plain.name], asked)


def _answer(bench: Bench, way: Way, variant: Variant, part: list[tuple[int, Any]], prompts: Any, caches: Any) -> None:
    """The way's points on the questions of a batch."""
    texts, _ = generate(bench.session, prompts, caches, way, fidelity_cells.ANSWER_TOKENS, 512, **variant.options)
    way.scores += [task.score(text) for (_, task), text in zip(part, texts, strict=True)]


def _tell(bench: Bench, variant: Variant, way: Way, dense: Way, asked: list[tuple[int, Any]]) -> None:
    """A row of all questions, with the points of each kind and of the parts that `required` names."""
    where = [d for d, _ in asked]
    numbers = fidelity_stats.accuracy(way.scores, dense.scores, where)
    kinds = {}
    for kind in ASKED["tasks"]:
        if at := [i for i, (_, task) in enumerate(asked) if task.kind == kind]:
            kinds[kind] = [round(sum(scores[i] for i in at) / len(at), 3) for scores in (way.scores, dense.scores)]
    bench.emit(
        bench="variants", context=bench.opts["context"], track="tasks", selector=variant.name, heads=variant.heads,
        budget=way.budget, mode=way.mode, **numbers, by_kind=kinds, acceptance_length=round(way.stats.acceptance_length, 3),
    )  # fmt: skip


def _replays(bench: Bench, pair: Pair, variants: list[Variant], track: str, until: float) -> None:
    """The variants that differ in what they read, on one track, at the budget and at twice as much."""
    opts, context = bench.opts, bench.opts["context"]
    if track == "chat":
        replay, _ = chat_replay(pair, context, opts["tokens"], opts["gamma"])
    else:
        replay = text_replay(pair, context, opts["tokens"], opts["gamma"])
    for variant in variants:
        if variant.mode != "sparse" or variant.options:
            continue
        for budget in [opts["budget"], 2 * opts["budget"]] if variant.budget == 1 else [variant.budget * opts["budget"]]:
            if time.perf_counter() > until:
                click.echo(f"out of time: {track} of {variant.name} and what follows", err=True)
                return
            bench.guarded(f"{track} {variant.name}", partial(_replay, bench, replay, variant, track, budget))
    replay.close()


def _replay(bench: Bench, replay: Any, variant: Variant, track: str, budget: int) -> None:
    cell = Cell(_registered(variant), variant.heads, budget)
    measured = replay_cell(replay, cell, _scoring(bench, variant), budget, bench.session)
    bench.emit(
        bench="variants", context=bench.opts["context"], track=track, selector=variant.name, heads=variant.heads, budget=budget,
        **fidelity_stats.cell(measured),
    )  # fmt: skip


def table() -> str:
    """A line a variant: points on the questions, KL on chat and text."""
    from bench.tables import markdown

    made = rows.read(OUT)
    base = min(row["budget"] for row in made)
    lines = []
    for name in dict.fromkeys(row["selector"] for row in made):
        mine = [row for row in made if row["selector"] == name]
        asked = next((row for row in mine if row["track"] == "tasks"), None)
        cells = [f"{100 * asked['accuracy_of_dense']:.1f}" if asked else ""]
        cells.append(" / ".join(f"{asked['by_kind'][k][0]:.2f}" for k in asked["by_kind"]) if asked else "")
        for track in ("chat", "text"):
            for budget in (base, 2 * base):
                found = next((row for row in mine if row["track"] == track and row["budget"] == budget), None)
                cells.append(f"{found['kl']:.3f}" if found else "")
        lines.append([name, *cells])
    first = next(row for row in made if row["track"] == "tasks")
    kinds = " / ".join(first["by_kind"])
    head = ["variant", "questions, % of dense", kinds]
    head += [f"{track} KL, k={budget}" for track in ("chat", "text") for budget in (base, 2 * base)]
    note = (
        f"{first['model']} with {first['draft']} as draft, {first['context']} tokens, {first['questions']} questions at "
        f"budget {base} (points by kind), {first['dtype']}, {first['card']}; `{first['command']}` at {first['commit']}."
    )
    return markdown(head, lines) + "\n\n" + note


def few_own_sets() -> str:
    """What a calibration with a layer or two of own sets found, beside the profile that it began with, on held-out documents."""
    from bench.tables import markdown

    made = rows.read(OUT.with_name("few_own_sets.jsonl"))
    lines: dict[str, dict[tuple[str, int], str]] = {}
    for row in made:
        if row.get("bytes_of_budget") not in (None, 3072) or row["selector"] == "dense":
            continue
        name = row["selector"] if row["selector"] != "dustin" else row["heads"]
        budget = row.get("bytes_of_budget") or row["budget"]
        if budget in (512, 1024, 3072):
            flips, share = 100 * row["hard_flips"], 100 * row["share_of_dense_bytes"]
            shown = f"{row['kl']:.3f} / {flips:.1f} / {row['perplexity_ratio']:.2f} / {share:.1f}"
            lines.setdefault(name, {})[row["track"], budget] = shown
    keys = [(track, budget) for track in ("chat", "text") for budget in (512, 1024, 3072)]
    head = ["KL / hard flips % / perplexity ratio / bytes %"]
    head += [f"{track}, bytes of 3072" if budget == 3072 else f"{track}, k={budget}" for track, budget in keys]
    first = made[0]
    note = f"{first['context']} tokens, {first['documents']} documents, {first['card']}; `{first['command']}` at {first['commit']}."
    return markdown(head, [[name, *(cells.get(key, "") for key in keys)] for name, cells in lines.items()]) + "\n\n" + note
