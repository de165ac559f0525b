"""Continuous batching on a GPU, with graphs: sequences that join and leave get the tokens they get alone, in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session
from dustin.sequence import Sequence
from dustin.slots import SlotEngine
from dustin.stats import Stats
from tests import tiny_model

pytestmark = pytest.mark.gpu
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
LENGTHS = (300, 20, 150, 90, 1, 280, 64, 33)
COUNTS = (24, 9, 30, 1, 12, 16, 20, 8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Session:
    import dustin

    folder = tmp_path_factory.mktemp("models")
    more = SHAPE | {"head_dim": 64, "max_position_embeddings": 1024}
    target = tiny_model.write(folder / "target", **more)
    draft = tiny_model.write(folder / "draft", seed=1, **more | {"num_hidden_layers": 1})
    return dustin.load(str(target), str(draft), device="cuda", dtype="float32")


def serve(session: Session, prompts: list[list[int]], slots: int = 3) -> list[list[int]]:
    options = session.resolve()
    engine = session.make_engine(SlotEngine, options, Stats())
    engine.open(session.target.new_cache(slots, 512), slots)
    waiting = list(enumerate(zip(prompts, COUNTS, strict=True)))
    rows: dict[int, Sequence] = {}
    while waiting or engine.active or engine.reading:
        while waiting and engine.free:
            index, (prompt, count) = waiting.pop(0)
            rows[index] = Sequence(engine.free[0], prompt, RequestOptions(max_tokens=count), count, frozenset(), None)
            engine.admit(rows[index])
        engine.read_chunk(100)
        if engine.active:
            engine.step()
    return [rows[index].generated for index in sorted(rows)]


@pytest.mark.parametrize(
    ("mode", "drafter"),
    [
        ("ar", "none"),
        ("dense", "draft"),
        ("dense", "lookup"),
        ("dense", "self"),
        ("exact", "draft"),
        ("exact", "none"),
        ("auto", "draft"),
    ],
)
def test_slots_equal_single_runs(loaded: Session, mode: str, drafter: str) -> None:
    small = EngineOptions(budget=64, num_sink_tokens=4, num_recent_tokens=16, exact_block=8, num_draft_tokens=4)
    prompts = [loaded.encode((TEXT[i:] + TEXT * 3)[:n]) for i, n in enumerate(LENGTHS)]
    plain = Session(loaded.backend, loaded.target, loaded.tokenizer, replace(small, mode="ar", drafter="none"))
    requests = [RequestOptions(max_tokens=count, ignore_eos=True) for count in COUNTS]
    expected = [plain.batch_generate([prompt], request)[0].tokens for prompt, request in zip(prompts, requests, strict=True)]
    session = Session(loaded.backend, loaded.target, loaded.tokenizer, replace(small, mode=mode, drafter=drafter), loaded.draft)
    assert serve(session, prompts) == expected
    # Over the slots' leftovers, in another order of arrival.
    assert serve(session, prompts, slots=2) == expected
