"""The engine's thread: jobs wait, take a slot, stream their events and leave; one round at a time for all of them."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.errors import DustinError
from dustin.generation import Session
from dustin.interfaces import TokenLogprobs
from dustin.prefill import chunk_between, shared_chunk
from dustin.sequence import Event, Sequence, TextSink
from dustin.serving.failures import RequestFailure, engine_failed, queue_full, stopping, timed_out, unavailable
from dustin.serving.options import ServerOptions
from dustin.slots import SlotEngine
from dustin.stats import Stats
from dustin.warm_up import slot_context, warm_up

# So many failures of the engine in a row end the server: it does not get better by itself.
_MOST_FAILURES = 3


@dataclass
class Job:
    """One sequence asked for. `deliver` is called in the engine's thread with new events, or with None when there will be none.

    `failure` is set before that last call where the job did not finish. With `prompt_top_logprobs` the `prompt_logprobs` are there
    when the first event comes. Times are of time.monotonic.
    """

    prompt: list[int]
    request: RequestOptions
    sink: TextSink | None
    deliver: Callable[[list[Event] | None], None]
    prompt_top_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    created: float = field(default_factory=time.monotonic)
    cached_tokens: int = 0
    sequence: Sequence | None = None
    failure: RequestFailure | None = None
    cancelled: bool = False
    first_at: float | None = None
    last_at: float | None = None

    @property
    def stats(self) -> Stats:
        """Counts of this job's drafts."""
        return self.sequence.stats if self.sequence is not None else Stats()

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.sequence.committed - self.sequence.prompt_length if self.sequence is not None else 0


class Watcher:
    """What the scheduler tells the metrics; this one listens to nothing."""

    def first_token(self, seconds: float) -> None:
        """Time from a job's arrival to its first token."""

    def tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the one before them."""

    def finished(self, outcome: str, seconds: float) -> None:
        """A job ended: stop, length, error, cancelled or timeout."""

    def refused(self) -> None:
        """A request met a full queue."""

    def engine_failure(self) -> None:
        """A step raised."""


class Scheduler:
    """Owns the engine and its thread. `submit`, `cancel`, `drain` and the counts may be called from any thread."""

    def __init__(self, load: Callable[[], Session], options: ServerOptions, watcher: Watcher | None = None) -> None:
        self.options = options
        self.watcher = watcher or Watcher()
        self.session: Session | None = None
        self.engine_options = EngineOptions()
        self.context = 0
        self.stats = Stats()
        self.state = "loading"
        self.error: BaseException | None = None
        self.on_stop: Callable[[], None] = lambda: None
        # Called in the engine's thread after jobs were delivered to.
        self.flush: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda message: None
        self._load = load
        self._engine: SlotEngine | None = None
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._used: dict[int, int] = {}
        self._clock = itertools.count()
        self._failures = 0
        self._durations: deque[float] = deque([1.0], maxlen=16)
        self._advanced = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # Any thread.

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs in slots."""
        return len(self._running)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """KV rows that running jobs hold, and rows there are."""
        engine = self._engine
        if engine is None or engine.cache is None:
            return 0, 0
        lengths = engine.cache.lengths
        return sum(lengths[slot] for slot in list(self._running) if slot < len(lengths)), engine.cache.capacity * len(lengths)

    @property
    def stalled(self) -> bool:
        """Whether there is work and no step has ended for `stall_timeout` seconds."""
        busy = bool(self._running or self._waiting)
        return busy and time.monotonic() - self._advanced > self.options.stall_timeout

    def submit(self, jobs: list[Job]) -> None:
        """Queue all of these jobs. Raise RequestFailure: not loaded, draining, or a full queue."""
        with self._wake:
            if self.state != "ready":
                raise _not_ready(self.state)
            if len(self._running) + len(self._waiting) + len(jobs) > self.options.slots + self.options.max_queue:
                self.watcher.refused()
                raise queue_full(self.options.max_queue, self._retry_after())
            if not (self._running or self._waiting):
                self._advanced = time.monotonic()
            self._waiting.extend(jobs)
            self._wake.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """These jobs are wanted no more: their slots are free after the round that runs now."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def drain(self) -> None:
        """Take no more jobs, finish those there are, end the thread."""
        with self._wake:
            if self.state in ("loading", "warming", "ready"):
                self.state = "draining"
            self._wake.notify()

    def abandon(self) -> None:
        """Drain without finishing: every job is told that the server stops."""
        with self._wake:
            if self.state not in ("stopped", "failed"):
                self.state = "stopping"
            self._wake.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)

    def _retry_after(self) -> int:
        """Seconds until a queued job more would find room: what the last ones took, spread over the slots."""
        mean = sum(self._durations) / len(self._durations)
        return max(1, min(60, round(mean * (len(self._waiting) + 1) / self.options.slots)))

    # The engine's thread.

    def _main(self) -> None:
        try:
            self.session = self._load()
            self._warm_up(self.session)
            self._open()
            with self._wake:
                self.state = "ready" if self.state in ("loading", "warming") else self.state
            self._serve()
        except BaseException as error:
            self.error = error
        finally:
            with self._wake:
                self.state = "failed" if self.error is not None else "stopped"
                left = [*self._running.values(), *self._waiting]
                self._running.clear()
                self._waiting.clear()
            for job in left:
                self._end(job, "error", stopping())
            self.flush()
            self.on_stop()

    def _warm_up(self, session: Session) -> None:
        """Compile and record the shapes of rounds before anybody waits for them, where that is wanted."""
        useful = bool(getattr(session.backend, "warms_up", False))
        wanted = self.options.warmup
        if not (useful if wanted is None else wanted):
            return
        with self._wake:
            self.state = "warming" if self.state == "loading" else self.state
        options, slots = self._resolved(session), self.options.slots
        why = "" if useful else ", though this backend neither compiles nor records shapes"
        self.say(f"warming up {slots} slots in mode {options.mode}{why} (--no-warmup leaves it out) ...")
        backend = session.backend
        chunks = (chunk_between(self.options.prefill_tokens, backend, 1), shared_chunk(options.prefill_chunk, backend, 1))
        room = slot_context(session, options)
        try:
            seconds = warm_up(session, options, slots, room, chunks, lambda: self.state not in ("draining", "stopping"))
        except DustinError:
            raise
        except Exception as error:
            # Requests meet only the shapes they need: one that nobody asks for must not keep the server from starting.
            self.say(f"warming up failed ({type(error).__name__}: {error}): first requests will wait for what they need")
            return
        if self.state == "warming":
            self.say(f"warmed up in {seconds:.1f} s")

    @staticmethod
    def _resolved(session: Session) -> EngineOptions:
        options = session.resolve()
        if options.mode == "exact" and session.options.lookahead_lag is None:
            # Any request may sample, which mode exact with a draft allows with lagged sets only.
            options = session.resolve(RequestOptions(sampling=SamplingOptions(temperature=1.0)))
        return options

    def _open(self) -> None:
        """A fresh engine. Raise UsageError where the options cannot be served, MemoryLimitError where the slots do not fit."""
        session = self.session
        if session is None:
            raise RuntimeError("the model is not loaded: _open comes after load")
        options = self._resolved(session)
        self.context = slot_context(session, options)
        self.engine_options = options
        stats = self.stats
        stats.mode, stats.drafter, stats.selector = options.mode, options.drafter, options.selector
        self._engine = None  # the old one's memory goes first
        engine = session.make_engine(SlotEngine, options, stats)
        slots = self.options.slots
        engine.open(session.target.new_cache(slots, self.context), slots, self.options.share_prefixes)
        self._engine = engine
        self._used = {}

    def _serve(self) -> None:
        while True:
            with self._wake:
                while self.state == "ready" and not (self._waiting or self._running):
                    self._wake.wait()
                if self.state == "stopping" or (self.state == "draining" and not (self._waiting or self._running)):
                    return
            self._drop()
            try:
                self._advance()
                self._failures = 0
            except Exception as error:
                self._recover(error)
            self.flush()
            self._advanced = time.monotonic()

    def _drop(self) -> None:
        """Let go of jobs that were cancelled or took too long."""
        limit = self.options.request_timeout
        late = time.monotonic() - limit if limit else float("-inf")
        with self._wake:
            gone = [job for job in self._waiting if job.cancelled or job.created < late]
            for job in gone:
                self._waiting.remove(job)
        for slot, job in list(self._running.items()):
            if job.cancelled or job.created < late:
                self._the_engine.release(slot)
                self._leave(slot)
                gone.append(job)
        for job in gone:
            if job.cancelled:
                self._end(job, "cancelled")
            else:
                self._end(job, "timeout", timed_out(limit))

    def _advance(self) -> None:
        """Fill the slots, read a chunk of the new prompts, run a round, hand out what came of it."""
        engine = self._the_engine
        while engine.free and (job := self._next()) is not None:
            self._admit(job)
        reading = len(engine.reading)
        if engine.active:
            engine.begin_chunk(chunk_between(self.options.prefill_tokens, engine.backend, reading))
        else:
            engine.begin_chunk(shared_chunk(self.engine_options.prefill_chunk, engine.backend, reading))
        # The round of those who stream is told to the device, and read, while it is at the prompts.
        if engine.active:
            self._hand_out(engine.step())
        self._hand_out(engine.finish_chunk())

    def _next(self) -> Job | None:
        with self._wake:
            return self._waiting.popleft() if self._waiting else None

    def _admit(self, job: Job) -> None:
        """Into the slot that remembers most of the prompt; among equals the one out of use longest."""
        engine, session = self._the_engine, self.session
        tokenizer = session.tokenizer if session is not None else None
        slot = max(engine.free, key=lambda slot: (engine.reusable(slot, job.prompt), -self._used.get(slot, -1)))
        eos = frozenset(tokenizer.eos_ids) if tokenizer is not None else frozenset()
        job.sequence = Sequence(slot, job.prompt, job.request, job.request.max_tokens, eos, job.sink)
        engine.admit(job.sequence, job.prompt_top_logprobs)
        self._running[slot] = job

    def _hand_out(self, events: list[Event]) -> None:
        now = time.monotonic()
        by_slot: dict[int, list[Event]] = {}
        for event in events:
            by_slot.setdefault(event.row, []).append(event)
        for slot, batch in by_slot.items():
            job = self._running[slot]
            if job.first_at is None:
                job.first_at = now
                job.cached_tokens = self._the_engine.reused[slot]
                job.prompt_logprobs = self._the_engine.prompt_logprobs.pop(slot, [])
                self.watcher.first_token(now - job.created)
            else:
                self.watcher.tokens(len(batch), now - (job.last_at or now))
            job.last_at = now
            reason = batch[-1].finish_reason
            if reason is None:
                job.deliver(batch)
                continue
            self._leave(slot)
            self._durations.append(now - job.created)
            if reason == "error":
                text = job.sequence.error if job.sequence is not None else None
                self._end(job, "error", engine_failed(f"the model gave no number: {text}"))
            else:
                job.deliver(batch)
                self._end(job, reason)
        self.flush()

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._used[slot] = next(self._clock)

    def _end(self, job: Job, outcome: str, failure: RequestFailure | None = None) -> None:
        job.failure = failure
        self.watcher.finished(outcome, time.monotonic() - job.created)
        job.deliver(None)

    def _recover(self, error: Exception) -> None:
        """A step raised: everyone in a slot is told, and the next ones meet a fresh engine."""
        traceback.print_exception(error, file=sys.stderr)
        self.watcher.engine_failure()
        self._failures += 1
        for slot, job in list(self._running.items()):
            self._leave(slot)
            self._end(job, "error", engine_failed(f"the engine failed ({type(error).__name__}); the server's log says where"))
        if self._failures >= _MOST_FAILURES:
            raise error
        self._open()

    @property
    def _the_engine(self) -> SlotEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not open")
        return self._engine


def _not_ready(state: str) -> RequestFailure:
    if state == "loading":
        return unavailable("the model is being loaded", "loading")
    if state == "warming":
        return unavailable("the model is being warmed up", "warming")
    if state == "failed":
        return unavailable("the engine has failed and the server is stopping", "engine_failed")
    return stopping()
