"""Where the messages of a chat come from: a terminal with line editing and history, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from dustin.chat_commands import COMMANDS
from dustin.config import MODES
from dustin.errors import DustinError, UsageError
from dustin.models import user_path
from dustin.terminal import decode_text

# Longer messages (pasted documents) are not kept in the history.
_LONGEST_REMEMBERED = 4096
_PATH_COMMANDS = ("/file", "/load", "/save")


class Reader(Protocol):
    """A source of messages."""

    def read(self, more: bool = False) -> str:
        """The next message or command; `more` asks for a further line of one. Raise EOFError, KeyboardInterrupt."""
        ...


class PipeReader:
    """One message a line of stdin."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stdin.buffer
        self._line = 0

    def read(self, more: bool = False) -> str:
        """See Reader. Raise UsageError for a line that is not UTF-8 text."""
        raw = self._stream.readline()
        if not raw:
            raise EOFError
        self._line += 1
        return decode_text(raw, f"line {self._line} of stdin").rstrip("\r\n")


def history_path() -> Path:
    """The file of earlier messages."""
    if sys.platform == "darwin":
        return user_path("~") / "Library" / "Application Support" / "dustin" / "chat_history"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(user_path("~")))) / "dustin" / "chat_history"
    return Path(os.environ.get("XDG_STATE_HOME") or user_path("~") / ".local" / "state") / "dustin" / "chat_history"


class TerminalReader:
    """prompt_toolkit: line editing, bracketed paste (a paste is one message, of any length and number of lines), completion."""

    def __init__(self, history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        # Answers alone go to stdout: `dustin chat | tee log` works.
        stream = next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), sys.stderr)
        self._session: Any = PromptSession(
            multiline=True,
            key_bindings=_keys(),
            completer=_completer(),
            complete_while_typing=False,
            enable_history_search=True,
            history=_history(history),
            output=create_output(stdout=stream),
            prompt_continuation="  ",
        )

    def read(self, more: bool = False) -> str:
        """See Reader."""
        return str(self._session.prompt(". " if more else "> "))


def gather(reader: Reader) -> str:
    """Lines up to `/end`, as one message. Raise UsageError where the input ends before."""
    lines: list[str] = []
    while True:
        try:
            line = reader.read(more=True)
        except EOFError:
            raise UsageError(f"/multi: the input ended before /end, {len(lines)} lines are dropped") from None
        if line.strip() == "/end":
            return "\n".join(lines)
        lines.append(line)


def _keys() -> Any:
    from prompt_toolkit.filters import completion_is_selected
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter", filter=~completion_is_selected)(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


def _history(path: Path | None) -> Any:
    """Messages of this and earlier chats, in a file that only its user may read; in memory where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Bounded(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                yield from super().load_history_strings()
            except OSError:
                return

        def store_string(self, string: str) -> None:
            if len(string) <= _LONGEST_REMEMBERED:
                try:
                    super().store_string(string)
                except OSError:
                    pass  # A full disk does not end a chat.

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return Bounded(str(path))


def _completer() -> Any:
    """Tab completes /commands, modes and paths."""
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
            text = document.text_before_cursor
            command, space, rest = text.partition(" ")
            if not text.startswith("/") or "\n" in text:
                return
            if not space:
                yield from (Completion(name, -len(command)) for name in COMMANDS if name.startswith(command))
            elif command in _PATH_COMMANDS:
                yield from paths.get_completions(Document(rest), complete_event)
            elif command == "/mode":
                yield from (Completion(mode, -len(rest)) for mode in MODES if mode.startswith(rest))

    return Words()


def open_reader(history: Path | None) -> Reader:
    """The reader for this stdin."""
    if not sys.stdin.isatty():
        return PipeReader()
    try:
        return TerminalReader(history)
    except ImportError as error:
        raise DustinError(f"{error}: a chat on a terminal needs prompt_toolkit (pip install prompt_toolkit)") from error
