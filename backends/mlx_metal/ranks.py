"""The processes of an mlx.launch run, joined by mx.distributed (ring on loopback or Ethernet, JACCL on Thunderbolt)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dustin.backends.common.steps import Steps
from dustin.errors import RankError

_HEADER = 4096
_joined: list[Ranks] = []


class Ranks(Steps):
    """The processes of an mlx.launch run. Every exchange is a sum or a gather: ring and JACCL know these on the CPU stream."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self.group = mx.distributed.init(strict=True)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"the ranks of mlx.launch cannot be joined: {error}") from error
        self.rank, self.size = self.group.rank(), self.group.size()

    def sum(self, x: mx.array) -> mx.array:
        """The sum over ranks, evaluated at once: exchanges happen in the same order on every rank."""
        total = mx.distributed.all_sum(x, group=self.group)
        mx.eval(total)
        return total

    def from_first(self, x: mx.array) -> mx.array:
        """Rank 0's x; elsewhere x gives shape and dtype alone."""
        return self.sum(x if self.rank == 0 else mx.zeros_like(x))

    def gather(self, x: mx.array) -> mx.array:
        """[size, ...] of every rank's x."""
        found = mx.distributed.all_gather(x[None], group=self.group)
        mx.eval(found)
        return found

    def bytes_from_first(self, body: bytes) -> bytes:
        """Rank 0's bytes."""
        head = np.zeros(_HEADER, np.uint8)
        content = len(body).to_bytes(8, "little") + body[: _HEADER - 8]
        if self.rank == 0:
            head[: len(content)] = np.frombuffer(content, np.uint8)
        first = bytes(np.array(self.from_first(mx.array(head))))
        length = int.from_bytes(first[:8], "little")
        if length <= _HEADER - 8:
            return first[8 : 8 + length]
        rest = np.zeros(length, np.uint8)
        if self.rank == 0:
            rest[:] = np.frombuffer(body, np.uint8)
        return bytes(np.array(self.from_first(mx.array(rest))))

    def agree(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        body = pickle.dumps(mine)
        content = len(body).to_bytes(8, "little") + body
        rows = self._rows(content[:_HEADER], _HEADER)
        most = max(int.from_bytes(row[:8], "little") for row in rows) + 8
        if most > _HEADER:
            # All ranks have seen the longest answer's length, so all of them send again.
            rows = self._rows(content, most)
        return [pickle.loads(row[8 : 8 + int.from_bytes(row[:8], "little")]) for row in rows]

    def _rows(self, content: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, filled up to `size`."""
        row = np.zeros(size, np.uint8)
        row[: len(content)] = np.frombuffer(content, np.uint8)
        return [bytes(x) for x in np.array(self.gather(mx.array(row)))]

    def order(self, what: str, values: dict[str, Any], arrays: Sequence[mx.array] = ()) -> None:
        """Tell the other ranks to do `what`. Rank 0 only."""
        shapes = [(x.shape, str(x.dtype).rsplit(".", 1)[-1]) for x in arrays]
        self.bytes_from_first(pickle.dumps((what, values, shapes)))
        for x in arrays:
            self.from_first(x)

    def next_order(self) -> tuple[str, dict[str, Any], list[mx.array]]:
        """Wait for rank 0's next order."""
        what, values, shapes = pickle.loads(self.bytes_from_first(b""))
        return what, values, [self.from_first(mx.zeros(shape, getattr(mx, dtype))) for shape, dtype in shapes]


def join() -> Ranks:
    """The ranks of this run."""
    if not _joined:
        _joined.append(Ranks())
    return _joined[0]


def leave() -> None:
    """On rank 0: let the others go. Out of step they hear nothing more: mlx.launch ends them when rank 0 has failed."""
    while _joined:
        ranks = _joined.pop()
        if ranks.rank == 0 and not ranks.busy and ranks.broken is None:
            ranks.order("end", {"first": []})
