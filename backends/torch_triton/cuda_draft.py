"""The greedy draft steps of a round as two CUDA graphs: the first step, and one that is replayed for each later step.

Each step's argmax feeds the next on the device, so the host launches without waiting; any number of drafts uses the same two.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.backends.torch_triton.cuda_forward import DeviceForward, Inputs, Slots, make_slots
from dustin.backends.torch_triton.cuda_fused import end_step, extend_set, feed_verdict
from dustin.backends.torch_triton.cuda_graphs import Captured, table_columns
from dustin.backends.torch_triton.cuda_recent import Recent, tensor_bytes
from dustin.backends.torch_triton.ops import host_values
from dustin.interfaces import TokenSet, Verdict

# Rows that may join a set between its choice and the draft, rounded up to this: one graph serves the usual rounds, also those
# after a check that cut a block, which see the recent tokens before the cut again.
GROWN_MULTIPLE = 64
# Drafts are rounded up to this where room is made for them: one pair of graphs serves every usual number.
STEPS_MULTIPLE = 16
Queries = dict[int, torch.Tensor]


@dataclass
class _Static:
    """What the graphs of one shape read and write in place.

    control [4, B] holds the draft's lengths, tokens fed first, the length a set was chosen at, and for `feed_verdict` the rows
    that the draft held before. What a step leaves for the next: `token` [B, 1], lengths `at` [B], entries `held` [B] of the set
    and rows in flight; `on` [B] is 1 for rows that take part, `step` [1] counts. `drafts` [B, room] and `queries` [B, room, S, D]
    collect what the steps made.
    """

    tokens: torch.Tensor
    control: torch.Tensor
    page_table: torch.Tensor
    indices: torch.Tensor | None
    sizes: torch.Tensor | None
    drafts: torch.Tensor
    token: torch.Tensor
    at: torch.Tensor
    held: torch.Tensor
    on: torch.Tensor
    step: torch.Tensor
    queries: Queries = field(default_factory=dict)
    slots: torch.Tensor | None = None
    table_of: weakref.ref[PagedCache] | None = None


@dataclass
class _Recorded:
    """The graphs of one shape; `later` is made when a second step is first asked for. `begun` counts chains begun so far."""

    static: _Static
    first: Captured
    later: Captured | None = None
    begun: int = 0

    def go_on(self, steps: int) -> None:
        """Launch so many later steps."""
        for _ in range(steps):
            if self.later is not None:
                self.later()

    def collect(self, steps: int) -> tuple[torch.Tensor, Queries]:
        """Drafts and queries of the first `steps` steps. The next replay overwrites them, and callers keep them longer."""
        queries = {layer: q[:, :steps].clone() for layer, q in self.static.queries.items()}
        return self.static.drafts[:, :steps].long(), queries


@dataclass
class BegunSteps:
    """Draft steps that were launched before the host knew what they follow (`DraftChain.ahead`)."""

    recorded: _Recorded
    cache: PagedCache
    steps: int
    number: int

    @torch.inference_mode()
    def finish(self, num_tokens: Sequence[int], steps: int) -> tuple[torch.Tensor, Queries] | None:
        """See BegunDrafts.finish. None where the chain ran anew since, or has no room for so many steps."""
        recorded, room = self.recorded, self.recorded.static.drafts.shape[1]
        if recorded.begun != self.number or steps > room or (steps > self.steps and recorded.later is None):
            return None
        counts = self.cache.check_room([n + steps - 1 if n else 0 for n in num_tokens])
        recorded.go_on(steps - self.steps)
        self.cache.advance(counts)
        return recorded.collect(steps)


@dataclass
class DraftChain:
    """The chains of one model over one page pool, two graphs for each shape; `memory` is the pool that its graphs share."""

    forward: DeviceForward
    graphs: Recent[_Recorded]
    seconds: float = 0.0

    def run(
        self,
        tokens: torch.Tensor,
        counts: Sequence[int],
        cache: PagedCache,
        steps: int,
        token_set: TokenSet | None,
        set_lengths: Sequence[int],
        heads: Mapping[int, tuple[int, ...]],
        use_graph: bool,
        memory: Any = None,
    ) -> tuple[torch.Tensor, Queries, Any]:
        """Drafts [B, steps] int64, queries [B, steps, S, D] of the last fed row of each step, and the graphs' memory pool.

        tokens [B, T]: row b feeds its first counts[b] (0: it takes no part), then what it drafts. The set, chosen at
        set_lengths, loses what lies beyond the cache and gains what lies between, as Backend.extend has it.
        """
        lengths = cache.lengths
        grown = max(0, *(n - then for n, then in zip(lengths, set_lengths, strict=True))) if token_set is not None else 0
        key, room, grown = self._key(tuple(tokens.shape), cache, steps, token_set, grown, heads, use_graph)
        width = None if token_set is None else token_set.indices.shape[1]

        def begin() -> None:
            static.tokens.copy_(tokens)
            self._fill(static, (lengths, counts), set_lengths, token_set, cache)

        recorded = self.graphs.get(key)
        if recorded is None:
            static = self._static(tokens, cache, width, room, heads)
            begin()
            first = Captured(lambda: self._first(static, grown, heads), tokens.device, memory, use_graph)
            self.seconds += first.seconds
            recorded = _Recorded(static, first)
            self.graphs.put(key, recorded, tensor_bytes([static.drafts, static.queries]))
        static = recorded.static
        begin()
        recorded.begun += 1
        recorded.first()
        memory = memory or recorded.first.pool
        if steps > 1 and recorded.later is None:
            later = Captured(lambda: self._later(static, heads), tokens.device, memory, use_graph)
            self.seconds += later.seconds
            recorded.later = later
            # Recording it ran it once.
            begin()
            recorded.first()
        recorded.go_on(steps - 1)
        return *recorded.collect(steps), memory

    def ahead(
        self,
        verdict: Verdict,
        known: Sequence[int],
        active: Sequence[bool],
        cache: PagedCache,
        steps: int,
        token_set: TokenSet | None,
        set_lengths: Sequence[int],
        heads: Mapping[int, tuple[int, ...]],
        use_graph: bool,
    ) -> BegunSteps | None:
        """Launch `steps` steps that follow `verdict` from what the device knows of it; nothing is recorded.

        known[b] tokens, the pending one with them, were there before. See GreedyAhead.draft_ahead.
        """
        batch, judged = len(known), verdict.tokens.shape[1] - 1
        grown = 0
        if token_set is not None:
            grown = max(n + judged - then for n, then, on in zip(known, set_lengths, active, strict=True) if on)
        key, _, _ = self._key((batch, 2), cache, steps, token_set, grown, heads, use_graph)
        recorded = self.graphs.get(key)
        if recorded is None or (steps > 1 and recorded.later is None):
            return None
        static = recorded.static
        self._fill(static, (known, [int(on) for on in active]), set_lengths, token_set, cache)
        feed_verdict(verdict.num_accepted, verdict.tokens, static.control, static.tokens)
        recorded.begun += 1
        recorded.first()
        recorded.go_on(steps - 1)
        return BegunSteps(recorded, cache, steps, recorded.begun)

    @staticmethod
    def _key(
        shape: tuple[int, ...], cache: PagedCache, steps: int, token_set: TokenSet | None, grown: int,
        heads: Mapping[int, tuple[int, ...]], use_graph: bool,
    ) -> tuple[tuple[Any, ...], int, int]:  # fmt: skip
        """What tells shapes apart, the room for drafts, and for tokens that join the set."""
        room = -(-steps // STEPS_MULTIPLE) * STEPS_MULTIPLE
        grown = max(1, -(-grown // GROWN_MULTIPLE)) * GROWN_MULTIPLE if token_set is not None else 0
        width = None if token_set is None else token_set.indices.shape[1]
        pages = table_columns(cache.page_table.shape[1], cache.page_table.device)
        return (*shape, room, pages, width, grown, tuple(sorted(heads.items())), use_graph), room, grown

    def _static(
        self, tokens: torch.Tensor, cache: PagedCache, width: int | None, room: int, heads: Mapping[int, tuple[int, ...]]
    ) -> _Static:
        batch, device = len(tokens), tokens.device
        control, drafts = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((4, batch), (batch, room)))
        table = torch.zeros(batch, table_columns(cache.page_table.shape[1], device), dtype=torch.int32, device=device)
        dim, dtype = self.forward.config.head_dim, self.forward.weights.embedding.dtype
        queries = {layer: torch.zeros(batch, room, len(h), dim, dtype=dtype, device=device) for layer, h in heads.items()}
        indices = sizes = None
        if width is not None:
            indices, sizes = torch.zeros(batch, width, dtype=torch.int32, device=device), torch.zeros_like(control[0])
        at, held, on = (torch.zeros_like(control[0]) for _ in range(3))
        step = torch.zeros(1, dtype=torch.int64, device=device)
        token = torch.zeros_like(drafts[:, :1])
        return _Static(torch.zeros_like(tokens), control, table, indices, sizes, drafts, token, at, held, on, step, queries)

    @staticmethod
    def _fill(
        static: _Static, rows: tuple[Sequence[int], Sequence[int]], set_lengths: Sequence[int], token_set: TokenSet | None,
        cache: PagedCache,
    ) -> None:  # fmt: skip
        lengths, counts = rows
        starts = list(set_lengths) if token_set is not None else [0] * len(counts)
        control = host_values([list(lengths), list(counts), starts, list(cache.lengths)], torch.int32, static.control.device)
        static.control.copy_(control, non_blocking=True)
        if static.table_of is None or static.table_of() is not cache:
            static.page_table[:, : cache.page_table.shape[1]].copy_(cache.page_table)
            static.table_of = weakref.ref(cache)
        if token_set is not None and static.indices is not None and static.sizes is not None:
            static.indices.copy_(token_set.indices)
            static.sizes.copy_(token_set.counts)

    def _first(self, static: _Static, grown: int, heads: Mapping[int, tuple[int, ...]]) -> None:
        """The step that feeds what the draft has not seen, and the slots for all steps."""
        lengths, counts, starts, _ = static.control
        width, table, page_size = static.tokens.shape[1], static.page_table, self.forward.pool.page_size
        room = static.drafts.shape[1]
        static.on.copy_(counts > 0)
        static.at.copy_(lengths)
        static.step.zero_()
        if static.indices is not None and static.sizes is not None:
            # Rows that take no part must not widen their set.
            begin = torch.where(counts > 0, starts, lengths)
            indices, base = extend_set(static.indices, static.sizes, begin, lengths, static.indices.shape[1] + grown)
            # The rows of earlier steps follow the set, so a step only counts more of them. No slot lies beyond the page table.
            ahead = torch.minimum(counts + static.on * (room - 1), table.shape[1] * page_size - lengths)
            static.slots = make_slots(indices, base, lengths, ahead, table, page_size, width + room - 1).slots
            static.held.copy_(base)
        self._step(static, static.tokens, counts, heads)

    def _later(self, static: _Static, heads: Mapping[int, tuple[int, ...]]) -> None:
        """A step that feeds the token before."""
        self._step(static, static.token, static.on, heads)

    def _step(self, static: _Static, tokens: torch.Tensor, fed: torch.Tensor, heads: Mapping[int, tuple[int, ...]]) -> None:
        chosen = None if static.slots is None else Slots(static.slots, static.slots, static.held)
        token, queries = self.forward.run_greedy(Inputs(tokens, static.at, fed, static.page_table, chosen), heads)
        for layer, q in queries.items():
            static.queries[layer].index_copy_(1, static.step, q)
        end_step(token, fed, static.at, static.held, static.step, static.token, static.drafts)
