"""How much of a prompt is read at a time."""

from __future__ import annotations

import time
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


def test_tokens_of_one_prompt_beside_slots_that_read_nothing_cost_their_own_number() -> None:
    torch = pytest.importorskip("torch")
    from dustin.backends.torch_triton.backend import TorchBackend

    backend, prompt = TorchBackend(torch.device("cpu")), list(range(4096))

    def best(rows: list[list[int]]) -> float:
        times = []
        for _ in range(9):
            began = time.perf_counter()
            found = backend.tokens(rows)
            times.append(time.perf_counter() - began)
        assert found.tolist() == [row + [0] * (4096 - len(row)) for row in rows]
        return min(times)

    alone, beside = best([prompt]), best([[], prompt, *[[] for _ in range(62)]])
    assert beside < 10 * alone + 1e-3, f"{1e3 * beside:.2f} ms beside 63 empty rows, {1e3 * alone:.2f} ms alone"
