"""The server on SmolLM2's real weights, through the real client: many chats at once equal the same chats one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import dustin
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session
from tests.real.test_smollm2 import QUESTIONS
from tests.server.helpers import Running, running

pytestmark = pytest.mark.real

ASKED = [
    *QUESTIONS, "Write the word naïve and a smiling emoji.", "Count from one to ten.", "What is 12 times 12?",
    "Name three rivers.", "What colour is grass?", "Say 'größer' in English.",
]  # fmt: skip
TOKENS = 24


@pytest.fixture(scope="module")
def session() -> Session:
    return dustin.load(dtype="float32", options=EngineOptions(mode="ar"))


@pytest.fixture(scope="module")
def expected(session: Session) -> list[str]:
    """From the Python API, plain decoding, one at a time."""
    chats = [session.encode([{"role": "user", "content": text}]) for text in ASKED]
    return [session.generate(chat, RequestOptions(max_tokens=TOKENS)).text for chat in chats]


@pytest.fixture(scope="module", params=["ar", "dense", "exact", "auto"])
def server(request: pytest.FixtureRequest, session: Session) -> Iterator[Running]:
    drafter = "lookup" if request.param == "dense" else "auto"
    options = EngineOptions(mode=request.param, drafter=drafter, budget=64, max_kv_size=1024, exact_block=8)
    one = Session(session.backend, session.target, session.tokenizer, options)
    with running(one, names=["SmolLM2"], slots=6, prefill_tokens=64) as server:
        yield server


def test_sixteen_chats_at_once_equal_their_sequential_answers(server: Running, expected: list[str]) -> None:
    client = server.open_ai(timeout=600)

    def ask(text: str) -> str:
        chat = [{"role": "user", "content": text}]
        stream = client.chat.completions.create(model="SmolLM2", messages=chat, max_tokens=TOKENS, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, ASKED)) == expected


def test_a_stop_string_of_a_real_answer(server: Running, expected: list[str]) -> None:
    text = expected[0]
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    chat = [{"role": "user", "content": ASKED[0]}]
    answer = server.open_ai(timeout=600).chat.completions.create(model="SmolLM2", messages=chat, max_tokens=TOKENS, stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
