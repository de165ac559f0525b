"""From the engine's thread to the answers in the event loop: what a round gave all of them crosses at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from dustin.sequence import Event
from dustin.serving.replies import Choice

Item = tuple[Choice, list[Event] | None]


class Inbox:
    """What comes for one answer. Of the event loop's thread alone."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    def put(self, item: Item) -> None:
        """Events of a choice, or None: it has ended."""
        self._queue.put_nowait(item)

    async def get(self) -> list[Item]:
        """All that is there, at least one entry; nothing where a `beat` is due. Events that wait for the same choice come together:
        a loop that is late has fewer pieces to send."""
        found: list[Item] = []
        item = await self._queue.get()
        self._last = asyncio.get_running_loop().time()
        while True:
            if item is not None:
                choice, events = item
                if found and found[-1][0] is choice and events is not None and found[-1][1] is not None:
                    found[-1][1].extend(events)
                else:
                    found.append((choice, None if events is None else list(events)))
            if self._queue.empty():
                return found
            item = self._queue.get_nowait()

    def beat(self, seconds: float) -> None:
        """From now on `get` returns, with nothing, also where so many seconds pass without an entry. One timer serves them all."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()

        def due() -> None:
            idle = loop.time() - self._last
            if idle >= seconds:
                self._queue.put_nowait(None)
                idle = 0.0
            self._timer = loop.call_later(seconds - idle, due)

        self._timer = loop.call_later(seconds, due)

    def close(self) -> None:
        """No more beats."""
        if self._timer is not None:
            self._timer.cancel()


class Outbox:
    """What goes to the inboxes of all answers. Filled and flushed in the engine's thread: waking the loop for each answer would
    hand it the interpreter in the middle of a round's end as many times."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Inbox, Item]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def deliverer(self, inbox: Inbox, choice: Choice) -> Callable[[list[Event] | None], None]:
        """A job's `deliver` into the inbox of an answer of the running loop."""
        self._loop = asyncio.get_running_loop()

        def deliver(events: list[Event] | None) -> None:
            self._waiting.append((inbox, (choice, events)))

        return deliver

    def flush(self) -> None:
        """Hand over what waits."""
        batch, self._waiting = self._waiting, []
        # The loop may be gone by now: a job's end is then nobody's concern.
        with contextlib.suppress(RuntimeError):
            if batch and self._loop is not None:
                self._loop.call_soon_threadsafe(_spread, batch)


def _spread(batch: list[tuple[Inbox, Item]]) -> None:
    for inbox, item in batch:
        inbox.put(item)
