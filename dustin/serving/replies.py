"""What goes back to a client: OpenAI's objects, whole or as server-sent events."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dustin.detokenizer import Detokenizer
from dustin.interfaces import TokenLogprobs
from dustin.sequence import Event
from dustin.serving.scheduler import Job
from dustin.stats import Stats
from dustin.text import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this


def dumps(value: Any) -> bytes:
    """JSON as UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Choice:
    """One answer as it comes: text, finish reason, log-probabilities of the tokens whose text is out.

    A stop string's tokens carry no log-probabilities, as their text is withheld.
    """

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer | None, echoed: str = "") -> None:
        self.index = index
        self.job = job
        self.text: list[str] = [echoed] if echoed else []
        self.entries: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.echoed = echoed
        self._tokenizer = tokenizer
        self._pieces = Detokenizer(tokenizer, continues=True) if tokenizer is not None else None
        self._pending: list[tuple[int, TokenLogprobs]] = []
        self._shown = self._covered = 0

    @property
    def num_characters(self) -> int:
        """Characters of the text so far."""
        return len(self.echoed) + self._shown

    def take(self, events: Sequence[Event]) -> tuple[str, list[TokenLogprobs]]:
        """New text and new entries."""
        text = "".join(event.text for event in events)
        self._shown += len(text)
        for event in events:
            self.finish_reason = event.finish_reason or self.finish_reason
            if event.logprobs is not None and not self._ends(event):
                length = len(self._pieces.add(event.token)) if self._pieces is not None else 0
                self._pending.append((length, event.logprobs))
        entries = self._released(ended=self.finish_reason is not None and not self._stopped_by_text(events[-1]))
        self.text.append(text)
        self.entries += entries
        return text, entries

    def _released(self, ended: bool) -> list[TokenLogprobs]:
        """Entries whose text is out; a token that is a part of a character comes with the rest of it."""
        count, covered = 0, self._covered
        for index, (length, _) in enumerate(self._pending):
            if covered + length > self._shown:
                break
            covered += length
            if length:
                count, self._covered = index + 1, covered
        count = len(self._pending) if ended else count
        entries = [entry for _, entry in self._pending[:count]]
        del self._pending[:count]
        return entries

    def _stopped_by_text(self, event: Event) -> bool:
        return event.finish_reason == "stop" and not self._ends(event)

    def _ends(self, event: Event) -> bool:
        return event.finish_reason == "stop" and self._tokenizer is not None and event.token in self._tokenizer.eos_ids

    # Log-probabilities in the two forms.

    def _name(self, token: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.token_bytes(token) if self._tokenizer is not None else b""
        return raw.decode("utf-8", "replace"), list(raw)

    def chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """`{"content": [...]}`."""

        def one(token: int, value: float) -> dict[str, Any]:
            text, raw = self._name(token)
            return {"token": text, "logprob": _finite(value), "bytes": raw}

        content = []
        for entry in entries:
            best = [one(*pair) for pair in zip(entry.top_tokens, entry.top_logprobs, strict=True)]
            content.append(one(entry.token, entry.logprob) | {"top_logprobs": best})
        return {"content": content, "refusal": None}

    def completion_logprobs(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The older form: parallel lists; `offset` is where the first entry's text begins."""
        names = [self._name(entry.token)[0] for entry in entries]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        best: list[dict[str, float] | None] = [self._alternatives(entry) for entry in entries]
        return {
            "tokens": names,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in zip(entry.top_tokens, entry.top_logprobs, strict=True):
            # Parts of characters share a name: the best of them stands for all.
            found.setdefault(self._name(token)[0], _finite(value))
        return found

    def echoed_logprobs(self) -> dict[str, Any]:
        """Those of an echoed prompt: its first token has none."""
        first = TokenLogprobs(self.job.prompt[0], 0.0)
        entries = [first, *self.job.prompt_logprobs]
        made = self.completion_logprobs(entries, 0)
        made["token_logprobs"][0] = None
        if self.job.prompt_top_logprobs:
            made["top_logprobs"] = [None, *map(self._alternatives, self.job.prompt_logprobs)]
        return made


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts of one completion's log-probabilities."""
    return {name: (first[name] or []) + (second[name] or []) or None for name in first}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST_LOGPROB


@dataclass
class Reply:
    """The objects of one request's answer. `metrics` comes with the last one."""

    chat: bool
    model: str
    fingerprint: str
    choices: list[Choice]
    wants_logprobs: bool
    include_usage: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def usage(self) -> dict[str, Any]:
        """Token counts; a prompt shared by several choices counts once."""
        jobs = [choice.job for choice in self.choices]
        prompts = {id(job.prompt): len(job.prompt) for job in jobs}
        cached = {id(job.prompt): job.cached_tokens for job in reversed(jobs)}
        generated = sum(job.num_generated for job in jobs)
        return {
            "prompt_tokens": sum(prompts.values()),
            "completion_tokens": generated,
            "total_tokens": sum(prompts.values()) + generated,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def metrics(self) -> dict[str, Any]:
        """vLLM's block, of this request alone."""
        total = Stats()
        for choice in self.choices:
            stats = choice.job.stats
            total.drafted += stats.drafted
            total.accepted += stats.accepted
            total.spec_steps += stats.spec_steps
            total.acceptance_histogram.update(stats.acceptance_histogram)
        return {"speculative_decoding": total.as_dict()["speculative_decoding"]}

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        return self._head(chunk=False) | {
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        if self.chat:
            logprobs = choice.chat_logprobs(choice.entries) if self.wants_logprobs else None
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            logprobs = choice.completion_logprobs(choice.entries, len(choice.echoed)) if self.wants_logprobs else None
            if logprobs is not None and choice.job.prompt_top_logprobs is not None:
                logprobs = _joined(choice.echoed_logprobs(), logprobs)
            content = {"text": text}  # type: ignore[dict-item]
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    # Pieces of a stream.

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a choice begins with: the role, or the echoed prompt."""
        if self.chat:
            return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)
        logprobs = choice.echoed_logprobs() if choice.job.prompt_top_logprobs is not None else None
        return self._chunk(choice, {"text": choice.echoed}, logprobs, None) if choice.echoed else None

    def piece(self, choice: Choice, events: Sequence[Event]) -> dict[str, Any] | None:
        """A chunk of new text (None while all of it is held back)."""
        offset = choice.num_characters
        text, entries = choice.take(events)
        if not (text or entries):
            return None
        logprobs = None
        if self.wants_logprobs:
            logprobs = choice.chat_logprobs(entries) if self.chat else choice.completion_logprobs(entries, offset)
        return self._chunk(choice, {"delta": {"content": text}} if self.chat else {"text": text}, logprobs, None)

    def closing(self, choice: Choice) -> dict[str, Any]:
        """The chunk with the finish reason."""
        chunk = self._chunk(choice, {"delta": {}} if self.chat else {"text": ""}, None, choice.finish_reason)
        last = all(each.finish_reason is not None for each in self.choices)
        return chunk | {"metrics": self.metrics()} if last and not self.include_usage else chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk where usage was asked for: no choices."""
        return self._head(chunk=True) | {"choices": [], "usage": self.usage(), "metrics": self.metrics()}

    def _chunk(self, choice: Choice, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        part = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._head(chunk=True) | {"choices": [part]} | ({"usage": None} if self.include_usage else {})
