"""The Python API: `load` a model (and a draft), then `generate`, `stream_generate` or `batch_generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dustin import cost_model, prompt_cache
from dustin.acceptance import RelaxedAcceptance, SpeculativeAcceptance
from dustin.async_api import Worker
from dustin.config import EngineOptions, RequestOptions, require
from dustin.drafting import ModelDrafter, NoDrafter, SelfDrafter
from dustin.engine import Engine
from dustin.errors import ContextLengthError, MemoryLimitError, NumericsError, UsageError
from dustin.evidence import PriceList
from dustin.interfaces import Backend, Drafter, KVCache, Model, TokenLogprobs
from dustin.lookup import LookupDrafter
from dustin.prefill import chunk_of
from dustin.profile_file import scoring_of
from dustin.resolving import resolve
from dustin.responses import GenerationResponse, GenerationResult
from dustin.scoring import Scoring
from dustin.selection import create_selector, prepare, usable, with_fidelity
from dustin.sequence import Event, Sequence, TextSink
from dustin.stats import Stats
from dustin.text import TextStream, Tokenizer, check_compatible, prompt_items
from dustin.warm_up import slot_context, warm_up

Prompt = str | Seq[int] | Seq[dict[str, str]]
Progress = Callable[[int, int], None]
AnyEngine = TypeVar("AnyEngine", bound=Engine)


class Session:
    """A loaded model, its draft and tokenizer. One batch runs at a time.

    With `prefix_cache` the KV of the last single conversation is kept, the draft's too, and a prompt that continues it reads
    only what is new; rows that sparse attention wrote are read again densely, so the answer equals a cold run's.
    """

    def __init__(
        self,
        backend: Backend,
        target: Model,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        draft: Model | None = None,
    ) -> None:
        self.backend = backend
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.options = options
        self.prefix_cache = False
        self._prices = PriceList()
        self._scorings: dict[tuple[str, bool], Scoring] = {}
        # side ("target", "draft") -> tokens whose KV is kept, and the cache that holds them
        self._kept: dict[str, tuple[list[int], KVCache]] = {}
        self._worker = Worker()

    # Calls.

    def generate(self, prompt: Prompt, request: RequestOptions | None = None, progress: Progress | None = None) -> GenerationResult:
        """Generate to the end. Raise NumericsError on NaN logits, ContextLengthError when the prompt does not fit."""
        result = self.batch_generate([prompt], [request or RequestOptions()], progress)[0]
        if result.error:
            raise NumericsError(result.error)
        return result

    def stream_generate(
        self, prompt: Prompt, request: RequestOptions | None = None, progress: Progress | None = None
    ) -> Generator[GenerationResponse, None, None]:
        """Generate token by token. Closing the iterator ends the request and keeps what was committed."""
        run = self._start([prompt], [request or RequestOptions()])
        try:
            for event in run.events(progress):
                if event.finish_reason == "error":
                    raise NumericsError(run.rows[0].error or "NaN logits")
                yield self._response(event, run)
        finally:
            self._keep(run)

    def batch_generate(
        self, prompts: Seq[Prompt], requests: Seq[RequestOptions] | RequestOptions, progress: Progress | None = None
    ) -> list[GenerationResult]:
        """Generate for several prompts at once, each with its own request; greedy rows equal their single runs."""
        if isinstance(requests, RequestOptions):
            requests = [requests] * len(prompts)
        require("prompts", prompts, not isinstance(prompts, (str, bytes)), "a list of prompts: put one prompt in a list")
        if len(requests) != len(prompts):
            raise UsageError(f"{len(requests)} requests for {len(prompts)} prompts, expected one each or one for all")
        if not prompts:
            return []
        run = self._start(prompts, requests)
        texts: list[list[str]] = [[] for _ in prompts]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in prompts]
        for event in run.events(progress):
            texts[event.row].append(event.text)
            if event.logprobs is not None:
                logprobs[event.row].append(event.logprobs)
        self._keep(run)
        return [
            GenerationResult(
                "".join(texts[row.row]), row.generated, row.finish_reason or "error", logprobs[row.row], run.stats, row.error
            )
            for row in run.rows
        ]

    async def agenerate(
        self, prompt: Prompt, request: RequestOptions | None = None, progress: Progress | None = None
    ) -> GenerationResult:
        """`generate`, awaited: the same result and errors. See `astream_generate`."""
        result = GenerationResult("", [], "error")
        async for response in self.astream_generate(prompt, request, progress):
            result.text += response.text
            result.tokens.append(response.token)
            result.finish_reason, result.stats = response.finish_reason or "error", response.stats
            if response.logprobs is not None:
                result.logprobs.append(response.logprobs)
        return result

    def astream_generate(
        self, prompt: Prompt, request: RequestOptions | None = None, progress: Progress | None = None
    ) -> AsyncGenerator[GenerationResponse, None]:
        """`stream_generate`, awaited token by token while the steps (and `progress`) run in a worker thread.

        Calls on one session wait for one another. Cancelling the task, or closing the iterator (`contextlib.aclosing`; a
        `break` alone leaves that to the event loop), ends the request after the step it is in and keeps what was committed.
        """
        return self._worker.stream(lambda: self.stream_generate(prompt, request, progress))

    def resolve(self, *requests: RequestOptions) -> EngineOptions:
        """The options with every `auto` of drafter and lag replaced. Raise UsageError for a combination that cannot work."""
        return resolve(self.options, self.draft is not None, requests)

    def warm_up(self, batch: int = 1, context: int | None = None) -> float:
        """Compile and record now what calls would wait for; returns the seconds it took.

        For calls with `batch` prompts of about `context` tokens with their answers (None: what the models hold). Nothing of it
        shows in prompts, kept KV, statistics or seeds. On a backend that neither compiles nor records it is time for nothing.
        """
        options = self.resolve()
        room = slot_context(self, options)
        require("batch", batch, isinstance(batch, int) and batch >= 1, "1 or more prompts")
        fits = context is None or (isinstance(context, int) and 2 <= context <= room)
        require("context", context, fits, f"2 to {room} tokens")
        return warm_up(self, options, batch, context or room, (chunk_of(options.prefill_chunk, self.backend, batch),))

    def forget(self) -> None:
        """Drop the KV that `prefix_cache` kept."""
        self._kept.clear()

    def save_kept(self, path: str | Path) -> int:
        """Write the KV that `prefix_cache` kept to a file, whole or not at all; returns its bytes (0: nothing was kept)."""
        return prompt_cache.save(Path(path), self._kept, self._models(), self.tokenizer)

    def load_kept(self, path: str | Path) -> int:
        """Take up what `save_kept` wrote; returns its tokens. Raise UsageError for a file of another model, dtype or tokenizer."""
        self.prefix_cache = True
        self._kept = prompt_cache.load(Path(path), self._models(), self.tokenizer)
        return len(self._kept["target"][0]) if "target" in self._kept else 0

    def _models(self) -> dict[str, Model]:
        return {"target": self.target} | ({"draft": self.draft} if self.draft is not None else {})

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a raw string, of chat messages (through the model's template), or of ids themselves.

        Raise UsageError for anything else.
        """
        if isinstance(prompt, str):
            return list(self._need_tokenizer().encode(prompt))
        given = prompt_items(prompt)
        if given and isinstance(given[0], dict):
            return list(self._need_tokenizer().apply_chat_template(given))
        return [int(token) for token in given]

    # Inside.

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError("this session has no tokenizer: pass token ids")
        return self.tokenizer

    def _start(self, prompts: Seq[Prompt], requests: Seq[RequestOptions], cache: KVCache | None = None) -> Run:
        for request in requests:
            require("request", request, isinstance(request, RequestOptions), "RequestOptions(...)")
        options = self.resolve(*requests)
        stats = Stats(mode=options.mode, drafter=options.drafter, selector=options.selector)
        ids = [self.encode(prompt) for prompt in prompts]
        rows = [
            Sequence(row, tokens, request, self._limit(tokens, request, options, stats), self._eos(), self._sink(request))
            for row, (tokens, request) in enumerate(zip(ids, requests, strict=True))
        ]
        capacity = max(row.prompt_length + row.limit for row in rows)
        engine = self.make_engine(Engine, options, stats)
        # A selector that looks at the prompt's last rows reads those again.
        again = max(engine.selector.prompt_rows, engine.selector.history_rows)
        cache = cache or self._cache(self.target, "target", ids, capacity, options.max_kv_size, again)
        drafter = engine.drafter
        if isinstance(drafter, ModelDrafter) and self.prefix_cache and len(ids) == 1 and self.draft is not None:
            room = min(capacity + options.num_draft_tokens, self.draft.spec.context_length)
            drafter.resume(self._cache(self.draft, "draft", ids, room))
        return Run(engine, rows, cache, stats, self.backend)

    def make_engine(self, kind: type[AnyEngine], options: EngineOptions, stats: Stats) -> AnyEngine:
        """An engine of this kind over the session's models, with options as `resolve` gives them."""
        scoring = with_fidelity(options, self._scoring(options), self.target)
        scoring = scoring if kind.pools else replace(scoring, refresh=1)
        selector = create_selector(options, scoring, self.target.spec)
        drafter = self._drafter(options, stats, scoring)
        if options.mode in ("sparse", "rectified", "exact", "auto") or drafter.name == "self":
            # Others read no sets: they do not wait for compact keys to be fitted.
            prepare(selector, self.target, self.tokenizer)
            stats.scoring = getattr(selector, "describe", scoring.describe)(drafter.tap is not None)
        lossy = options.relaxed_weight or options.route_confidence
        rule = RelaxedAcceptance(options.relaxed_weight, options.route_confidence) if lossy else SpeculativeAcceptance()
        engine = kind(self.backend, self.target, drafter, selector, rule, selector.tap, options, stats)
        if engine.planner is not None:
            engine.planner.prices = self._prices  # What rounds cost is the machine's, not the request's.
            if drafter.name not in self._prices.cards:
                card, draft = getattr(self.backend, "card", ""), self.draft.spec if self.draft is not None else None
                self._prices.cards[drafter.name] = cost_model.find(card, self.target.spec, draft, drafter.name)
        return engine

    def _scoring(self, options: EngineOptions) -> Scoring:
        """The pair's scoring heads: its profile's, or the heuristic."""
        high = ", high fidelity" if options.fidelity == "high" else ""
        key = (options.profile + high, options.drafter == "draft")
        if key not in self._scorings:
            scoring = scoring_of(options, self.target.spec, self.draft.spec if key[1] and self.draft else None)
            if getattr(self.backend, "scores_all", False):
                scoring = replace(scoring, refresh=1)
            self._scorings[key] = usable(scoring, self.target, self.tokenizer)
        return self._scorings[key]

    def _drafter(self, options: EngineOptions, stats: Stats, scoring: Scoring) -> Drafter:
        if options.drafter == "draft" and self.draft is not None:
            return ModelDrafter(self.backend, self.draft, scoring.draft, options, stats)
        if options.drafter == "self":
            return SelfDrafter(self.backend, self.target, options, stats)
        return LookupDrafter(self.backend) if options.drafter == "lookup" else NoDrafter()

    def _limit(self, prompt: list[int], request: RequestOptions, options: EngineOptions, stats: Stats) -> int:
        """Tokens this request may generate: max_tokens, or what the contexts (of target and draft) leave."""
        if not prompt:
            raise UsageError("the prompt is empty: give at least one token of text")
        vocab = self.target.spec.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise UsageError(f"prompt token {wrong} is outside the vocabulary of {vocab} tokens")
        rooms = {f"the context of {self.target.spec.name}": self.target.spec.context_length}
        if options.drafter == "draft" and self.draft is not None:
            rooms[f"the context of draft {self.draft.spec.name}"] = self.draft.spec.context_length - options.num_draft_tokens
        if options.max_kv_size is not None:
            rooms["--max-kv-size"] = options.max_kv_size
        what, room = min(rooms.items(), key=lambda item: item[1])
        if len(prompt) >= room:
            fits = max(room - 1, 0)
            larger = "raise it" if what == "--max-kv-size" else "use a model with a longer context"
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but {what} leaves room for {fits}: shorten the prompt or {larger}"
            )
        left = room - len(prompt)
        if request.max_tokens > left:
            stats.warnings.append(f"max_tokens lowered from {request.max_tokens} to {left} by {what} ({room} tokens)")
        return min(request.max_tokens, left)

    def _eos(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_ids) if self.tokenizer is not None else frozenset()

    def _sink(self, request: RequestOptions) -> TextSink | None:
        if self.tokenizer is None:
            if request.stop:
                raise UsageError("stop strings need a tokenizer, and this session has none")
            return None
        return TextStream(self.tokenizer, request.stop)

    def _cache(
        self, model: Model, side: str, ids: list[list[int]], capacity: int, most: int | None = None, again: int = 1
    ) -> KVCache:
        """A cache for these prompts: the kept one of the conversation (grown where it is too small), or an empty one."""
        context = model.spec.context_length
        # A conversation grows: room for the next turns saves copying it.
        roomy = min(2 * capacity, max(capacity, min(context, most or context))) if self.prefix_cache else capacity
        kept = self._kept.pop(side, None)
        if kept is not None and self.prefix_cache and len(ids) == 1:
            try:
                return prompt_cache.continued(*kept, ids[0], again, capacity, roomy)
            except MemoryLimitError:
                pass  # Two copies do not fit: read again into one.
        kept = None
        try:
            return model.new_cache(len(ids), roomy)
        except MemoryLimitError:
            if roomy == capacity:
                raise
            return model.new_cache(len(ids), capacity)

    def _keep(self, run: Run) -> None:
        """After a single request: the rows that a cold run would have too. A draft that took no part keeps its older ones."""
        run.finish()
        if not self.prefix_cache or len(run.rows) != 1 or run.rows[0].finish_reason == "error":
            return
        row, drafter = run.rows[0], run.engine.drafter
        self._kept["target"] = (row.tokens[: min(row.dense_rows, *run.cache.lengths)], run.cache)
        if isinstance(drafter, ModelDrafter) and drafter.cache is not None:
            self._kept["draft"] = (row.tokens[: min(*drafter.dense_rows, *drafter.cache.lengths)], drafter.cache)

    def _response(self, event: Event, run: Run) -> GenerationResponse:
        stats = run.stats
        return GenerationResponse(
            event.text,
            event.token,
            event.from_draft,
            stats.prompt_tokens,
            stats.prompt_tps,
            len(run.rows[event.row].generated),
            stats.generation_tps,
            stats.peak_memory_bytes / 1e9,
            event.finish_reason,
            event.logprobs,
            stats,
        )


@dataclass
class Run:
    """One batch on its way."""

    engine: Engine
    rows: list[Sequence]
    cache: KVCache
    stats: Stats
    backend: Backend

    def events(self, progress: Progress | None) -> Generator[Event, None, None]:
        """All events in order of commitment."""
        events = self.engine.start(self.rows, self.cache, progress)
        self.stats.peak_memory_bytes = self.backend.peak_memory_bytes()
        yield from events
        while self.engine.active:
            events = self.engine.step()
            self.stats.peak_memory_bytes = self.backend.peak_memory_bytes()
            yield from events

    def finish(self) -> None:
        """Drop provisional tokens of a run that was cut short."""
        for row in self.rows:
            del row.tokens[row.committed :]


def load(
    model: str | None = None,
    draft_model: str | None = None,
    *,
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    options: EngineOptions | None = None,
) -> Session:
    """Load a target (and a draft): a known name, a hub id, a folder of safetensors or a .gguf file; None is the default model.

    Raise ModelError when a model cannot be found or read, TokenizerMismatch naming the first differing token.
    """
    from dustin import models, registry

    require("options", options, options is None or isinstance(options, EngineOptions), "EngineOptions(...)")
    engine = registry.create(backend, device)
    source = models.resolve(models.DEFAULT if model is None else model)
    draft_source = models.resolve(draft_model) if draft_model is not None else None
    tokenizer = Tokenizer.load(source)
    if draft_source is not None:
        check_compatible(tokenizer, Tokenizer.load(draft_source))
    target = engine.load(source, dtype=dtype)
    draft = engine.load(draft_source, dtype=dtype, role="draft") if draft_source is not None else None
    if draft is not None:
        # Padded vocabularies differ in size between models of one family; the shared tokens are what counts.
        shared = min(target.spec.vocab_size, draft.spec.vocab_size)
        target.limit_vocabulary(shared)
        draft.limit_vocabulary(shared)
    return Session(engine, target, tokenizer, options or EngineOptions(), draft)


def generate(prompt: Prompt, model: str | None = None, draft_model: str | None = None, **request: Any) -> GenerationResult:
    """One call: load, generate, return. Keyword arguments are those of RequestOptions."""
    return load(model, draft_model).generate(prompt, RequestOptions(**request))
