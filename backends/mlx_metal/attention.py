"""The seam between mlx-lm's unforked model definitions and our cache: what a layer sees as its `cache` in one forward.

mlx-lm's layers turn q and k by `cache.offset`, hand k and v to `cache.update_and_fetch`, and call
`scaled_dot_product_attention(..., cache=cache, ...)`, a name each model module imports. `connect` wraps that name once a module:
a cache with `attend` computes the attention itself, every other cache gets mlx-lm's function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from dustin.backends.mlx_metal.cache import MlxCache
from dustin.backends.mlx_metal.ops import layer_score, select
from dustin.backends.mlx_metal.sets import checked, facts_of, set_of_layer
from dustin.errors import UsageError
from dustin.interfaces import TokenSet
from dustin.metal_kernels.append_kv import append_kv
from dustin.metal_kernels.attention import verify_attention
from dustin.metal_kernels.fallback import CAUSAL, stock_attention
from dustin.metal_kernels.gate import Gate
from dustin.metal_kernels.plan import HEAD_DIMS, MAX_ROWS


def connect(model: Any) -> None:
    """Route the attention of `model`'s definition through its cache where the cache wants it. Doing it twice changes nothing."""
    module = sys.modules[type(model).__module__]
    theirs = module.scaled_dot_product_attention
    if getattr(theirs, "dispatches", False):
        return

    @functools.wraps(theirs)
    def attention(queries: mx.array, keys: mx.array, values: mx.array, *, cache: Any, scale: float, **rest: Any) -> mx.array:
        if hasattr(cache, "attend"):
            return cache.attend(queries, scale)
        return theirs(queries, keys, values, cache=cache, scale=scale, **rest)

    attention.dispatches = True  # type: ignore[attr-defined]
    module.scaled_dot_product_attention = attention


def may_use_kernels(gate: Gate) -> bool:
    """Whether custom Metal kernels can run at all here: there is Metal, or the caller forces them."""
    return gate.mode == "kernel" or (gate.mode == "auto" and gate.chip is not None)


class Forward:
    """What all layers of one forward share. `rows` names the sequences the model runs: all, or in long forwards the active ones.

    `queries` collects, for each layer of `heads`, the post-RoPE queries [len(rows), T, S, D].
    """

    def __init__(
        self,
        cache: MlxCache,
        counts: Sequence[int],
        num_rows: int,
        token_set: TokenSet | None,
        heads: Mapping[int, tuple[int, ...]],
        gate: Gate,
    ) -> None:
        self.cache, self.counts, self.num_rows, self.gate = cache, counts, num_rows, gate
        self.long = num_rows > MAX_ROWS
        self.rows = [b for b, n in enumerate(counts) if n] if self.long else list(range(len(counts)))
        self.lengths, self.dtype = cache.lengths, cache.keys[0].dtype
        self.uniform = len(set(self.lengths)) == 1 and set(counts) == {num_rows}
        self.in_place = not self.long and may_use_kernels(gate) and cache.keys[0].shape[3] in HEAD_DIMS
        self.heads, self.queries = heads, {}  # type: tuple[Mapping[int, tuple[int, ...]], dict[int, mx.array]]
        self.token_set = checked(token_set, self.lengths)
        lengths = cache.lengths_array(self.lengths)
        self.lengths_array = lengths[mx.array(self.rows, mx.int32)] if self.long else lengths
        self.counts_array = mx.array(list(counts), mx.int32)
        self.plans: dict[Any, Any] = {}
        self._destinations = None if self.in_place else cache.destinations(counts)
        self._packed = self._packing()
        self._masked: dict[tuple[bool, ...], tuple[mx.array, mx.array]] = {}
        # What the last layer that chose for itself has chosen.
        self._last: TokenSet | None = None

    def views(self, num_layers: int) -> list[LayerCache]:
        """The `cache` argument of an mlx-lm model."""
        return [LayerCache(self, layer) for layer in range(num_layers)]

    def _packing(self) -> tuple[mx.array, mx.array] | None:
        """Where the valid rows lie in [len(rows), T], sequence by sequence; None when all are valid."""
        counts = [self.counts[b] for b in self.rows]
        if all(n == self.num_rows for n in counts):
            return None
        at = [(i, t) for i, n in enumerate(counts) for t in range(n)]
        return mx.array([i for i, _ in at]), mx.array([t for _, t in at])

    def append(self, layer: int, keys: mx.array, values: mx.array) -> mx.array:
        """Write the new rows [rows, T, Hkv, D] of a layer; the lengths before them, in an array that orders attention after it."""
        cache = self.cache
        if self.in_place:
            stores = cache.keys[layer], cache.values[layer]
            k, v, starts, _ = append_kv(*stores, keys, values, self.lengths_array, self.counts_array)
            cache.keys[layer], cache.values[layer], cache.fence = k, v, starts
            return starts
        packed = [x.flatten(0, 1) if self._packed is None else x[self._packed] for x in (keys, values)]
        cache.write(layer, self._destinations, *packed)  # type: ignore[arg-type]
        return self.lengths_array

    def attend(self, q: mx.array, layer: int, starts: mx.array, scale: float) -> mx.array:
        """[rows, T, Hq, D] from q of that shape; the in-flight K and V lie in the cache already."""
        chosen = self._choose(q, layer, scale)
        self._last = chosen or self._last
        if chosen is None:
            chosen, again = set_of_layer(self.token_set, layer), self.token_set.reselection if self.token_set else None
            if again is not None and again.reuse and self._last is not None and chosen is self.token_set:
                chosen = self._last
        everything = [chosen is None or self._all_of(chosen, b) for b in range(len(self.counts))]
        if self.long:
            sets = [None if everything[b] else chosen for b in self.rows]
            parts = [self._long_row(q[i : i + 1], b, layer, sets[i], scale) for i, b in enumerate(self.rows)]
            return mx.concatenate(parts, axis=0)
        end = max(n + t for n, t in zip(self.lengths, self.counts, strict=True))
        k, v = self.cache.keys[layer][:, :end], self.cache.values[layer][:, :end]
        taking = [bool(n) for n in self.counts]
        dense = tuple(takes and all_of for takes, all_of in zip(taking, everything, strict=True))
        if not any(taking) or dense == tuple(taking) or chosen is None:
            return self._verify(q, k, v, starts, self.counts_array, None, scale)
        if not any(dense):
            return self._verify(q, k, v, starts, self.counts_array, chosen, scale)
        # Rows whose set is everything must equal dense attention bit for bit; a row of 0 tokens comes out as 0.
        if dense not in self._masked:
            both = [(n, 0) if whole else (0, n) for n, whole in zip(self.counts, dense, strict=True)]
            self._masked[dense] = (mx.array([n for n, _ in both], mx.int32), mx.array([n for _, n in both], mx.int32))
        full, part = self._masked[dense]
        return self._verify(q, k, v, starts, full, None, scale) + self._verify(q, k, v, starts, part, chosen, scale)

    def _choose(self, q: mx.array, layer: int, scale: float) -> TokenSet | None:
        """What the rows in flight, q [rows, T, Hq, D], choose where the set's reselection names `layer`; None elsewhere.

        Raise ValueError on heads that the layer lacks, UsageError on compact keys.
        """
        again = None if self.token_set is None else self.token_set.reselection
        if self.token_set is None or again is None or layer not in again.heads:
            return None
        if layer in self.token_set.dense_layers or layer in self.token_set.by_layer:
            return None
        heads, width = list(again.heads[layer]), max(self.lengths)
        if not heads or min(heads) < 0 or max(heads) >= q.shape[2]:
            raise ValueError(f"reselection names heads {heads} of layer {layer}, expected some of 0 to {q.shape[2] - 1}")
        if again.by_kv_head:
            raise UsageError("reselection_by_kv_head is set, but backend mlx chooses by layer: leave --reselection-by-kv-head out")
        if again.rank:
            raise UsageError(f"reselection_rank is {again.rank}, but backend mlx keeps no compact keys: use --reselection-rank 0")
        ends = self.cache.lengths_array(self.lengths)
        scores = []
        for i, b in enumerate(self.rows):
            # Sequences differ in how many of their rows count.
            asked = q[i : i + 1, : max(1, min(self.counts[b], again.max_rows))][:, :, mx.array(heads, mx.int32)]
            keys = self.cache.keys[layer][b : b + 1, : max(1, width)]
            scores.append(layer_score(asked, keys, heads, ends[b : b + 1], q.shape[2], scale, self.gate))
        found = dict(zip(self.rows, scores, strict=True))
        nothing = mx.zeros((1, max(1, width)), mx.float32)
        mass = mx.concatenate([found.get(b, nothing) for b in range(len(self.counts))], axis=0)
        # Evaluated here: a pending reader of the keys would make the next append copy them.
        mx.eval(mass)
        return select(mass, None, self.lengths, again.budget, again.num_sink_tokens, again.num_recent_tokens, 0, self.gate)

    def _verify(
        self, q: mx.array, k: mx.array, v: mx.array, starts: mx.array, counts: mx.array, chosen: TokenSet | None, scale: float
    ) -> mx.array:
        # Plans hold masks of the given counts, and with the in-place kernel `starts` must be read anew in every layer.
        plans = None if self.in_place or counts is not self.counts_array else self.plans
        if chosen is None and counts is self.counts_array and self.uniform:
            plans = {(None, k.shape[1]): CAUSAL}
        extra = () if chosen is None else (chosen.indices, chosen.counts)
        return verify_attention(q, k, v, starts, counts, scale, *extra, gate=self.gate, plans=plans)[0]

    def _all_of(self, chosen: TokenSet, b: int) -> bool:
        facts = facts_of(chosen)
        return facts is not None and facts.counts[b] == self.lengths[b]

    def _long_row(self, q: mx.array, b: int, layer: int, chosen: TokenSet | None, scale: float) -> mx.array:
        """One sequence of many rows, q [1, T, Hq, D]: stock attention over exactly its keys."""
        n, count = self.lengths[b], self.counts[b]
        k, v = (store[layer][b : b + 1, : n + count] for store in (self.cache.keys, self.cache.values))
        if chosen is not None:
            spans = mx.array([n], mx.int32), mx.array([count], mx.int32)
            return verify_attention(
                q, k, v, *spans, scale, chosen.indices[b : b + 1], chosen.counts[b : b + 1], gate=self.gate
            )[0]  # fmt: skip
        out = stock_attention(q[:, :count], k, v, scale, "causal")
        return mx.pad(out, [(0, 0), (0, self.num_rows - count), (0, 0), (0, 0)])


class LayerCache:
    """One layer's side of a forward, with the names that mlx-lm's definitions use."""

    def __init__(self, forward: Forward, layer: int) -> None:
        self._forward, self._layer = forward, layer
        self._starts = forward.lengths_array

    @property
    def offset(self) -> mx.array:
        """int32 [rows]: the position of each sequence's first new row."""
        return self._forward.lengths_array

    def make_mask(self, *_: Any, **__: Any) -> None:
        """No mask: attention masks by lengths."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append k and v [rows, Hkv, T, D]. They are handed back as they are: `attend` reads the cache itself."""
        turn, dtype = (0, 2, 1, 3), self._forward.dtype
        rows = (x.astype(dtype).transpose(turn) for x in (keys, values))
        self._starts = self._forward.append(self._layer, *rows)
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """[rows, Hq, T, D] of post-RoPE queries of that shape."""
        forward, turn = self._forward, (0, 2, 1, 3)
        # Norms kept in fp32 beside half-precision weights promote q and k; kernels want q as the cache is.
        q = queries.astype(forward.dtype).transpose(turn)
        if self._layer in forward.heads:
            forward.queries[self._layer] = q[:, :, mx.array(list(forward.heads[self._layer]), mx.int32)]
        return forward.attend(q, self._layer, self._starts, scale).transpose(turn).astype(queries.dtype)
