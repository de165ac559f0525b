"""Keys and values of B ragged sequences, preallocated and token-major: [B, Nmax, Hkv, D] for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dustin.backends.common.checks import check_copy, check_forward, check_lengths, check_memory, check_restored, host_bytes
from dustin.backends.common.ragged import RaggedLengths

__all__ = ["TorchCache", "available_bytes", "check_forward", "check_lengths"]


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or None where nothing tells."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_bytes()


@dataclass(frozen=True)
class HeadView:
    """One kv head of a layer: `keys`, `values` by layer [B, Nmax, 1, D] (views), as attention takes a cache."""

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    capacity: int


class TorchCache(RaggedLengths):
    """The KVCache of dustin.interfaces. Rows at and beyond `lengths[b]` hold anything: nothing may read them."""

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raise ValueError on a shape below 1, MemoryLimitError where 2 * L * B * Nmax * Hkv * D entries do not fit."""
        super().__init__(batch, capacity)
        self.device = torch.device(device)
        # Who encodes compact keys -> layer -> codes beside the keys (see compact_keys).
        self.compact: dict[Any, dict[int, torch.Tensor]] = {}
        self.num_bytes = 2 * num_layers * batch * capacity * num_kv_heads * head_dim * dtype.itemsize
        check_memory(self.num_bytes, available_bytes(self.device), batch, capacity)
        shape = (batch, capacity, num_kv_heads, head_dim)
        # torch.empty: pages are committed as rows are written, so a generous capacity costs nothing until used.
        self.keys = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(num_layers)]

    def destinations(self, num_tokens: Sequence[int]) -> torch.Tensor | slice:
        """Where the next num_tokens[b] rows of each sequence lie in [B * Nmax]: a slice where they are neighbours."""
        spans = [(b * self.capacity + self._lengths[b], n) for b, n in enumerate(num_tokens) if n]
        if len(spans) == 1:
            return slice(spans[0][0], sum(spans[0]))
        return torch.cat([torch.arange(start, start + n, device=self.device) for start, n in spans])

    def write(self, layer: int, where: torch.Tensor | slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys, values [R, Hkv, D] (all sequences' new rows, packed) at `destinations`. Lengths stay: see `advance`."""
        for store, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            flat = store.flatten(0, 1)
            if isinstance(where, slice):
                flat[where] = rows
            else:
                flat.index_copy_(0, where, rows)

    def flat_keys(self, layer: int) -> torch.Tensor:
        """A layer's keys as rows [B * Nmax, Hkv, D] (a view); see `places`."""
        return self.keys[layer].flatten(0, 1)

    def of_kv_head(self, layer: int, head: int) -> HeadView:
        """What attention reads of one kv head of a layer."""
        keys, values = (store[layer][:, :, head : head + 1] for store in (self.keys, self.values))
        return HeadView(dict.fromkeys((0, layer), keys), dict.fromkeys((0, layer), values), self.capacity)

    def places(self, indices: torch.Tensor) -> torch.Tensor:
        """Where tokens [B, n] of each sequence lie in `flat_keys`."""
        return indices.long() + self.capacity * torch.arange(self.batch, device=self.device)[:, None]

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`. Raise ValueError on a sequence or length out of range."""
        check_copy(source, target, length, self._lengths)
        for store in (*self.keys, *self.values):
            store[target, :length] = store[source, :length]
        self._replace_row(target, length)

    def dump(self, row: int) -> list[np.ndarray]:
        """See PortableCache.dump."""
        length = self._lengths[row]
        return [to_host(torch.stack([k[row, :length], v[row, :length]])) for k, v in zip(self.keys, self.values, strict=True)]

    @torch.inference_mode()
    def restore(self, row: int, layers: Sequence[np.ndarray]) -> None:
        """See PortableCache.restore."""
        shape, dtype = (len(self.keys), *self.keys[0].shape[2:]), self.keys[0].dtype
        count = check_restored(layers, shape, host_dtype(dtype), self._lengths[row], self.capacity)
        for keys, values, rows in zip(self.keys, self.values, layers, strict=True):
            keys[row, :count], values[row, :count] = from_host(rows, dtype).to(self.device)
        self._replace_row(row, count)

    def take(self, rows: Sequence[int], capacity: int | None = None) -> TorchCache:
        """A new cache with copies of the given sequences (repeats allowed). Raise ValueError where `capacity` is too small."""
        check_lengths("rows", rows, [0] * len(rows), [self.batch - 1] * len(rows))
        size = self.capacity if capacity is None else capacity
        lengths = check_lengths("lengths", [self._lengths[row] for row in rows], [0] * len(rows), [size] * len(rows))
        heads, dim = self.keys[0].shape[2:]
        other = TorchCache(len(self.keys), len(rows), size, heads, dim, dtype=self.keys[0].dtype, device=self.device)
        for mine, its in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                its[b, :length] = mine[row, :length]
        other._lengths = lengths
        return other


def host_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype that holds a torch dtype's bits: numpy has no bfloat16."""
    return np.dtype(np.uint16) if dtype == torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype


def to_host(rows: torch.Tensor) -> np.ndarray:
    """A tensor as numpy, bfloat16 as its bits."""
    bits = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    return bits.cpu().numpy().view(host_dtype(rows.dtype))


def from_host(rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The counterpart of `to_host`, on the CPU."""
    bits = np.ascontiguousarray(rows)
    return torch.from_numpy(bits.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(bits)
