"""Which mode wins where: the best of every mode for a context and a batch, from graph replays of the parts of a round.

A part that grows with the number of rows (draft steps, rows of a verification) is measured at a few numbers and read off a
line in between; a mode's best drafts and block are then chosen by tokens a second, as `--mode auto` does while it runs.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dustin.triton_kernels.argmax_rows import argmax_rows

if TYPE_CHECKING:
    from bench.decode import DecodeBench
    from bench.decode_rounds import Rounds

TABLE = [(n, b) for n in (2048, 8192, 31744, 130048) for b in (1, 4, 8, 32) if n * b <= 8 * 131072]
DENSE_ROWS, SPARSE_ROWS = (1, 3, 5, 9, 17), (3, 6)
MOST_DRAFTS, MOST_ROUNDS = 8, 8


def cells_of(text: str) -> list[tuple[int, int]]:
    """(context, batch) pairs of `2048x1,...`; `all` is the table of the README."""
    if text == "all":
        return TABLE
    return [tuple(int(n) for n in cell.split("x")) for cell in text.split(",") if cell]  # type: ignore[misc]


class Line:
    """Milliseconds by a count: straight lines between what was measured, the last one goes on."""

    def __init__(self, points: dict[int, float]) -> None:
        self.points = dict(sorted(points.items()))

    def __call__(self, count: float) -> float:
        known = list(self.points.items())
        if len(known) == 1:
            return known[0][1] * count / known[0][0]
        pairs = list(zip(known, known[1:], strict=False))
        (a, low), (b, high) = next((pair for pair in pairs if count <= pair[1][0]), pairs[-1])
        return low + (high - low) * (count - a) / (b - a)


def _parts(bench: DecodeBench, batch: int) -> dict[str, Any]:
    """Milliseconds of every part."""
    from bench.decode import gpu_ms

    def ms(function: Callable[[], Any]) -> float:
        captured = bench.capture(function)
        took = gpu_ms(captured, 5)
        del captured
        return took

    # One pair of caches: two would not fit in the pool.
    sides = bench.sides(batch)
    drafts: dict[str, Line] = {}
    for name, sparse in (("sparse", True), ("dense", False)):
        points = {}
        for gamma in (2, 6) if sparse else (3,):
            state = bench.rounds(batch, sparse, sparse, gamma, sides)
            points[gamma] = ms(state.propose)
        drafts[name] = Line(points)
    verify = {}
    for rows in SPARSE_ROWS:
        state = bench.rounds(batch, True, True, rows - 1, sides)
        tokens = torch.zeros(batch, rows - 1, dtype=torch.int32, device=bench.device)
        verify[rows] = ms(partial(_verify, state, tokens))
    state = bench.rounds(batch, True, True, 4, sides)
    _, lookahead = state.propose()
    choose = ms(lambda: state.select(*state.score(lookahead)))
    dense = {}
    for rows in DENSE_ROWS:
        tokens = torch.zeros(batch, rows, dtype=torch.int32, device=bench.device)
        dense[rows] = ms(partial(_check, state, tokens, torch.full_like(state.pending, rows)))
    lines = {"draft": drafts["sparse"], "dense_draft": drafts["dense"], "verify": Line(verify), "check": Line(dense)}
    return {**lines, "choose": choose}


def _verify(state: Rounds, tokens: torch.Tensor) -> object:
    return argmax_rows(state.verify(tokens)[0].flatten(0, 1))


def _check(state: Rounds, tokens: torch.Tensor, fed: torch.Tensor) -> object:
    logits, _ = state.dense_pass(tokens, state.target_lengths, fed, "all")
    return None if logits is None else argmax_rows(logits.flatten(0, 1))


def _best(bench: DecodeBench, parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Mode -> its fastest setting: tokens and milliseconds of a round (exact: of a checked block)."""
    a = bench.acceptance
    found: dict[str, dict[str, Any]] = {"ar": {"tokens": 1.0, "ms": parts["check"](1)}}

    def offer(mode: str, tokens: float, ms: float, **setting: Any) -> None:
        if mode not in found or tokens / ms > found[mode]["tokens"] / found[mode]["ms"]:
            found[mode] = {"tokens": tokens, "ms": ms, **setting}

    for gamma in range(1, min(MOST_DRAFTS, a.most("sparse"), a.most("dense")) + 1):
        check = parts["check"](gamma + 1)
        brings = a.expected("dense", gamma)
        offer("dense", brings, parts["dense_draft"](gamma) + check, num_draft_tokens=gamma, draft="dense")
        sparse_draft = parts["draft"](gamma) + parts["choose"]
        offer("dense", brings, sparse_draft + check, num_draft_tokens=gamma, draft="sparse")
        tokens, ms = a.expected("sparse", gamma), sparse_draft + parts["verify"](gamma + 1)
        offer("sparse", tokens, ms, num_draft_tokens=gamma)
        for rounds in range(1, MOST_ROUNDS + 1):
            block = math.floor(rounds * tokens)
            if block <= min(24, a.most("check")):
                total = rounds * ms + parts["check"](block + 1)
                offer("exact", a.expected("check", block), total, num_draft_tokens=gamma, exact_block=block)
    return found


def measure(bench: DecodeBench, context: int, batch: int) -> None:
    """One row for each mode of a cell."""
    before, bench.context = bench.context, context
    try:
        parts = _parts(bench, batch)
        found = _best(bench, parts)
        shown = {name: part.points if isinstance(part, Line) else part for name, part in parts.items()}
        rounded = {
            name: {str(n): round(ms, 3) for n, ms in part.items()} if isinstance(part, dict) else round(part, 3)
            for name, part in shown.items()
        }
        winner = max(found, key=lambda mode: found[mode]["tokens"] / found[mode]["ms"])
        for mode, best in found.items():
            setting = {k: v for k, v in best.items() if k not in ("tokens", "ms")}
            bench.record(
                batch, mode, batch, best["ms"] / best["tokens"] / 1e3, regime=True, wins=mode == winner,
                method="sum of graph replays of its parts", tokens_per_step=round(best["tokens"], 3), step_ms=round(best["ms"], 3),
                budget=bench.budget, **setting, **({"parts_ms": rounded} if mode == "ar" else {}),
                **({"acceptance_length": round(best["tokens"], 3)} if mode != "ar" else {}),
            )  # fmt: skip
    finally:
        bench.context = before
        gc.collect()
