"""Warming up: rounds over made-up tokens at the shapes of the real ones, so that nobody waits while kernels compile and graphs
are recorded. Engine, caches and counts are its own and are dropped: what stays is what the backend compiled and recorded."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.errors import DustinError
from dustin.planning import few_drafts
from dustin.plans import Plan
from dustin.prefill import chunk_of, shared_chunk
from dustin.sequence import Sequence
from dustin.slots import SlotEngine
from dustin.stats import Stats

if TYPE_CHECKING:
    from dustin.generation import Session

# A call is recorded when it comes for the third time; one round more replays it.
_ROUNDS, _BLOCKS = 4, 2
# Chunks of a prompt up to this many tokens are recorded at once, in powers of two; larger ones may be, and compile kernels.
_SMALL_CHUNK = 64
# Contexts that scores are met at: each double the one before, up to this many tokens.
_LONGEST = 32768
_SHORT = 16
# Scores of so many tokens are an even number of programs' work, and so many tokens before that end they are still met.
_EVEN, _BEFORE = 8192, 48
# A wait for the warm-up that is longer is explained.
_PATIENCE_SECONDS = 0.7


def plans_of(options: EngineOptions, drafter: str, greedy: bool) -> list[EngineOptions]:
    """What rounds may be asked to do: plain ones, which end a text, and the mode with its drafts; for `auto` dense ones with the
    numbers of drafts that it tries. The last is what most rounds do."""
    plain, drafts = replace(options, mode="ar"), few_drafts(options.num_draft_tokens)
    if options.mode != "auto":
        return [plain, options] if options.mode != "ar" else [options]
    if drafter == "none" or not (greedy or drafter == "draft"):
        return [plain]
    # What is drawn from a seed is never planned: it drafts as many as there may be.
    numbers = drafts if greedy else [options.num_draft_tokens]
    return [plain, *(replace(options, mode="dense", num_draft_tokens=n) for n in numbers)]


def warm_up(
    session: Session,
    options: EngineOptions,
    slots: int,
    context: int,
    chunks: tuple[int, ...] = (),
    going: Callable[[], bool] = lambda: True,
) -> float:
    """Run prompts and rounds of `slots` sequences over caches of `context` tokens; returns the seconds it took.

    `options` are resolved ones, `chunks` the larger pieces that prompts are read in. Stops between two calls once `going` is false.
    Raise MemoryLimitError where the caches do not fit.
    """
    began = time.perf_counter()
    for greedy in (True, False):
        engine = session.make_engine(SlotEngine, options, Stats())
        # Choosing goes by what was measured, which made-up rounds must not change.
        planner, engine.planner = engine.planner, None
        plans = plans_of(options, engine.drafter.name, greedy)
        if greedy and planner is not None:
            blocks = [(plan.num_draft_tokens, plan.exact_block) for plan in planner.worth_warming([context] * slots)]
            plans += [replace(options, mode="exact", num_draft_tokens=n, exact_block=block) for n, block in blocks]
        engine.options = plans[-1]
        engine.open(session.target.new_cache(slots, context), slots, share=False)
        run = _WarmUp(engine, session.target.spec.vocab_size, 0.0 if greedy else 1.0, going)
        run.read_prompts(sorted({*doubles(max(chunks, default=_SMALL_CHUNK)), *chunks}) if greedy else [])
        length = 2 * options.budget + _SHORT
        # Short contexts have no set, but once there is one it stays.
        for reached in (_SHORT, length):
            for plan in plans:
                run.rounds(plan, reached)
        while greedy and 2 * length <= min(context, _LONGEST):
            length *= 2
            # Compiled, not recorded: graphs of scores are kept for few contexts, and those are for the real ones.
            for plan in plans[1:] or plans:
                # Scores over a long power of two are kernels of their own: also in rounds right before it.
                power = 1 << length.bit_length() - 1
                for reached in (power - _BEFORE, length) if power >= _EVEN else (length,):
                    run.rounds(plan, reached, 1 if plan.mode == "exact" else 2)
        if greedy and planner is not None and going():
            ran = (Plan(plan.mode, plan.num_draft_tokens, plan.exact_block, plan.budget) for plan in plans)
            sizes = {size for plan in ran for size in plan.sizes}
            planner.prices.warm(engine.drafter.name, slots, context, sizes)
        del engine, run, planner
        # The pages are free, for the next caches to find them and the graphs over them.
        gc.collect()
        if not going():
            break
    return time.perf_counter() - began


def doubles(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << n for n in range(most.bit_length())]


def slot_context(session: Session, options: EngineOptions) -> int:
    """Tokens (prompt and answer) that one slot holds: the least of the contexts and --max-kv-size."""
    rooms = [session.target.spec.context_length]
    if options.drafter == "draft" and session.draft is not None:
        rooms.append(session.draft.spec.context_length - options.num_draft_tokens)
    if options.max_kv_size is not None:
        rooms.append(options.max_kv_size)
    return min(rooms)


class WhileWaiting:
    """Warming up in a thread of its own, for one call at a time, while nobody uses the session: until it is done or `stop`ped."""

    def __init__(self, session: Session, context: int) -> None:
        """`context` tokens of prompt and answer, less where the models hold less."""
        self._going = True
        self._thread = threading.Thread(target=self._run, args=(session, context), name="warm-up", daemon=True)
        self._thread.start()

    def _run(self, session: Session, context: int) -> None:
        try:
            options = session.resolve()
            room = min(context, slot_context(session, options))
            chunk = chunk_of(options.prefill_chunk, session.backend, 1)
            warm_up(session, options, 1, room, (chunk,), lambda: self._going)
        except (DustinError, RuntimeError, ValueError):
            pass  # What fails here fails again, and says so, when it is asked for.

    def stop(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Return once the session is free: after the call that is under way, which may compile. `say` is told where that takes."""
        self._going = False
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            say("waiting for kernels that are being compiled ...")
            self._thread.join()


class _WarmUp:
    """Made-up requests of one temperature."""

    def __init__(self, engine: SlotEngine, vocabulary: int, temperature: float, going: Callable[[], bool]) -> None:
        self._engine, self._vocabulary, self._going = engine, vocabulary, going
        self._sampling = SamplingOptions(temperature=temperature)
        self._room = engine.target_cache.capacity

    def _admit(self, slot: int, length: int, tokens: int) -> None:
        tokens = max(1, min(tokens, self._room // 2))
        prompt = [(7 * i + slot) % self._vocabulary for i in range(max(1, min(length, self._room - tokens)))]
        request = RequestOptions(max_tokens=tokens, ignore_eos=True, sampling=self._sampling)
        self._engine.admit(Sequence(slot, prompt, request, tokens, frozenset(), None))

    def _read(self, most: int) -> None:
        while self._going() and self._engine.reading:
            self._engine.read_chunk(most)

    def _release(self) -> None:
        for row in self._engine.rows:
            if row.active or row.reading:
                self._engine.release(row.row)

    def read_prompts(self, chunks: list[int]) -> None:
        """Prompts read in pieces of each size: in their middle and at their end; small pieces also of all slots together."""
        for chunk in chunks:
            # What is not recorded at once is when it comes again; the second prompt ends with a whole piece in any context.
            small = chunk <= _SMALL_CHUNK
            for length in (2 * chunk,) if small else (2 * chunk, chunk) * 2:
                self._read_alike(1, length, chunk)
            slots = len(self._engine.rows)
            if small and slots > 1:
                for length in (chunk, 2 * chunk)[: 1 + (chunk == _SMALL_CHUNK)]:
                    self._read_alike(slots, length, slots * chunk)

    def _read_alike(self, count: int, length: int, most: int) -> None:
        for slot in range(count):
            self._admit(slot, length, 1)
        self._read(most)
        self._release()

    def rounds(self, plan: EngineOptions, length: int, count: int = 0) -> None:
        """Rounds of all slots (as many as recording takes, or `count`), one of which has a prompt of `length` tokens."""
        engine = self._engine
        engine.options = plan
        exact = plan.mode == "exact"
        count = count or (_BLOCKS if exact else _ROUNDS)
        each = max(plan.exact_block if exact else 0, plan.num_draft_tokens) + 1
        for slot in engine.free:
            self._admit(slot, _SHORT if slot else length, (count + 1) * each)
        self._read(shared_chunk(plan.prefill_chunk, engine.backend, len(engine.reading)))
        for _ in range(count):
            if self._going() and engine.active:
                engine.step()
        self._release()
