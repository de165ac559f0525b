"""A model of mlx-lm behind the Model protocol: forward over a ragged cache, queries of the scoring heads, logits as asked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dustin.backends.common.checks import check_forward
from dustin.backends.common.config import ModelConfig
from dustin.backends.mlx_metal.attention import Forward, connect
from dustin.backends.mlx_metal.cache import MlxCache
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet
from dustin.metal_kernels.gate import Gate


def fingerprint(config: ModelConfig, weights: list[tuple[str, mx.array]]) -> str:
    """sha256 of the configuration, the dtype and some numbers of every tensor: stable over runs, cheap for any size."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode())
    samples = [tensor.flatten()[:: max(1, tensor.size // 64)].astype(mx.float32) for _, tensor in weights]
    mx.eval(samples)
    for (name, tensor), sample in zip(weights, samples, strict=True):
        digest.update(f"{name}{tensor.dtype}{tensor.shape}".encode() + bytes(memoryview(sample)))
    return digest.hexdigest()


class MlxModel:
    """Model of dustin.interfaces around an unforked mlx-lm model."""

    def __init__(self, inner: Any, config: ModelConfig, name: str, gate: Gate) -> None:
        connect(inner)
        self._inner, self.config, self._gate = inner, config, gate
        self.scale = float(inner.layers[0].self_attn.scale)
        weights = tree_flatten(inner.parameters())
        # What layers compute in: quantised weights have the dtype of their scales.
        self.dtype = inner.model.embed_tokens(mx.zeros((1, 1), mx.int32)).dtype
        self._vocabulary = config.vocab_size
        self.spec = ModelSpec(
            name=name,
            architecture=config.architecture,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            dtype=str(self.dtype).rsplit(".", 1)[-1],
            fingerprint=fingerprint(config, weights),
            bytes_per_kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.size,
            weight_bytes=sum(tensor.nbytes for _, tensor in weights),
        )

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError on a size out of range."""
        if not 1 <= size <= self.config.vocab_size:
            raise ValueError(f"size is {size}, expected 1 to {self.config.vocab_size}")
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def new_cache(self, batch: int, capacity: int) -> MlxCache:
        """An empty cache: see Model.new_cache."""
        c = self.config
        return MlxCache(c.num_layers, batch, capacity, c.num_kv_heads, c.head_dim, dtype=self.dtype)

    def forward(
        self,
        tokens: mx.array,
        num_tokens: Sequence[int],
        cache: MlxCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward. Raise ValueError on a bad count, set, tap or cache, and on the CPU on a token out of range."""
        batch, rows = tokens.shape
        counts, heads = check_forward(self.config.num_layers, tokens, num_tokens, cache, tap, logits)
        if not any(counts):
            return self._nothing(batch, rows, heads, tap, logits)
        self._check_tokens(tokens)
        state = Forward(cache, counts, rows, token_set, heads, self._gate)
        taking = mx.array(state.rows, mx.int32)
        fed = tokens if len(state.rows) == batch else tokens[taking]
        hidden = self._inner.model(fed, cache=state.views(self.config.num_layers))
        cache.advance(counts)
        last = mx.maximum(state.counts_array[taking] - 1, 0)[:, None]
        if tap is not None and tap.last_row_only:
            queries = {i: mx.take_along_axis(q, last[:, :, None, None], axis=1) for i, q in state.queries.items()}
        else:
            live = (mx.arange(rows)[None] <= last)[:, :, None, None]
            queries = {i: mx.where(live, q, 0.0) for i, q in state.queries.items()}
        out = None
        if logits != "none":
            out = self._head(hidden if logits == "all" else mx.take_along_axis(hidden, last[:, :, None], axis=1))
            out = _spread(out, state.rows, batch)
        queries = {i: _spread(q, state.rows, batch) for i, q in queries.items()}
        pending = [x for x in (out, *queries.values()) if x is not None]
        if state.in_place:
            mx.async_eval(*pending, *cache.keys, *cache.values)
        else:
            # Waiting frees what the graph holds: a cache that anything still holds is copied by the next write to it.
            mx.eval(*pending, *cache.keys, *cache.values)
        return ForwardResult(out, queries)

    def _head(self, hidden: mx.array) -> mx.array:
        """fp32 logits [b, t, V] of normed hidden states, as mlx-lm's Model makes them."""
        inner = self._inner
        head = inner.model.embed_tokens.as_linear if self.config.tied_embeddings else inner.lm_head
        return head(hidden)[..., : self.spec.vocab_size].astype(mx.float32)

    def _check_tokens(self, tokens: mx.array) -> None:
        """A gather out of range is undefined in MLX. Only the CPU reads the tokens back: elsewhere it would stall the round."""
        if mx.default_device() != mx.Device(mx.cpu):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if not 0 <= low <= high < self.config.vocab_size:
            raise ValueError(f"tokens range over {low}..{high}, expected 0 to {self.config.vocab_size - 1}")

    def _nothing(self, batch: int, rows: int, heads: dict[int, tuple[int, ...]], tap: Tap | None, logits: str) -> ForwardResult:
        """The result where no row takes part."""
        kept = 1 if tap is not None and tap.last_row_only else rows
        queries = {i: mx.zeros((batch, kept, len(h), self.config.head_dim), self.dtype) for i, h in heads.items()}
        height = {"all": rows, "last": 1}.get(logits)
        return ForwardResult(None if height is None else mx.zeros((batch, height, self.spec.vocab_size)), queries)


def _spread(x: mx.array, rows: Sequence[int], batch: int) -> mx.array:
    """[B, ...] from [len(rows), ...]: sequences that took no part are 0."""
    if len(rows) == batch:
        return x
    blank = mx.zeros((1, *x.shape[1:]), x.dtype)
    place = {b: i for i, b in enumerate(rows)}
    return mx.concatenate([x, blank])[mx.array([place.get(b, len(rows)) for b in range(batch)], mx.int32)]
