"""Keys and values of B ragged sequences in float64. A row that holds nothing is NaN, so any read of it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dustin.backends.common.checks import SMALLER, check_copy, check_restored
from dustin.errors import MemoryLimitError

Floats = npt.NDArray[np.float64]
_BYTES = 8


def available_bytes() -> int | None:
    """Free memory as the kernel reports it, or None where it does not (only Linux does)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_lengths(name: str, values: Sequence[int], batch: int, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
    """The values as ints, one a sequence, each in low[b]..high[b]. Raise ValueError that names the row."""
    if len(values) != batch:
        raise ValueError(f"{name} has {len(values)} entries, expected one for each of the {batch} sequences")
    for b, value in enumerate(values):
        if not low[b] <= value <= high[b]:
            raise ValueError(f"{name}[{b}] is {value}, expected {low[b]} to {high[b]}")
    return tuple(int(value) for value in values)


@dataclass(frozen=True)
class HeadView:
    """One kv head of a layer: `keys`, `values` by layer [B, Nmax, 1, D], as attention takes a cache."""

    keys: dict[int, Floats]
    values: dict[int, Floats]
    capacity: int


class Cache:
    """The KVCache of METHOD section 2: per layer K and V [B, Nmax, Hkv, D], valid up to `lengths[b]`, NaN elsewhere."""

    def __init__(self, num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError on a shape below 1 and MemoryLimitError where it does not fit the free memory."""
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        shape = (batch, capacity, num_kv_heads, head_dim)
        self.capacity = capacity
        self.num_bytes = 2 * num_layers * int(np.prod(shape, dtype=object)) * _BYTES
        available = available_bytes()
        if available is not None and self.num_bytes > available:
            raise MemoryLimitError(
                f"the KV cache asks for {self.num_bytes} bytes ({batch} sequences of {capacity} tokens), "
                f"{available} are available: {SMALLER}"
            )
        self.keys = [np.full(shape, np.nan) for _ in range(num_layers)]
        self.values = [np.full(shape, np.nan) for _ in range(num_layers)]
        self._lengths = (0,) * batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid rows of each sequence."""
        return self._lengths

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    def check_room(self, num_tokens: Sequence[int]) -> tuple[int, ...]:
        """num_tokens as ints if each sequence has room for its share; raise ValueError if not."""
        room = [self.capacity - length for length in self._lengths]
        return check_lengths("num_tokens", num_tokens, self.batch, [0] * self.batch, room)

    def write(self, layer: int, num_tokens: Sequence[int], keys: Floats, values: Floats) -> None:
        """Put the first num_tokens[b] rows of keys, values [B, T, Hkv, D] behind the valid rows. Lengths stay: see `advance`."""
        self.check_room(num_tokens)
        for b, count in enumerate(num_tokens):
            span = slice(self._lengths[b], self._lengths[b] + count)
            self.keys[layer][b, span] = keys[b, :count]
            self.values[layer][b, span] = values[b, :count]

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Count the rows that every layer has written."""
        counts = self.check_room(num_tokens)
        self._lengths = tuple(length + count for length, count in zip(self._lengths, counts, strict=True))

    def of_kv_head(self, layer: int, head: int) -> HeadView:
        """What attention reads of one kv head of a layer."""
        keys, values = (store[layer][:, :, head : head + 1] for store in (self.keys, self.values))
        return HeadView({layer: keys}, {layer: values}, self.capacity)

    def rollback(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shorten to lengths[b]; the dropped rows become NaN. Return how many each dropped. ValueError on a longer length."""
        new = check_lengths("lengths", lengths, self.batch, [0] * self.batch, self._lengths)
        for store in (*self.keys, *self.values):
            for b, length in enumerate(new):
                store[b, length:] = np.nan
        dropped = tuple(old - length for old, length in zip(self._lengths, new, strict=True))
        self._lengths = new
        return dropped

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`. Raise ValueError on a sequence or length out of range."""
        check_copy(source, target, length, self._lengths)
        for store in (*self.keys, *self.values):
            store[target, length:] = np.nan
            store[target, :length] = store[source, :length]
        self._lengths = tuple(length if b == target else n for b, n in enumerate(self._lengths))

    def dump(self, row: int) -> list[np.ndarray]:
        """See PortableCache.dump: float64."""
        length = self._lengths[row]
        return [np.stack([keys[row, :length], values[row, :length]]) for keys, values in zip(self.keys, self.values, strict=True)]

    def restore(self, row: int, layers: Sequence[np.ndarray]) -> None:
        """See PortableCache.restore."""
        shape = (len(self.keys), *self.keys[0].shape[2:])
        count = check_restored(layers, shape, np.dtype(np.float64), self._lengths[row], self.capacity)
        for (keys, values), rows in zip(zip(self.keys, self.values, strict=True), layers, strict=True):
            keys[row, :count], values[row, :count] = rows
        self._lengths = tuple(count if b == row else n for b, n in enumerate(self._lengths))

    def take(self, rows: Sequence[int], capacity: int | None = None) -> Cache:
        """A new cache of the given sequences (repeats allowed) that shares no memory with this one."""
        check_lengths("rows", rows, len(rows), [0] * len(rows), [self.batch - 1] * len(rows))
        num_kv_heads, head_dim = self.keys[0].shape[2:]
        lengths = tuple(self._lengths[row] for row in rows)
        room = self.capacity if capacity is None else capacity
        if room < max(lengths, default=0):
            raise ValueError(f"capacity is {room}, expected at least the {max(lengths)} rows to keep")
        other = Cache(len(self.keys), len(rows), room, num_kv_heads, head_dim)
        for mine, its in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                its[b, :length] = mine[row, :length]
        other._lengths = lengths
        return other

    def rows(self, b: int, layer: int) -> tuple[Floats, Floats]:
        """Keys and values [length, Hkv, D] of sequence b in a layer, for tests."""
        return self.keys[layer][b, : self._lengths[b]], self.values[layer][b, : self._lengths[b]]
