"""Which mode wins where: the best of every mode for a context and a batch, from graph replays of the parts of a round.

A part that grows with the number of rows (draft steps, rows of a verification) is measured at a few numbers and read off a
line in between; a mode's best drafts and block are then chosen by tokens a second, as `--mode auto` does while it runs. The
parts are in the rows of `ar`: `python -m bench regimes` makes the rows anew for another acceptance, and the cost model of `auto`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import torch

from bench.regimes import WIDE_BUDGET, mode_rows
from dustin.errors import MemoryLimitError
from dustin.triton_kernels.argmax_rows import argmax_rows

if TYPE_CHECKING:
    from bench.decode import DecodeBench
    from bench.decode_rounds import Rounds

# The most telling first, where time is short.
CONTEXTS, BATCHES = (31744, 8192, 130048, 2048, 65536, 16384, 4096), (1, 4, 16, 32, 8, 2)
# Rows of KV that a card of 141 GB holds for the 7B and the 0.5B shape beside their weights.
MOST_TOKENS = 8 * 131072 + 8 * 1024
TABLE = [(n, b) for n in CONTEXTS for b in BATCHES if n * b <= MOST_TOKENS]
# Sizes between those of the table, to judge its interpolation by.
BETWEEN = [(12288, 6), (24576, 3), (49152, 12)]
DENSE_ROWS, SPARSE_ROWS, DRAFTS = (1, 3, 5, 9, 17, 33), (3, 6), (2, 6)
WIDE_ROWS, WIDE_DRAFTS = 6, 6
# Rows of a rectification that one pass takes: it is long, so that one run of it is timed.
RECTIFY_ROWS = 160


def cells_of(text: str) -> list[tuple[int, int]]:
    """(context, batch) pairs of `2048x1,...`; `all` is the table, `between` what its interpolation is held against."""
    known = {"all": TABLE, "between": BETWEEN}
    if text in known:
        return known[text]
    return [tuple(int(n) for n in cell.split("x")) for cell in text.split(",") if cell]  # type: ignore[misc]


class PartTimes:
    """Milliseconds of the parts of a round in one cell, as dustin.cost_model.Cell has them: part -> count -> milliseconds."""

    def __init__(self, bench: DecodeBench, batch: int) -> None:
        self._bench, self._batch = bench, batch
        # One pair of caches: two would not fit in the pool.
        self._sides = bench.sides(batch)

    def all(self) -> dict[str, dict[str, float]]:
        """Every part, and `rectify` by rows."""
        found = {**self.drafting(), **self.verifying(), **self.choosing(), **self.checking()}
        return {part: {str(n): round(took, 3) for n, took in points.items()} for part, points in found.items()}

    def drafting(self) -> dict[str, dict[int, float]]:
        """The draft's steps: on a sparse cache, on a wider one, on all of it."""
        return {
            "draft": {n: self._ms(self._state(True, n).propose) for n in DRAFTS},
            "wide_draft": {WIDE_DRAFTS: self._ms(self._state(True, WIDE_DRAFTS, WIDE_BUDGET).propose)},
            "dense_draft": {3: self._ms(self._state(False, 3).propose)},
        }

    def verifying(self) -> dict[str, dict[int, float]]:
        """Sparse verifications by rows of a sequence."""
        return {
            "verify": {rows: self._verify_ms(rows) for rows in SPARSE_ROWS},
            "wide_verify": {WIDE_ROWS: self._verify_ms(WIDE_ROWS, WIDE_BUDGET)},
        }

    def choosing(self) -> dict[str, dict[int, float]]:
        """Scores of both models and the set."""
        state = self._state(True, 4)
        _, lookahead = state.propose()
        return {"choose": {1: self._ms(lambda: state.select(*state.score(lookahead)))}}

    def checking(self) -> dict[str, dict[int, float]]:
        """Dense passes by rows of a sequence, and one as long as a rectification's, without a graph as the engine does it."""
        state = self._state(True, 4)

        def dense(rows: int, logits: str) -> Callable[[], object]:
            tokens = torch.zeros(self._batch, rows, dtype=torch.int32, device=self._bench.device)
            return partial(_check, state, tokens, torch.full_like(state.pending, rows), logits)

        found = {"check": {rows: self._ms(dense(rows, "all")) for rows in DENSE_ROWS}}
        return {**found, "rectify": {RECTIFY_ROWS: _timed(dense(RECTIFY_ROWS, "none"))}}

    def _ms(self, function: Callable[[], Any]) -> float:
        captured = self._bench.capture(function)
        took = _timed(captured)
        del captured
        return took

    def _state(self, sparse: bool, drafts: int, budget: int = 0) -> Rounds:
        bench, before = self._bench, self._bench.budget
        bench.budget = budget or before
        try:
            return bench.rounds(self._batch, sparse, sparse, drafts, self._sides)
        finally:
            bench.budget = before

    def _verify_ms(self, rows: int, budget: int = 0) -> float:
        tokens = torch.zeros(self._batch, rows - 1, dtype=torch.int32, device=self._bench.device)
        return self._ms(partial(_verify, self._state(True, rows - 1, budget), tokens))


def _timed(function: Callable[[], Any]) -> float:
    """Milliseconds of a call; short ones are repeated."""
    from bench.decode import gpu_ms

    took = gpu_ms(function, 1)
    return took if took > 20 else gpu_ms(function, 3)


def _verify(state: Rounds, tokens: torch.Tensor) -> object:
    return argmax_rows(state.verify(tokens)[0].flatten(0, 1))


def _check(state: Rounds, tokens: torch.Tensor, fed: torch.Tensor, logits: str) -> object:
    made, _ = state.dense_pass(tokens, state.target_lengths, fed, logits)
    return None if made is None else argmax_rows(made.flatten(0, 1))


def measure(bench: DecodeBench, context: int, batch: int) -> None:
    """One row for each mode of a cell; a cell that does not fit is said to, and passed over."""
    before, bench.context = bench.context, context
    began = time.perf_counter()
    try:
        ms = PartTimes(bench, batch).all()
        record(bench, batch, ms)
        click.echo(f"{context} x {batch}: {time.perf_counter() - began:.1f} s", err=True)
    except (MemoryLimitError, torch.OutOfMemoryError) as error:
        click.echo(f"{context} x {batch} does not fit: {error}", err=True)
    finally:
        bench.context = before
        gc.collect()


def record(bench: DecodeBench, batch: int, ms: dict[str, dict[str, float]]) -> None:
    """The rows of a cell."""
    between = (bench.context, batch) in BETWEEN
    for row in mode_rows(bench.acceptance, ms, bench.budget, batch):
        own = {"parts_ms": ms, "shapes": bench.shapes(), "between": between} if row["mode"] == "ar" else {}
        bench.record(batch, row.pop("mode"), batch, batch / row["tokens_per_second"], **row, **own)
