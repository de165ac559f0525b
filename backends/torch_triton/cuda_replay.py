"""Device work of a round that is no forward (scores, the choice of a set), replayed as CUDA graphs.

Launched one by one, their kernels cost the host several times what they cost the device: at a few sequences a round then
waits for its launches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_graphs import Captured, graphs_enabled
from dustin.backends.torch_triton.cuda_recent import Recent

Inputs = Mapping[str, torch.Tensor]
Work = Callable[[Inputs], tuple[torch.Tensor, ...]]
# A call is captured when it comes this often: studies that make each once pay no capture.
CAPTURE_AT = 3
# Graphs kept for one owner. A further one takes the place of what was not used for IDLE calls, or is launched as it is: to record
# it each time it comes would cost more than it saves. So many other calls are remembered at most.
MOST, IDLE, MOST_SEEN = 24, 256, 1024


class Replays:
    """Runs functions of tensors, from their third call with one key on as a graph. `seconds`: spent on captures."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = graphs_enabled(device)
        self.seconds = 0.0
        self._device = device
        self._memory: Any = None
        # By the owner of what a graph reads in place: it goes when its owner does.
        self._graphs: weakref.WeakKeyDictionary[Any, Recent[tuple[dict[str, torch.Tensor], Captured]]]
        self._graphs = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, Counter[Hashable]] = weakref.WeakKeyDictionary()

    @property
    def possible(self) -> bool:
        """Whether graphs are made at all: not where ranks are joined, whose collectives go between."""
        return self.enabled and not (torch.distributed.is_available() and torch.distributed.is_initialized())

    def __call__(self, owner: Any, key: Hashable, inputs: Inputs, work: Work) -> tuple[torch.Tensor, ...]:
        """work(inputs), whose outputs are the caller's own. `key` tells apart whatever changes what `work` launches.

        `work` must not hold `owner`, may read tensors of it in place, and waits for nothing. Inputs, which may lie on the host,
        are copied to the device.
        """
        if not self.possible:
            return work(self._moved(inputs))
        key = (key, tuple((name, x.shape, x.dtype) for name, x in inputs.items()))
        if owner not in self._graphs:
            self._graphs[owner], self._seen[owner] = Recent(self._device, MOST), Counter()
        known, seen = self._graphs[owner], self._seen[owner]
        found = known.get(key)
        if found is None:
            if len(seen) >= MOST_SEEN:
                seen.clear()
            seen[key] += 1
            if seen[key] < CAPTURE_AT or not known.room(IDLE):
                return work(self._moved(inputs))
            del seen[key]
            static = {name: torch.empty(x.shape, dtype=x.dtype, device=self._device) for name, x in inputs.items()}
            self._copy(static, inputs)
            captured = Captured(lambda: work(static), self._device, self._memory)
            self._memory = self._memory or captured.pool
            self.seconds += captured.seconds
            found = static, captured
            known.put(key, found, captured.bytes)
        static, captured = found
        self._copy(static, inputs)
        # Graphs share memory: the next one may write over what this one returned.
        return tuple(x.clone() for x in captured())

    def _moved(self, inputs: Inputs) -> Inputs:
        return {name: x.to(self._device, non_blocking=True) for name, x in inputs.items()}

    @staticmethod
    def _copy(static: dict[str, torch.Tensor], inputs: Inputs) -> None:
        for name, x in inputs.items():
            static[name].copy_(x, non_blocking=True)
