"""What every backend checks of its arguments, and what the host has of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dustin.errors import MemoryLimitError
from dustin.interfaces import Tap, WarpBatch

# What helps where a KV cache does not fit; which commands say how many sequences there are.
SMALLER = "lower --max-kv-size, or take fewer sequences at once (--slots, --batch)"
# Lower temperatures count as this one: in float32 they would be zero, and the row a NaN.
COLDEST = 1e-30


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def host_bytes() -> int | None:
    """Free memory of the host: what the kernel and a container limit leave, or None where nothing tells."""
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


def check_inserted(tokens: Sequence[int], starts: Sequence[int], parts: Sequence[int], counts: Sequence[int]) -> None:
    """The arguments of a Backend.insert_tokens on arrays of these shapes. Raise ValueError where they do not fit."""
    begins = check_lengths("starts", starts, [0] * tokens[0], [tokens[1]] * tokens[0])
    check_lengths("counts", counts, [0] * parts[0], [min(parts[1], tokens[1] - start) for start in begins])


def check_copy(source: int, target: int, length: int, lengths: Sequence[int]) -> None:
    """The arguments of a KVCache.copy_row. Raise ValueError on a sequence or a length out of range."""
    for name, row in (("source", source), ("target", target)):
        if not 0 <= row < len(lengths):
            raise ValueError(f"{name} is {row}, expected 0 to {len(lengths) - 1}")
    if not 0 <= length <= lengths[source]:
        raise ValueError(f"length is {length}, expected 0 to the {lengths[source]} rows of sequence {source}")


def check_forward(
    num_layers: int, tokens: Any, num_tokens: Sequence[int], cache: Any, tap: Tap | None, logits: str
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


def check_memory(asked: int, free: int | None, batch: int, capacity: int) -> None:
    """Raise MemoryLimitError where a KV cache asks for more bytes than are free (None: nobody knows)."""
    if free is not None and asked > free:
        raise MemoryLimitError(
            f"the KV cache asks for {asked} bytes ({batch} sequences of {capacity} tokens), {free} are available: {SMALLER}"
        )


def check_restored(layers: Sequence[np.ndarray], shape: tuple[int, int, int], dtype: np.dtype, length: int, capacity: int) -> int:
    """Rows that `KVCache.restore` is to write into a sequence of `length` rows; `shape` is (layers, Hkv, D).

    Raise ValueError that names what differs: a sequence that is not empty, too many rows, another shape or dtype.
    """
    if length:
        raise ValueError(f"the sequence has {length} rows, expected an empty one")
    if len(layers) != shape[0]:
        raise ValueError(f"{len(layers)} layers of K and V, expected {shape[0]}")
    count = layers[0].shape[1] if layers[0].ndim == 4 else 0
    for layer, rows in enumerate(layers):
        if rows.shape != (2, count, *shape[1:]) or rows.dtype != dtype:
            raise ValueError(f"layer {layer} is {rows.dtype} {list(rows.shape)}, expected {dtype} {[2, count, *shape[1:]]}")
    if count > capacity:
        raise ValueError(f"{count} rows, expected at most the capacity of {capacity}")
    return count


def check_warp(warp: WarpBatch, context: Sequence[Sequence[int]] | None, batch: int, rows: int, width: int) -> None:
    """Raise ValueError where `warp` is not of `batch` rows, or a penalty lacks its committed or its `width` in-flight tokens."""
    if len(warp.temperature) != batch:
        raise ValueError(f"warp has {len(warp.temperature)} rows, expected {batch}")
    if warp.penalised and context is None:
        raise ValueError("context is None, expected the committed tokens: a row has a penalty")
    if warp.penalised and width < rows - 1:
        raise ValueError(f"inflight has {width} tokens a row, expected {rows - 1} or more: a row has a penalty")
