"""How much of a prompt is read at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dustin.prefill import chunk_between, chunk_of, shared_chunk

PLAIN: Any = object()
WIDE: Any = SimpleNamespace(prompt_rows=8192)


@pytest.mark.parametrize(
    ("backend", "rows", "each", "together"),
    [
        (PLAIN, 1, 512, 512),
        (PLAIN, 16, 512, 512),
        (WIDE, 1, 4096, 4096),
        (WIDE, 4, 2048, 8192),
        (WIDE, 8, 1024, 8192),
        (WIDE, 16, 512, 8192),
        (WIDE, 64, 512, 8192),
    ],
)
def test_what_nobody_asked_for(backend: Any, rows: int, each: int, together: int) -> None:
    assert chunk_of(None, backend, rows) == each
    assert shared_chunk(None, backend, rows) == together
    assert chunk_between(None, backend, rows) == (min(8192, 1024 * rows) if backend is WIDE else 256)


@pytest.mark.parametrize("backend", [PLAIN, WIDE])
def test_what_was_asked_for(backend: Any) -> None:
    assert chunk_of(100, backend, 16) == shared_chunk(100, backend, 16) == chunk_between(100, backend, 16) == 100
