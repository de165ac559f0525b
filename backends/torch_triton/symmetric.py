"""Sums over the GPUs of one host through each other's memory, off unless DUSTIN_TP_SYMMETRIC=1.

The operation alone takes half the time of NCCL's on two H200s in CUDA graphs, bf16: 128 KiB 7.3 against 14.3 us, 640 KiB 8.2
against 18.5, 1.1 MiB 10.1 against 21.5. Whole rounds with it have not been timed, which is why it is off.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from dustin.backends.torch_triton.ranks import Ranks

# Larger sums are bound by the links, which NCCL uses better. A multiple of every alignment that the operation asks for.
LIMIT_BYTES = 4 << 20
# What the operation is written for; float16 is not.
_DTYPES = (torch.bfloat16, torch.float32)
# Numbers of ranks that torch's kernels are written for.
_SIZES = (2, 4, 8)
_ALIGNMENT = 16


class SymmetricSum:
    """Memory that every rank can reach, at the same address in every CUDA graph, and the sum in it."""

    def __init__(self, buffers: dict[torch.dtype, torch.Tensor], group: str, size: int) -> None:
        self._buffers, self._group, self._size = buffers, group, size

    def room(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[rows, columns] to be summed, overwritten by the next; None where they are too many or do not divide among the ranks."""
        whole, count = self._buffers.get(dtype), rows * columns
        if whole is None or not count or count > len(whole) or count * dtype.itemsize % (_ALIGNMENT * self._size):
            return None
        return whole[:count].view(rows, columns)

    def sum(self, x: torch.Tensor) -> None:
        """Replace what `room` gave by its sum over ranks, the same bits on each."""
        torch.ops.symm_mem.two_shot_all_reduce_(x.view(-1), "sum", self._group)


class Sums:
    """Products whose columns are spread over ranks."""

    symmetric: SymmetricSum | None = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        raise NotImplementedError

    def linear_sum(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum over ranks of x [R, in] times weight [out, in], plus each rank's bias [out]; valid until the next one."""
        room = self.symmetric.room(len(x), len(weight), x.dtype) if self.symmetric is not None else None
        if room is None or self.symmetric is None:
            return self.sum(F.linear(x, weight, bias))
        # The product writes where the others read: no copy.
        if bias is None:
            torch.mm(x, weight.t(), out=room)
        else:
            torch.addmm(bias, x, weight.t(), out=room)
        self.symmetric.sum(room)
        return room


def prepare(ranks: Ranks, group: Any) -> SymmetricSum | None:
    """Shared memory of the ranks' GPUs, tried out; None on several hosts, without a way from each GPU to each, or if unwanted.

    Called on all ranks.
    """
    device, size, count = ranks.device, ranks.size, torch.cuda.device_count()
    others = [other for other in range(min(size, count)) if other != device.index]
    reached = count >= size and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    here = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
    wanted = os.environ.get("DUSTIN_TP_SYMMETRIC", "0") != "0" and size in _SIZES and here and reached
    answers = ranks.agree((socket.gethostname(), wanted))
    if any(answer != answers[0] for answer in answers) or not wanted:
        return None
    found: SymmetricSum | None = None
    try:
        found = _make(device, group, size)
        right = _right(found, ranks)
    except (RuntimeError, ImportError, AttributeError, TypeError, NotImplementedError):
        right = False
    return found if all(ranks.agree(right)) else None


def _make(device: torch.device, group: Any, size: int) -> SymmetricSum:
    import torch.distributed._symmetric_memory as memory

    buffers = {}
    for dtype in _DTYPES:
        buffers[dtype] = memory.empty(LIMIT_BYTES // dtype.itemsize, dtype=dtype, device=device)
        memory.rendezvous(buffers[dtype], group)
    return SymmetricSum(buffers, group.group_name, size)


def _right(found: SymmetricSum, ranks: Ranks) -> bool:
    """Whether sums come out right."""
    expected = ranks.size * (ranks.size + 1) // 2
    for dtype in _DTYPES:
        room = found.room(3, 1024, dtype)
        if room is None:
            return False
        room.fill_(ranks.rank + 1)
        found.sum(room)
        if not bool((room == expected).all()):
            return False
    return True
