"""Awaiting a session: its steps run in one worker thread, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from dustin.errors import UsageError

Item = TypeVar("Item")


class Worker:
    """Runs generators in a thread of its own, one after the other; nothing starts before the first call."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        # A lock belongs to one event loop, a session may outlive several (one a call of asyncio.run).
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._consumer: asyncio.Task[Any] | None = None

    async def stream(self, make: Callable[[], Generator[Item, None, None]]) -> AsyncGenerator[Item, None]:
        """The items of `make()`. Cancelling or closing closes the generator after the step it is in, and waits for that.

        Raise UsageError where a task would wait for an iterator that it left open itself.
        """
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="dustin")
        threads = self._threads

        def run(call: Callable[..., Any], *values: Any) -> asyncio.Future[Any]:
            return loop.run_in_executor(threads, call, *values)

        turn = self._turns.setdefault(loop, asyncio.Lock())
        if turn.locked() and self._consumer is asyncio.current_task():
            raise UsageError(
                "an earlier astream_generate of this task is still open, and this call would wait for it for ever: "
                "close it first, as `async with contextlib.aclosing(...)` does"
            )
        async with turn:
            source = make()
            try:
                while (item := await run(next, source, None)) is not None:
                    self._consumer = asyncio.current_task()
                    yield item
            finally:
                self._consumer = None
                # The thread takes this up once the step is done; a second cancellation must not tear it from under the engine.
                await asyncio.shield(run(source.close))
