"""Keys and values of B ragged sequences, preallocated and token-major: [B, Nmax, Hkv, D] for each layer.

Nothing grows by copying and no view is kept: MLX writes into an array in place only while nobody else holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dustin.backends.common.checks import SMALLER, check_copy, check_lengths, check_memory, check_restored, host_bytes
from dustin.backends.common.ragged import RaggedLengths
from dustin.errors import MemoryLimitError


def device_info() -> dict[str, Any]:
    """What MLX tells of the default GPU."""
    return dict(mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info())


def free_bytes() -> int | None:
    """Memory that a cache may take: of the host on the CPU, of the GPU's recommended working set elsewhere; None if unknown."""
    if mx.default_device() == mx.Device(mx.cpu):
        return host_bytes()
    info = device_info()
    limit = info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
    return None if limit is None else max(0, int(limit) - mx.get_active_memory())


class MlxCache(RaggedLengths):
    """The KVCache of dustin.interfaces. Rows at and beyond `lengths[b]` hold anything finite: they are masked, not skipped.

    `fence` is an output of the last in-place kernel, or None: what reads it runs after that kernel (see `lengths_array`).
    """

    def __init__(
        self, num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, *, dtype: mx.Dtype = mx.float32
    ) -> None:
        """Raise ValueError on a shape below 1, MemoryLimitError where 2 * L * B * Nmax * Hkv * D entries do not fit."""
        super().__init__(batch, capacity)
        self.num_bytes = 2 * num_layers * batch * capacity * num_kv_heads * head_dim * dtype.size
        check_memory(self.num_bytes, free_bytes(), batch, capacity)
        shape = (batch, capacity, num_kv_heads, head_dim)
        self.keys = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        self.values = [mx.zeros(shape, dtype) for _ in range(num_layers)]
        try:
            mx.eval(self.keys, self.values)
        except RuntimeError as error:
            raise MemoryLimitError(
                f"MLX has no room for a KV cache of {self.num_bytes} bytes ({batch} sequences of {capacity} tokens): {error}. "
                f"What helps: {SMALLER}"
            ) from error
        self.fence: mx.array | None = None

    def lengths_array(self, lengths: Sequence[int]) -> mx.array:
        """`lengths` as int32 [B], ordered after every row written so far.

        A kernel that writes in place is invisible to MLX's barriers, which follow output buffers; reading its small output is
        what makes later work wait for it.
        """
        made = mx.array(list(lengths), mx.int32)
        return made if self.fence is None else made + mx.minimum(self.fence, 0)

    def destinations(self, num_tokens: Sequence[int]) -> tuple[Any, Any]:
        """Where the next num_tokens[b] rows of each sequence lie: (sequence, slice) for a single one, else index arrays [R]."""
        rows = [(b, n, count) for b, (n, count) in enumerate(zip(self._lengths, num_tokens, strict=True)) if count]
        if len(rows) == 1:
            b, start, count = rows[0]
            return b, slice(start, start + count)
        sequences = [b for b, _, count in rows for _ in range(count)]
        return mx.array(sequences), mx.array([start + t for _, start, count in rows for t in range(count)])

    def write(self, layer: int, where: tuple[Any, Any], keys: mx.array, values: mx.array) -> None:
        """Put keys, values [R, Hkv, D] (all sequences' new rows, packed) at `destinations`. Lengths stay: see `advance`."""
        self.keys[layer][where] = keys
        self.values[layer][where] = values

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`. Raise ValueError on a sequence or length out of range."""
        check_copy(source, target, length, self._lengths)
        if self.fence is not None:
            mx.eval(self.fence)
        for stores in (self.keys, self.values):
            for layer in range(len(stores)):
                # A sum is a copy of its own; a view of the source would make the write copy the whole layer.
                rows = stores[layer][source, :length] + 0
                mx.eval(rows)
                stores[layer][target, :length] = rows
                mx.eval(stores[layer])
        self._lengths = tuple(length if b == target else n for b, n in enumerate(self._lengths))

    def dump(self, row: int) -> list[np.ndarray]:
        """See PortableCache.dump."""
        if self.fence is not None:
            mx.eval(self.fence)
        length, out = self._lengths[row], []
        for keys, values in zip(self.keys, self.values, strict=True):
            rows = mx.stack([keys[row, :length], values[row, :length]])
            out.append(np.array(rows.view(mx.uint16) if rows.dtype == mx.bfloat16 else rows))
            del rows  # a view that lives on would make the next write copy the whole layer
        return out

    def restore(self, row: int, layers: Sequence[np.ndarray]) -> None:
        """See PortableCache.restore."""
        dtype = self.keys[0].dtype
        bits = np.dtype(np.uint16) if dtype == mx.bfloat16 else np.array(mx.zeros((1,), dtype)).dtype
        shape = (len(self.keys), *self.keys[0].shape[2:])
        count = check_restored(layers, shape, bits, self._lengths[row], self.capacity)
        for layer, rows in enumerate(layers):
            made = mx.array(rows)
            keys, values = made.view(dtype) if dtype == mx.bfloat16 else made
            for stores, new in ((self.keys, keys), (self.values, values)):
                stores[layer][row, :count] = new
                mx.eval(stores[layer])
        self._lengths = tuple(count if b == row else n for b, n in enumerate(self._lengths))

    def take(self, rows: Sequence[int], capacity: int | None = None) -> MlxCache:
        """A new cache with copies of the given sequences (repeats allowed). Raise ValueError where `capacity` is too small."""
        check_lengths("rows", rows, [0] * len(rows), [self.batch - 1] * len(rows))
        size = self.capacity if capacity is None else capacity
        lengths = check_lengths("lengths", [self._lengths[row] for row in rows], [0] * len(rows), [size] * len(rows))
        heads, dim = self.keys[0].shape[2:]
        other = MlxCache(len(self.keys), len(rows), size, heads, dim, dtype=self.keys[0].dtype)
        if self.fence is not None:
            mx.eval(self.fence)
        stores: tuple[tuple[list[Any], list[Any]], ...] = ((self.keys, other.keys), (self.values, other.values))
        for mine, its in stores:
            for layer, source in enumerate(mine):
                for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                    its[layer][b, :length] = source[row, :length]
                # Now, and layer by layer: a pending copy would hold the source, and its next write would copy all of it.
                mx.eval(its[layer])
        other._lengths = lengths
        return other
