"""For all tests."""

from __future__ import annotations

import signal

# A run started in the background inherits "ignore" for Ctrl-C, and so would every process that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
