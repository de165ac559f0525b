"""Recording a generation for people to look at: which tokens each round read, why, what was accepted, what attention was left out.

The recorder sits between the engine and its selector, rule and backend and changes nothing: the tokens are those of an
unrecorded run. A study tool: it reads every set back to the host, which a round never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dustin.config import RequestOptions
from dustin.errors import NumericsError, UsageError
from dustin.generation import Session
from dustin.interfaces import (
    AcceptanceRule,
    Array,
    Backend,
    ChoosingModel,
    Drafts,
    HostVerdict,
    KVCache,
    Measures,
    SelectionContext,
    Selector,
    Tap,
    TokenSet,
    Verdict,
)
from dustin.stats import Stats

VERSION = 1
# Why a token is read, in the order in which a token is claimed.
SOURCES = ("sink", "recent", "draft", "target")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class Round:
    """One verification. `length` committed or provisional tokens before it; `kept` source -> ascending positions, or None: all.

    `own` has, for each layer that reads other tokens, those: of all its heads, or of each kv head; None: all. `check` marks the
    dense check of a block (mode exact). `recovery` has, for each layer, the share of dense attention (of the rows that were kept,
    over the tokens before the round) that falls into the set it reads.
    """

    length: int
    kept: dict[str, list[int]] | None
    check: bool = False
    drafted: int = 0
    accepted: int = 0
    tail: tuple[int, ...] = ()
    recovery: list[float] | None = None
    own: dict[int, list[list[int]] | None] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """All positions read."""
        return list(range(self.length)) if self.kept is None else sorted(i for part in self.kept.values() for i in part)


@dataclass
class Trace:
    """A recorded run: `tokens` are the prompt and the answer, `pieces` their text, token by token."""

    info: dict[str, Any]
    tokens: list[int]
    pieces: list[str]
    prompt_tokens: int
    text: str
    rounds: list[Round] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; positions as `packed` writes them."""
        return {
            "version": VERSION,
            "info": self.info,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "pieces": self.pieces,
            "sources": list(SOURCES),
            "rounds": [
                {
                    "length": r.length,
                    "kept": None if r.kept is None else {name: packed(part) for name, part in r.kept.items()},
                    "check": r.check,
                    "drafted": r.drafted,
                    "accepted": r.accepted,
                    "recovery": r.recovery,
                    "own": {layer: None if sets is None else [packed(part) for part in sets] for layer, sets in r.own.items()},
                }
                for r in self.rounds
            ],
        }


def packed(positions: Sequence[int]) -> str:
    """Ascending positions as base-36 differences with commas; `~n` continues a run of n more neighbours: 4 5 6 9 is `4~2,3`."""
    out: list[str] = []
    last, run = 0, 0
    for position in [*positions, None]:
        if position is not None and out and position == last + 1:
            run, last = run + 1, position
            continue
        if run:
            out[-1] += "~" + base36(run)
        if position is not None:
            out.append(base36(position - last))
            last, run = position, 0
    return ",".join(out)


def unpacked(text: str) -> list[int]:
    """The positions that `packed` wrote."""
    out: list[int] = []
    last = 0
    for part in text.split(",") if text else []:
        first, _, run = part.partition("~")
        start = last + int(first, 36)
        last = start + (int(run, 36) if run else 0)
        out += range(start, last + 1)
    return out


def base36(number: int) -> str:
    """A number of 0 or more in digits and small letters, as JavaScript's parseInt reads it."""
    out = ""
    while number or not out:
        number, digit = divmod(number, 36)
        out = _DIGITS[digit] + out
    return out


class _Recording:
    """Passes everything on to `inner`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _SelectingBackend(_Recording):
    """Notes the first quota rule of a selection: its arguments tell which tokens the draft chose."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.call: tuple[tuple[Any, ...], dict[str, int]] | None = None

    def select(self, *args: Any, **options: int) -> TokenSet:
        """See Backend.select."""
        if self.call is None:
            self.call = (args, options)
        return cast(TokenSet, self._inner.select(*args, **options))


class _RecordingSelector(_Recording):
    def __init__(self, inner: Selector, note: Callable[[SelectionContext, TokenSet | None, Any], None]) -> None:
        super().__init__(inner)
        self._note = note

    def select(self, context: SelectionContext) -> TokenSet | None:
        """See Selector.select."""
        backend = _SelectingBackend(context.backend)
        chosen = cast("TokenSet | None", self._inner.select(replace(context, backend=cast(Backend, backend))))
        if not context.repeat:
            self._note(context, chosen, backend.call)
        return chosen


class _RecordingBackend(_Recording):
    """Sees the one read of each verification."""

    def __init__(self, inner: Backend, note: Callable[[HostVerdict], None]) -> None:
        super().__init__(inner)
        self._note = note

    def read(self, verdict: Verdict, logits: Array | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """See Backend.read."""
        host = cast(HostVerdict, self._inner.read(verdict, logits, top_logprobs))
        self._note(host)
        return host


class _RecordingRule(_Recording):
    def __init__(self, inner: AcceptanceRule, note: Callable[[Drafts], None]) -> None:
        super().__init__(inner)
        self._note = note

    def judge(self, backend: Backend, drafts: Drafts, *args: Any) -> Verdict:
        """See AcceptanceRule.judge."""
        self._note(drafts)
        return cast(Verdict, self._inner.judge(backend, drafts, *args))


class Recorder:
    """Records one run of one sequence."""

    def __init__(self, session: Session, prompt: Any, request: RequestOptions) -> None:
        self._run = run = session._start([prompt], [request])
        self._engine, self._session = run.engine, session
        self.rounds: list[Round] = []
        self._open: Round | None = None
        self._drafted = 0
        engine, row = run.engine, run.rows[0]
        if row.prompt_length + row.limit <= engine.options.budget:
            raise self._nothing_chosen()
        engine.memory.selector = cast(Selector, _RecordingSelector(engine.selector, self._selected))
        engine.rule = cast(AcceptanceRule, _RecordingRule(engine.rule, self._judged))
        engine.backend = cast(Backend, _RecordingBackend(engine.backend, self._read))

    @property
    def stats(self) -> Stats:
        """Counters of the run."""
        return self._run.stats

    def run(self, progress: Callable[[int, int], None] | None = None, on_text: Callable[[str], None] | None = None) -> Trace:
        """Generate to the end. Raise NumericsError on NaN logits, UsageError where no round read a chosen set."""
        row = self._run.rows[0]
        text = ""
        for event in self._run.events(progress):
            text += event.text
            if on_text is not None:
                on_text(event.text)
        self._run.finish()
        if row.error:
            raise NumericsError(row.error)
        options, stats = self._engine.options, self._run.stats
        if not any(r.kept is not None for r in self.rounds):
            raise self._nothing_chosen()
        target, draft = self._session.target.spec, self._session.draft
        info = {
            "model": target.name,
            "draft": draft.spec.name if draft is not None else None,
            "mode": options.mode,
            "drafter": options.drafter,
            "selector": options.selector,
            "budget": options.budget,
            "num_layers": target.num_layers,
            "scoring": stats.scoring,
            "finish_reason": row.finish_reason,
            "stats": stats.as_dict(),
        }
        tokens = row.tokens[: row.committed]
        return Trace(info, tokens, pieces(self._session, tokens), row.prompt_length, text, self.rounds)

    def measure_recovery(self, trace: Trace, most: int) -> None:
        """Fill `recovery` of up to `most` rounds, spread evenly: their rows are computed again densely, with all queries."""
        row, model, backend = self._run.rows[0], self._session.target, self._session.backend
        fits = [r for r in trace.rounds if r.kept is not None and self._holds(r, trace.tokens)]
        if not fits or most < 1:
            return
        wanted = {id(fits[i * (len(fits) - 1) // max(1, most - 1)]) for i in range(most)} if len(fits) > most else {*map(id, fits)}
        layers = [i for i in range(model.spec.num_layers) if i not in set(model.spec.sliding_layers)]
        every = Tap({layer: tuple(range(model.spec.num_heads)) for layer in layers})
        # From the last round to the first, so that one copy of the cache is only ever shortened.
        cache = self._run.cache.take([row.row], capacity=len(trace.tokens) + 1)
        for r in sorted((r for r in fits if id(r) in wanted), key=lambda r: -r.length):
            cache.rollback([r.length])
            fed = trace.tokens[r.length : r.length + 1 + r.accepted]
            out = model.forward(backend.tokens([fed]), [len(fed)], cache, tap=every, logits="none")
            r.recovery = [0.0] * model.spec.num_layers
            for layer in layers:
                r.recovery[layer] = round(self._recovered(r, layer, out.queries[layer], cache), 4)

    def _recovered(self, r: Round, layer: int, queries: Array, cache: KVCache) -> float:
        """The share of the layer's dense attention by these queries of all its heads that falls into what it read."""
        read = r.own.get(layer, [r.positions])
        if read is None:
            return 1.0
        model, backend = self._session.target, self._session.backend
        every = Tap({layer: tuple(range(model.spec.num_heads))})
        group, held, whole = model.spec.num_heads // len(read), 0.0, 0.0
        for kv, part in enumerate(read):
            tap, mine = Tap({layer: tuple(range(kv * group, (kv + 1) * group))}), {layer: queries}
            if len(read) > 1:  # Backends whose kv heads choose can measure.
                mine = dict(cast(Measures, backend).narrow_queries(mine, every, tap))
            mass = backend.score(mine, tap, model, cache, [r.length])[0, : r.length].tolist()
            held, whole = held + sum(mass[i] for i in part), whole + sum(mass)
        return min(1.0, held / max(whole, 1e-30))

    # Inside.

    def _nothing_chosen(self) -> UsageError:
        options, row = self._engine.options, self._run.rows[0]
        if row.prompt_length > options.budget and (options.mode != "dense" or options.drafter == "self"):
            return UsageError(
                f"no round of mode {options.mode!r} chose tokens to read: the answer ended after {len(row.generated)} tokens; "
                "give a larger --max-tokens, or another question"
            )
        return UsageError(
            f"no round of mode {options.mode!r} chooses tokens to read: the prompt has {row.prompt_length} tokens and the "
            f"budget is {options.budget}; give a longer document or a smaller --budget, and a mode that reads sparsely"
        )

    def _selected(self, context: SelectionContext, chosen: TokenSet | None, call: Any) -> None:
        length = context.lengths[0]
        tail = tuple(self._engine.rows[0].tokens[self._run.rows[0].prompt_length :])
        kept = None if chosen is None else self._kept(context.backend, chosen, call, length)
        self._open = Round(length, kept, tail=tail, own={} if chosen is None else self._own(context, chosen))

    def _own(self, context: SelectionContext, chosen: TokenSet) -> dict[int, list[list[int]] | None]:
        """What layers read in place of the shared set. Those that choose in the forward do so by queries which a forward of the
        same rows makes here before the engine's: it writes nothing that stays."""
        own: dict[int, list[list[int]] | None] = dict.fromkeys(chosen.dense_layers)
        own |= {layer: [_host_row(part)] for layer, part in chosen.by_layer.items()}
        again, model, cache = chosen.reselection, context.target, context.target_cache
        if again is None or not again.heads or not isinstance(model, ChoosingModel):
            return own
        tap, before = Tap({layer: tuple(range(model.spec.num_heads)) for layer in again.heads}), cache.lengths
        out = model.forward(context.inflight, context.num_inflight, cache, token_set=chosen, tap=tap, logits="none")
        cache.rollback(before)
        made = model.chosen_sets(out.queries, context.num_inflight, cache, chosen)
        last: list[list[int]] | None = None
        for layer in range(model.spec.num_layers):
            if layer in made:
                last = own[layer] = [_host_row(part) for part in made[layer]]
            elif again.reuse and last is not None and layer not in own and layer not in model.spec.sliding_layers:
                own[layer] = last
        return dict(sorted(own.items()))

    def _kept(self, backend: Backend, chosen: TokenSet, call: Any, length: int) -> dict[str, list[int]]:
        """The set by source. The draft's own choice is what the same rule takes when its budget ends after the draft's share."""
        kept = _host_row(chosen)
        options = self._engine.options
        sinks = {i for i in kept if i < options.num_sink_tokens}
        recent = {i for i in kept if i >= length - options.num_recent_tokens} - sinks
        by_draft: set[int] = set()
        if call is not None:
            (target, draft, lengths), quota = call
            share = quota["num_draft_selected"]
            if draft is not None and target is None:
                by_draft = set(kept)
            elif draft is not None and share:
                protected = quota["num_sink_tokens"] + quota["num_recent_tokens"]
                by_draft = set(_host_row(backend.select(None, draft, lengths, **(quota | {"budget": protected + share}))))
        parts = dict.fromkeys(sinks, "sink") | dict.fromkeys(recent, "recent")
        names = {i: parts.get(i) or ("draft" if i in by_draft else "target") for i in kept}
        return {name: [i for i in kept if names[i] == name] for name in SOURCES}

    def _judged(self, drafts: Drafts) -> None:
        self._drafted = drafts.num_drafts[0]

    def _read(self, host: HostVerdict) -> None:
        engine = self._engine
        row = engine.rows[0]
        if row.committed == row.prompt_length:
            return  # The first token belongs to the prefill.
        open_round, self._open = self._open, None
        if open_round is None:
            check = engine.chosen.mode == "exact"
            open_round = Round(row.committed - 1, None, check=check)
        open_round.drafted, open_round.accepted = self._drafted, host.num_accepted[0]
        self.rounds.append(open_round)

    def _holds(self, r: Round, tokens: Sequence[int]) -> bool:
        """Whether what the round had before it, provisional tokens included, and what it kept is in the final text."""
        start = self._run.rows[0].prompt_length
        return r.length + 1 + r.accepted <= len(tokens) and list(r.tail) == list(tokens[start : start + len(r.tail)])


def _host_row(token_set: TokenSet) -> list[int]:
    """Positions of the first sequence. Arrays of every backend have `tolist`."""
    count = int(token_set.counts.tolist()[0])
    return [int(i) for i in token_set.indices.tolist()[0][:count]]


def pieces(session: Session, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character of several tokens belongs to the one that completes it, special tokens are shown."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    out: list[str] = []
    held = b""
    for token in tokens:
        if token in tokenizer.special_ids:
            out.append(tokenizer.decode([token], skip_special_tokens=False))
            continue
        held += tokenizer.token_bytes(token)
        try:
            out.append(held.decode())
            held = b""
        except UnicodeDecodeError as error:
            # Bytes that can never become a character are given up; an unfinished character waits for the next token.
            if error.reason != "unexpected end of data" or len(held) > 4:
                out.append(held.decode(errors="replace"))
                held = b""
            else:
                out.append("")
    return out
