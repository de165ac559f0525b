"""Many requests in one speculating batch: each gets what it would get alone. Random weights, fp32."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("torch")

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.generation import Session
from tests import tiny_model
from tests.server.helpers import events, running, tiny_session, until

COUNT = 14
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew tea for their very old cat".split()
SMALL = {"budget": 40, "num_sink_tokens": 2, "num_recent_tokens": 8, "exact_block": 8, "num_draft_tokens": 3}


def prompts(count: int) -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_model.write(folder / "target"), tiny_model.write(folder / "draft", seed=1, num_hidden_layers=1)


def alone(session: Session, prompt: str, count: int, **sampling: Any) -> str:
    """The same text from the Python API, one at a time, plain decoding."""
    options = replace(session.options, mode="ar", drafter="none")
    plain = Session(session.backend, session.target, session.tokenizer, options)
    request = RequestOptions(max_tokens=count, ignore_eos=True, sampling=SamplingOptions(**sampling))
    return plain.generate(plain.encode(prompt), request).text


@pytest.mark.parametrize(
    ("mode", "drafter"),
    [
        ("ar", "auto"),
        ("dense", "draft"),
        ("dense", "lookup"),
        ("dense", "self"),
        ("exact", "draft"),
        ("exact", "none"),
        ("auto", "auto"),
    ],
)
def test_sixteen_prompts_at_once_equal_their_sequential_answers(folders: tuple[Path, Path], mode: str, drafter: str) -> None:
    session = tiny_session(folders[0], folders[1] if drafter == "draft" else None, mode=mode, drafter=drafter, **SMALL)
    asked = prompts(16)
    with running(session, slots=6, prefill_tokens=32) as server, ThreadPoolExecutor(16) as pool:
        body = {"max_tokens": COUNT, "ignore_eos": True}
        at_once = list(pool.map(lambda prompt: server.complete(prompt, **body).json(), asked))
        found = server.metrics()
        # And again, over the slots' leftovers, one by one.
        in_turn = [server.complete(prompt, **body).json() for prompt in asked[:4]]
    expected = [alone(session, prompt, COUNT) for prompt in asked]
    assert [answer["choices"][0]["text"] for answer in at_once] == expected
    assert [answer["choices"][0]["text"] for answer in in_turn] == expected[:4]
    assert found["dustin_generation_tokens_total"] == 16 * COUNT
    if mode == "dense":
        drafted = sum(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in at_once)
        assert drafted == found["dustin_spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.parametrize("mode", ["sparse", "rectified"])
def test_modes_that_approximate_give_what_the_python_api_gives(folders: tuple[Path, Path], mode: str) -> None:
    session = tiny_session(folders[0], folders[1], mode=mode, **SMALL)
    request = RequestOptions(max_tokens=20, ignore_eos=True)
    single = Session(session.backend, session.target, session.tokenizer, session.options, session.draft)
    asked = prompts(8)
    with running(session, slots=3) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=20, ignore_eos=True).json(), asked))
    assert [answer["choices"][0]["text"] for answer in answers] == [single.generate(single.encode(p), request).text for p in asked]


def test_greedy_and_sampled_requests_in_one_batch(folders: tuple[Path, Path]) -> None:
    """Every request with its own sampling; a seed gives its text whoever else is in the batch."""
    session = tiny_session(folders[0], mode="auto", **SMALL)
    asked = prompts(9)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.3, "seed": 5, "top_p": 0.8},
        {"temperature": 0.7, "seed": 6, "top_k": 9},
        {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 1.0, "seed": 8, "min_p": 0.05, "repetition_penalty": 1.2},
    ]
    jobs = [(prompt, settings[i % len(settings)]) for i, prompt in enumerate(asked)]
    with running(session, slots=4) as server, ThreadPoolExecutor(9) as pool:
        bodies = list(pool.map(lambda job: server.complete(job[0], max_tokens=20, ignore_eos=True, **job[1]).json(), jobs))
    expected = [alone(session, prompt, 20, **sampling) for prompt, sampling in jobs]
    assert [body["choices"][0]["text"] for body in bodies] == expected


def test_log_probabilities_of_an_echoed_prompt(folders: tuple[Path, Path]) -> None:
    """What lm-eval sends to /v1/completions to score continuations: token ids, echo, one token, one alternative."""
    import torch

    session = tiny_session(folders[0], mode="auto", **SMALL)
    texts = [list(session.encode(prompt)) for prompt in prompts(5)]
    body = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    with running(session, slots=3) as server:
        choices = server.complete(texts, **body).json()["choices"]
        streamed = events(server.complete(texts[0], stream=True, **body))
        again = server.complete(texts[0], **body).json()
    for tokens, choice in zip(texts, choices, strict=True):
        ids = torch.tensor([tokens])
        out = session.target.forward(ids, [len(tokens)], session.target.new_cache(1, len(tokens)))
        expected = out.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(tokens) + 1 == len(found["top_logprobs"]) and found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(expected.tolist(), abs=1e-4)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert best[:-1] == pytest.approx(out.logits[0, :-1].log_softmax(-1).amax(-1).tolist(), abs=1e-4)
        assert choice["text"].startswith(session.tokenizer.decode(tokens))  # type: ignore[union-attr]
    mine = streamed[0]["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert mine == pytest.approx(choices[0]["logprobs"]["token_logprobs"][1:-1], abs=1e-4)
    assert again["choices"][0]["logprobs"]["tokens"] == choices[0]["logprobs"]["tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_exact_samples_with_lagged_sets_or_not_at_all(folders: tuple[Path, Path]) -> None:
    with running(tiny_session(*folders, mode="exact", **SMALL)) as server:
        assert server.scheduler.engine_options.lookahead_lag == 1
        assert server.complete("hello", temperature=1).status_code == 200
    with running(tiny_session(*folders, mode="exact", lookahead_lag=0, **SMALL)) as server:
        reply = server.complete("hello", temperature=1)
        assert reply.status_code == 400 and "lookahead-lag 0" in reply.text
        assert server.complete("hello").status_code == 200


@pytest.mark.parametrize("backend", ["mlx", "numpy"])
def test_other_backends_serve_too(folders: tuple[Path, Path], backend: str) -> None:
    """All of a model's work is done in the engine's thread, which is where MLX wants it."""
    import dustin

    if backend == "mlx":
        pytest.importorskip("mlx.core")
    options = EngineOptions(mode="dense", drafter="lookup")
    asked = ["the same beginning, then a fox", "the same beginning, then a dog", "tea"]
    expected = [alone(tiny_session(folders[0]), prompt, 8) for prompt in asked]
    load = partial(dustin.load, str(folders[0]), backend=backend, device="cpu", options=options)
    with running(load, slots=2) as server, ThreadPoolExecutor(3) as pool:
        until(lambda: server.scheduler.state != "loading", 60)
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=8, ignore_eos=True).json(), asked))
    assert [answer["choices"][0]["text"] for answer in answers] == expected


def test_what_cannot_be_served_is_refused_at_the_start(folders: tuple[Path, Path]) -> None:
    for options, says in (
        ({"mode": "sparse", "drafter": "self"}, "gains nothing"),
        ({"mode": "dense", "drafter": "draft"}, "no draft model"),
        ({"mode": "sparse", "selector": "snapkv"}, "not for slots"),
    ):
        session = tiny_session(folders[0], **options)
        with running(lambda session=session: session) as server:
            server.thread.join(10)
            assert says in str(server.scheduler.error)


def test_the_drafts_context_counts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    short = tiny_model.write(tmp_path / "short", seed=1, num_hidden_layers=1, max_position_embeddings=128)
    with running(tiny_session(folders[0], short, mode="dense", num_draft_tokens=4)) as server:
        assert server.scheduler.context == 124
        assert server.complete("x" * 124).status_code == 400
        assert server.complete("x" * 100, max_tokens=24, ignore_eos=True).json()["usage"]["completion_tokens"] == 24
