"""The rounds of METHOD section 5: draft -> select -> verify -> accept -> commit, over a batch of ragged sequences.

The engine is policy over opaque arrays: every array operation is a method of the backend, and the host reads once a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from dustin.ahead import PlainAhead, begin_plain
from dustin.config import EngineOptions
from dustin.exact import exact_block
from dustin.interfaces import (
    AcceptanceRule,
    Array,
    Backend,
    Drafter,
    Drafts,
    ForwardAhead,
    ForwardResult,
    HostVerdict,
    KVCache,
    Model,
    RoundState,
    SelectionContext,
    Selector,
    Tap,
    TokenSet,
    Verdict,
)
from dustin.plan_rounds import learn_round, plan_round
from dustin.planning import AutoPlanner, Look, Plan
from dustin.prefill import chunk_of, prefill
from dustin.rectify import rectify
from dustin.scoring import ReadBytes
from dustin.sequence import Event, Sequence, padded, warp_batch
from dustin.set_memory import SetMemory
from dustin.stats import Stats


class Engine:
    """Runs one batch of sequences to their end; `start`, then `step` until nothing is active.

    Modes (METHOD section 7): `ar`, `dense` (classic speculation), `sparse` (the paper), `rectified` (sparse, and every
    `rectify_interval` tokens the newest rows are computed again densely), `exact` (sparse rounds propose a block, one dense
    pass checks it), `auto` (a planner picks `ar`, `dense` or `exact`, drafts and block, per round).
    """

    def __init__(
        self,
        backend: Backend,
        target: Model,
        drafter: Drafter,
        selector: Selector,
        rule: AcceptanceRule,
        tap: Tap,
        options: EngineOptions,
        stats: Stats,
    ) -> None:
        self.backend = backend
        self.target = target
        self.drafter = drafter
        self.selector = selector
        self.rule = rule
        # Plain decoding chooses no set: nobody looks at the queries.
        self.tap = tap if options.mode != "ar" else Tap({})
        self.options = options
        self.stats = stats
        self.rows: list[Sequence] = []
        self.cache: KVCache | None = None
        self.planner: AutoPlanner | None = None
        if options.mode == "auto":
            # Less than this, and the protected tokens leave little to choose.
            least = 4 * (options.num_sink_tokens + options.num_recent_tokens)
            bounds = options.budget, options.num_draft_tokens, options.exact_block
            recorded = getattr(backend, "recorded_rows", 0) > 0
            self.planner = AutoPlanner(target.spec, drafter.name, *bounds, least, recorded)
        self.chosen = Plan(options.mode, options.num_draft_tokens, options.exact_block)
        self.memory = SetMemory(backend, selector, options)
        self.looks: list[Look] = []
        self._uniforms: list[list[float]] = []
        self._ahead: PlainAhead | None = None
        self._begins = isinstance(target, ForwardAhead)
        # Whether the device was told to do something else since the last round, which the next one waits for.
        self.disturbed = False

    # Whether scores may be kept within a pool between refreshes, which all rows have at once.
    pools = True

    # Start.

    def start(self, rows: list[Sequence], cache: KVCache, progress: Callable[[int, int], None] | None = None) -> list[Event]:
        """Read the prompts densely and commit each row's first token. `cache` may already hold leading rows of the prompts."""
        began = time.perf_counter()
        self.rows, self.cache = rows, cache
        self.memory.rows = rows
        self.stats.sequences += len(rows)
        self.warp = warp_batch([row.request.sampling for row in rows])
        if self.planner is not None and not self.warp.greedy:
            # The planner goes by the clock, and which tokens a seed gives must not.
            self.planner = None
            self.options = replace(self.options, mode="dense" if self.drafter.name == "draft" else "ar")
            self.stats.warnings.append(f"auto samples in mode {self.options.mode}, so that a seed repeats")
        seen = cache.lengths
        self.stats.prompt_tokens += sum(row.prompt_length for row in rows)
        self.stats.reused_prompt_tokens += sum(seen)
        unread = [row.tokens[known:] for row, known in zip(rows, seen, strict=True)]
        wide, chunk = self.selector.prompt_rows > 1, chunk_of(self.options.prefill_chunk, self.backend, len(rows))
        try:
            out = cast(
                ForwardResult,
                prefill(self.backend, self.target, cache, unread, chunk, self.tap, progress, all_rows=wide),
            )
        finally:
            # What was read so far is dense, also when the reader gave up in the middle.
            for row, rows_read in zip(rows, cache.lengths, strict=True):
                row.dense_rows = rows_read
        self.drafter.start([row.tokens for row in rows], cache.capacity + self.options.num_draft_tokens, progress)
        # The first token is a verification without drafts.
        none = Drafts(None, (0,) * len(rows))
        self._uniforms = [row.uniforms.draw(1) for row in rows]
        verdict = self.judge(none, out)
        self.memory.learn_prompt(out.queries, [min(len(part), chunk) - 1 for part in unread])
        events = self.commit(none, self.read(verdict, out), {row.row for row in rows}, count=False)
        self.stats.prefill_seconds += time.perf_counter() - began
        return events

    @property
    def active(self) -> bool:
        """Whether any sequence is unfinished."""
        return any(row.active for row in self.rows)

    def clock(self) -> float:
        """Seconds, less those in which shapes were recorded: that happens once and is no round's price."""
        return time.perf_counter() - self._recording()

    def _recording(self) -> float:
        """Seconds that the backend and the models have spent on recording shapes so far."""
        parts = {id(part): part for part in (self.backend, self.target, self.drafter.model)}
        return sum(getattr(part, "capture_seconds", 0.0) for part in parts.values())

    def step(self) -> list[Event]:
        """One round (in mode exact: one checked block) for all active rows; the committed tokens as events."""
        began, recorded = time.perf_counter(), self._recording()
        self.chosen = Plan(self.options.mode, self.options.num_draft_tokens, self.options.exact_block)
        if self.planner is not None:
            plan_round(self, self.planner)
        mode = self.chosen.mode
        self.stats.mode_rounds[mode] += 1
        self.looks = []
        late = (self.drafter.drop() if mode == "ar" else self._ahead is not None) or self.disturbed
        self.disturbed = False
        self._ahead = self._ahead if mode == "ar" else None
        read = self.stats.kv_bytes_read, self.stats.draft_kv_bytes_read
        try:
            events = exact_block(self) if mode == "exact" else self._round(mode)
        except BaseException:
            # Ctrl-C: what was read for tokens that nobody gets is no share of what reading them densely costs.
            self.stats.kv_bytes_read, self.stats.draft_kv_bytes_read = read
            raise
        if mode == "rectified":
            rectify(self)
        elapsed = time.perf_counter() - began
        self.stats.decode_seconds += elapsed
        if self.planner is not None:
            recording = max(0.0, self._recording() - recorded)
            # A round that had to wait for steps begun for another mode, or for prompts, tells nothing of its own price.
            learn_round(self, self.planner, [] if late else self.looks, events, elapsed - recording, recording)
        return events

    # One round.

    def _round(self, mode: str) -> list[Event]:
        began = self.clock()
        taking = self._taking()
        sparse = mode not in ("ar", "dense")
        planned = 0 if mode == "ar" else self.chosen.num_draft_tokens
        choosing = sparse or (mode == "dense" and self.memory.worth_for_draft(self.drafter, self.warp.greedy))
        drafts = self.draft(taking, planned, choosing)
        token_set = self.select(drafts, taking) if choosing else None
        begun, self._ahead = self._ahead, None
        if mode == "ar" and begun is not None and begun.serves(self.rows, taking, self.target_cache.lengths):
            counts = [int(row.row in taking) for row in self.rows]
            self.count_verification(counts, None)
            out = begun.begun.finish(counts)
        else:
            out = self.verify(drafts, taking, token_set if sparse else None)
        verdict = self.judge(drafts, out)
        self.memory.learn_verified(out.queries, verdict.num_accepted, taking)
        self.foresee(drafts, verdict, taking)
        host = self.read(verdict, out)
        self.drafter.settle(host)
        if self._ahead is not None:
            self._ahead.verdict = host
        self.look("dense" if planned else "plain", planned, host, taking, began)
        events = self.commit(drafts, host, taking, dense=not sparse)
        for look in self.looks:
            # The host's part is of the round's price too: where nothing is begun ahead, the device waits for it.
            look.seconds = self.clock() - began
            look.warm = not (planned and self.drafter.cold)
        return events

    def _taking(self) -> set[int]:
        """The rows of this round: those that it was begun ahead for; all that are active where none of it was."""
        active = {row.row for row in self.rows if row.active}
        if self._ahead is not None:
            return self._ahead.those(self.rows, active)
        return self.drafter.those(active) if self.warp.greedy and not self.warp.penalised else active

    def look(self, kind: str, planned: int, host: HostVerdict, taking: set[int], began: float) -> None:
        """What the planner learns of a round; rows near their last token, which may not draft as planned, tell nothing."""
        free = [row.row for row in self.rows if row.row in taking and row.remaining > planned]
        if self.planner is not None and free:
            self.looks.append(Look(kind, planned, [host.num_accepted[b] for b in free], self.clock() - began))

    def draft(self, taking: set[int], most: int, sparse: bool) -> Drafts:
        """Up to `most` guesses for each row of `taking`; with `sparse` also the queries that a selection looks at."""
        # A row may draft one less than it may still emit: verification adds a token of its own.
        least = self.options.min_draft_confidence
        limits = tuple(
            max(0, min(row.drafts_worth(least, most), row.remaining - 1)) if most and row.row in taking else 0 for row in self.rows
        )
        drawn = 2 * self.options.num_draft_tokens + 1
        if self.warp.greedy and not self.warp.penalised:
            # Nothing looks at them.
            self._uniforms = [[0.0] * drawn if row.row in taking else [] for row in self.rows]
        else:
            self._uniforms = [row.uniforms.draw(drawn) if row.row in taking else [] for row in self.rows]
        # Queries of a draft model serve the selection even where nothing may be drafted any more.
        wants_lookahead = sparse and most > 0 and self.drafter.tap is not None and self.selector.needs_lookahead
        if not any(limits) and not wants_lookahead:
            return Drafts(None, limits)
        state = RoundState(
            tokens=[row.tokens for row in self.rows],
            active=tuple(row.row in taking for row in self.rows),
            num_drafts=limits,
            max_drafts=most if sparse else max(limits),
            warp=self.warp,
            uniforms=padded([row[:most] for row in self._uniforms], most),
            context=self.penalty_context(),
            target_cache=self.target_cache,
            draft_set=self._set_of_draft(taking),
            # A row that takes no part must not widen the draft's set.
            set_lengths=self._set_lengths(taking),
            select=lambda: self.select(Drafts(None, limits), taking),
            may_stop=not sparse,
            planned=most,
        )
        return self.drafter.propose(state)

    def _set_of_draft(self, taking: set[int]) -> TokenSet | None:
        """What a draft model's own attention reads this round: the last set; None for everything."""
        lossless = self.chosen.mode if self.warp.greedy else ""
        return self.memory.for_draft(lossless, self.target_cache.lengths, taking)

    def _set_lengths(self, taking: set[int]) -> tuple[int, ...]:
        return tuple(n if b in taking else self.target_cache.capacity for b, n in enumerate(self.memory.set_lengths))

    def foresee(self, drafts: Drafts, verdict: Verdict, taking: set[int]) -> None:
        """Begin the next round, as far as the device can, before the host reads this one's verdict: where its rows want one."""
        plain = self.chosen.mode == "ar"
        if not (self._begins if plain else drafts.tokens is not None and self.drafter.foresees):
            return
        # Who has joined since this round was begun waits for the next. In a block all begin together.
        waiting = {row.row for row in self.rows if row.active and row.row not in taking and self.chosen.mode != "exact"}
        if waiting and not plain:
            return
        going = [row.row in waiting or (row.row in taking and row.remaining > 1) for row in self.rows]
        # Log-probabilities are read with the verdict, after whatever the device has been told to do.
        wanted = any(row.request.top_logprobs is not None for row in self.rows)
        if wanted or not any(going) or not self.warp.greedy or self.warp.penalised:
            return
        known = [len(row.tokens) for row in self.rows]
        if plain:
            model = cast(ForwardAhead, self.target)
            self._ahead = begin_plain(self.backend, model, self.target_cache, self.tap, verdict, self.rows, going, waiting)
        else:
            rest = self._set_of_draft(taking), self._set_lengths(taking)
            self.drafter.foresee(verdict, drafts.num_drafts, known, going, self.chosen.num_draft_tokens, *rest)

    def select(self, drafts: Drafts, taking: set[int]) -> TokenSet | None:
        """The set of this round; None where reading everything costs no more."""
        cache = self.target_cache
        # Rows that take no part have nothing to score: their draft may lag behind their provisional tokens.
        lengths = tuple(n if row.row in taking else 0 for row, n in zip(self.rows, cache.lengths, strict=True))
        fed, counts = self._inflight(drafts, taking)
        context = SelectionContext(
            self.backend, self.target, cache, lengths, None, self.tap, self.drafter.model, self.drafter.cache,
            None, self.drafter.tap, fed, counts,
        )  # fmt: skip
        chosen = self.memory.select(context, drafts, taking)
        # The set of a dense round is a draft model's: no layer of the target chooses anew.
        cost, verified = self.selector.cost, self.chosen.mode != "dense" or self.drafter.name == "self"
        self.stats.kv_bytes_read += cost.target_bytes + cost.own_bytes * verified
        self.stats.draft_kv_bytes_read += cost.draft_bytes
        return chosen

    def verify(self, drafts: Drafts, taking: set[int], token_set: TokenSet | None) -> ForwardResult:
        """The target over the pending token and the drafts of each row, densely without a set."""
        fed, counts = self._inflight(drafts, taking)
        self.count_verification(counts, token_set)
        return self.target.forward(fed, counts, self.target_cache, token_set=token_set, tap=self.tap, logits="all")

    def _inflight(self, drafts: Drafts, taking: set[int]) -> tuple[Array, tuple[int, ...]]:
        """Tokens [B, T] to verify, the pending one and the drafts, and how many each row has."""
        pending = self.backend.tokens([[row.tokens[-1]] if row.row in taking else [] for row in self.rows])
        if drafts.tokens is None:
            return pending, tuple(int(row.row in taking) for row in self.rows)
        counts = tuple(1 + n if row.row in taking else 0 for row, n in zip(self.rows, drafts.num_drafts, strict=True))
        return self.backend.concat_tokens([pending, drafts.tokens]), counts

    def judge(self, drafts: Drafts, out: ForwardResult) -> Verdict:
        """Which drafts stay, and the token after them, with the numbers that `draft` drew for it."""
        width = max(drafts.num_drafts, default=0)
        drawn = self._uniforms
        most = self.options.num_draft_tokens
        accept = padded([row[most : most + width] for row in drawn], width)
        final = [row[-1] if row else 0.0 for row in drawn]
        return self.rule.judge(self.backend, drafts, out.logits, self.warp, self.penalty_context(), accept, final)

    def read(self, verdict: Verdict, out: ForwardResult) -> HostVerdict:
        """The one device-to-host read of a round, with log-probabilities where a request wants them."""
        wanted = [row.request.top_logprobs for row in self.rows if row.request.top_logprobs is not None]
        return self.backend.read(verdict, out.logits if wanted else None, max(wanted) if wanted else None)

    def commit(self, drafts: Drafts, host: HostVerdict, taking: set[int], dense: bool = True, count: bool = True) -> list[Event]:
        """Commit what was accepted. `dense`: its KV is what dense attention writes; `count`: a round of drafts to count."""
        events: list[Event] = []
        for row in self.rows:
            if row.row not in taking:
                continue
            if not host.finite[row.row]:
                events.append(row.fail(f"NaN logits after token {row.committed} of sequence {row.row}"))
                continue
            accepted = host.num_accepted[row.row]
            if count:
                self.count_drafts(row, drafts.num_drafts[row.row], accepted)
            before = row.committed
            logprobs = host.logprobs[row.row] if host.logprobs else None
            committed = row.commit(host.tokens[row.row][: accepted + 1], accepted, logprobs)
            self.stats.generated_tokens += len(committed)
            events += committed
            if before > row.prompt_length:  # The first token belongs to the prefill.
                # The pending token's own row is not yet in the cache, here as in count_verification.
                self.stats.kv_bytes_dense += self._kv_bytes(sum(range(before - 1, row.committed - 1)))
            if dense and row.dense_rows >= before - 1:
                row.dense_rows = row.committed - 1
        self.stats.rounds += 1
        self.roll_back()
        return events

    def count_drafts(self, row: Sequence, offered: int, accepted: int) -> None:
        """One verification of one sequence."""
        self.stats.count_round(offered, accepted)
        row.stats.count_round(offered, accepted)
        row.note_drafts(offered, accepted)

    def roll_back(self, drafted: Seq[int] = ()) -> None:
        """Drop rejected rows by length only: the last working token has no target KV yet. Row b's draft keeps drafted[b] more."""
        cache = self.target_cache
        # Of who joins all prompt rows stay: its first token is not there yet.
        working = [len(row.tokens) + row.joining for row in self.rows]
        cache.rollback([min(have, length - 1) for have, length in zip(cache.lengths, working, strict=True)])
        self.drafter.commit([length + n for length, n in zip(working, drafted or [0] * len(working), strict=True)])
        self.memory.roll_back(cache.lengths)

    # Small pieces.

    @property
    def target_cache(self) -> KVCache:
        """The target's cache. Raise RuntimeError before `start`."""
        if self.cache is None:
            raise RuntimeError("the engine was not started: call start first")
        return self.cache

    def penalty_context(self) -> list[list[int]] | None:
        """The tokens that penalties count, of each row; None without penalties."""
        return [row.tokens for row in self.rows] if self.warp.penalised else None

    def _kv_bytes(self, tokens: int) -> int:
        return tokens * self.target.spec.bytes_per_kv_token

    def count_verification(self, counts: Seq[int], token_set: TokenSet | None) -> None:
        """Count the bytes that a pass over the rows with counts[b] > 0 reads of the target's cache: all of it without a set."""
        budget = (self.chosen.budget or self.options.budget) if token_set is not None else None
        lengths = [n for count, n in zip(counts, self.target_cache.lengths, strict=True) if count]
        read = self._kv_bytes(sum(min(n, budget) if budget else n for n in lengths))
        if token_set is not None and token_set.dense_layers:
            beyond = sum(max(0, n - (budget or 0)) for n in lengths)
            read += ReadBytes(self.target.spec).layers(len(token_set.dense_layers), beyond)
        self.stats.kv_bytes_read += read
