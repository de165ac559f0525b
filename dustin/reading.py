"""Prompts read into a cache, and their greedy continuations: what calibration and the fidelity benches start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dustin.interfaces import Array, Backend, KVCache, Model, Tap
from dustin.prefill import prefill
from dustin.selectors.peers import OBSERVED_ROWS

Progress = Callable[[int, int], None]


@dataclass
class Prompts:
    """Prompts in a cache: the queries of their last rows (`rows` [B, OBSERVED_ROWS, S, D], `last` [B, 1, S, D] a layer), and
    the logits [B, 1, V] after them."""

    rows: Mapping[int, Array]
    last: Mapping[int, Array]
    logits: Array


def read_prompts(
    backend: Backend,
    model: Model,
    cache: KVCache,
    rows: Sequence[Sequence[int]],
    tap: Tap,
    chunk: int,
    progress: Progress | None = None,
) -> Prompts:
    """Append rows[b] (OBSERVED_ROWS tokens or more each) densely. Raise ValueError on a shorter one."""
    if min(len(row) for row in rows) <= OBSERVED_ROWS:
        raise ValueError(f"the shortest prompt has {min(len(row) for row in rows)} new tokens, expected over {OBSERVED_ROWS}")
    prefill(backend, model, cache, [row[:-OBSERVED_ROWS] for row in rows], chunk, None, progress, logits=False)
    ends = backend.tokens([row[-OBSERVED_ROWS:] for row in rows])
    out = model.forward(ends, [OBSERVED_ROWS] * len(rows), cache, tap=tap, logits="last")
    last = backend.gather_rows(out.queries, [OBSERVED_ROWS - 1] * len(rows))
    return Prompts(out.queries, last, out.logits)


def continue_greedily(
    backend: Backend, model: Model, cache: KVCache, logits: Array, count: int, eos: frozenset[int]
) -> tuple[list[list[int]], list[int]]:
    """`count` dense greedy tokens a sequence after `logits` [B, 1, V], and how many come before an end token.

    The cache is left as it was. Generation goes on after an end token, so that all sequences are of one length.
    """
    before = cache.lengths
    batch = len(before)
    rows: list[list[int]] = [[] for _ in range(batch)]
    for _ in range(count):
        verdict = backend.accept_greedy(backend.tokens([[]] * batch), [0] * batch, logits)
        for row, tokens in zip(rows, backend.read(verdict).tokens, strict=True):
            row.append(tokens[0])
        if len(rows[0]) < count:
            out = model.forward(backend.tokens([[row[-1]] for row in rows]), [1] * batch, cache, logits="last")
            logits = out.logits
    cache.rollback(before)
    return rows, [next((i for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
