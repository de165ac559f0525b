"""One chat: turns, pending documents, system prompt, and a file that holds them. Nothing here touches a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dustin.config import RequestOptions
from dustin.errors import ContextLengthError, DustinError, UsageError

FORMAT = "dustin-conversation-1"
_ROLES = ("user", "assistant")


class Conversation:
    """Messages of one chat over a session, whose `prefix_cache` keeps the KV between turns.

    `documents` are texts that go before the next message. `stats` are those of the last answer.
    """

    def __init__(self, session: Any, request: RequestOptions, system: str | None = None) -> None:
        self.session, self.request, self.system = session, request, system
        self.turns: list[dict[str, str]] = []
        self.documents: list[str] = []
        self.stats: Any = None
        self.finish_reason: str | None = None
        session.prefix_cache = True

    @property
    def room(self) -> int:
        """Tokens that the whole conversation may have."""
        context = self.session.target.spec.context_length
        return min(context, self.session.options.max_kv_size or context)

    @property
    def tokens(self) -> int:
        """Tokens of the conversation after the last answer."""
        return self.stats.prompt_tokens + self.stats.generated_tokens if self.stats else 0

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.session.tokenizer.encode(text, add_special_tokens=False))

    def messages(self, message: str) -> list[dict[str, str]]:
        """What the model is asked, with the pending documents before the message."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, *self.turns, {"role": "user", "content": "\n\n".join([*self.documents, message])}]

    def ask(self, message: str, progress: Callable[[int, int], None] | None = None) -> Generator[Any, None, None]:
        """Responses of the answer. Closing the iterator ends the answer; what came so far is the assistant's turn.

        A message without a single token of answer leaves no trace, except that documents which do not fit are dropped.
        """
        messages = self.messages(message)
        pieces: list[str] = []
        answered = False
        self.finish_reason = None
        try:
            with closing(self.session.stream_generate(messages, self.request, progress=progress)) as stream:
                for response in stream:
                    answered = True
                    self.stats, self.finish_reason = response.stats, response.finish_reason
                    pieces.append(response.text)
                    yield response
        except ContextLengthError as error:
            raise ContextLengthError(self._overflow(error)) from error
        except DustinError:
            answered = False
            raise
        finally:
            if answered:
                self.documents = []
                self.turns += [messages[-1], {"role": "assistant", "content": "".join(pieces)}]

    def _overflow(self, error: ContextLengthError) -> str:
        """The limit's own words, and what helps in a chat."""
        what = str(error).partition(": shorten")[0].replace("the prompt", "the conversation with this message")
        longer = "start with a model of a longer context"
        if self.documents:
            count, self.documents = len(self.documents), []
            pending = "the pending document was" if count == 1 else f"the {count} pending documents were"
            return f"{what}; {pending} dropped: give a shorter file or {longer}"
        if self.turns:
            return f"{what}: /reset begins a new conversation (/save PATH keeps this one), or {longer}"
        return f"{what}: shorten the message or {longer}"

    @property
    def full(self) -> bool:
        """Whether the last answer was cut because nothing more fits."""
        return self.finish_reason == "length" and self.stats.generated_tokens < self.request.max_tokens

    def set_options(self, **changes: Any) -> None:
        """Change the engine's options between turns. Raise UsageError, changing nothing, where they cannot work together."""
        before = self.session.options
        self.session.options = replace(before, **changes)
        try:
            self.session.resolve(self.request)
        except UsageError:
            self.session.options = before
            raise

    def forget(self) -> None:
        """Begin anew; the system prompt stays."""
        self.turns, self.documents, self.stats, self.finish_reason = [], [], None, None

    # On disk.

    def save(self, path: Path) -> None:
        """Write the conversation as JSON. Raise UsageError rather than replace a file that holds something else."""
        if os.path.exists(path):  # unlike Path.exists it is False for a name that cannot be
            _read(path)
        content = {
            "format": FORMAT,
            "model": self.session.target.spec.name,
            "system": self.system,
            "turns": self.turns,
            "documents": self.documents,
        }
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, text with lone surrogates
            raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error

    def load(self, path: Path) -> str:
        """Replace this conversation by a saved one; returns the name of the model it was held with."""
        content = _read(path)
        self.forget()
        self.system, self.turns, self.documents = content["system"], content["turns"], content["documents"]
        return str(content["model"])


def _read(path: Path) -> dict[str, Any]:
    """A saved conversation, checked. Raise UsageError naming the file and what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, not JSON
        raise UsageError(f"{path} holds no conversation: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path} holds no conversation: expected a JSON object of format {FORMAT!r}, as /save writes it")
    turns, system, documents = content.get("turns"), content.get("system"), content.get("documents", [])
    turns_ok = isinstance(turns, list) and all(
        isinstance(turn, dict) and turn.get("role") == _ROLES[at % 2] and isinstance(turn.get("content"), str) and len(turn) == 2
        for at, turn in enumerate(turns)
    )
    if not turns_ok or len(turns or []) % 2:
        raise UsageError(f"{path} is damaged: its turns must be user and assistant in turn, each with a role and a content")
    if not isinstance(system, str | None) or not (isinstance(documents, list) and all(isinstance(text, str) for text in documents)):
        raise UsageError(f"{path} is damaged: system must be text or null, documents a list of texts")
    return {"turns": turns, "system": system, "documents": documents, "model": content.get("model", "")}
