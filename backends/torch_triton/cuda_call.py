"""Calls of a paged model: what each shape of one reads in place, and the CUDA graph of its launches."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_cache import PagedCache, PagePool
from dustin.backends.torch_triton.cuda_draft import DraftChain
from dustin.backends.torch_triton.cuda_forward import DeviceForward, Inputs, make_slots, pack
from dustin.backends.torch_triton.cuda_graphs import Captured, table_columns
from dustin.backends.torch_triton.cuda_recent import Recent
from dustin.backends.torch_triton.ops import host_values
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.interfaces import TokenSet

# Calls with more rows a sequence (prefill chunks) run eager: launches do not limit them, and their shapes vary.
MAX_GRAPH_ROWS = 64
# Widths of a token set are rounded up to this, so that a set that grows a little finds its graph again.
SET_MULTIPLE = 64

# Static copies of a call's sets: layer (or _SHARED) -> indices [B, k], counts [B].
Sets = dict[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Static:
    """The static inputs of one shape of call. `control` [2, B] holds lengths and num_tokens."""

    control: torch.Tensor
    inputs: Inputs
    sets: Sets
    # The cache whose page table was copied last: a table stays as it is for the life of its cache.
    table_of: weakref.ref[PagedCache] | None = None


@dataclass
class PoolEngine:
    """One pool, its launches and the graphs that hold its addresses."""

    pool: PagePool
    forward: DeviceForward
    graphs: Recent[tuple[Static, Captured]]
    capture_seconds: float = 0.0
    memory: Any = None
    chain: DraftChain | None = None


class Call:
    """One call of `forward`: finds or makes the graph of its shape, fills its static inputs, copies the outputs out."""

    def __init__(
        self,
        engine: PoolEngine,
        cache: PagedCache,
        token_set: TokenSet | None,
        heads: dict[int, tuple[int, ...]],
        last_row_only: bool,
        logits: str,
        variant: Any = None,
        again: Rechoice | None = None,
    ) -> None:
        self._variant, self._again = variant, again
        # Rows of the products, where not all go through them.
        self.packed = 0
        self._engine, self._cache = engine, cache
        self._heads, self._last_row_only, self._logits = heads, last_row_only, logits
        self._dense = frozenset(token_set.dense_layers) if token_set is not None else frozenset()
        self._sets = _sets_of(token_set)

    def run(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        counts: Sequence[int],
        graph: bool,
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        widths = tuple((layer, _rounded(part.indices.shape[1])) for layer, part in sorted(self._sets.items()))
        columns = table_columns(self._cache.page_table.shape[1], tokens.device)
        shape = (*tokens.shape, columns, widths, self._dense)
        heads = tuple(sorted(self._heads.items()))
        key = (*shape, heads, self._last_row_only, self._logits, graph, self._variant, self._again, self.packed)
        if not graph and tokens.shape[1] > MAX_GRAPH_ROWS:
            # Prompts come in any number of rows: nothing is kept for each.
            static = self._static(tokens.shape, dict(widths))
            self._fill(static, tokens, lengths, counts)
            if self._logits != "all" and 8 * sum(counts) <= 7 * tokens.numel():
                static.inputs.packed = pack(static.inputs.num_tokens, tokens.shape[1], sum(counts))
            return self._launch(static.inputs, static.sets)
        found = self._engine.graphs.get(key)
        if found is None:
            static = self._static(tokens.shape, dict(widths))
            self._fill(static, tokens, lengths, counts)
            captured = Captured(lambda: self._launch(static.inputs, static.sets), tokens.device, self._engine.memory, graph)
            self._engine.memory = self._engine.memory or captured.pool
            self._engine.capture_seconds += captured.seconds
            found = static, captured
            self._engine.graphs.put(key, found, captured.bytes)
        static, captured = found
        self._fill(static, tokens, lengths, counts)
        # What was captured keeps this call, for its launches: cache and sets must not live as long as that.
        del self._cache, self._sets
        out, queries = captured()
        if not graph:
            return out, queries
        # The next replay overwrites what the graph returned, and callers keep queries over several calls.
        return None if out is None else out.clone(), {layer: q.clone() for layer, q in queries.items()}

    def _static(self, shape: Sequence[int], widths: dict[int, int]) -> Static:
        batch, device = shape[0], self._cache.page_table.device
        control = torch.zeros(2, batch, dtype=torch.int32, device=device)
        tokens = torch.zeros(tuple(shape), dtype=torch.long, device=device)
        table = torch.zeros(batch, table_columns(self._cache.page_table.shape[1], device), dtype=torch.int32, device=device)
        sets = {
            layer: (
                torch.zeros(batch, width, dtype=torch.int32, device=device),
                torch.zeros(batch, dtype=torch.int32, device=device),
            )
            for layer, width in widths.items()
        }
        return Static(control, Inputs(tokens, control[0], control[1], table), sets)

    def _fill(self, static: Static, tokens: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        static.inputs.tokens.copy_(tokens)
        control = host_values([list(lengths), list(counts)], torch.int32, static.control.device)
        static.control.copy_(control, non_blocking=True)
        if static.table_of is None or static.table_of() is not self._cache:
            static.inputs.page_table[:, : self._cache.page_table.shape[1]].copy_(self._cache.page_table)
            static.table_of = weakref.ref(self._cache)
        for layer, (indices, sizes) in static.sets.items():
            part = self._sets[layer]
            indices[:, : part.indices.shape[1]].copy_(part.indices)
            sizes.copy_(part.counts)

    def _launch(self, inputs: Inputs, sets: Sets) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        page_size = self._engine.pool.page_size
        made = {
            layer: make_slots(
                indices, sizes, inputs.lengths, inputs.num_tokens, inputs.page_table, page_size, inputs.tokens.shape[1]
            )
            for layer, (indices, sizes) in sets.items()
        }
        by_layer: dict[int, Any] = {layer: None for layer in self._dense}
        by_layer.update({layer: slots for layer, slots in made.items() if layer >= 0})
        complete = dataclasses.replace(inputs, shared=made.get(_SHARED), by_layer=by_layer, again=self._again)
        if not self.packed:
            return self._engine.forward.run(complete, self._heads, self._last_row_only, self._logits)
        complete.packed = pack(inputs.num_tokens, inputs.tokens.shape[1], self.packed)
        out, queries = self._engine.forward.run(complete, self._heads, self._last_row_only, self._logits)
        if out is not None:
            # Logits of rows that were not fed are those of some that were: finite.
            fed = complete.packed.places.minimum((inputs.num_tokens.sum() - 1).clamp_(min=0))
            out = out[0][fed].view(*inputs.tokens.shape, -1)
        return out, queries


# Key of the set that all layers share, beside the layer numbers of those with their own.
_SHARED = -1


def _sets_of(token_set: TokenSet | None) -> dict[int, TokenSet]:
    return {} if token_set is None else {_SHARED: token_set, **token_set.by_layer}


def _rounded(width: int) -> int:
    return max(SET_MULTIPLE, -(-width // SET_MULTIPLE) * SET_MULTIPLE)
