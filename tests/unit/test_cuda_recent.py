"""What a long-lived process keeps of its recordings: bounded in number and bytes, and nothing freed that the device may use."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dustin.backends.torch_triton import cuda_recent  # noqa: E402
from dustin.backends.torch_triton.cuda_recent import Recent, tensor_bytes  # noqa: E402

CPU = torch.device("cpu")


class Graph:
    """Something recorded."""


class Event:
    """What the device has passed once `done`."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_the_least_recently_used_goes_first() -> None:
    kept: Recent[str] = Recent(CPU, most=3)
    for name in "abc":
        kept.put(name, name.upper())
    assert kept.get("a") == "A"
    kept.put("d", "D")
    assert list(kept) == ["c", "a", "d"] and kept.get("b") is None


def test_bytes_are_bounded_but_the_few_that_rounds_need_stay() -> None:
    kept: Recent[int] = Recent(CPU, most=10, most_bytes=100, fewest=3)
    for i in range(8):
        kept.put(i, i, 30)
        assert kept.bytes == 30 * len(kept)
    assert list(kept) == [5, 6, 7]
    for i in range(8, 11):
        kept.put(i, i, 500)
    assert list(kept) == [8, 9, 10] and kept.bytes == 1500
    kept.clear()
    assert len(kept) == kept.bytes == 0


def test_room_is_made_only_by_what_was_idle() -> None:
    kept: Recent[int] = Recent(CPU, most=2)
    assert kept.room(5)
    kept.put(1, 1)
    kept.put(2, 2)
    for _ in range(4):
        kept.get(2)
    assert not kept.room(5)
    kept.get(2)
    assert kept.room(5)
    kept.get(1)
    kept.get(3)
    assert not kept.room(5)


def test_what_is_in_flight_outlives_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def mark(device: Any) -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(cuda_recent, "mark", mark)
    kept: Recent[Graph] = Recent(CPU, most=1)
    alive = []
    for i in range(3):
        graph = Graph()
        alive.append(weakref.ref(graph))
        kept.put(i, graph)
    del graph
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, True, True] and len(events) == 2
    # The first has left the device, the second has not.
    events[0].done = True
    kept.put(3, Graph())
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True, True]
    for event in events:
        event.done = True
    kept.put(4, Graph())
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False]
    events[-1].done = True
    cuda_recent.retire(None, CPU)
    cuda_recent._leaving.clear()


def test_bytes_of_nested_outputs() -> None:
    x = torch.zeros(3, 4)
    assert tensor_bytes((x, {0: x.half(), 1: None}, [x.double()])) == 48 + 24 + 96
    assert tensor_bytes(None) == 0


@pytest.mark.gpu
def test_evicted_graphs_may_be_in_flight() -> None:
    from dustin.backends.torch_triton.cuda_graphs import Captured

    device = torch.device("cuda")
    x = torch.ones(1 << 20, device=device)
    total = torch.zeros_like(x)
    kept: Recent[Captured] = Recent(device, most=2)
    memory = None
    before = None
    for i in range(12):
        captured = Captured(lambda: total.add_(x * 2), device, memory)
        memory = memory or captured.pool
        total.zero_()
        kept.put(i, captured, captured.bytes)
        for _ in range(200):
            captured()
        del captured
        torch.cuda.synchronize() if i == 5 else None
        before = torch.cuda.memory_allocated() if i == 5 else before
    assert float(total.min()) == float(total.max()) == 400.0
    torch.cuda.synchronize()
    kept.put(99, Captured(lambda: total + x, device, memory))
    assert len(kept) == 2 and torch.cuda.memory_allocated() <= before + x.nbytes
