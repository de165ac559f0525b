"""A conversation over a real document with SmolLM2's weights: every turn gives the tokens of a cold run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import dustin
from dustin.conversation import Conversation
from dustin.generation import Session

pytestmark = pytest.mark.real

CHAPTER = Path(__file__).resolve().parents[2] / "bench" / "data" / "northanger_abbey_chapter_1.txt"


@pytest.fixture(scope="module")
def loaded() -> Session:
    return dustin.load(dtype="float32")


@pytest.mark.parametrize(
    ("mode", "drafter"), [("ar", "none"), ("dense", "self"), ("sparse", "lookup"), ("rectified", "lookup"), ("exact", "none")]
)
def test_turns_over_a_document_equal_cold_runs(loaded: Session, mode: str, drafter: str) -> None:
    options = dustin.EngineOptions(mode=mode, drafter=drafter, budget=256, rectify_interval=16)
    session = Session(loaded.backend, loaded.target, loaded.tokenizer, options)
    chat = Conversation(session, dustin.RequestOptions(max_tokens=24))
    chat.documents = [CHAPTER.read_text()[:6000]]
    for question in ("Who is this about?", "What did her father do?"):
        prompt = chat.messages(question)
        cold = Session(session.backend, session.target, session.tokenizer, options)
        tokens = [response.token for response in chat.ask(question)]
        assert tokens == cold.generate(prompt, chat.request).tokens
    # The second turn read its own words alone.
    assert chat.stats.prompt_tokens - chat.stats.reused_prompt_tokens < 60
