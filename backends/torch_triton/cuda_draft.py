"""All greedy draft steps of a round in one CUDA graph: each step's argmax feeds the next, the host launches once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.backends.torch_triton.cuda_forward import DeviceForward, Inputs, Slots, make_slots
from dustin.backends.torch_triton.cuda_fused import extend_set
from dustin.backends.torch_triton.cuda_graphs import Captured, few_sizes
from dustin.backends.torch_triton.ops import host_values
from dustin.interfaces import TokenSet

# Rows that may join a set between its choice and the draft, rounded up to this: one graph serves the usual rounds, also those
# after a check that cut a block, which see the recent tokens before the cut again.
GROWN_MULTIPLE = 64
Queries = dict[int, torch.Tensor]


@dataclass
class _Static:
    """Inputs of one shape: control [3, B] holds the draft's lengths, tokens fed first, and the length a set was chosen at."""

    tokens: torch.Tensor
    control: torch.Tensor
    page_table: torch.Tensor
    indices: torch.Tensor | None
    sizes: torch.Tensor | None
    table_of: weakref.ref[PagedCache] | None = None


@dataclass
class DraftChain:
    """The chains of one model over one page pool, a graph for each shape; `memory` is the pool that its graphs share."""

    forward: DeviceForward
    graphs: dict[tuple[Any, ...], tuple[_Static, Captured]] = field(default_factory=dict)
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
        grown = max(1, -(-grown // GROWN_MULTIPLE)) * GROWN_MULTIPLE if token_set is not None else 0
        width = None if token_set is None else token_set.indices.shape[1]
        pages = few_sizes(cache.page_table.shape[1])
        key = (*tokens.shape, steps, pages, width, grown, tuple(sorted(heads.items())), use_graph)
        if key not in self.graphs:
            static = self._static(tokens, cache, width)
            self._fill(static, tokens, lengths, counts, set_lengths, token_set, cache)
            captured = Captured(lambda: self._launch(static, steps, grown, heads), tokens.device, memory, use_graph)
            self.seconds += captured.seconds
            self.graphs[key] = static, captured
        static, captured = self.graphs[key]
        self._fill(static, tokens, lengths, counts, set_lengths, token_set, cache)
        drafts, queries = captured()
        if use_graph:
            queries = {layer: q.clone() for layer, q in queries.items()}
        return drafts.long(), queries, captured.pool

    @staticmethod
    def _static(tokens: torch.Tensor, cache: PagedCache, width: int | None) -> _Static:
        batch, device = len(tokens), tokens.device
        control = torch.zeros(3, batch, dtype=torch.int32, device=device)
        table = torch.zeros(batch, few_sizes(cache.page_table.shape[1]), dtype=torch.int32, device=device)
        if width is None:
            return _Static(torch.zeros_like(tokens), control, table, None, None)
        indices = torch.zeros(batch, width, dtype=torch.int32, device=device)
        return _Static(torch.zeros_like(tokens), control, table, indices, torch.zeros_like(control[0]))

    @staticmethod
    def _fill(
        static: _Static, tokens: torch.Tensor, lengths: Sequence[int], counts: Sequence[int], set_lengths: Sequence[int],
        token_set: TokenSet | None, cache: PagedCache,
    ) -> None:  # fmt: skip
        static.tokens.copy_(tokens)
        starts = list(set_lengths) if token_set is not None else [0] * len(counts)
        control = host_values([list(lengths), list(counts), starts], torch.int32, static.control.device)
        static.control.copy_(control, non_blocking=True)
        if static.table_of is None or static.table_of() is not cache:
            static.page_table[:, : cache.page_table.shape[1]].copy_(cache.page_table)
            static.table_of = weakref.ref(cache)
        if token_set is not None and static.indices is not None and static.sizes is not None:
            static.indices.copy_(token_set.indices)
            static.sizes.copy_(token_set.counts)

    def _launch(
        self, static: _Static, steps: int, grown: int, heads: Mapping[int, tuple[int, ...]]
    ) -> tuple[torch.Tensor, Queries]:
        lengths, counts, starts = static.control
        width, table, page_size = static.tokens.shape[1], static.page_table, self.forward.pool.page_size
        on = (counts > 0).to(torch.int32)
        # Lengths before each step: what was fed first, then one token a step.
        before = [lengths, *(lengths + counts + on * i for i in range(steps - 1))]
        slots, sizes = None, []
        if static.indices is not None and static.sizes is not None:
            # Rows that take no part must not widen their set.
            begin = torch.where(counts > 0, starts, lengths)
            indices, base = extend_set(static.indices, static.sizes, begin, lengths, static.indices.shape[1] + grown)
            room = counts + on * (steps - 1)
            # One list of slots for all steps: the rows of earlier steps follow the set, so a step only counts more of them.
            slots = make_slots(indices, base, lengths, room, table, page_size, width + steps - 1)
            sizes = [base + at - lengths for at in before]
        tokens, fed = static.tokens, counts
        drafts, kept = [], []
        for step, at in enumerate(before):
            chosen = None if slots is None else Slots(slots.slots, slots.slots, sizes[step])
            token, queries = self.forward.run_greedy(Inputs(tokens, at, fed, table, chosen), heads)
            drafts.append(token)
            kept.append(queries)
            tokens, fed = token[:, None], on
        return torch.stack(drafts, 1), {layer: torch.cat([q[layer] for q in kept], 1) for layer in heads}
