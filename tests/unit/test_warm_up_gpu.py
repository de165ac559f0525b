"""Warming up on an NVIDIA GPU: afterwards rounds of slots record nothing, prompts compile nothing, and the tokens are the same."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

pytest.importorskip("triton")
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session
from tests.unit.test_round_waits import round_shapes
from tests.unit.test_slots_gpu import COUNTS, LENGTHS, TEXT, loaded, serve

__all__ = ["loaded"]  # the fixture
pytestmark = pytest.mark.gpu
SLOTS, CONTEXT = 3, 512


def recording_seconds(session: Session) -> float:
    models = [model for model in (session.target, session.draft) if model is not None]
    return sum(model.capture_seconds for model in models)


@pytest.mark.parametrize("mode", ["ar", "dense", "auto"])
def test_requests_after_it_wait_for_no_recording(loaded: Session, mode: str) -> None:
    small = EngineOptions(budget=64, num_sink_tokens=4, num_recent_tokens=16, num_draft_tokens=4, prefill_chunk=100)
    prompts = [loaded.encode((TEXT[i:] + TEXT * 3)[:n]) for i, n in enumerate(LENGTHS)]
    plain = Session(loaded.backend, loaded.target, loaded.tokenizer, replace(small, mode="ar", drafter="none"))
    requests = [RequestOptions(max_tokens=count, ignore_eos=True) for count in COUNTS]
    expected = [plain.batch_generate([prompt], request)[0].tokens for prompt, request in zip(prompts, requests, strict=True)]
    drafter = "none" if mode == "ar" else "draft"
    session = Session(loaded.backend, loaded.target, loaded.tokenizer, replace(small, mode=mode, drafter=drafter), loaded.draft)
    gc.collect()
    assert session.warm_up(SLOTS, CONTEXT) > 0
    known, spent = round_shapes(session), recording_seconds(session)
    assert known and spent > 0
    assert serve(session, prompts, slots=SLOTS) == expected
    assert round_shapes(session) - known == set()
