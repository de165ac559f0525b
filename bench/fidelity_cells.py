"""One context of the fidelity bench: the traces, the cells replayed on them, and the tasks answered by whole engines."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from typing import Any

from bench.fidelity_documents import TASKS, Document, suffix
from dustin.cli_options import LayerList
from dustin.config import EngineOptions, RequestOptions
from dustin.drafting import ModelDrafter
from dustin.engine import Engine
from dustin.generation import Session
from dustin.interfaces import SelectionContext, Tap
from dustin.reading import continue_greedily, read_prompts
from dustin.replay import Reading, Replay
from dustin.scoring import ReadBytes, Scoring, all_heads, budget_within, full_layers, heuristic, scoring_bytes
from dustin.selection import create_selector, prepare, with_fidelity
from dustin.selectors.peers import OracleSelector
from dustin.sequence import Sequence
from dustin.stats import Stats

# Room for three answers in a list with a sentence before it.
ANSWER_TOKENS = 72
POOL = 4096
BY_LAYER = "oracle by layer"


@dataclass(frozen=True)
class Cell:
    """What a row is about: selector, scoring heads by name, budget in tokens (0: whatever fits `bytes_of` tokens' bytes; with
    `like` what the bytes of `budget` tokens and of scoring by those heads hold). With `lag` 1 it sees the lookahead of the round
    before."""

    selector: str
    heads: str
    budget: int
    bytes_of: int = 0
    top_mass: float | None = None
    lag: int = 0
    like: str = ""


class Pair:
    """Both models with the documents in their caches, at the longest context; `settle` goes to another one: down for nothing, up
    by reading again what was written over."""

    def __init__(
        self, session: Session, documents: list[Document], context: int, room: int, chunk: int, copies: int
    ) -> None:
        """Read all documents. There is memory for `copies` sequences more, in the same pool: graphs of a shape serve them too."""
        self.session, self.documents = session, documents
        self.chunk, self.longest, self.copies = chunk, context, copies
        # Leading rows that still hold the documents.
        self._intact = context
        models = [session.target, *([session.draft] if session.draft else [])]
        self.readings = []
        for model in models:
            model.new_cache(len(documents) + copies, context + room)
            cache = model.new_cache(len(documents), context + room)
            self.readings.append(Reading(model, cache))
            read_prompts(
                session.backend, model, cache, [document.prefix(context) for document in documents],
                Tap({}), chunk,
            )  # type: ignore[arg-type] # fmt: skip

    def settle(self, context: int) -> None:
        """Both caches hold the first `context` tokens of every document; what is appended then writes over the rows after them."""
        for reading in self.readings:
            reading.cache.rollback([min(context, self._intact)] * len(self.documents))
            if context > self._intact:
                again = [document.tokens[self._intact : context] for document in self.documents]
                read_prompts(self.session.backend, reading.model, reading.cache, again, Tap({}), self.chunk)
        self._intact = context

    @property
    def draft(self) -> Reading | None:
        """The draft's reading, where there is a draft."""
        return self.readings[1] if len(self.readings) > 1 else None


Texts = tuple[list[list[int]], list[int]]


def chat_replay(pair: Pair, context: int, tokens: int, gamma: int, known: Texts | None = None) -> tuple[Replay, Texts]:
    """Documents with a task each, continued by dense attention's own greedy answers (or those known); returns those too."""
    session = pair.session
    tails = [suffix(session.tokenizer, TASKS[document.kind]) for document in pair.documents]
    pair.settle(context)
    prompts = [read_prompts(session.backend, r.model, r.cache, tails, r.tap, pair.chunk) for r in pair.readings]
    target = pair.readings[0]
    eos = frozenset(session.tokenizer.eos_ids)  # type: ignore[union-attr]
    texts, valid = known or continue_greedily(session.backend, target.model, target.cache, prompts[0].logits, tokens, eos)
    first = prompts[0]
    backend: Any = session.backend
    return Replay(backend, target, pair.draft, texts, gamma, first.last, first.rows, [max(n, 8) for n in valid]), (texts, valid)


def text_replay(pair: Pair, context: int, tokens: int, gamma: int) -> Replay:
    """Documents read on: the text itself is the continuation."""
    session = pair.session
    # The last tokens of the prefix are read again, for their queries.
    pair.settle(context - 32)
    tails = [document.tokens[context - 32 : context] for document in pair.documents]
    prompts = [read_prompts(session.backend, r.model, r.cache, tails, r.tap, pair.chunk) for r in pair.readings]
    rows = [document.tokens[context : context + tokens] for document in pair.documents]
    backend: Any = session.backend
    return Replay(backend, pair.readings[0], pair.draft, rows, gamma, prompts[0].last, prompts[0].rows)


def named_scoring(name: str, session: Session, profiles: dict[str, Scoring]) -> Scoring:
    """Scoring heads by name: heuristic, one (layer), mid (layers at 0.5-0.7, all heads), high (`--fidelity high`), none, or one of
    `profiles`.

    With `/8` all tokens are scored every 8th round, in between a pool of POOL. With `+every4` the rows in flight choose anew at
    every 4th layer from the 3rd on, with `+every1` at each; with a further `c32` by compact keys of 32 numbers (`c32r4`: the first
    4 rows alone choose), with `kv` at the end each kv head its own. `+at0-4,7` instead names the layers, which then choose for
    those after them too.
    """
    kind = "+every" if "+every" in name else "+at"
    if kind in name:
        first, _, again = name.partition(kind)
        by_kv_head, again = again.endswith("kv"), again.removesuffix("kv")
        which, _, rank = again.partition("c")
        rank, _, rows = rank.partition("r")
        spec = session.target.spec
        step = int(which) if kind == "+every" else 0
        layers = full_layers(spec)[step // 2 :: step] if step else LayerList().convert(which, None, None)
        return replace(
            named_scoring(first, session, profiles), reselection=all_heads(spec, layers), reselection_rank=int(rank or 0),
            reselection_by_kv_head=by_kv_head, reselection_reuse=not step, reselection_rows=int(rows or 16),
        )  # fmt: skip
    if name.endswith("/8"):
        return replace(named_scoring(name[:-2], session, profiles), refresh=8, pool=POOL)
    target, draft = session.target.spec, session.draft.spec if session.draft else None
    base = heuristic(target, draft)
    if name in profiles:
        return profiles[name]
    if name == "heuristic":
        return base
    if name == "high":
        return with_fidelity(EngineOptions(fidelity="high", drafter="draft" if draft else "lookup"), base, session.target)
    if name == "ahead":
        # The draft's scores alone: for the draft's own reading, where the target's layers choose for themselves.
        return replace(base, target=Tap({}))
    if name == "none":
        # For sets that layers choose themselves: nothing is scored before the forward.
        return replace(base, target=Tap({}), draft=Tap({}))
    if name == "one":
        layer = min(full_layers(target), key=lambda i: abs(i - 0.65 * (target.num_layers - 1)))
        return replace(base, target=all_heads(target, [layer]))
    if name == "mid":
        taps = [
            all_heads(spec, [i for i in full_layers(spec) if 0.5 <= i / (spec.num_layers - 1) <= 0.7]) if spec else Tap({})
            for spec in (target, draft)
        ]
        return replace(base, target=taps[0], draft=taps[1])
    raise ValueError(f"heads are {name!r}, expected heuristic, one, mid, high or one of {', '.join(profiles)}")


def budget_of(cell: Cell, scoring: Scoring, session: Session, context: int, profiles: dict[str, Scoring]) -> int:
    """The cell's budget, or what the bytes of `bytes_of` tokens, or of `budget` tokens chosen by `like`, leave after scoring
    (METHOD section 8), in steps of 64."""
    if not cell.bytes_of and not cell.like:
        return cell.budget
    target, draft = session.target.spec, session.draft.spec if session.draft else None
    allowed = ReadBytes(target).tokens(cell.bytes_of or cell.budget)
    if cell.like:
        allowed += scoring_bytes(named_scoring(cell.like, session, profiles), target, draft, context, cell.budget)
    return budget_within(allowed, scoring, target, draft, context)


def replay_cell(replay: Replay, cell: Cell, scoring: Scoring, budget: int, session: Session, **how: Any) -> Any:
    """`Measured` of one cell. `oracle` is the shared set; `oracle by layer` a set for each layer."""
    gamma = replay.height - 1
    spec = session.target.spec
    name = "oracle" if cell.selector.startswith("oracle") else cell.selector
    options = EngineOptions(selector=name, budget=budget, num_draft_tokens=gamma, top_mass=cell.top_mass)
    if cell.selector == BY_LAYER:
        selector: Any = by_layer(session, cell.selector, options, scoring)
    else:
        selector = create_selector(options, scoring, spec)
    prepare(selector, session.target, session.tokenizer)
    return replay.run(selector, scoring.draft, lag=cell.lag, **how)


def by_layer(session: Session, name: str, options: EngineOptions, scoring: Scoring) -> OracleSelector:
    """The oracle with a set for each layer: `add_selector` makes engines know it."""
    spec = session.target.spec
    return OracleSelector(name, options, scoring, full_layers(spec), spec.num_heads, per_layer=True)


def layer_recovery(replay: Replay, scoring: Scoring, budget: int, session: Session, every: int = 8) -> dict[str, list[float]]:
    """Share of each full layer's own attention that the shared set holds (`shared`) and that a set of its own would (`own`).

    Sets are chosen with dense attention's queries, in every `every`-th round; means over rounds and sequences.
    """
    options = EngineOptions(budget=budget, num_draft_tokens=replay.height - 1)
    replay_cell(replay, Cell("dense", "", budget), scoring, budget, session)
    backend, target, cache = replay.backend, replay.target, replay.target.cache
    selector = create_selector(options, replace(scoring, refresh=1, history_rows=1, history_decay=0.0), session.target.spec)
    batch, layers = len(replay.start), list(target.tap.heads)
    sums = {"shared": [0.0] * len(layers), "own": [0.0] * len(layers)}
    looked = range(1, len(replay.rounds), every)
    for i in looked:
        lengths = tuple(start + i * replay.height for start in replay.start)
        known, before = replay.rounds[i], replay.rounds[i - 1]
        last = backend.gather_rows(before.queries, [replay.height - 1] * batch)
        history = backend.narrow_queries(last, target.tap, selector.tap)
        draft = replay.draft
        ahead = backend.narrow_queries(known.lookahead, draft.tap, scoring.draft) if draft and known.lookahead else None
        context = SelectionContext(
            backend, target.model, cache, lengths, history, selector.tap, draft.model if draft else None,
            draft.cache if draft else None, ahead, scoring.draft,
        )  # fmt: skip
        chosen = selector.select(context)
        if chosen is None:
            raise ValueError(f"budget {budget} holds all of {max(lengths)} tokens: nothing to recover")
        for n, layer in enumerate(layers):
            heads = Tap({layer: target.tap.heads[layer]})
            scores = backend.score({layer: known.queries[layer]}, heads, target.model, cache, lengths)
            own = backend.select(
                scores, None, lengths, budget=budget, num_sink_tokens=options.num_sink_tokens,
                num_recent_tokens=options.num_recent_tokens, num_draft_selected=0,
            )  # fmt: skip
            for kind, token_set in (("shared", chosen), ("own", own)):
                sums[kind][n] += sum(backend.set_mass(token_set, scores)) / batch / len(looked)
    return {kind: [round(x, 4) for x in values] for kind, values in sums.items()}


@dataclass
class Way:
    """One way to answer the questions: an engine mode with a selector, its scoring heads and budget."""

    label: str
    mode: str
    selector: str
    scoring: Scoring
    heads: str
    budget: int
    sparse_draft: bool = True
    scores: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


def answer(pair: Pair, context: int, per_document: int, ways: list[Way], deadline: float) -> list[tuple[int, Any]]:
    """Every way answers the same questions about the documents' prefixes, from copies of the caches; returns (document, task).

    Batches are as large as the memory of the pair's copies holds at this context. Ways that the deadline leaves no time for have
    fewer scores than there are questions.
    """
    session = pair.session
    pair.settle(context)
    asked = [(d, task) for d, document in enumerate(pair.documents) for task in document.tasks(context, per_document, d)]
    batches = -(-len(asked) // max(1, pair.copies * pair.longest // _room(context)))
    at_once = -(-len(asked) // batches)
    for start in range(0, len(asked), at_once):
        part = asked[start : start + at_once]
        prompts, caches = opened(session, pair, part, context)
        for way in ways:
            if time.perf_counter() > deadline:
                break
            texts, _ = generate(session, prompts, caches, way, ANSWER_TOKENS, pair.chunk, sparse_draft=way.sparse_draft)
            way.texts += texts
            way.scores += [task.score(text) for (_, task), text in zip(part, texts, strict=True)]
            reread(caches, context, len(part))
        del caches
        gc.collect()
    return asked


def _room(context: int) -> int:
    """Tokens of a cache for a document, a question and its answer, which take less."""
    return context + ANSWER_TOKENS + 256


def opened(session: Session, pair: Pair, part: list[tuple[int, Any]], context: int) -> tuple[list[list[int]], list[Any]]:
    """Prompts of (document, question) pairs and both models' caches that hold the documents."""
    caches = [reading.cache.take([d for d, _ in part], _room(context)) for reading in pair.readings]
    prompts = [[*pair.documents[d].prefix(context), *suffix(session.tokenizer, task.question)] for d, task in part]
    return prompts, caches


def reread(caches: list[Any], context: int, count: int) -> None:
    """Take the caches back to the documents alone, for the next way to answer; let go of what the last one held."""
    for cache in caches:
        cache.rollback([context] * count)
    # Engines refer to themselves: without this their caches would outlive them, and the next batch find no memory.
    gc.collect()


def generate(
    session: Session,
    prompts: list[list[int]],
    caches: list[Any],
    way: Way,
    tokens: int,
    chunk: int,
    ignore_eos: bool = False,
    **extra: Any,
) -> tuple[list[str], list[list[int]]]:
    """Texts and tokens of one greedy batch from caches that hold leading rows of the prompts; counters go to the way's."""
    drafter = "draft" if session.draft is not None else "lookup"
    options = EngineOptions(
        mode=way.mode, drafter=drafter, selector=way.selector, budget=way.budget, prefill_chunk=chunk, lookahead_lag=0, **extra
    )
    inner = Session(session.backend, session.target, session.tokenizer, options, session.draft)
    inner._scorings = {("auto", drafter == "draft"): way.scoring}
    engine = inner.make_engine(Engine, inner.resolve(RequestOptions()), way.stats)
    if isinstance(engine.drafter, ModelDrafter):
        engine.drafter.resume(caches[1])
    request = RequestOptions(max_tokens=tokens, ignore_eos=ignore_eos)
    eos = frozenset(session.tokenizer.eos_ids)  # type: ignore[union-attr]
    rows = [Sequence(i, prompt, request, tokens, eos, None) for i, prompt in enumerate(prompts)]
    engine.start(rows, caches[0])
    while engine.active:
        engine.step()
    made = [list(row.generated) for row in rows]
    return [session.tokenizer.decode(row) for row in made], made  # type: ignore[union-attr]
