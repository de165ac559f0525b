"""One forward of a decoder as device launches alone: no host read, no shape that depends on a length, so a graph can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_cache import PagePool
from dustin.backends.torch_triton.cuda_decode import DecodeBlocks, attention_config, supports
from dustin.backends.torch_triton.cuda_fused import add_norm
from dustin.backends.torch_triton.cuda_wide import WideProducts
from dustin.backends.torch_triton.model import Peers, embed
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.backends.torch_triton.weights import Layer, Linear, Weights
from dustin.triton_kernels import dense_verify as dense
from dustin.triton_kernels import sparse_verify as sparse
from dustin.triton_kernels.argmax_rows import argmax_rows
from dustin.triton_kernels.attention_core import AttentionConfig, AttentionWorkspace
from dustin.triton_kernels.decode_linear import Stream
from dustin.triton_kernels.head_argmax import head_argmax
from dustin.triton_kernels.rope_append import rope_append
from dustin.triton_kernels.stream_rows import capture_heads, last_norm
from dustin.triton_kernels.translate_slots import translate_slots

# For so many sequences the argmax is taken inside the head's product: 4 to 6 us of a draft step's 650 to 730 (0.5B, 8, 16 and 32
# rows, one H200). At one row the library's product, and an argmax after it, are faster.
FUSED_HEAD_ROWS = range(5, 33)
# Scratch of calls with more rows a sequence, prompts of any length, is made for each: they are many shapes, and no graphs.
KEPT_ROWS = 64
# Rows of one MLP product: bounds its intermediate [rows, 2 I] when a batch prefills.
MLP_ROWS = 8192


@dataclass
class Slots:
    """A token set as pool rows (see translate_slots): `slots` [B, k + T], committed entries `counts` [B], `indices` [B, k]; with a
    set for each kv head B * Hkv rows of each."""

    indices: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


@dataclass
class Packed:
    """Which rows of [B, T] go through the products of ragged sequences: `rows` [R] int64 are their places in B * T, `places`
    [B * T] int64 where each place lies among them, `starts` [B] int32 where those of a sequence begin."""

    rows: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


def pack(num_tokens: torch.Tensor, max_tokens: int, size: int) -> Packed:
    """The fed rows of num_tokens [B] int32 of up to `max_tokens` each, `size` at most; by device launches alone. Places of rows
    that are not fed, and what lies beyond the fed ones, are some valid row."""
    ends = num_tokens.cumsum(0)
    starts = ends - num_tokens
    at = torch.arange(size, device=ends.device)
    owner = torch.searchsorted(ends, at, right=True).clamp_(max=len(ends) - 1)
    rows = owner * max_tokens + (at - starts[owner]).clamp_(max=max_tokens - 1)
    places = (starts[:, None] + torch.arange(max_tokens, device=ends.device)).clamp_(max=size - 1)
    # Should they not fit, some are written over others: nothing is written beyond them.
    starts = torch.minimum(starts, size - num_tokens).clamp_(min=0).to(torch.int32)
    return Packed(rows, places.flatten(), starts)


@dataclass
class Inputs:
    """What a forward reads, all on the device: tokens [B, T] int64; lengths (before the step), num_tokens [B] int32;
    page_table [B, max_pages] int32; `shared` is the set of all layers, `by_layer` that of single ones (None = dense); layers
    of `again` that are not among those choose their own. `set_lengths`: see Rechoice.choose, made at the first such layer;
    `chosen` is what the last one chose, which those after it read where `again` says so. `packed`: the rows of a
    dense pass that count."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    num_tokens: torch.Tensor
    page_table: torch.Tensor
    shared: Slots | None = None
    by_layer: Mapping[int, Slots | None] = field(default_factory=dict)
    again: Rechoice | None = None
    set_lengths: torch.Tensor | None = None
    chosen: Slots | None = None
    packed: Packed | None = None

    def slots_of(self, layer: int) -> Slots | None:
        """The set that `layer` reads."""
        return self.by_layer.get(layer, self.shared)


def make_slots(
    indices: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_tokens: int,
) -> Slots:
    """Slots of indices [B, k] int32 (counts[b] valid), or of several sets a sequence, followed by up to max_tokens in-flight rows
    from lengths[b] on."""
    sets = len(indices) // len(lengths)
    slots, slot_counts = translate_slots(indices, counts, lengths, num_tokens, page_table, page_size, max_tokens, sets=sets)
    return Slots(indices, slots, slot_counts)


class DeviceForward:
    """The launches of one model over one page pool. Scratch of few rows is sized per shape on first use and kept for replays."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pool: PagePool,
        cos: torch.Tensor,
        sin: torch.Tensor,
        peers: Peers | None = None,
    ) -> None:
        """With `peers` the weights are one rank's shard and rank 0 alone gets logits (see TorchModel)."""
        self.config = config
        self.peers = peers
        self.vocab_size = config.vocab_size
        self.weights = weights
        self.head: Linear = weights.head
        self.pool = pool
        self._cos, self._sin = cos, sin
        self._workspaces: dict[tuple[int, ...], AttentionWorkspace] = {}
        self._head_indices: dict[tuple[int, ...], torch.Tensor] = {}
        # The blocks add the residual inside a product, where the sum over ranks is not known yet.
        fused = peers is None and supports(config, weights)
        self.blocks = DecodeBlocks(config, weights, pool, cos, sin) if fused else None
        self.products = WideProducts(weights, peers is None)

    def run(
        self, inputs: Inputs, heads: Mapping[int, tuple[int, ...]], last_row_only: bool, logits: str
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Logits [B, T, V] ([1, R, V] of packed rows), [B, 1, V] or None; of each layer of `heads` queries [B, T or 1, S, D]."""
        batch, rows = inputs.tokens.shape
        # A graph records the same inputs that were warmed up: what one run made is not there in the next.
        inputs.set_lengths = inputs.chosen = None
        if self.blocks is not None and batch * rows <= self.blocks.max_rows:
            return self._run_blocks(self.blocks, inputs, heads, last_row_only, logits)
        eps, packed = self.config.rms_norm_eps, inputs.packed
        if packed is not None and (inputs.shared is not None or inputs.by_layer or inputs.again is not None):
            raise ValueError("packed: expected a dense pass, got one that reads token sets: give it all rows")
        tokens = inputs.tokens.flatten() if packed is None else inputs.tokens.flatten()[packed.rows]
        residual = embed(tokens, self.weights.embedding, self.peers)
        last = None
        if last_row_only or logits == "last":
            last = (inputs.num_tokens.long() - 1).clamp_(min=0) + torch.arange(batch, device=residual.device) * rows
        queries: dict[int, torch.Tensor] = {}
        update = None
        for i, layer in enumerate(self.weights.layers):
            qkv = self.products.linear("qkv", add_norm(update, residual, layer.input_norm, eps), layer.qkv)
            q = self._turn(layer, qkv, inputs, i, i in heads)
            if i in heads:
                queries[i] = self._capture(q, heads[i], last if last_row_only else None)
            attended = self._attend(q, inputs, i).view(len(tokens), -1)
            update = self._product("output", attended, layer.output)
            update = self._mlp(layer, add_norm(update, residual, layer.mlp_norm, eps))
        if logits == "none":
            return None, queries
        x = add_norm(update, residual, self.weights.norm, eps)
        if logits == "all":
            return self._logits(x, batch if packed is None else 1), queries
        return self._logits(x[last if packed is None else packed.places[last]], batch), queries

    def _logits(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        out = F.linear(x, self.head.weight, self.head.bias)
        if self.peers is not None:
            out = self.peers.gather_columns(out)
        return out.view(batch, -1, out.shape[-1])[..., : self.vocab_size]

    def _product(self, name: str, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """x [R, in] times a weight of which each rank has some columns; over ranks it is valid until the next one."""
        if self.peers is None:
            return self.products.linear(name, x, layer)
        return self.peers.linear_sum(x, layer.weight, layer.bias)

    def _run_blocks(
        self, blocks: DecodeBlocks, inputs: Inputs, heads: Mapping[int, tuple[int, ...]], last_row_only: bool, logits: str
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """`run` for a few rows."""
        stream, queries = self._stream(blocks, inputs, heads, last_row_only)
        if logits == "none":
            return None, queries
        norm, eps = self.weights.norm, self.config.rms_norm_eps
        if logits == "last":
            x = last_norm(stream.residual, inputs.num_tokens, norm, eps)
        else:
            x = add_norm(None, stream.residual, norm, eps)
        return self._logits(x, len(inputs.tokens)), queries

    def _stream(
        self, blocks: DecodeBlocks, inputs: Inputs, heads: Mapping[int, tuple[int, ...]], last_row_only: bool
    ) -> tuple[Stream, dict[int, torch.Tensor]]:
        queries: dict[int, torch.Tensor] = {}

        def keep(i: int, q: torch.Tensor) -> None:
            if i in heads:
                queries[i] = capture_heads(q, self._indices_of(heads[i], q.device), inputs.num_tokens, last_row_only)

        stream = blocks.run(
            inputs.tokens, inputs.page_table, inputs.lengths, inputs.num_tokens, lambda q, i: self._attend(q, inputs, i), keep
        )
        return stream, queries

    def run_greedy(
        self, inputs: Inputs, heads: Mapping[int, tuple[int, ...]]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The argmax [B] int32 of each sequence's last row, as argmax_rows gives it for `run`'s logits, and its queries."""
        batch, rows = inputs.tokens.shape
        blocks = self.blocks
        if blocks is None or batch * rows > blocks.max_rows or batch not in FUSED_HEAD_ROWS:
            logits, queries = self.run(inputs, heads, True, "last")
            if logits is None:
                raise RuntimeError("a step gave no logits")
            return argmax_rows(logits[:, 0])[0], queries
        stream, queries = self._stream(blocks, inputs, heads, True)
        x = last_norm(stream.residual, inputs.num_tokens, self.weights.norm, self.config.rms_norm_eps)
        return head_argmax(x, self.head.weight, vocabulary=self.vocab_size)[0], queries

    def _indices_of(self, heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
        # Made at the first run, before a capture, which may not copy from the host.
        if heads not in self._head_indices:
            self._head_indices[heads] = torch.tensor(heads, device=device)
        return self._head_indices[heads]

    def _turn(self, layer: Layer, qkv: torch.Tensor, inputs: Inputs, index: int, clean: bool) -> torch.Tensor:
        """Queries [B, T, Hq, D] turned to their positions; keys and values go to the pool."""
        c = self.config
        batch, rows = inputs.tokens.shape
        lead = (batch, rows) if inputs.packed is None else (len(qkv),)
        q, k, v = qkv.view(*lead, -1, c.head_dim).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], -2)
        # rope_append leaves rows that are not fed as they were; captured queries must be finite.
        out = torch.zeros(batch, rows, c.num_heads, c.head_dim, dtype=q.dtype, device=q.device) if clean else None
        packed = {} if inputs.packed is None else {"starts": inputs.packed.starts, "max_tokens": rows}
        return rope_append(
            q, k, v, self.pool.keys[index], self.pool.values[index], inputs.page_table, inputs.lengths, inputs.num_tokens,
            self._cos, self._sin, q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=c.rms_norm_eps, out=out, **packed,
        )  # fmt: skip

    def _capture(self, q: torch.Tensor, heads: tuple[int, ...], last: torch.Tensor | None) -> torch.Tensor:
        chosen = q
        if heads != tuple(range(q.shape[2])):
            chosen = q.index_select(2, self._indices_of(heads, q.device))
        return chosen if last is None else chosen.flatten(0, 1)[last][:, None]

    def _attend(self, q: torch.Tensor, inputs: Inputs, index: int) -> torch.Tensor:
        window = self.config.windows[index] or 0
        # A layer with a window keeps it and ignores the set.
        slots = None if window else inputs.slots_of(index)
        keys, values = self.pool.keys[index], self.pool.values[index]
        if inputs.again is not None and index in inputs.again.heads and index not in inputs.by_layer and not window:
            inputs.chosen = self._choose(inputs.again, q, inputs, index)
            return self._sparse(q, keys, values, inputs, inputs.chosen, settled=False)
        if inputs.again is not None and inputs.again.reuse and slots is inputs.shared:
            slots = inputs.chosen or slots
        if slots is None:
            packed = {}
            if inputs.packed is not None:
                rows = torch.empty(len(inputs.packed.rows), *q.shape[2:], dtype=q.dtype, device=q.device)
                packed = {"out": rows, "starts": inputs.packed.starts}
            return dense.dense_verify(
                q, keys, values, inputs.page_table, inputs.lengths, inputs.num_tokens, window=window,
                workspace=self._workspace(q, inputs.page_table.shape[1] * self.pool.page_size, sparse_keys=False), **packed,
            )  # fmt: skip
        # The launch before wrote the queries and the in-flight rows; slots are older.
        return self._sparse(q, keys, values, inputs, slots, settled=True)

    def _sparse(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, inputs: Inputs, slots: Slots, settled: bool
    ) -> torch.Tensor:
        """Attention of q [B, T, H, D] over slots of keys and values [pages, page size, heads, D]."""
        rows = slots.slots.shape[1] - q.shape[1]
        return sparse.sparse_verify(
            q, keys, values, inputs.page_table, inputs.lengths, inputs.num_tokens, slots.indices[:, :rows], slots.counts,
            slots=slots.slots, slot_counts=slots.counts,
            workspace=self._workspace(q, slots.slots.shape[1], sparse_keys=True, heads=keys.shape[2]),
            config=self._sparse_config(q, keys.shape[2]), settled=settled,
        )  # fmt: skip

    def _choose(self, again: Rechoice, q: torch.Tensor, inputs: Inputs, index: int) -> Slots:
        """The set that the rows in flight choose at this layer, or one for each kv head."""
        pool, table = self.pool, inputs.page_table
        codes = None if again.compact is None else pool.compact[again.compact][index]
        if inputs.set_lengths is None:
            sets = self.config.num_kv_heads if again.by_kv_head else 1
            # A copy also of one length, which would otherwise be the same place for all sets. Who feeds nothing has no scores:
            # among many that are all alike a choice takes longest.
            inputs.set_lengths = (inputs.lengths * (inputs.num_tokens > 0))[:, None].repeat(1, sets).flatten()
        rest = (inputs.lengths, inputs.num_tokens)
        indices, counts = again.choose(q, pool.keys[index], table, *rest, inputs.set_lengths, index, self.config, codes)
        return make_slots(indices, counts, *rest, table, pool.page_size, q.shape[1])

    def _sparse_config(self, q: torch.Tensor, kv_heads: int) -> AttentionConfig:
        batch, rows, heads, dim = q.shape
        packed = rows * (heads // kv_heads)
        # Behind the small launch that appends the rows, programs that fit a processor twice are spread unevenly.
        base = sparse.choose_config(packed, dim, q.dtype, sparse.one_wave(q, kv_heads), chained=False)
        return attention_config(base, batch, kv_heads, packed, dim)

    def _workspace(self, q: torch.Tensor, max_keys: int, sparse_keys: bool, heads: int = 0) -> AttentionWorkspace | None:
        if q.shape[1] > KEPT_ROWS:
            return None
        heads = heads or self.config.num_kv_heads
        key = (*q.shape, max_keys, sparse_keys, heads)
        if key not in self._workspaces:
            if sparse_keys:
                plan = sparse.plan(q, heads, max_keys, self._sparse_config(q, heads))
            else:
                plan = dense.plan(q, heads, max_keys)
            self._workspaces[key] = AttentionWorkspace(plan.num_rows, q.shape[3], plan.num_counters, q.device, plan.num_handed)
        return self._workspaces[key]

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for rows in x.split(MLP_ROWS):
            gated = self.products.gated(rows, layer.gate_up)
            parts.append(self._product("down", gated, layer.down))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
