"""A lean decoder of the Llama, Mistral, Qwen2 and Qwen3 family. Rows of all sequences run packed: [R, H], no padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from dustin.backends.torch_triton import compact_keys, ops, rope
from dustin.backends.torch_triton.attention import Attention
from dustin.backends.torch_triton.cache import TorchCache, check_forward
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.weights import Layer, Linear, Weights, spec_of
from dustin.interfaces import ForwardResult, Tap, TokenSet

# Rows of one MLP product: bounds its intermediate [rows, 2 I] when a batch prefills.
_MLP_ROWS = 1024


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x [R, in] times the weight [out, in], plus the bias."""
    return F.linear(x, layer.weight, layer.bias)


def set_of_layer(token_set: TokenSet | None, layer: int) -> TokenSet | None:
    """The set that `layer` reads: its own in `by_layer`, none (dense) in `dense_layers`, else the shared one."""
    if token_set is None or layer in token_set.by_layer:
        return None if token_set is None else token_set.by_layer[layer]
    return None if layer in token_set.dense_layers else token_set


class Peers(Protocol):
    """What a model that holds one rank's shard needs of the other ranks."""

    rank: int
    # Tells calls apart that differ for another rank only: ranks must record the same graphs.
    variant: Any

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        ...

    def linear_sum(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum over ranks of x [R, in] times a weight [out, in], plus the bias; valid until the next one."""
        ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 every rank's [R, n] side by side; elsewhere x itself."""
        ...


def embed(tokens: torch.Tensor, weight: torch.Tensor, peers: Peers | None) -> torch.Tensor:
    """[..., H] of tokens [...]; of several ranks each looks up its own span of the vocabulary, weight [share, H]."""
    if peers is None:
        return F.embedding(tokens, weight)
    own = tokens - peers.rank * len(weight)
    held = (own >= 0) & (own < len(weight))
    return peers.sum(F.embedding(own.clamp(0, len(weight) - 1), weight) * held[..., None])


class TorchModel:
    """Model of dustin.interfaces.

    With `peers` it is one rank's shard: `config` counts this rank's heads, sums run over ranks, and rank 0 alone has logits.
    """

    def __init__(self, config: ModelConfig, weights: Weights, name: str, peers: Peers | None = None) -> None:
        self.peers = peers
        self.config = config
        self.weights = weights
        self.scale = config.head_dim**-0.5
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._head = weights.head
        inverse, self._amplitude = rope.frequencies(config.rope_theta, config.head_dim, config.rope_scaling, config.context_length)
        self._inverse = inverse.to(self.device)
        self.compact: compact_keys.CompactKeys | None = None
        self._fitted: dict[int, compact_keys.CompactKeys] = {}
        self.spec = spec_of(config, weights, name)

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError on a size out of range."""
        if not 1 <= size <= self.config.vocab_size:
            raise ValueError(f"size is {size}, expected 1 to {self.config.vocab_size}")
        if self.peers is None:
            self._head = Linear(self.weights.head.weight[:size], None)
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def fit_compact_keys(self, tokens: Sequence[int], rank: int) -> None:
        """See CompactModel.fit_compact_keys."""
        if rank not in self._fitted:
            self._fitted[rank] = compact_keys.fit_model(self, tokens, rank, self._inverse)
        self.compact = self._fitted[rank]

    def new_cache(self, batch: int, capacity: int) -> TorchCache:
        """An empty cache: see Model.new_cache."""
        c = self.config
        return TorchCache(c.num_layers, batch, capacity, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        num_tokens: Sequence[int],
        cache: TorchCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward. Rows beyond num_tokens[b] come out as 0. Raise ValueError on a bad token, count or set."""
        batch, rows = tokens.shape
        counts, heads = check_forward(self.config.num_layers, tokens, num_tokens, cache, tap, logits)
        places = _Places(batch, rows, counts, self.device)
        if token_set is not None and token_set.reselection is not None and token_set.reselection.rank:
            again = token_set.reselection
            compact_keys.needed(self.compact, again.rank).catch_up(cache, sorted(again.heads))
        flat = places.pack(tokens)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.config.vocab_size:
            raise ValueError(f"tokens range over {int(flat.min())}..{int(flat.max())}, expected 0 to {self.config.vocab_size - 1}")
        last_only = tap is not None and tap.last_row_only
        hidden, queries = self._blocks(flat, counts, cache, token_set, heads)
        cache.advance(counts)
        return ForwardResult(
            self._logits(hidden, places, logits),
            {i: places.last(q) if last_only else places.unpack(q) for i, q in queries.items()},
        )

    def _blocks(
        self,
        flat: torch.Tensor,
        counts: Sequence[int],
        cache: TorchCache,
        token_set: TokenSet | None,
        heads: dict[int, tuple[int, ...]],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Hidden states [R, H] after the last block and the captured queries [R, S, D] of each tapped layer."""
        hidden = embed(flat, self.weights.embedding, self.peers)
        queries: dict[int, torch.Tensor] = {}
        if not flat.numel():
            return hidden, {i: hidden.new_zeros(0, len(h), self.config.head_dim) for i, h in heads.items()}
        spans = zip(cache.lengths, counts, strict=True)
        positions = torch.cat([torch.arange(n, n + count, device=self.device) for n, count in spans])
        turn = rope.table(positions, self._inverse, self._amplitude)
        attention = Attention(cache.lengths, counts, self.scale)
        where = cache.destinations(counts)
        # What the last layer that chose for itself has chosen.
        chosen: list[TokenSet] = []
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._project(layer, hidden, turn)
            cache.write(i, where, k, v)
            if i in heads:
                queries[i] = q[:, list(heads[i])]
            chosen = self._chosen(q, cache, i, counts, token_set) or chosen
            attended = self._attended(attention, q, cache, i, token_set, chosen)
            hidden = hidden + self._sum(linear(attended.flatten(1), layer.output))
            hidden = hidden + self._sum(self._mlp(layer, hidden))
        return hidden, queries

    def _chosen(
        self, q: torch.Tensor, cache: TorchCache, i: int, counts: Sequence[int], token_set: TokenSet | None
    ) -> list[TokenSet]:
        """The sets that queries [R, Hq, D] of layer i choose: one for all kv heads, or for each; none where it does not choose."""
        again = ops.reselection_at(token_set, i, q.shape[1])
        if token_set is None or again is None:
            return []
        parts = again.of_kv_heads(i, q.shape[1], self.config.num_kv_heads) if again.by_kv_head else [again]
        how: dict[str, Any] = {"scale": self.scale, "compact": self.compact}
        made = [ops.reselected(dataclasses.replace(token_set, reselection=part), q, cache, i, counts, **how) for part in parts]
        return [one for one in made if one is not None]

    @torch.inference_mode()
    def chosen_sets(
        self, queries: Mapping[int, torch.Tensor], num_tokens: Sequence[int], cache: TorchCache, token_set: TokenSet
    ) -> dict[int, list[TokenSet]]:
        """See ChoosingModel."""
        counts, again = list(num_tokens), token_set.reselection
        if again is not None and again.rank:
            compact_keys.needed(self.compact, again.rank).catch_up(cache, sorted(again.heads))
        made = {}
        for layer, q in queries.items():
            places = _Places(*q.shape[:2], counts, self.device)
            made[layer] = self._chosen(places.pack(q), cache, layer, counts, token_set)
        return {layer: sets for layer, sets in made.items() if sets}

    def _attended(
        self, attention: Attention, q: torch.Tensor, cache: TorchCache, i: int, token_set: TokenSet | None, chosen: list[TokenSet]
    ) -> torch.Tensor:
        """[R, Hq, D] of queries of that shape, through the layer's set; `chosen` are those that this layer, or the last one before
        it that did, has chosen."""
        window, again = self.config.windows[i], None if token_set is None else token_set.reselection
        read: list[TokenSet | None] = [set_of_layer(token_set, i)]
        if again is not None and chosen and read[0] is token_set and (again.reuse or i in again.heads):
            read = list(chosen)
        if len(read) == 1:
            return attention(q, cache, i, read[0], window)
        parts = []
        for kv, (mine, one) in enumerate(zip(q.chunk(len(read), 1), read, strict=True)):
            parts.append(attention(mine.contiguous(), cache.of_kv_head(i, kv), i, one, window))  # type: ignore[arg-type]
        return torch.cat(parts, 1)

    def _project(
        self, layer: Layer, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [R, Hq, D], k and v [R, Hkv, D], normed where the model does and turned to their positions."""
        c = self.config
        both = c.num_heads + c.num_kv_heads
        qkv = linear(self._norm(hidden, layer.input_norm), layer.qkv).view(len(hidden), -1, c.head_dim)
        qk = qkv[:, :both]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([self._norm(qk[:, : c.num_heads], layer.q_norm), self._norm(qk[:, c.num_heads :], layer.k_norm)], 1)
        qk = rope.rotate(qk, *turn)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, both:]

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.peers is None else self.peers.sum(x)

    def _mlp(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        parts = []
        for x in hidden.split(_MLP_ROWS):
            gate, up = linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            parts.append(linear(F.silu(gate).mul_(up), layer.down))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last axis, its sums in fp32."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _logits(self, hidden: torch.Tensor, places: _Places, wanted: str) -> torch.Tensor | None:
        """[B, T, V] or [B, 1, V] fp32."""
        if wanted == "none":
            return None
        if wanted == "last":
            hidden = places.last(hidden)[:, 0]
        out = linear(self._norm(hidden, self.weights.norm), self._head)
        if self.peers is not None:
            out = self.peers.gather_columns(out)[:, : self.spec.vocab_size]
        out = out.float()
        if wanted == "all":
            return places.unpack(out)
        return out[:, None]


class _Places:
    """Where the valid rows of [B, T] lie in the packed [R] order (sequence by sequence)."""

    def __init__(self, batch: int, rows: int, counts: Sequence[int], device: torch.device) -> None:
        self._shape, self._device = (batch, rows), device
        self._full = all(count == rows for count in counts)
        self._valid = [b * rows + t for b, count in enumerate(counts) for t in range(count)] if not self._full else []
        ends = [sum(counts[: b + 1]) for b in range(batch)]
        self._last = [(b, end - 1) for b, (end, count) in enumerate(zip(ends, counts, strict=True)) if count]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...] from [B, T, ...]."""
        x = x.flatten(0, 1)
        return x if self._full else x[torch.tensor(self._valid, dtype=torch.long, device=self._device)]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] from [R, ...]; rows that are not valid are 0."""
        if self._full:
            return x.view(*self._shape, *x.shape[1:])
        out = x.new_zeros(self._shape[0] * self._shape[1], *x.shape[1:])
        out[torch.tensor(self._valid, dtype=torch.long, device=self._device)] = x
        return out.view(*self._shape, *x.shape[1:])

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1, ...] from [R, ...]: each sequence's last valid row, 0 where it has none."""
        if len(self._last) == self._shape[0]:
            return x[[at for _, at in self._last]][:, None]
        out = x.new_zeros(self._shape[0], 1, *x.shape[1:])
        if self._last:
            out[[b for b, _ in self._last], 0] = x[[at for _, at in self._last]]
        return out
