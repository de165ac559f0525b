"""The awaited API: equal to the plain one, in turn, and ended by cancellation after the step it is in."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from dustin.config import EngineOptions, RequestOptions
from dustin.errors import UsageError
from dustin.generation import Session
from tests.unit.engine_helpers import backend, draft, greedy, target

PROMPT = tuple(range(1, 31))
REQUEST = RequestOptions(max_tokens=9)
LONG = RequestOptions(max_tokens=400)


def session(mode: str = "dense") -> Session:
    made = Session(backend, target(), None, EngineOptions(mode=mode), draft())
    made.prefix_cache = True
    return made


def test_the_same_tokens_and_statistics_as_the_plain_calls() -> None:
    one = session()
    expected = session().generate(PROMPT, REQUEST)
    result = asyncio.run(one.agenerate(PROMPT, REQUEST))
    assert (result.tokens, result.text, result.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    assert result.stats.generated_tokens == 9

    async def stream() -> list[int]:
        return [response.token async for response in one.astream_generate(PROMPT, REQUEST)]

    # Another event loop, the same session.
    assert asyncio.run(stream()) == list(greedy(PROMPT, 9))


def test_logprobs_and_errors_come_through() -> None:
    wanted = RequestOptions(max_tokens=3, top_logprobs=2)
    result = asyncio.run(session().agenerate(PROMPT, wanted))
    assert [entry.token for entry in result.logprobs] == result.tokens
    with pytest.raises(UsageError, match="prompt is empty"):
        asyncio.run(session().agenerate([], REQUEST))


def test_the_event_loop_stays_free() -> None:
    async def main() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await session().agenerate(PROMPT, RequestOptions(max_tokens=100))
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 10


def test_calls_on_one_session_wait_for_one_another() -> None:
    one = session()
    running: list[int] = []
    most = 0

    async def ask(number: int) -> list[int]:
        nonlocal most
        tokens = []
        async for response in one.astream_generate((*PROMPT, number), REQUEST):
            running.append(number)
            most = max(most, len(set(running)))
            tokens.append(response.token)
            if len(tokens) == 9:
                running.clear()
        return tokens

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(ask(number) for number in range(5)))

    assert asyncio.run(main()) == [list(greedy((*PROMPT, number), 9)) for number in range(5)]
    assert most == 1


@pytest.mark.parametrize("twice", [False, True])
def test_cancelling_closes_the_run_and_the_next_call_is_right(twice: bool) -> None:
    one = session()

    async def main() -> list[int]:
        seen = asyncio.Event()

        async def ask() -> None:
            async for _ in one.astream_generate(PROMPT, LONG):
                seen.set()

        task = asyncio.create_task(ask())
        await seen.wait()
        task.cancel()
        if twice:
            await asyncio.sleep(0)
            task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 5
        # What was committed is kept for a prompt that continues it, and nothing of the old run is in the way.
        return (await one.agenerate(PROMPT, REQUEST)).tokens

    assert asyncio.run(main()) == list(greedy(PROMPT, 9))
    assert one._kept["target"][0][: len(PROMPT)] == list(PROMPT)


def test_closing_the_iterator_ends_the_request() -> None:
    one = session()
    steps: list[int] = []

    async def main() -> None:
        async with aclosing(one.astream_generate(PROMPT, LONG)) as stream:
            async for response in stream:
                steps.append(response.token)
                if len(steps) == 3:
                    break

    asyncio.run(main())
    assert steps == list(greedy(PROMPT, 3)) and len(one._kept["target"][0]) < len(PROMPT) + 30


def test_a_waiting_call_that_is_cancelled_lets_the_next_one_through() -> None:
    one = session()

    async def main() -> list[int]:
        first = asyncio.create_task(one.agenerate(PROMPT, RequestOptions(max_tokens=30)))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(one.agenerate(PROMPT, REQUEST))
        await asyncio.sleep(0.01)
        second.cancel()
        third = await one.agenerate((*PROMPT, 3), REQUEST)
        assert second.cancelled() and (await first).finish_reason == "length"
        return third.tokens

    assert asyncio.run(main()) == list(greedy((*PROMPT, 3), 9))


def test_a_task_never_waits_for_an_iterator_that_it_left_open() -> None:
    one = session()

    async def main() -> list[int]:
        stream = one.astream_generate(PROMPT, LONG)
        async for _ in stream:
            break
        with pytest.raises(UsageError, match="still open"):
            await one.agenerate(PROMPT, REQUEST)
        # Another task may wait for it, and goes on once it is closed.
        other = asyncio.create_task(one.agenerate(PROMPT, REQUEST))
        await asyncio.sleep(0.01)
        await stream.aclose()
        await other
        return (await one.agenerate(PROMPT, REQUEST)).tokens

    assert asyncio.run(asyncio.wait_for(main(), 60)) == list(greedy(PROMPT, 9))


def test_nothing_is_started_before_it_is_needed() -> None:
    one = session()
    one.generate(PROMPT, REQUEST)
    assert one._worker._threads is None
