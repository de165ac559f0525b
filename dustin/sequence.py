"""One request: its tokens, limits and text, and the ONE path by which tokens are committed."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dustin.config import RequestOptions, SamplingOptions
from dustin.interfaces import TokenLogprobs, WarpBatch
from dustin.stats import Stats


class TextSink(Protocol):
    """Turns tokens into text that is never taken back; see `dustin.text`."""

    stopped: bool

    def add(self, token: int) -> str:
        """New text; sets `stopped` once a stop string is complete (its text and all after it is withheld)."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of a sequence that no stop string ended."""
        ...


@dataclass(frozen=True)
class Event:
    """One committed token of sequence `row`. `text` is new text for the user; `finish_reason` is set on the last event."""

    row: int
    token: int
    text: str
    from_draft: bool
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class UniformStream:
    """Uniform numbers in [0, 1) of one request: counter-based (Philox), so a batch draws what single runs draw."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def draw(self, count: int) -> list[float]:
        """The next `count` numbers. A number is never drawn twice: a set that depends on one must not meet it again."""
        return self._generator.random(count).tolist()


class Sequence:
    """A request in the batch.

    `tokens` are the working tokens: committed ones, then (mode exact) provisional ones that a dense check may still cut.
    `dense_rows` counts the leading KV rows that are what dense attention would have written. `reading` is True while the
    prompt is read in chunks, beside others' rounds, `joining` while all of it is read and its first token is not there yet. `stats`
    counts this request's drafts alone.
    """

    def __init__(
        self, row: int, prompt: Seq[int], request: RequestOptions, limit: int, eos: frozenset[int], sink: TextSink | None
    ) -> None:
        self.row = row
        self.request = request
        self.limit = limit
        self.eos = frozenset() if request.ignore_eos else eos
        self.tokens: list[int] = list(prompt)
        self.prompt_length = len(self.tokens)
        self.committed = self.prompt_length
        self.dense_rows = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.reading = self.joining = False
        self.stats = Stats()
        self.uniforms = UniformStream(request.sampling.seed)
        self.draft_rate = 1.0
        self._sink = sink

    def note_drafts(self, offered: int, kept: int) -> None:
        """How a round's drafts fared: `draft_rate` follows the share kept of those that were put to the test."""
        if offered:
            self.draft_rate += 0.25 * (kept / (kept + (kept < offered)) - self.draft_rate)

    def drafts_worth(self, least: float, most: int) -> int:
        """How many drafts (1 to `most`) have, at the rate of late, a chance of `least` or more to be kept together."""
        if self.draft_rate >= 1.0 or least <= 0:
            return most
        if self.draft_rate <= 0.0:
            return min(1, most)
        return max(min(1, most), min(most, int(math.log(least) / math.log(self.draft_rate))))

    @property
    def active(self) -> bool:
        """False while the prompt is read in chunks, and once a finish reason is set."""
        return self.finish_reason is None and not self.reading

    @property
    def generated(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.prompt_length : self.committed]

    @property
    def remaining(self) -> int:
        """Tokens that may still follow the working ones."""
        return self.limit - (len(self.tokens) - self.prompt_length)

    def extend_provisionally(self, tokens: Seq[int]) -> bool:
        """Append unchecked tokens; return False once an end-of-sequence token is among them (nothing after it is kept)."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.eos:
                return False
        return True

    def commit(self, tokens: Seq[int], num_accepted: int, logprobs: Seq[TokenLogprobs] | None = None) -> list[Event]:
        """Commit verified tokens, the first `num_accepted` of which were drafted; cut at EOS, stop string or limit."""
        del self.tokens[self.committed :]
        events = []
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            self.committed += 1
            text = self._end_or_text(token)
            entry = self._trimmed(logprobs[index]) if logprobs is not None else None
            events.append(Event(self.row, token, text, index < num_accepted, self.finish_reason, entry))
            if not self.active:
                break
        return events

    def fail(self, message: str) -> Event:
        """End this sequence with an error; the others go on."""
        del self.tokens[self.committed :]
        self.finish_reason, self.error = "error", message
        return Event(self.row, -1, "", False, "error")

    def _trimmed(self, entry: TokenLogprobs) -> TokenLogprobs | None:
        """What this request asked for: a batch is read with as many alternatives as its most demanding row wants."""
        wanted = self.request.top_logprobs
        if wanted is None:
            return None
        return replace(entry, top_tokens=entry.top_tokens[:wanted], top_logprobs=entry.top_logprobs[:wanted])

    def _end_or_text(self, token: int) -> str:
        sink = self._sink
        if token in self.eos:
            self.finish_reason = "stop"
            return sink.finish() if sink else ""
        text = sink.add(token) if sink else ""
        if sink and sink.stopped:
            self.finish_reason = "stop"
        elif self.committed - self.prompt_length >= self.limit:
            self.finish_reason = "length"
            text += sink.finish() if sink else ""
        return text


def warp_batch(samplings: Seq[SamplingOptions]) -> WarpBatch:
    """The sampling parameters of a batch, a tuple each."""
    return WarpBatch(**{name: tuple(getattr(s, name) for s in samplings) for name in WarpBatch.__dataclass_fields__})


def padded(rows: Seq[list[float]], width: int) -> list[list[float]]:
    """Rows of numbers, filled up with zeros to one width."""
    return [row + [0.0] * (width - len(row)) for row in rows]
