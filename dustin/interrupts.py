"""Ctrl-C at a moment when Python may not simply raise."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Ctrl-C takes effect after the block. An extension module that meets an exception while it is loaded aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals come to the main thread alone.
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            os.kill(os.getpid(), signal.SIGINT)
