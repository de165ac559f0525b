"""A conversation on an NVIDIA GPU: kept KV of target and draft, paged caches that grow by copying, the awaited API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.conversation import Conversation
from dustin.generation import Session, load
from tests import tiny_model

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Session:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_model.write(folder / "target", **SHAPE)
    draft = tiny_model.write(folder / "draft", seed=3, num_hidden_layers=1, **SHAPE)
    return load(str(target), str(draft), backend="torch", device="cuda", dtype="float32")


PAIRS = [("dense", "draft"), ("sparse", "draft"), ("rectified", "lookup"), ("exact", "draft")]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("mode", "drafter"), PAIRS)
def test_every_turn_equals_a_cold_run(loaded: Session, mode: str, drafter: str, temperature: float) -> None:
    options = EngineOptions(mode=mode, drafter=drafter, budget=64, exact_block=8, rectify_interval=10)
    draft = loaded.draft if drafter == "draft" else None
    session = Session(loaded.backend, loaded.target, loaded.tokenizer, options, draft)
    chat = Conversation(session, RequestOptions(max_tokens=16, sampling=SamplingOptions(temperature=temperature, seed=4)))
    capacities = set()
    for message in ("a question " * 20, "another", "a longer one " * 60):
        prompt = chat.messages(message)
        cold = Session(session.backend, session.target, session.tokenizer, options, draft)
        assert [response.token for response in chat.ask(message)] == cold.generate(prompt, chat.request).tokens
        capacities.add(session._kept["target"][1].capacity)
    assert len(capacities) > 1 and chat.stats.reused_prompt_tokens > 200


def test_the_worker_thread_of_the_awaited_api(loaded: Session) -> None:
    session = Session(loaded.backend, loaded.target, loaded.tokenizer, EngineOptions(mode="dense"), loaded.draft)
    request = RequestOptions(max_tokens=20)
    expected = session.generate("One, two, three", request).tokens
    assert asyncio.run(session.agenerate("One, two, three", request)).tokens == expected
    assert session.generate("One, two, three", request).tokens == expected
