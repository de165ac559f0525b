"""Request bodies, checked field by field: what is understood, what is accepted without effect, and a clear 400 for the rest."""

from __future__ import annotations

import difflib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dustin.config import RequestOptions, SamplingOptions
from dustin.errors import UsageError
from dustin.serving.failures import RequestFailure, bad_field

Prompt = str | list[int] | list[dict[str, str]]

_SHARED = {
    "model", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    "max_tokens", "logprobs", "top_k", "min_p", "repetition_penalty", "ignore_eos",
}  # fmt: skip
CHAT_FIELDS = _SHARED | {"messages", "max_completion_tokens", "top_logprobs", "response_format"}
COMPLETION_FIELDS = _SHARED | {"prompt", "echo"}
# Fields of OpenAI's that say nothing about the answer's text.
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
}  # fmt: skip
# Fields accepted with these values only, which ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "logit_bias": ({},),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
    "best_of": (1,), "suffix": ("",),
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MOST_STOPS = 16
_MOST_CHOICES = 128


@dataclass(frozen=True)
class Ask:
    """A request as the server understands it. `top_logprobs` None asks for none; `max_tokens` None for what there is room for."""

    chat: bool
    model: str | None
    prompts: list[Prompt]
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    top_logprobs: int | None
    sampling: SamplingOptions

    def request(self, choice: int, max_tokens: int) -> RequestOptions:
        """The options of one choice: each draws its own numbers."""
        sampling = replace(self.sampling, seed=(self.sampling.seed + choice) % 2**63)
        return RequestOptions(max_tokens, self.stop, self.ignore_eos, self.top_logprobs, sampling)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raise RequestFailure (400) for anything else."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestFailure(400, f"the body is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}") from error
    except RecursionError as error:
        raise RequestFailure(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise RequestFailure(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestFailure(400, f"the body is {_kind(body)}, expected a JSON object")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def parse_ask(body: Mapping[str, Any], chat: bool, defaults: SamplingOptions) -> Ask:
    """Check a chat or completion request. Raise RequestFailure naming the field, its value and what was expected."""
    fields = {name: value for name, value in body.items() if value is not None}
    _refuse_unknown(fields, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if options is not None:
        if not stream:
            raise bad_field("stream_options", "stream_options needs stream: true")
        if not isinstance(options, dict):
            raise _wrong("stream_options", options, "an object")
        if unknown := set(options) - {"include_usage", "include_obfuscation"}:
            raise bad_field("stream_options", f"stream_options has {_shown(sorted(unknown)[0])}, expected include_usage")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong("model", model, "a string")
    return Ask(
        chat=chat,
        model=model,
        prompts=[_messages(fields)] if chat else _prompts(fields),
        n=_whole(fields, "n", 1, 1, _MOST_CHOICES),
        stream=stream,
        include_usage=options is not None and _flag(options, "include_usage", "stream_options.include_usage"),
        echo=not chat and _flag(fields, "echo"),
        max_tokens=_max_tokens(fields, chat),
        stop=_stops(fields),
        ignore_eos=_flag(fields, "ignore_eos"),
        top_logprobs=_top_logprobs(fields, chat),
        sampling=_sampling(fields, defaults),
    )


def _refuse_unknown(fields: Mapping[str, Any], known: set[str]) -> None:
    if "response_format" in fields and "response_format" in known:
        form = fields["response_format"]
        if not isinstance(form, dict) or form.get("type") != "text":
            raise bad_field(
                "response_format", f"response_format is {_shown(form)}, expected {{'type': 'text'}}: others are not supported"
            )
    for name, value in fields.items():
        if name in NEUTRAL:
            if not any(type(value) is type(ok) and value == ok for ok in NEUTRAL[name]):
                raise bad_field(name, f"{name} is not supported by this server: leave it out", "unsupported_parameter")
        elif name not in known and name not in WITHOUT_EFFECT:
            raise bad_field(name[:100], f"unknown field {_shown(name)}{_meant(name[:100], known)}", "unknown_parameter")


def _meant(name: str, known: set[str]) -> str:
    if name in CHAT_FIELDS | COMPLETION_FIELDS:
        return f", which is one of /v1/{'completions' if 'messages' in known else 'chat/completions'}"
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f", did you mean {near[0]!r}?" if near else ""


# Prompts.


def _messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of one message or more")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(where, message, "an object with role and content")
    given = {name: value for name, value in message.items() if value is not None}
    if given.get("tool_calls") or given.get("function_call") or given.get("role") in ("tool", "function"):
        raise bad_field(where, f"{where} is about tools, which this server does not support", "unsupported_parameter")
    if unknown := set(given) - {"role", "content", "name", "refusal", "tool_calls", "annotations"}:
        raise bad_field(where, f"{where} has an unknown field {_shown(sorted(unknown)[0])}", "unknown_parameter")
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", role, "one of " + ", ".join(_ROLES))
    return {
        "role": _ROLES[role],
        "content": _content(given.get("content", "" if role == "assistant" else None), f"{where}.content"),
    }


def _content(content: Any, where: str) -> str:
    if isinstance(content, list):
        texts = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise _wrong(f"{where}[{index}].type", kind, "text: other parts are not supported")
            texts.append(_text(part.get("text"), f"{where}[{index}].text"))
        return "".join(texts)
    return _text(content, where)


def _prompts(fields: Mapping[str, Any]) -> list[Prompt]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if isinstance(prompt, list) and prompt:
        if all(_is_int(token) for token in prompt):
            return [list(prompt)]
        return [_one_prompt(part, f"prompt[{index}]") for index, part in enumerate(prompt)]
    raise _wrong("prompt", prompt, "a string, a list of token ids, or a list of either")


def _one_prompt(part: Any, where: str) -> Prompt:
    if isinstance(part, str):
        return _text(part, where)
    if isinstance(part, list) and part and all(_is_int(token) for token in part):
        return list(part)
    raise _wrong(where, part, "a string or a list of token ids")


# Fields.


def _max_tokens(fields: Mapping[str, Any], chat: bool) -> int | None:
    names = ["max_completion_tokens", "max_tokens"] if chat else ["max_tokens"]
    given = {name: _whole(fields, name, 1, 1, 2**31) for name in names if name in fields}
    if len(set(given.values())) > 1:
        raise bad_field("max_tokens", f"max_tokens is {given['max_tokens']} and max_completion_tokens is "
                        f"{given['max_completion_tokens']}: give one of them")  # fmt: skip
    # OpenAI's completions stop after 16 tokens unless told otherwise.
    return next(iter(given.values()), None if chat else 16)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise _wrong("stop", stop, f"a string or a list of up to {_MOST_STOPS} strings, none of them empty")
    return tuple(_text(text, "stop") for text in stops)


def _top_logprobs(fields: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(fields, "logprobs", 0, 0, 20) if "logprobs" in fields else None
    if not _flag(fields, "logprobs"):
        if "top_logprobs" in fields:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    return _whole(fields, "top_logprobs", 0, 0, 20)


def _sampling(fields: Mapping[str, Any], defaults: SamplingOptions) -> SamplingOptions:
    seed = fields.get("seed")
    if seed is None:
        # The server's own seed is for servers that must repeat; without one, answers differ.
        seed = defaults.seed or secrets.randbits(63)
    elif not _is_int(seed) or not -(2**63) <= seed < 2**63:
        raise _wrong("seed", seed, "a whole number of 64 bits")
    values = {
        "temperature": _number(fields, "temperature", defaults.temperature, 0, 2),
        "top_p": _number(fields, "top_p", defaults.top_p, 0, 1),
        "presence_penalty": _number(fields, "presence_penalty", defaults.presence_penalty, -2, 2),
        "frequency_penalty": _number(fields, "frequency_penalty", defaults.frequency_penalty, -2, 2),
        "top_k": _whole(fields, "top_k", defaults.top_k, -1, 2**31),
        "min_p": _number(fields, "min_p", defaults.min_p, 0, 1),
        "repetition_penalty": _number(fields, "repetition_penalty", defaults.repetition_penalty, 0, 10),
    }
    values["top_k"] = max(0, values["top_k"])  # type: ignore[type-var]
    try:
        return SamplingOptions(seed=seed % 2**63, **values)  # type: ignore[arg-type]
    except UsageError as error:  # the open ends: top_p 0, min_p 1, repetition_penalty 0
        raise bad_field(str(error).split(" ", 1)[0], str(error)) from error


def _flag(fields: Mapping[str, Any], name: str, where: str | None = None) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(where or name, value, "true or false")
    return bool(value)


def _whole(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if not _is_int(value) or not low <= value <= high:
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return int(value)


def _number(fields: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or not math.isfinite(value):
        raise _wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_field(
            where, f"{where} has half a character (a lone surrogate) at {error.start}, expected Unicode text"
        ) from error
    return value


def _wrong(param: str, value: Any, expected: str) -> RequestFailure:
    what = "missing" if value is None else _shown(value)
    return bad_field(param, f"{param} is {what}, expected {expected}")


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else _shown(value)


def _shown(value: Any) -> str:
    """A value for a message: short and printable, whatever a client sent."""
    if isinstance(value, dict | list):
        text = _kind(value) if len(value) > 3 or any(isinstance(part, dict | list) for part in value) else ascii(value)
    else:
        text = ascii(value)
    return text if len(text) <= 100 else text[:97] + "..."
