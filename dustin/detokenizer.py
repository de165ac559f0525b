"""Text from a stream of tokens that is never taken back, and stop strings across token boundaries."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dustin.text import Tokenizer


class Detokenizer:
    """Tokens in, text out: each piece is final, and the pieces join to `tokenizer.decode` of all tokens.

    A character split over tokens appears once it is whole; U+FFFD only for bytes that are not UTF-8. The cost of a token
    does not grow with what came before. With `continues` the leading space of a sentencepiece word is kept, as text that
    goes on after a prompt needs it; without, it is dropped as `decode` drops it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space and not continues

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still incomplete."""
        if token in self._skip:
            return ""
        return self._stripped(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Cuts a stream of text at the first stop string; text that may begin one is held back.

    The first stop string to be complete wins (of two that end together, the longer), so the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("an empty stop string, expected text")
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete; everything after it is discarded."""
        return self.matched is not None

    def add(self, text: str) -> str:
        """The part of the text so far that is safe to show and was not shown before."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        found = [(pending.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in pending]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return pending[: end - len(self.matched)]
        keep = max(self._overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """The text held back when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0


class TextStream:
    """Detokenizer and StopMatcher in one: tokens in, text to show out, `stopped` once a stop string is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = (), *, continues: bool = False) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._matcher = StopMatcher(stops)
        self.stopped = False

    def add(self, token: int) -> str:
        """New text; never taken back, never from a stop string on."""
        text = self._matcher.add(self._detokenizer.add(token))
        self.stopped = self._matcher.stopped
        return text

    def finish(self) -> str:
        """What was held back (nothing after a stop string)."""
        text = self._matcher.add(self._detokenizer.finish())
        self.stopped = self._matcher.stopped
        return text if self.stopped else text + self._matcher.finish()
