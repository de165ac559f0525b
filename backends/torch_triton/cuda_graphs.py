"""CUDA graphs of a forward, one for each shape: static inputs, replayed outputs; the same code runs eager with graphs off."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_recent import tensor_bytes

# Small caches share graphs whatever their size: those of a chat grow from turn to turn. Empty splits of attention cost little.
LEAST_PAGES = 64
# Graphs made while ranks are joined: collectives may be in them.
_shared: weakref.WeakSet[Captured] = weakref.WeakSet()


def graphs_enabled(device: torch.device) -> bool:
    """Graphs are on for a CUDA device unless DUSTIN_CUDA_GRAPHS=0."""
    return device.type == "cuda" and os.environ.get("DUSTIN_CUDA_GRAPHS", "1") != "0"


def few_sizes(size: int) -> int:
    """`size` or up to an eighth more, one of few numbers: caches of many sizes share graphs."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def table_columns(pages: int, device: torch.device) -> int:
    """Columns of a page table of `pages`, one of few numbers; for caches up to LEAST_PAGES one and the same."""
    return max(LEAST_PAGES if device.type == "cuda" else 1, few_sizes(pages))


class Captured:
    """A function without arguments over static tensors, captured once. `seconds` is what warming up and capturing took.

    Calling it replays the graph and returns the outputs of the capture: the same tensors each time, overwritten.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any = None, enabled: bool = True) -> None:
        self.outputs: Any = None
        self.seconds = 0.0
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if not enabled:
            return
        began = time.perf_counter()
        # The first run compiles kernels and fills caches, which a capture may not do.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        # A group's watchdog thread queries events, which a capture forbids to all threads unless told otherwise.
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        mode = "thread_local" if joined else "global"
        if joined:
            _shared.add(self)
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode=mode):
            self.outputs = function()
        self.seconds = time.perf_counter() - began

    @property
    def bytes(self) -> int:
        """Bytes of the outputs, which live as long as the graph."""
        return tensor_bytes(self.outputs)

    @property
    def pool(self) -> Any:
        """The memory pool of the graph, to be shared with others of the same model (None when eager)."""
        return self._graph.pool() if self._graph is not None else None

    def drop(self) -> None:
        """Give the graph up; later calls run the function."""
        self._graph = self.outputs = None

    def __call__(self) -> Any:
        """Replay (or run, with graphs off) and return the outputs."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self.outputs


def drop_shared() -> None:
    """Give up every graph that may hold collectives: NCCL ends a communicator only when no graph knows it any more."""
    for captured in list(_shared):
        captured.drop()
    _shared.clear()
