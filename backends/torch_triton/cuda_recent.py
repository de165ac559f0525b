"""What was recorded, by the shape of its call, within a bound: the least recently used goes, once the device is done with it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch

# A server meets some 40 shapes a pool of pages. Beyond so many, or so many bytes of outputs, the oldest go; but `FEWEST` stay,
# whatever they hold: recording what each round needs anew would cost more than the memory is worth.
MOST, MOST_BYTES, FEWEST = 64, 1 << 30, 16

T = TypeVar("T")
# What was given up, and what says that the device has passed its last replay.
_leaving: deque[tuple[Any, Any]] = deque()


def tensor_bytes(item: Any) -> int:
    """Bytes of the tensors in nested tuples, lists and dictionaries."""
    if isinstance(item, torch.Tensor):
        return item.nbytes
    if isinstance(item, dict):
        return sum(map(tensor_bytes, item.values()))
    return sum(map(tensor_bytes, item)) if isinstance(item, (tuple, list)) else 0


def mark(device: torch.device) -> Any:
    """An event that `query`s true once the device has done what it was told so far; None where nothing is pending."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def retire(item: Any, device: torch.device) -> None:
    """Drop `item` (a graph, tensors that it writes) as soon as no replay of it is in flight, without waiting for that."""
    while _leaving and _leaving[0][0].query():
        _leaving.popleft()
    passed = mark(device)
    if passed is not None:
        _leaving.append((passed, item))


class Recent(Generic[T]):
    """A mapping that keeps what was used last."""

    def __init__(self, device: torch.device, most: int = MOST, most_bytes: int = MOST_BYTES, fewest: int = FEWEST) -> None:
        self._device, self._most, self._most_bytes, self._fewest = device, most, most_bytes, fewest
        self._items: OrderedDict[Hashable, tuple[T, int, int]] = OrderedDict()
        self._calls = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._items)

    def get(self, key: Hashable) -> T | None:
        """What is kept for `key`, which is the most recently used now."""
        self._calls += 1
        found = self._items.get(key)
        if found is None:
            return None
        self._items[key] = (found[0], found[1], self._calls)
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, item: T, size: int = 0) -> None:
        """Keep `item`, whose tensors have `size` bytes; older ones go where that is too much."""
        self._items[key] = (item, size, self._calls)
        self.bytes += size
        while len(self._items) > self._most or (self.bytes > self._most_bytes and len(self._items) > self._fewest):
            _, (old, freed, _) = self._items.popitem(last=False)
            self.bytes -= freed
            retire(old, self._device)

    def room(self, idle: int) -> bool:
        """Whether another may be kept at no cost to others: a place is free, or the oldest was last used `idle` look-ups ago."""
        if len(self._items) < self._most:
            return True
        _, _, used = next(iter(self._items.values()))
        return self._calls - used >= idle

    def clear(self) -> None:
        """Drop everything at once."""
        self._items.clear()
        self.bytes = 0
