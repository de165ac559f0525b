"""The /commands of a chat, one function each, and the table that /help prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dustin.config import MODES
from dustin.conversation import Conversation
from dustin.errors import UsageError
from dustin.models import user_path
from dustin.terminal import note, read_file

MODE_NOTES = {
    "auto": "plain decoding or lossless speculation, whichever is measured faster",
    "ar": "plain decoding",
    "dense": "classic speculation, lossless",
    "sparse": "verification reads the selected tokens only: approximate",
    "rectified": "sparse, made good from time to time: approximate",
    "exact": "sparse rounds propose, one dense pass checks: lossless",
}


class Quit(Exception):
    """The user wants to leave."""


def _quit(_: Conversation, rest: str) -> None:
    raise Quit


def _help(_: Conversation, rest: str) -> None:
    for usage, text, _function in COMMANDS.values():
        note(f"{usage:15} {text}")
    note("//text          a message that begins with /")
    note("Ctrl-C          stops an answer; at the prompt, twice: leaves")
    note("Alt-Enter       a new line in a message; what is pasted stays one message, however many lines it has")


def _reset(chat: Conversation, rest: str) -> None:
    chat.forget()
    note("conversation forgotten")


def _system(chat: Conversation, rest: str) -> None:
    chat.system = rest or None
    note("system prompt set" if rest else "system prompt removed")
    if chat.turns:
        note("the conversation so far is read again with your next message")


def _file(chat: Conversation, rest: str) -> None:
    path = _path("/file", rest)
    if rest == "-":
        raise UsageError("/file cannot read stdin, where your messages come from: give the PATH of a file")
    text = read_file(str(path)).strip("\n")
    if not text.strip():
        raise UsageError(f"{rest} is empty: nothing to put before your message")
    chat.documents.append(text)
    count = chat.count(text)
    note(f"{rest}: {count} tokens, goes before your next message")
    if chat.tokens + count >= chat.room:
        left = max(chat.room - chat.tokens, 0)
        note(f"note: that is more than the {left} tokens left of {chat.room}: /reset makes room, or drops it")


def _answers(chat: Conversation) -> str:
    count = len(chat.turns) // 2
    return "1 answer" if count == 1 else f"{count} answers"


def _stats(chat: Conversation, rest: str) -> None:
    for line in chat.stats.summary_lines() if chat.stats else ["no answer yet"]:
        note(line)
    note(f"conversation: {_answers(chat)}, {chat.tokens} of {chat.room} tokens")


def _mode(chat: Conversation, rest: str) -> None:
    if rest:
        if rest not in MODES:
            raise UsageError(f"mode is {rest!r}, expected one of {', '.join(MODES)}")
        chat.set_options(mode=rest)
    options = chat.session.resolve(chat.request)
    note(f"mode {options.mode} ({MODE_NOTES[options.mode]}), drafter {options.drafter}, budget {options.budget}")
    if not rest:
        for mode in MODES:
            note(f"  /mode {mode:10} {MODE_NOTES[mode]}")


def _budget(chat: Conversation, rest: str) -> None:
    if rest:
        try:
            budget = int(rest.replace(",", "").replace("_", ""))
        except ValueError:
            raise UsageError(f"/budget is {rest!r}, expected a number of tokens") from None
        chat.set_options(budget=budget)
    mode = chat.session.options.mode
    unused = f" (mode {mode} reads all of them)" if mode == "ar" else ""
    note(f"budget {chat.session.options.budget} tokens{unused}")


def _save(chat: Conversation, rest: str) -> None:
    path = _path("/save", rest)
    chat.save(path)
    note(f"{path}: {_answers(chat)} saved")


def _load(chat: Conversation, rest: str) -> None:
    path = _path("/load", rest)
    model = chat.load(path)
    note(f"{path}: {_answers(chat)}, read with your next message")
    if model and model != chat.session.target.spec.name:
        note(f"note: it was held with {model}, this is {chat.session.target.spec.name}")


def _multi(_: Conversation, rest: str) -> None:
    # Lines are gathered by the reader, before a line gets here.
    raise UsageError("/multi begins a message of several lines and /end ends it: /end came without /multi")


def _path(command: str, rest: str) -> Path:
    """The PATH of a command, with or without quotes."""
    text = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "'\"" else rest
    if not text:
        raise UsageError(f"{command} needs a PATH")
    return user_path(text)


COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str], None]]] = {
    "/help": ("/help", "this list", _help),
    "/file": ("/file PATH", "put a text file before your next message", _file),
    "/multi": ("/multi", "a message of several lines, up to a line /end", _multi),
    "/system": ("/system TEXT", "set the system prompt (without TEXT: remove it)", _system),
    "/reset": ("/reset", "forget the conversation, keep the system prompt", _reset),
    "/stats": ("/stats", "statistics of the last answer", _stats),
    "/mode": ("/mode [MODE]", "show or set how tokens are verified", _mode),
    "/budget": ("/budget [N]", "show or set how many tokens sparse attention reads", _budget),
    "/save": ("/save PATH", "write the conversation to a file", _save),
    "/load": ("/load PATH", "go on with a saved conversation", _load),
    "/quit": ("/quit", "leave (so does Ctrl-D)", _quit),
}
_OTHER_NAMES = {"/exit": "/quit", "/end": "/multi", "/?": "/help"}


def is_command(text: str) -> bool:
    """Whether a message is meant for us: `/word` alone or with an argument on one line; `/usr/bin` and `/* ... */` are not."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    known = first in COMMANDS or first in _OTHER_NAMES
    return (known or bool(re.fullmatch(r"/[a-z?]+", first))) and ("\n" not in text or first == "/system")


def carry_out(chat: Conversation, text: str) -> None:
    """Run a /command. Raise Quit to leave, UsageError for a command that cannot be run."""
    name, _, rest = text.partition(" ")
    entry = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if entry is None:
        raise UsageError(f"unknown command {name}: /help lists them, and //{name[1:]} sends it as a message")
    if rest.strip() and " " not in entry[0]:
        raise UsageError(f"{name} takes nothing after it, got {rest.strip()!r}")
    entry[2](chat, rest.strip())
