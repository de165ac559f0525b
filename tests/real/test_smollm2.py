"""SmolLM2's real weights (fetched on first use): text against transformers, and lossless modes against plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dustin
from bench.cpu import load_transformers, passages
from dustin import models
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session

pytestmark = pytest.mark.real

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers above 20.",
    "Who wrote Pride and Prejudice?",
    "Translate 'good morning' into Spanish.",
    "What does HTTP stand for?",
    "Give one reason why the sky is blue.",
    "How many legs has a spider?",
    "Name a mammal that lays eggs.",
]


@pytest.fixture(scope="module")
def session() -> Session:
    return dustin.load(dtype="float32", options=EngineOptions(mode="ar"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_transformers(models.resolve(models.DEFAULT), "float32")


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_text_equals_transformers(session: Session, reference: Any, question: str) -> None:
    import torch

    prompt = session.encode([{"role": "user", "content": question}])
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
            eos_token_id=list(session.tokenizer.eos_ids), pad_token_id=0,
        )  # fmt: skip
    assert session.generate(prompt, RequestOptions(max_tokens=40)).tokens == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("mode", "drafter"), [("dense", "self"), ("dense", "lookup"), ("exact", "none"), ("exact", "lookup"), ("auto", "auto")]
)
def test_lossless_modes_equal_plain_decoding_over_a_document(session: Session, mode: str, drafter: str) -> None:
    prompt = passages(session.tokenizer, 1500, 1)[0]
    request = RequestOptions(max_tokens=40, ignore_eos=True)
    plain = session.generate(prompt, request)
    options = EngineOptions(mode=mode, drafter=drafter, budget=256)
    other = Session(session.backend, session.target, session.tokenizer, options).generate(prompt, request)
    assert other.tokens == plain.tokens
