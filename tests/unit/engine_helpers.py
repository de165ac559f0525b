"""Small random models on the numpy backend, scripted drafters and references for engine tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from dustin.acceptance import SpeculativeAcceptance
from dustin.backends.numpy_reference.backend import create
from dustin.backends.numpy_reference.model import ModelConfig, random_model
from dustin.config import EngineOptions, RequestOptions
from dustin.drafting import ModelDrafter, NoDrafter, SelfDrafter
from dustin.engine import Engine
from dustin.interfaces import Drafter, Drafts, KVCache, Model, RoundState
from dustin.lookup import LookupDrafter
from dustin.selection import create_selector, draft_tap, heuristic
from dustin.sequence import Event
from dustin.sequence import Sequence as Row
from dustin.stats import Stats

VOCAB = 48
# From so many copies of one prompt on, it is read once: the laws of sampling want hundreds.
MANY = 8
backend = create("cpu")


@cache
def target() -> Model:
    """Three layers, 4 query heads on 2 kv heads."""
    return random_model(tiny(), seed=1)


@cache
def draft() -> Model:
    """Another random model of the same vocabulary."""
    return random_model(tiny(num_layers=2), seed=2)


def tiny(num_layers: int = 3) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        context_length=512,
    )


@cache
def greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Plain greedy decoding, one token a forward, on a fresh cache: the reference of every lossless mode."""
    model = target()
    store = model.new_cache(1, len(prompt) + count + 1)
    out = model.forward(backend.tokens([list(prompt)]), [len(prompt)], store, logits="last")
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model.forward(backend.tokens([[tokens[-1]]]), [1], store, logits="last")
    return tuple(tokens)


class ScriptedDrafter(NoDrafter):
    """Drafts the true greedy continuation, wrong where `is_wrong(row, position)`: acceptance of any pattern."""

    name = "scripted"

    def __init__(self, is_wrong: Callable[[int, int], bool], count: int) -> None:
        self._is_wrong = is_wrong
        self._count = count
        self._prompts: list[tuple[int, ...]] = []

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: object) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]

    def propose(self, state: RoundState) -> Drafts:
        found = []
        for row, (tokens, most, on) in enumerate(zip(state.tokens, state.num_drafts, state.active, strict=True)):
            true = greedy(self._prompts[row], self._count)
            at = len(tokens) - len(self._prompts[row])
            span = true[at : at + most] if on else ()
            found.append([(t + 1) % VOCAB if self._is_wrong(row, at + i) else t for i, t in enumerate(span)])
        counts = tuple(len(row) for row in found)
        return Drafts(backend.tokens(found) if any(counts) else None, counts)


PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "none accepted": lambda row, at: True,
    "half": lambda row, at: at % 2 == 0,
    "all": lambda row, at: False,
    "by row": lambda row, at: (at + row) % (row + 1) != 0,
}


def make_engine(options: EngineOptions, drafter: str | Drafter = "draft") -> Engine:
    stats = Stats()
    made: dict[str, Callable[[], Drafter]] = {
        "draft": lambda: ModelDrafter(backend, draft(), draft_tap(draft().spec), options, stats),
        "self": lambda: SelfDrafter(backend, target(), options, stats),
        "lookup": lambda: LookupDrafter(backend),
        "none": NoDrafter,
    }
    chosen = made[drafter]() if isinstance(drafter, str) else drafter
    selector = create_selector(options, heuristic(target().spec, draft().spec), target().spec)
    return Engine(backend, target(), chosen, selector, SpeculativeAcceptance(), selector.tap, options, stats)


def read_once(model: Model, tokens: Sequence[int], rows: int, capacity: int) -> KVCache:
    """A cache of `rows` sequences that all begin with these tokens. A batch computes what a single one does, bit for bit."""
    one = model.new_cache(1, capacity)
    model.forward(backend.tokens([tokens]), [len(tokens)], one, logits="none")
    return one.take([0] * rows)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[RequestOptions] | RequestOptions,
    eos: frozenset[int] = frozenset(),
    sinks: Sequence[object] | None = None,
) -> tuple[list[Row], list[Event]]:
    """Run to the end; rows and all events."""
    if isinstance(requests, RequestOptions):
        requests = [requests] * len(prompts)
    rows = [
        Row(i, prompt, request, request.max_tokens, eos, sinks[i] if sinks else None)  # type: ignore[arg-type]
        for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    capacity = max(len(row.tokens) + row.limit for row in rows) + engine.options.num_draft_tokens + 1
    if len(rows) > MANY and all(row.tokens == rows[0].tokens for row in rows):
        cache = read_once(target(), rows[0].tokens[:-1], len(rows), capacity)
        if isinstance(engine.drafter, ModelDrafter):
            engine.drafter.resume(read_once(draft(), rows[0].tokens[:-1], len(rows), capacity + engine.options.num_draft_tokens))
    else:
        cache = target().new_cache(len(rows), capacity)
    events = engine.start(rows, cache)
    while engine.active:
        events += engine.step()
    return rows, events
