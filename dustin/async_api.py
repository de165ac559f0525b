"""Awaiting a session: its steps run in one worker thread, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Item = TypeVar("Item")


class Worker:
    """Runs generators in a thread of its own, one after the other; nothing starts before the first call."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        # A lock belongs to one event loop, a session may outlive several (one a call of asyncio.run).
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def stream(self, make: Callable[[], Generator[Item, None, None]]) -> AsyncGenerator[Item, None]:
        """The items of `make()`. Cancelling or closing closes the generator after the step it is in, and waits for that."""
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="dustin")
        threads = self._threads

        def run(call: Callable[..., Any], *values: Any) -> asyncio.Future[Any]:
            return loop.run_in_executor(threads, call, *values)

        async with self._turns.setdefault(loop, asyncio.Lock()):
            source = make()
            try:
                while (item := await run(next, source, None)) is not None:
                    yield item
            finally:
                # The thread takes this up once the step is done; a second cancellation must not tear it from under the engine.
                await asyncio.shield(run(source.close))
