"""Request bodies: every field, what is refused by name, and bodies at random, which never make an error of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn")

from dustin.config import SamplingOptions
from dustin.serving import asks
from dustin.serving.failures import RequestFailure
from tests.server.helpers import JSON, Running, running, toy_session

MESSAGES = [{"role": "user", "content": "x"}]
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "[]"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": ["hi"]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0]", "'mood'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tools"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"model": 5}, "model", "a string"),
    ({"n": 0}, "n", "0"),
    ({"n": True}, "n", "True"),
    ({"n": 129}, "n", "129"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "6"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": True}, "temperature", "True"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"min_p": 1}, "min_p", "1"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": [1]}, "frequency_penalty", "[1]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"top_k": 1.0}, "top_k", "1.0"),
    ({"seed": 2**63}, "seed", str(2**63)),
    ({"stop": ""}, "stop", "''"),
    ({"stop": ["a"] * 17}, "stop", "a list of 17"),
    ({"stop": [1]}, "stop", "[1]"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "'x'"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "1"),
    ({"logprobs": 3}, "logprobs", "3"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"colour": "blue"}, "colour", "unknown field 'colour'"),
    ({"prompt": "x"}, "prompt", "unknown field 'prompt', which is one of /v1/completions"),
    ({"max_token": 3}, "max_token", "unknown field 'max_token', did you mean 'max_tokens'?"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=[f"{param}-{i}" for i, (_, param, _) in enumerate(WRONG)])
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        asks.parse_ask({"messages": MESSAGES} | fields, True, SamplingOptions())
    assert caught.value.status == 400 and caught.value.param == param and says in str(caught.value)


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [1.5], ["x", 1], [True], {"a": 1}, [["x"]]])
def test_prompts_of_other_kinds(prompt: Any) -> None:
    if prompt == "":  # an empty text: a tokenizer may begin it with a token of its own, so the server decides
        assert asks.parse_ask({"prompt": ""}, False, SamplingOptions()).prompts == [""]
        return
    with pytest.raises(RequestFailure, match="prompt"):
        asks.parse_ask({"prompt": prompt}, False, SamplingOptions())


@pytest.mark.parametrize("prompt", ["", [-1], [10**9], [10**30], ["a", ""]])
def test_prompts_without_tokens_or_outside_the_vocabulary(server: Running, prompt: Any) -> None:
    reply = server.complete(prompt)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"


def test_what_is_accepted_without_effect() -> None:
    quiet: dict[str, Any] = dict.fromkeys(asks.WITHOUT_EFFECT, "x") | {name: ok[0] for name, ok in asks.NEUTRAL.items() if ok}
    quiet |= dict.fromkeys(asks.CHAT_FIELDS - {"messages"})  # null is as good as nothing
    ask = asks.parse_ask({"messages": MESSAGES, "response_format": {"type": "text"}} | quiet, True, SamplingOptions(seed=1))
    assert ask == asks.parse_ask({"messages": MESSAGES}, True, SamplingOptions(seed=1))
    assert asks.parse_ask({"prompt": "x"}, False, SamplingOptions()).max_tokens == 16


def test_both_names_of_the_limit() -> None:
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert asks.parse_ask({"messages": MESSAGES} | fields, True, SamplingOptions()).max_tokens == 7


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"5", b"null", b'{"n": NaN}', b'{"n": Infinity}', b"\xff", b"[" * 100_000, b'{"a":' * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
    ids=range(11),
)  # fmt: skip
def test_bodies_that_are_no_object(server: Running, raw: bytes) -> None:
    reply = server.client.post("/v1/completions", content=raw, headers=JSON)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(toy_session(), slots=2) as server:
        yield server


def everything() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(codec=None), max_size=8)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)


def likely() -> st.SearchStrategy[Any]:
    """Values that are often right, so that requests get far."""
    return st.sampled_from(
        [0, 1, 2, 5, -1, 0.5, 1.0, 2.0, True, False, None, "", "Z", "text", ["Z"], ["ch ", "5"], [], {}, {"type": "text"}, [1, 2],
         {"include_usage": True}, [{"role": "user", "content": "hi"}], 2**63 - 1, -(2**63), 1e308]
    )  # fmt: skip


def bodies(fields: set[str], needed: str, value: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(sorted(fields | asks.WITHOUT_EFFECT | set(asks.NEUTRAL)))
    some = st.dictionaries(names | st.text(max_size=5), likely() | everything(), max_size=5)
    return some.map(lambda body: {needed: value, "max_tokens": 3} | body) | some


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(chat=st.booleans(), data=st.data())
def test_no_body_makes_an_error_of_ours(server: Running, chat: bool, data: st.DataObject) -> None:
    if chat:
        path, some = "/v1/chat/completions", bodies(asks.CHAT_FIELDS, "messages", MESSAGES)
    else:
        path, some = "/v1/completions", bodies(asks.COMPLETION_FIELDS, "prompt", "x")
    body = data.draw(some | everything())
    reply = server.client.post(path, content=json.dumps(body), headers=JSON)
    assert reply.status_code in (200, 400, 404), reply.text
    assert "Traceback" not in reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


def test_the_server_is_well_after_all_that(server: Running) -> None:
    found = server.metrics()
    assert found["dustin_requests_running"] == 0 and found["dustin_engine_failures_total"] == 0
    assert server.complete("x", max_tokens=2).status_code == 200
