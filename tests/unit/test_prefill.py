"""How much of a prompt is read at a time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dustin.prefill import chunk_between, chunk_of, piece_alone, read_together, shared_chunk

PLAIN: Any = object()
WIDE: Any = SimpleNamespace(prompt_rows=8192)
RECORDED: Any = SimpleNamespace(prompt_rows=8192, recorded_prompt_rows=4096, recorded_rows=64)


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
        (RECORDED, 1, 4096, 4096),
        (RECORDED, 16, 512, 4096),
    ],
)
def test_what_nobody_asked_for(backend: Any, rows: int, each: int, together: int) -> None:
    assert chunk_of(None, backend, rows) == each
    assert shared_chunk(None, backend, rows) == together
    between = {id(PLAIN): 256, id(WIDE): min(8192, 1024 * rows), id(RECORDED): 2048}
    assert chunk_between(None, backend, rows) == between[id(backend)]


@pytest.mark.parametrize("backend", [PLAIN, WIDE])
def test_what_was_asked_for(backend: Any) -> None:
    assert chunk_of(100, backend, 16) == shared_chunk(100, backend, 16) == chunk_between(100, backend, 16) == 100


@pytest.mark.parametrize(
    ("left", "most", "pieces"),
    [
        (4123, 4096, [4096, 27]),
        (4123, 2048, [2048, 2048, 27]),
        (3800, 4096, [3800]),  # padded to 4,096
        (3000, 4096, [2048, 952]),
        (600, 4096, [512, 88]),
        (700, 4096, [700]),
        (300, 4096, [300]),
        (1, 4096, [1]),
        (250, 100, [64, 64, 64, 58]),
        (9000, 100000, [4096, 4096, 808]),
    ],
)
def test_pieces_of_one_prompt_are_powers_of_two_or_its_end(left: int, most: int, pieces: list[int]) -> None:
    found = []
    while left:
        found.append(piece_alone(left, most, 4096))
        left -= found[-1]
    assert found == pieces


@pytest.mark.parametrize(
    ("left", "slots", "together"),
    [
        ([27], 16, 1),
        ([12, 27, 4096], 16, 1),  # two calls of 32 rows against one of 1,024
        ([12, 27, 50, 4096], 16, 3),
        ([300, 4096], 16, 1),
        ([100] * 16, 16, 16),
        ([4123] * 16, 16, 1),
        ([500] * 16, 16, 16),
        ([30, 40], 2, 2),
    ],
)
def test_short_prompts_share_calls(left: list[int], slots: int, together: int) -> None:
    assert read_together(left, slots, 64) == together


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
