"""Events on their way from the engine's thread to the answers: one wake a round, and what is late comes together."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from dustin.sequence import Event
from dustin.serving.inbox import Inbox, Outbox
from tests.server.helpers import PacedModel, events, running, toy_session, until

FIRST, SECOND = (SimpleNamespace(index=i) for i in range(2))


def said(text: str) -> Event:
    return Event(0, 1, text, False)


def test_what_is_late_comes_together_in_order() -> None:
    async def run() -> None:
        inbox = Inbox()
        inbox.put((FIRST, [said("a")]))
        given = [said("b")]
        for item in ((FIRST, given), (SECOND, [said("x")]), (FIRST, [said("c")]), (FIRST, None), (SECOND, None)):
            inbox.put(item)  # type: ignore[arg-type]
        found = [(choice.index, None if got is None else "".join(e.text for e in got)) for choice, got in await inbox.get()]
        assert found == [(0, "ab"), (1, "x"), (0, "c"), (0, None), (1, None)]
        # What was delivered is the deliverer's own.
        assert [e.text for e in given] == ["b"]

    asyncio.run(run())


def test_beats_come_where_nothing_else_does_and_end() -> None:
    async def run() -> None:
        inbox = Inbox()
        inbox.beat(0.05)
        assert await inbox.get() == []
        for _ in range(4):
            await asyncio.sleep(0.03)
            inbox.put((FIRST, [said("a")]))  # type: ignore[arg-type]
            assert await inbox.get() != []
        inbox.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.get(), 0.15)

    asyncio.run(run())


def test_a_round_of_all_answers_wakes_the_loop_once() -> None:
    async def run() -> None:
        outbox, inboxes, loop = Outbox(), [Inbox() for _ in range(16)], asyncio.get_running_loop()
        woken: list[Any] = []
        wake = loop.call_soon_threadsafe
        deliver = [outbox.deliverer(inbox, FIRST) for inbox in inboxes]  # type: ignore[arg-type]

        def round_of_all() -> None:
            for one in deliver:
                one([said("a")])
            outbox.flush()
            outbox.flush()

        loop.call_soon_threadsafe = lambda *a: (woken.append(a), wake(*a))[1]  # type: ignore[method-assign]
        thread = threading.Thread(target=round_of_all)
        thread.start()
        for inbox in inboxes:
            assert [(c, [e.text for e in got or []]) for c, got in await inbox.get()] == [(FIRST, ["a"])]
        thread.join()
        assert len(woken) == 1

    asyncio.run(run())


def test_a_loop_that_is_gone_is_nobodys_concern() -> None:
    outbox = Outbox()

    async def run() -> Any:
        return outbox.deliverer(Inbox(), FIRST)  # type: ignore[arg-type]

    asyncio.run(run())([said("a")])
    outbox.flush()


def test_a_server_wakes_its_loop_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen streams: as many wakes as rounds, not as tokens."""
    wakes = 0
    flush = Outbox.flush

    def counted(self: Outbox) -> None:
        nonlocal wakes
        wakes += bool(self._waiting)
        flush(self)

    monkeypatch.setattr(Outbox, "flush", counted)
    model = PacedModel()
    model.gate.clear()
    with running(toy_session(model, mode="ar", drafter="none"), slots=16) as server:
        body = {"prompt": ["hello"] * 16, "max_tokens": 20, "stream": True}
        answer: list[Any] = []
        thread = threading.Thread(target=lambda: answer.append(server.complete(**body)))
        thread.start()
        until(lambda: server.scheduler.num_running)
        model.gate.set()
        thread.join(20)
    texts = [""] * 16
    for event in events(answer[0]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert len(set(texts)) == 1 and len(texts[0]) > 10
    assert 20 <= wakes <= 30
