"""The rounds of METHOD section 5: draft -> select -> verify -> accept -> commit, over a batch of ragged sequences.

The engine is policy over opaque arrays: every array operation is a method of the backend, and the host reads once a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from dustin.config import EngineOptions
from dustin.interfaces import (
    AcceptanceRule,
    Array,
    Backend,
    Drafter,
    Drafts,
    ForwardResult,
    HostVerdict,
    KVCache,
    Model,
    RoundState,
    SelectionContext,
    Selector,
    Tap,
    TokenLogprobs,
    TokenSet,
    Verdict,
    WarpBatch,
)
from dustin.planning import AutoPlanner, Look, Plan
from dustin.prefill import prefill
from dustin.scoring import ReadBytes
from dustin.sequence import Event, Sequence
from dustin.stats import Stats

Queries = Mapping[int, Array]
# KV bytes of a draft model over its weights from which a dense round's draft reads a set too: below, its launches cost more.
_SPARSE_DRAFT_SHARE = 0.25


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
        self.tap = tap
        self.options = options
        self.stats = stats
        self.rows: list[Sequence] = []
        self.cache: KVCache | None = None
        self.planner: AutoPlanner | None = None
        if options.mode == "auto":
            # Less than this, and the protected tokens leave little to choose.
            least = 4 * (options.num_sink_tokens + options.num_recent_tokens)
            bounds = options.budget, options.num_draft_tokens, options.exact_block
            self.planner = AutoPlanner(target.spec, drafter.name, *bounds, least)
        self._chosen = Plan(options.mode, options.num_draft_tokens, options.exact_block)
        self._looks: list[Look] = []
        self._history: Queries | None = None
        self._prompt: Queries | None = None
        self._lagged: Queries | None = None
        self._set: TokenSet | None = None
        self._set_lengths: tuple[int, ...] = ()
        self._unlagged: set[int] = set()  # rows that joined a running batch: the lagged queries in their place are not theirs
        self._uniforms: list[list[float]] = []

    # Start.

    def start(self, rows: list[Sequence], cache: KVCache, progress: Callable[[int, int], None] | None = None) -> list[Event]:
        """Read the prompts densely and commit each row's first token. `cache` may already hold leading rows of the prompts."""
        began = time.perf_counter()
        self.rows, self.cache = rows, cache
        self.stats.sequences += len(rows)
        self.warp = warp_batch(rows)
        if self.planner is not None and not self.warp.greedy:
            # The planner goes by the clock, and which tokens a seed gives must not.
            self.planner = None
            self.options = replace(self.options, mode="dense" if self.drafter.name == "draft" else "ar")
            self.stats.warnings.append(f"auto samples in mode {self.options.mode}, so that a seed repeats")
        seen = cache.lengths
        self.stats.prompt_tokens += sum(row.prompt_length for row in rows)
        self.stats.reused_prompt_tokens += sum(seen)
        unread = [row.tokens[known:] for row, known in zip(rows, seen, strict=True)]
        wide, chunk = self.selector.prompt_rows > 1, self.options.prefill_chunk
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
        verdict = self._judge(none, out)
        if out.queries and wide:
            last = [min(len(part), chunk) - 1 for part in unread]
            self._prompt = self.backend.gather_rows(out.queries, last, self.selector.prompt_rows)
            self._history = self.backend.gather_rows(out.queries, last, self.selector.history_rows)
        elif out.queries:
            self._history = self._last_row_history(out.queries)
        events = self._commit(none, self._read(verdict, out), {row.row for row in rows}, count=False)
        self.stats.prefill_seconds += time.perf_counter() - began
        return events

    @property
    def active(self) -> bool:
        """Whether any sequence is unfinished."""
        return any(row.active for row in self.rows)

    def step(self) -> list[Event]:
        """One round (in mode exact: one checked block) for all active rows; the committed tokens as events."""
        began = time.perf_counter()
        self._chosen = Plan(self.options.mode, self.options.num_draft_tokens, self.options.exact_block)
        if self.planner is not None:
            self._chosen = self.planner.choose([row.committed for row in self.rows if row.active])
            self.selector.resize(self._chosen.budget or self.options.budget)
        mode = self._chosen.mode
        self.stats.mode_rounds[mode] += 1
        self._looks = []
        if mode == "exact":
            events = self._exact_block()
        else:
            events = self._round(mode)
            if mode == "rectified":
                self._rectify()
        elapsed = time.perf_counter() - began
        self.stats.decode_seconds += elapsed
        if self.planner is not None:
            self.planner.record(self._looks, elapsed)
            if not self.active or self.stats.rounds % 16 == 0:
                self.stats.plan = self.planner.as_dict()
        return events

    # One round.

    def _round(self, mode: str) -> list[Event]:
        began = time.perf_counter()
        taking = {row.row for row in self.rows if row.active}
        sparse = mode not in ("ar", "dense")
        planned = 0 if mode == "ar" else self._chosen.num_draft_tokens
        choosing = sparse or (mode == "dense" and self._drafts_sparsely())
        drafts = self._draft(taking, planned, choosing)
        token_set = self._select(drafts, taking) if choosing else None
        out = self._verify(drafts, taking, token_set if sparse else None)
        verdict = self._judge(drafts, out)
        self._remember_history(out, verdict, taking)
        host = self._read(verdict, out)
        self._look("dense" if planned else "plain", planned, host, taking, began)
        return self._commit(drafts, host, taking, dense=not sparse)

    def _look(self, kind: str, planned: int, host: HostVerdict, taking: set[int], began: float) -> None:
        """What the planner learns of a round; rows near their last token, which may not draft as planned, tell nothing."""
        free = [row.row for row in self.rows if row.row in taking and row.remaining > planned]
        if self.planner is not None and free:
            self._looks.append(Look(kind, planned, [host.num_accepted[b] for b in free], time.perf_counter() - began))

    def _drafts_sparsely(self) -> bool:
        """Whether a set is chosen for the draft of a dense round alone: where reading all of its KV costs more than the scores.

        Greedy only: what is drawn from a seed may not depend on who else is in the batch.
        """
        model, lengths = self.drafter.model, [row.committed for row in self.rows if row.active]
        if model is None or self.drafter.tap is None or not self.options.sparse_draft or not self.warp.greedy or not lengths:
            return False
        heavy = sum(lengths) * model.spec.bytes_per_kv_token >= _SPARSE_DRAFT_SHARE * model.spec.weight_bytes
        return heavy and max(lengths) >= 2 * self.options.budget

    def _draft(self, taking: set[int], most: int, sparse: bool) -> Drafts:
        # A row may draft one less than it may still emit: verification adds a token of its own.
        least = self.options.min_draft_confidence
        limits = tuple(
            max(0, min(row.drafts_worth(least, most), row.remaining - 1)) if row.row in taking else 0 for row in self.rows
        )
        self._uniforms = [
            row.uniforms.draw(2 * self.options.num_draft_tokens + 1) if row.row in taking else [] for row in self.rows
        ]
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
            uniforms=self._pad([row[:most] for row in self._uniforms], most),
            context=self._penalty_context(),
            target_cache=self._target_cache,
            draft_set=self._set_of_draft(taking),
            # A row that takes no part must not widen the draft's set.
            set_lengths=tuple(n if b in taking else self._target_cache.capacity for b, n in enumerate(self._set_lengths)),
            select=lambda: self._select(Drafts(None, limits), taking),
            may_stop=not sparse,
        )
        return self.drafter.propose(state)

    def _set_of_draft(self, taking: set[int]) -> TokenSet | None:
        """What a draft model's own attention reads this round: the last set; None for everything."""
        return self._set

    def _select(self, drafts: Drafts, taking: set[int]) -> TokenSet | None:
        lookahead = drafts.queries
        if self.options.lookahead_lag == 1:
            # The set must not depend on drafts it will judge (exact sampling): use the previous round's.
            lookahead, self._lagged = self._lagged, self._merged(self._lagged, drafts.queries, taking)
        cache = self._target_cache
        # Rows that take no part have nothing to score: their draft may lag behind their provisional tokens.
        lengths = tuple(n if row.row in taking else 0 for row, n in zip(self.rows, cache.lengths, strict=True))
        fed, counts = self._inflight(drafts, taking)
        context = SelectionContext(
            self.backend, self.target, cache, lengths, self._history, self.tap, self.drafter.model, self.drafter.cache,
            lookahead, self.drafter.tap, fed, counts, self._prompt,
        )  # fmt: skip
        chosen = self.selector.select(context)
        if chosen is not None and lookahead is not None and self._unlagged & taking:
            # Their first round has history alone, as a batch's first round has.
            alone = self.selector.select(replace(context, lookahead=None, repeat=True))
            if alone is not None:
                chosen = self.backend.replace_set_rows(chosen, alone, [row.row in self._unlagged for row in self.rows])
        if drafts.queries:
            self._unlagged -= taking
        self._prompt = None
        self.stats.kv_bytes_read += self.selector.cost.target_bytes
        self.stats.draft_kv_bytes_read += self.selector.cost.draft_bytes
        self._remember_set(chosen, lengths, taking)
        return chosen

    def _verify(self, drafts: Drafts, taking: set[int], token_set: TokenSet | None, all_rows: bool = False) -> ForwardResult:
        fed, counts = self._inflight(drafts, taking)
        self._count_verification(counts, token_set)
        return self.target.forward(fed, counts, self._target_cache, token_set=token_set, tap=self.tap, logits="all")

    def _inflight(self, drafts: Drafts, taking: set[int]) -> tuple[Array, tuple[int, ...]]:
        """Tokens [B, T] to verify, the pending one and the drafts, and how many each row has."""
        pending = self.backend.tokens([[row.tokens[-1]] if row.row in taking else [] for row in self.rows])
        if drafts.tokens is None:
            return pending, tuple(int(row.row in taking) for row in self.rows)
        counts = tuple(1 + n if row.row in taking else 0 for row, n in zip(self.rows, drafts.num_drafts, strict=True))
        return self.backend.concat_tokens([pending, drafts.tokens]), counts

    def _judge(self, drafts: Drafts, out: ForwardResult) -> Verdict:
        width = max(drafts.num_drafts, default=0)
        drawn = self._uniforms
        most = self.options.num_draft_tokens
        accept = self._pad([row[most : most + width] for row in drawn], width)
        final = [row[-1] if row else 0.0 for row in drawn]
        return self.rule.judge(self.backend, drafts, out.logits, self.warp, self._penalty_context(), accept, final)

    def _read(self, verdict: Verdict, out: ForwardResult) -> HostVerdict:
        wanted = [row.request.top_logprobs for row in self.rows if row.request.top_logprobs is not None]
        return self.backend.read(verdict, out.logits if wanted else None, max(wanted) if wanted else None)

    def _commit(self, drafts: Drafts, host: HostVerdict, taking: set[int], dense: bool = True, count: bool = True) -> list[Event]:
        events: list[Event] = []
        for row in self.rows:
            if row.row not in taking:
                continue
            if not host.finite[row.row]:
                events.append(row.fail(f"NaN logits after token {row.committed} of sequence {row.row}"))
                continue
            accepted = host.num_accepted[row.row]
            if count:
                self.stats.count_round(drafts.num_drafts[row.row], accepted)
                row.stats.count_round(drafts.num_drafts[row.row], accepted)
                row.note_drafts(drafts.num_drafts[row.row], accepted)
            if row.committed > row.prompt_length:  # The first token belongs to the prefill.
                # The pending token's own row is not yet in the cache, here as in _count_verification.
                self.stats.kv_bytes_dense += self._kv_bytes(sum(row.committed - 1 + i for i in range(accepted + 1)))
            logprobs = _trimmed(host.logprobs[row.row], row.request.top_logprobs) if host.logprobs else None
            committed = row.commit(host.tokens[row.row][: accepted + 1], accepted, logprobs)
            self.stats.generated_tokens += len(committed)
            events += committed
            if dense and row.dense_rows >= row.committed - len(committed) - 1:
                row.dense_rows = row.committed - 1
        self.stats.rounds += 1
        self._roll_back()
        return events

    def _roll_back(self) -> None:
        """Drop rejected rows by length only: the last working token has no target KV yet."""
        cache = self._target_cache
        working = [len(row.tokens) for row in self.rows]
        cache.rollback([min(have, length - 1) for have, length in zip(cache.lengths, working, strict=True)])
        self.drafter.commit(working)
        if self._set is not None:
            # After a cut the set's recent window lies beyond the end: let the draft see the rows before the cut instead.
            recent = self.options.num_recent_tokens
            self._set_lengths = tuple(
                then if now >= then else max(0, now - recent) for then, now in zip(self._set_lengths, cache.lengths, strict=True)
            )

    # Rectification and the dense check.

    def _rectify(self) -> None:
        """Rows older than the interval are computed again densely, in one causal pass, and overwritten (ReSA, SpecPV)."""
        interval = self.options.rectify_interval
        due = {row.row for row in self.rows if row.active and row.committed - 1 - row.dense_rows >= interval}
        if not due:
            return
        cache = self._target_cache
        before = cache.lengths
        spans = [row.tokens[row.dense_rows : row.committed - 1] if row.row in due else [] for row in self.rows]
        cache.rollback([row.dense_rows if row.row in due else length for row, length in zip(self.rows, before, strict=True)])
        self._count_verification([len(span) for span in spans], None)
        out = self.target.forward(
            self.backend.tokens(spans),
            [len(span) for span in spans],
            cache,
            tap=Tap(self.tap.heads, last_row_only=True),
            logits="none",
        )
        self._history = self._merged(self._history, self._last_row_history(out.queries), due)
        for row in self.rows:
            if row.row in due:
                row.dense_rows = row.committed - 1
        self.stats.rectify_passes += 1
        self.stats.rectified_tokens += sum(len(span) for span in spans)

    def _exact_block(self) -> list[Event]:
        """Two-level speculation: sparse rounds propose up to `exact_block` tokens, one dense pass checks them (TriForce)."""
        base = self._target_cache.lengths
        judged_by: list[list[tuple[Array, int]]] = [[] for _ in self.rows]
        proposing = {row.row for row in self.rows if row.active and row.remaining > 1}
        started = len(proposing)
        while proposing:
            proposing = self._propose_provisionally(proposing, judged_by)
            if self.warp.greedy and 2 * len(proposing) < started:
                # A few slow rows would keep all others waiting. Greedy tokens do not depend on where a block ends.
                break
        provisional = [row.tokens[row.committed :] if row.active else [] for row in self.rows]
        for row in self.rows:
            del row.tokens[row.committed :]
        self._target_cache.rollback(base)
        return self._dense_check(provisional, judged_by)

    def _propose_provisionally(self, proposing: set[int], judged_by: list[list[tuple[Array, int]]]) -> set[int]:
        """One sparse round whose tokens stay provisional; returns the rows that want another."""
        began = time.perf_counter()
        drafts = self._draft(proposing, self._chosen.num_draft_tokens, True)
        out = self._verify(drafts, proposing, self._select(drafts, proposing))
        verdict = self._judge(drafts, out)
        self._remember_history(out, verdict, proposing)
        host = self.backend.read(verdict)
        self._look("sparse", self._chosen.num_draft_tokens, host, proposing, began)
        going = set()
        for row in self.rows:
            if row.row not in proposing:
                continue
            if not host.finite[row.row]:
                # The dense check decides: it sees the same row and reports NaN if its own logits have it.
                continue
            accepted = host.num_accepted[row.row]
            self.stats.count_round(drafts.num_drafts[row.row], accepted)
            row.stats.count_round(drafts.num_drafts[row.row], accepted)
            row.note_drafts(drafts.num_drafts[row.row], accepted)
            room = min(row.remaining - 1, self._chosen.exact_block - (len(row.tokens) - row.committed))
            tokens = host.tokens[row.row][: accepted + 1][:room]
            if verdict.probabilities is not None:
                judged_by[row.row] += [(verdict.probabilities, i) for i in range(len(tokens))]
            open_end = row.extend_provisionally(tokens)
            if open_end and row.remaining > 1 and len(row.tokens) - row.committed < self._chosen.exact_block:
                going.add(row.row)
        self._roll_back()
        return going

    def _dense_check(self, provisional: list[list[int]], judged_by: list[list[tuple[Array, int]]]) -> list[Event]:
        began = time.perf_counter()
        counts = tuple(len(tokens) for tokens in provisional)
        backend = self.backend
        probabilities = None
        if any(counts) and any(judged_by):
            probabilities = backend.ragged_rows([parts[:n] for parts, n in zip(judged_by, counts, strict=True)])
        drafts = Drafts(backend.tokens(provisional) if any(counts) else None, counts, probabilities)
        taking = {row.row for row in self.rows if row.active}
        out = self._verify(drafts, taking, None)
        width = max(counts)
        accept = self._pad(
            [row.uniforms.draw(n) if row.row in taking else [] for row, n in zip(self.rows, counts, strict=True)], width
        )
        final = [row.uniforms.draw(1)[0] if row.row in taking else 0.0 for row in self.rows]
        verdict = self.rule.judge(backend, drafts, out.logits, self.warp, self._penalty_context(), accept, final)
        self._remember_history(out, verdict, taking)
        host = self._read(verdict, out)
        if self.planner is not None and any(counts):
            kept, offered = [host.num_accepted[b] for b in taking], [counts[b] for b in taking]
            self._looks.append(Look("check", self._chosen.num_draft_tokens, kept, time.perf_counter() - began, offered))
        self.stats.dense_checks += len(taking)
        self.stats.checked_tokens += sum(counts)
        self.stats.check_accepted_tokens += sum(host.num_accepted[b] for b in taking)
        return self._commit(drafts, host, taking, dense=True, count=False)

    # Small pieces.

    @property
    def _target_cache(self) -> KVCache:
        if self.cache is None:
            raise RuntimeError("the engine was not started: call start first")
        return self.cache

    def _remember_history(self, out: ForwardResult, verdict: Verdict, taking: set[int]) -> None:
        if out.queries:
            fresh = self.backend.gather_rows(out.queries, verdict.num_accepted, self.selector.history_rows)
            self._history = self._merged(self._history, fresh, taking)

    def _last_row_history(self, queries: Queries) -> Queries:
        """History from queries of one row a sequence, [B, 1, S, D]: it repeats where the selector wants several."""
        rows = self.selector.history_rows
        return queries if rows == 1 or not queries else self.backend.gather_rows(queries, [0] * len(self.rows), rows)

    def _remember_set(self, chosen: TokenSet | None, lengths: tuple[int, ...], taking: set[int]) -> None:
        """For the draft's next round; rows that took no part keep their older set."""
        if chosen is not None:
            # Layers are the target's own matter: the draft reads the shared set in all of its.
            chosen = TokenSet(chosen.indices, chosen.counts)
        waiting = [row.active and row.row not in taking for row in self.rows]
        if self._set is None or not any(waiting):
            self._set, self._set_lengths = chosen, lengths
            return
        old = zip(waiting, self._set_lengths, lengths, strict=True)
        if chosen is None:
            # The rows of this round fit the budget: from length 0 on, everything joins their set.
            self._set_lengths = tuple(then if waits else 0 for waits, then, _ in old)
        else:
            self._set = self.backend.replace_set_rows(self._set, chosen, [not waits for waits in waiting])
            self._set_lengths = tuple(then if waits else now for waits, then, now in old)

    def _merged(self, old: Queries | None, new: Queries | None, taking: set[int]) -> Queries | None:
        """Fresh queries of the rows that took part; the others keep theirs."""
        if not new or not old:
            return new or old
        if all(row.row in taking or not row.active for row in self.rows):
            return new
        return self.backend.replace_rows(old, new, [row.row in taking for row in self.rows])

    def _penalty_context(self) -> list[list[int]] | None:
        return [row.tokens for row in self.rows] if self.warp.penalised else None

    @staticmethod
    def _pad(rows: list[list[float]], width: int) -> list[list[float]]:
        return [row + [0.0] * (width - len(row)) for row in rows]

    def _kv_bytes(self, tokens: int) -> int:
        return tokens * self.target.spec.bytes_per_kv_token

    def _count_verification(self, counts: Seq[int], token_set: TokenSet | None) -> None:
        budget = (self._chosen.budget or self.options.budget) if token_set is not None else None
        lengths = [n for count, n in zip(counts, self._target_cache.lengths, strict=True) if count]
        read = self._kv_bytes(sum(min(n, budget) if budget else n for n in lengths))
        if token_set is not None and token_set.dense_layers:
            beyond = sum(max(0, n - self.options.budget) for n in lengths)
            read += ReadBytes(self.target.spec).layers(len(token_set.dense_layers), beyond)
        self.stats.kv_bytes_read += read


def warp_batch(rows: list[Sequence]) -> WarpBatch:
    """The sampling parameters of a batch, a tuple each."""
    samplings = [row.request.sampling for row in rows]
    names = WarpBatch.__dataclass_fields__
    return WarpBatch(**{name: tuple(getattr(sampling, name) for sampling in samplings) for name in names})


def _trimmed(entries: Seq[TokenLogprobs], wanted: int | None) -> list[TokenLogprobs] | None:
    """What one request asked for: the batch was read with as many alternatives as its most demanding row wants."""
    if wanted is None:
        return None
    return [replace(e, top_tokens=e.top_tokens[:wanted], top_logprobs=e.top_logprobs[:wanted]) for e in entries]
