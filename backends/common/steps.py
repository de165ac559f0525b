"""Calls that all ranks of tensor parallelism make together, and what is refused once one of them was cut short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dustin.errors import RankError


class Steps:
    """What the ranks of a backend have in common. A step cut short (Ctrl-C, memory) leaves the others waiting in it for ever."""

    def __init__(self) -> None:
        # Why no further call can be made; calls under way, in whatever thread.
        self.broken: str | None = None
        self.busy = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around everything that waits for other ranks. Raise RankError where they are out of step."""
        if self.broken is not None:
            raise RankError(self.broken)
        yield

    @contextmanager
    def together(self, known: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """`guard` for a call that all ranks make; once it is cut short, every later one is refused.

        Errors of kind `known` are met by all ranks, and change nothing.
        """
        self.busy += 1
        try:
            with self.guard():
                yield
        except BaseException as error:
            lost = isinstance(error, RankError)
            if lost or not isinstance(error, known):
                reason = str(error) if lost else f"the ranks are out of step: {type(error).__name__} cut a step short. Start again"
                self.broken = self.broken or reason
            raise
        finally:
            self.busy -= 1
