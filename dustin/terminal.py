"""Input and output of the command line: prompts from arguments, files and stdin; progress on a terminal only."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from dustin.errors import UsageError
from dustin.models import user_path


def note(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def decode_text(raw: bytes, name: str) -> str:
    """UTF-8 text of `raw`. Raise UsageError for anything else, naming where it stops being text."""
    if b"\0" in raw:
        raise UsageError(f"{name} is a binary file, expected text: it has a NUL byte at offset {raw.index(0)}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text: byte {raw[error.start]:#04x} at offset {error.start}. Convert it first, as in "
            "`iconv -f LATIN1 -t UTF-8`"
        ) from error


def check_text(text: str, name: str) -> str:
    """`text` as UTF-8 says it. Raise UsageError where it came as bytes that are not UTF-8.

    Bytes that the locale does not know come as lone surrogates: in an ASCII locale those of good UTF-8 too.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise UsageError(f"{name} is not UTF-8 text: bad byte at character {error.start}") from error


def read_file(name: str) -> str:
    """Text of a file, or of stdin for `-`."""
    if name == "-":
        return decode_text(sys.stdin.buffer.read(), "stdin")
    try:
        raw = user_path(name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    return decode_text(raw, name)


def read_prompt(positional: str | None, option: str | None, files: Sequence[str]) -> str:
    """Files first, the question after them; without either, what is piped in. Raise UsageError when there is nothing."""
    if positional is not None and option is not None:
        raise UsageError("two prompts: give PROMPT or --prompt, not both")
    question = positional if positional is not None else option
    if [question, *files].count("-") > 1:
        raise UsageError("stdin (-) can be read only once")
    if question is None and not files:
        if sys.stdin.isatty():
            raise UsageError("no prompt: give PROMPT, --prompt, --file, or pipe text in")
        question = "-"
    parts = [read_file(name).strip("\n") for name in files]
    if question is not None:
        parts.append(read_file("-").strip("\n") if question == "-" else check_text(question, "the prompt"))
    prompt = "\n\n".join(parts)
    if not prompt.strip():
        raise UsageError("the prompt is empty: give some text")
    return prompt


def printable(text: str, stream: TextIO | None = None) -> str:
    """Text for `stream` (stdout): on a terminal control characters become visible (^[), so that no answer can steer it."""
    if not (stream or sys.stdout).isatty():
        return text
    return _CONTROL.sub(lambda match: f"^{chr(ord(match[0]) ^ 64)}" if match[0] < "\x80" else f"\\x{ord(match[0]):02x}", text)


# All of C0, DEL and C1 but tab and newline.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@contextlib.contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback that draws a bar while the prompt is read; None unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("prefill", total=None)

    def advance(done: int, total: int) -> None:
        # The bar is gone before the first word of the answer: both may share one screen.
        if done >= total:
            bar.stop()
        else:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        bar.stop()
