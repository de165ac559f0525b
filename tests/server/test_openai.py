"""The endpoints through the real `openai` client and as raw SSE, over loopback, on a model whose text is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import openai

from tests.server.helpers import CYCLE, PacedModel, Running, cycle, events, ids, running, toy_session

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(toy_session()) as server:
        yield server


def test_a_chat_with_the_openai_client(server: Running) -> None:
    answer = server.open_ai().chat.completions.create(model="toy", messages=CHAT, max_tokens=24)
    assert answer.choices[0].message.content == cycle(24) and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24 and answer.usage.total_tokens == 24 + answer.usage.prompt_tokens
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_accepted_draft_tokens"] > 0 and speculation["mean_acceptance_length"] > 1
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_with_the_openai_client(server: Running) -> None:
    stream = server.open_ai().chat.completions.create(model="toy", messages=CHAT, max_tokens=24, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cycle(24)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def test_a_completion_with_the_openai_client(server: Running) -> None:
    answer = server.open_ai().completions.create(model="toy", prompt="Z", max_tokens=9, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text == "Z" + cycle(10)[1:]
    assert len(choice.logprobs.tokens) == 10 and choice.logprobs.text_offset[:2] == [0, 1]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.token_logprobs[1] == pytest.approx(0, abs=1e-3)
    assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.top_logprobs[1]) == 2


def test_models(server: Running) -> None:
    client = server.open_ai()
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").model_extra["context_length"] == 512
    with pytest.raises(openai.NotFoundError, match="not loaded here"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert caught.value.code == "model_not_found"


def test_usage_comes_only_when_asked_and_the_stream_ends_with_done(server: Running) -> None:
    plain = server.chat(stream=True, max_tokens=5)
    assert plain.headers["content-type"].startswith("text/event-stream")
    assert all("usage" not in event and event["choices"] for event in events(plain))
    assert "speculative_decoding" in events(plain)[-1]["metrics"]
    asked = events(server.chat(stream=True, max_tokens=5, stream_options={"include_usage": True}))
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] == 5
    assert all(event["usage"] is None for event in asked[:-1])
    assert "speculative_decoding" in asked[-1]["metrics"]


@pytest.mark.parametrize("count", range(1, 16))
def test_max_tokens_inside_an_accepted_run(server: Running, count: int) -> None:
    prompt = CYCLE * 3  # lookup drafts from the first token on, and all of them are right
    answer = server.complete(prompt, max_tokens=count).json()
    assert answer["choices"][0]["text"] == cycle(count) and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == count
    if count > 2:
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("stop", ["rich", "5Z", "€", " €5Zü", ["x", "ch €"], "ü"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_and_accepted_runs(server: Running, stop: str | list[str], stream: bool) -> None:
    body = {"max_tokens": 60, "stop": stop, "logprobs": 1}
    first = min(at for at in ((CYCLE * 3).find(text) for text in ([stop] if isinstance(stop, str) else stop)) if at >= 0)
    if stream:
        chunks = [event["choices"][0] for event in events(server.complete(CYCLE * 3, stream=True, **body))]
        text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
        tokens = [token for chunk in chunks for token in (chunk["logprobs"] or {"tokens": []})["tokens"]]
    else:
        choice = server.complete(CYCLE * 3, **body).json()["choices"][0]
        text, reason, tokens = choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]
    assert text == (CYCLE * 3)[:first] and reason == "stop"
    assert len(tokens) == len(text.encode()), "log-probabilities must not give away the stop string"


def test_characters_split_over_tokens_come_whole(server: Running) -> None:
    pieces = [event["choices"][0]["text"] for event in events(server.complete("x", stream=True, max_tokens=48))]
    assert "".join(pieces) == CYCLE * 4 and all("\ufffd" not in piece for piece in pieces)
    # Cut inside the three bytes of a character: what is there of it shows as U+FFFD, at the very end.
    assert server.complete("x", max_tokens=9).json()["choices"][0]["text"] == "Zürich \ufffd"


def test_the_end_token_ends_an_answer() -> None:
    model = PacedModel()
    model.table[ids("c")] = 0.0
    model.table[ids("c"), 2] = 20.0  # <|im_end|> after "Züric"
    with running(toy_session(model)) as server:
        answer = server.chat(logprobs=True).json()
        assert answer["choices"][0]["message"]["content"] == "Züric" and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 7 and len(answer["choices"][0]["logprobs"]["content"]) == 6
        assert server.chat(max_tokens=9, ignore_eos=True).json()["choices"][0]["finish_reason"] == "length"


def test_several_choices_and_several_prompts(server: Running) -> None:
    answer = server.complete(["Z", ids("Zü")], n=2, max_tokens=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ür"] * 2 + ["ric"] * 2
    assert answer["usage"]["prompt_tokens"] == 1 + 3 and answer["usage"]["completion_tokens"] == 12
    chunks = events(server.chat(n=3, max_tokens=4, stream=True))
    for index in range(3):
        mine = [event["choices"][0] for event in chunks if event["choices"][0]["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in mine) == cycle(4)
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "length"


def test_seeds_repeat_and_choices_differ() -> None:
    with running(toy_session()) as server:
        ask = {"max_tokens": 12, "temperature": 2.0, "seed": 7, "n": 3, "top_p": 1.0}
        # The table's favourites weigh less at temperature 2, so that samples differ.
        server.scheduler.session.target.table *= 0.2  # type: ignore[union-attr]
        first, again = (server.complete("x", **ask).json()["choices"] for _ in range(2))
        assert [c["text"] for c in first] == [c["text"] for c in again] and len({c["text"] for c in first}) == 3
        other = server.complete("x", **ask | {"seed": 8, "n": 1}).json()["choices"][0]["text"]
        assert other == first[1]["text"]  # choice i draws as seed + i does
        free = [server.complete("x", **ask | {"seed": None, "n": 1}).json()["choices"][0]["text"] for _ in range(2)]
        assert free[0] != free[1]


def test_log_probabilities_of_a_chat(server: Running) -> None:
    content = server.chat(max_tokens=4, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"][0] for entry in content] == list("Zür".encode())
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    assert content[0]["token"] == "Z" and server.chat(max_tokens=4).json()["choices"][0]["logprobs"] is None


def test_content_in_parts_and_roles(server: Running) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}).json()
    assert whole["usage"]["prompt_tokens"] == server.chat(max_tokens=2).json()["usage"]["prompt_tokens"]
    roles = [{"role": role, "content": "x"} for role in ("developer", "user", "assistant", "user")]
    assert server.post("/v1/chat/completions", {"messages": roles, "max_tokens": 2}).status_code == 200


def test_a_prompt_longer_than_the_context_names_both_numbers(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt has 600 tokens, but the context of 512") as caught:
        server.open_ai().completions.create(model="toy", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    reply = server.complete("x" * 500, max_tokens=100)
    assert reply.status_code == 400 and "600 in all" in reply.text and "512" in reply.text
    # Without a limit a chat may use what is left.
    assert server.chat("x" * 440).json()["choices"][0]["finish_reason"] == "length"


def test_what_a_prompt_has_in_common_with_the_last_one_is_not_read_again() -> None:
    with running(toy_session(), slots=2) as server:
        first = server.complete("The document. " * 10, max_tokens=4).json()
        again = server.complete("The document. " * 10 + "A question", max_tokens=4).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 140
        assert again["choices"][0]["text"] == cycle(4)
        assert server.metrics()["dustin_prompt_tokens_cached_total"] == 140


def test_clients_that_may_not_know_of_each_other() -> None:
    with running(toy_session(), slots=2, share_prefixes=False) as server:
        for _ in range(3):
            answer = server.complete("The document." * 10, max_tokens=4).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and answer["choices"][0]["text"] == cycle(4)


def test_several_choices_read_their_prompt_once() -> None:
    with running(toy_session(), slots=4) as server:
        answer = server.complete("A prompt of some length, read once for all of them", n=4, max_tokens=5).json()
        assert [choice["text"] for choice in answer["choices"]] == [cycle(5)] * 4
        assert server.metrics()["dustin_prompt_tokens_cached_total"] == 3 * (answer["usage"]["prompt_tokens"] - 1)
