"""A table-lookup language model for engine tests: milliseconds a run, every acceptance pattern by altering the table."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from dustin.backends.numpy_reference.cache import Cache, check_lengths
from dustin.backends.numpy_reference.ops import selected, set_of_layer
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet

_MODULUS = 1021
_HEAD_DIM = 4


def random_table(vocab_size: int, seed: int = 0, sharpness: float = 3.0) -> np.ndarray:
    """Logits [V, V]: row t holds the next-token logits after token t."""
    return sharpness * np.random.default_rng(seed).standard_normal((vocab_size, vocab_size))


def altered(table: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    """A draft's table: in `share` of the contexts (0 none, 1 all) another token is the best one."""
    out = table.copy().reshape(-1, table.shape[-1])
    rng = np.random.default_rng(seed)
    for row in rng.permutation(len(out))[: round(share * len(out))]:
        out[row, (out[row].argmax() + rng.integers(1, out.shape[1])) % out.shape[1]] = out[row].max() + 3.0
    return out.reshape(table.shape)


class ToyModel:
    """Model of dustin.interfaces: logits after a token are a row of `table` ([V, V], or [V, V, V] for the last two tokens).

    Every cached row keeps (token, state) in V of each layer, where state hashes the token and the states this layer 0 row
    could see. So a dropped, stale or missing row changes the states; `set_weight` > 0 adds state-dependent noise of that
    size to the logits, and a sparse set then changes the output (0: logits are the same for any set). All reads of the
    cache are checked: a NaN (unwritten or dropped row) raises FloatingPointError.
    """

    scale = _HEAD_DIM**-0.5
    softcap = None

    def __init__(
        self,
        table: np.ndarray,
        vocab_size: int | None = None,
        *,
        set_weight: float = 0.0,
        context_length: int = 4096,
        num_layers: int = 4,
        num_heads: int = 2,
        name: str = "toy",
        nan_after: int | None = None,
    ) -> None:
        """`nan_after`: logits after this token are NaN (for tests of the error path). `vocab_size` pads the logits with -30."""
        self.table = np.asarray(table, dtype=np.float64)
        self.set_weight, self.nan_after = set_weight, nan_after
        self.noise = np.random.default_rng(7).standard_normal((_MODULUS, self.table.shape[-1]))
        self.embedding = np.random.default_rng(8).standard_normal((self.table.shape[-1], num_heads, _HEAD_DIM))
        self.num_forwards = 0
        digest = hashlib.sha256(self.table.tobytes() + repr((set_weight, num_layers, num_heads)).encode())
        self.spec = ModelSpec(
            name=name,
            architecture="Toy",
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=_HEAD_DIM,
            vocab_size=vocab_size or self.table.shape[-1],
            context_length=context_length,
            dtype="float64",
            fingerprint=digest.hexdigest(),
            bytes_per_kv_token=2 * num_layers * _HEAD_DIM * 8,
            weight_bytes=self.table.nbytes,
        )

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty numpy cache."""
        return Cache(self.spec.num_layers, batch, capacity, 1, _HEAD_DIM)

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError below the table's own vocabulary."""
        if not self.table.shape[-1] <= size <= self.spec.vocab_size:
            raise ValueError(f"size is {size}, expected {self.table.shape[-1]} to {self.spec.vocab_size}")
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def states(self, cache: Cache, b: int, layer: int = 0) -> list[int]:
        """State of every cached row of sequence b: equal to a dense prefill's unless a row was computed sparsely."""
        return [int(value) for value in cache.values[layer][b, : cache.lengths[b], 0, 1]]

    def cached_tokens(self, cache: Cache, b: int) -> list[int]:
        """The tokens whose rows sequence b holds."""
        return [int(value) for value in cache.values[0][b, : cache.lengths[b], 0, 0]]

    def forward(
        self,
        tokens: np.ndarray,
        num_tokens: Sequence[int],
        cache: Cache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward."""
        self.num_forwards += 1
        batch, rows = tokens.shape
        check_lengths("num_tokens", num_tokens, cache.batch, [0] * batch, [rows] * batch)
        cache.check_room(num_tokens)
        valid = np.arange(rows) < np.asarray(num_tokens)[:, None]
        if (valid & ((tokens < 0) | (tokens >= self.table.shape[-1]))).any():
            raise ValueError(f"tokens {tokens.tolist()} hold one outside 0..{self.table.shape[-1] - 1}")
        fed = np.where(valid, tokens, 0)
        keys = np.ascontiguousarray(self.embedding[fed][:, :, :1])
        out = np.zeros((batch, rows, self.spec.vocab_size))
        before = cache.lengths
        for layer in range(self.spec.num_layers):
            values = np.zeros((batch, rows, 1, _HEAD_DIM))
            values[:, :, 0, 0] = fed
            cache.write(layer, num_tokens, keys, values)
        for b, count in enumerate(num_tokens):
            if count:
                self._run_row(b, count, before[b], cache, token_set, out)
        cache.advance(num_tokens)
        queries = {layer: self.embedding[fed][:, :, list(heads)] for layer, heads in (tap.heads if tap else {}).items()}
        last = np.maximum(np.asarray(num_tokens) - 1, 0)
        if tap is not None and tap.last_row_only:
            queries = {layer: q[np.arange(batch), last][:, None] for layer, q in queries.items()}
        if logits == "last":
            return ForwardResult(out[np.arange(batch), last][:, None], queries)
        return ForwardResult(out if logits == "all" else None, queries)

    def _run_row(self, b: int, count: int, length: int, cache: Cache, token_set: TokenSet | None, out: np.ndarray) -> None:
        """Logits and states of the `count` new rows of sequence b, in every layer."""
        size = self.table.shape[-1]
        fed = cache.values[0][b, length : length + count, 0, 0].astype(int)
        for layer in range(self.spec.num_layers):
            store = cache.values[layer][b, :, 0]
            seen = float(store[selected(set_of_layer(token_set, layer), b, length), 1].sum())
            if np.isnan(seen):
                raise FloatingPointError(f"sequence {b} reads a dropped or unwritten KV row below {length}")
            for r in range(count):
                state = (31 * (fed[r] + 1) + 7 * int(seen) + 3 * (length + r)) % _MODULUS
                store[length + r, 1] = state
                seen += state
                if layer == 0:
                    noise = self.set_weight * self.noise[state] if self.set_weight else 0.0
                    out[b, r, :size] = self._lookup(cache, b, length + r) + noise
                    out[b, r, size:] = -30.0

    def _lookup(self, cache: Cache, b: int, position: int) -> np.ndarray:
        """The table's row for the last one or two tokens up to `position` (token 0 stands before the first)."""
        recent = cache.values[0][b, max(position - 1, 0) : position + 1, 0, 0]
        if np.isnan(recent).any():
            raise FloatingPointError(f"sequence {b} reads a dropped or unwritten KV row near {position}")
        current, previous = int(recent[-1]), int(recent[0]) if position else 0
        if current == self.nan_after:
            return np.full(self.table.shape[-1], np.nan)
        return self.table[current] if self.table.ndim == 2 else self.table[previous, current]
