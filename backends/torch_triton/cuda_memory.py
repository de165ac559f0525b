"""Out of device memory as one error that says what was asked, what is free, and which option lowers it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dustin.errors import MemoryLimitError


@contextmanager
def named_shortage(what: str, remedy: str) -> Iterator[None]:
    """Raise MemoryLimitError in place of torch's error: `what` asked, how much is free on the GPU, `remedy` lowers it."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ [KMGT]?i?B)", str(error))
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        amount = asked.group(1) if asked else "more memory"
        text = f"{what}: {amount} asked for in one piece, {free / 2**30:.2f} GiB are free on the GPU: {remedy}"
        raise MemoryLimitError(text) from error
