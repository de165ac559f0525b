"""A line at the foot of the terminal while an answer is written, and a keyboard that stays silent meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_INTERVAL_SECONDS = 0.2
_SMALLEST_HEIGHT = 4


def status_text(stats: Any, tokens: int, room: int) -> str:
    """What one line tells of a run: speed, acceptance, share of KV read, how full the context is."""
    parts = [f"{stats.generation_tps:.1f} tok/s"] if stats.decode_seconds else []
    if stats.drafted:
        parts.append(f"accepted {100 * stats.acceptance_rate:.0f} %")
    if stats.kv_bytes_dense:
        parts.append(f"KV read {100 * stats.kv_read_share:.0f} %")
    return " | ".join([*parts, f"{tokens} of {room} tokens"])


class StatusLine:
    """Keeps the last row of the terminal out of the scrolling region and writes there, so that the answer flows above untouched.

    Where stdout goes elsewhere the line stands alone and is written over. On no terminal, a dumb or a very small one it does
    nothing. Every method may be called at any time; `close` leaves the terminal as it was.
    """

    def __init__(self) -> None:
        self._on = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._alone = not sys.stdout.isatty()
        self._size: os.terminal_size | None = None
        self._column = 0
        self._drawn = float("-inf")
        self._dim = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")

    def wrote(self, text: str) -> None:
        """Remember where the answer's last character is: a cursor at the very edge must not be moved."""
        if not self._on or self._alone:
            return
        from prompt_toolkit.utils import get_cwidth

        last = text.rpartition("\n")[2]
        start = 0 if "\n" in text else self._column
        self._column = start + get_cwidth(last)

    def show(self, make: Callable[[], str]) -> None:
        """Draw the line that `make` gives, at most a few times a second."""
        now = time.monotonic()
        if not self._on or now - self._drawn < _INTERVAL_SECONDS:
            return
        size = os.get_terminal_size(sys.stderr.fileno())
        if size.lines < _SMALLEST_HEIGHT or (self._column and self._column % size.columns == 0):
            return
        self._drawn = now
        text = f"{self._dim[0]}{make()[: size.columns - 1]}{self._dim[1]}"
        if self._alone:
            self._write(f"\r\x1b[2K{text}")
            return
        if size != self._size:
            self._reserve(size)
        self._write(f"\x1b7\x1b[{size.lines};1H\x1b[2K{text}\x1b8")

    def close(self) -> None:
        """Erase the line and give its row back."""
        if self._alone and self._drawn > 0:
            self._write("\r\x1b[2K")
        elif self._size is not None:
            self._write(f"\x1b7\x1b[r\x1b[{self._size.lines};1H\x1b[2K\x1b8")
        self._size, self._drawn = None, float("-inf")

    def _reserve(self, size: os.terminal_size) -> None:
        # Index and up: where the cursor is in the last row, what is there scrolls out of the way.
        self._write(f"\x1bD\x1b[1A\x1b7\x1b[1;{size.lines - 1}r\x1b8")
        self._size = size

    @staticmethod
    def _write(codes: str) -> None:
        # Unbuffered: a signal handler may come here in the middle of a buffered write. The caller has flushed stdout.
        os.write(sys.stderr.fileno(), codes.encode())


@contextlib.contextmanager
def quiet_keyboard(status: StatusLine) -> Iterator[None]:
    """While an answer is written: keys are kept for the prompt, not echoed; Ctrl-Z and SIGTERM leave the terminal in order."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = termios.tcgetattr(descriptor)
    silent[3] &= ~termios.ECHO

    def suspend(*_: object) -> None:
        status.close()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here again once the job is in the foreground.
        signal.signal(signal.SIGTSTP, suspend)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    handlers = [(signal.SIGTSTP, signal.signal(signal.SIGTSTP, suspend)), (signal.SIGTERM, signal.signal(signal.SIGTERM, leave))]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        status.close()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        for number, handler in handlers:
            signal.signal(number, handler)
