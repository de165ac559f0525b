"""Keys and values of B ragged sequences, preallocated and token-major: [B, Nmax, Hkv, D] for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dustin.errors import MemoryLimitError
from dustin.interfaces import Tap


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device: what the kernel and a container limit leave, or None where nothing tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    free = next((int(row.split()[1]) * 1024 for row in meminfo.read_text().splitlines() if row.startswith("MemAvailable:")), None)
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if free is not None and limit is not None and used is not None:
        return max(0, min(free, limit - used))
    return free


def check_lengths(name: str, values: Sequence[int], low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
    """The values as ints, one a sequence, each in low[b]..high[b]. Raise ValueError that names the row."""
    if len(values) != len(low):
        raise ValueError(f"{name} has {len(values)} entries, expected one for each of the {len(low)} sequences")
    for b, value in enumerate(values):
        if not low[b] <= value <= high[b]:
            raise ValueError(f"{name}[{b}] is {value}, expected {low[b]} to {high[b]}")
    return tuple(int(value) for value in values)


def check_forward(
    num_layers: int, tokens: torch.Tensor, num_tokens: Sequence[int], cache: Any, tap: Tap | None, logits: str
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """The counts and tapped heads of a Model.forward over `cache`. Raise ValueError that names the bad argument."""
    batch, rows = tokens.shape
    if batch != cache.batch:
        raise ValueError(f"tokens have {batch} rows, expected the {cache.batch} sequences of the cache")
    counts = check_lengths("num_tokens", num_tokens, [0] * batch, [rows] * batch)
    cache.check_room(counts)
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits is {logits!r}, expected all, last or none")
    heads = {} if tap is None else {layer: tuple(chosen) for layer, chosen in tap.heads.items()}
    if unknown := set(heads) - set(range(num_layers)):
        raise ValueError(f"tap names layers {sorted(unknown)}, expected 0 to {num_layers - 1}")
    return counts, heads


class TorchCache:
    """The KVCache of interfaces.py. Rows at and beyond `lengths[b]` hold anything: nothing may read them."""

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
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        self.device = torch.device(device)
        self.capacity = capacity
        self.num_bytes = 2 * num_layers * batch * capacity * num_kv_heads * head_dim * dtype.itemsize
        free = available_bytes(self.device)
        if free is not None and self.num_bytes > free:
            raise MemoryLimitError(
                f"the KV cache asks for {self.num_bytes} bytes ({batch} sequences of {capacity} tokens), "
                f"{free} are available: lower --max-kv-size or --batch"
            )
        shape = (batch, capacity, num_kv_heads, head_dim)
        # torch.empty: pages are committed as rows are written, so a generous capacity costs nothing until used.
        self.keys = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(num_layers)]
        self._lengths: tuple[int, ...] = (0,) * batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid rows of each sequence (host values)."""
        return self._lengths

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self._lengths)

    def check_room(self, num_tokens: Sequence[int]) -> tuple[int, ...]:
        """num_tokens as ints if each sequence has room for its share; raise ValueError if not."""
        return check_lengths("num_tokens", num_tokens, [0] * self.batch, [self.capacity - n for n in self._lengths])

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

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Count the rows that every layer has written."""
        self._lengths = tuple(have + n for have, n in zip(self._lengths, self.check_room(num_tokens), strict=True))

    def rollback(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shorten to lengths[b]; return how many rows each dropped. Raise ValueError on a longer length."""
        new = check_lengths("lengths", lengths, [0] * self.batch, self._lengths)
        dropped = tuple(old - length for old, length in zip(self._lengths, new, strict=True))
        self._lengths = new
        return dropped

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
