"""Mode rectified: every so many tokens the newest rows are computed again densely (METHOD section 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dustin.interfaces import Tap

if TYPE_CHECKING:
    from dustin.engine import Engine


def rectify(engine: Engine) -> None:
    """Rows older than the interval are computed again densely, in one causal pass, and overwritten (ReSA, SpecPV)."""
    interval, cache = engine.options.rectify_interval, engine.target_cache
    due = {row.row for row in engine.rows if row.active and row.committed - 1 - row.dense_rows >= interval}
    if not due:
        return
    spans = [row.tokens[row.dense_rows : row.committed - 1] if row.row in due else [] for row in engine.rows]
    before = cache.lengths
    cache.rollback([row.dense_rows if row.row in due else length for row, length in zip(engine.rows, before, strict=True)])
    counts = [len(span) for span in spans]
    engine.count_verification(counts, None)
    tap = Tap(engine.tap.heads, last_row_only=True)
    out = engine.target.forward(engine.backend.tokens(spans), counts, cache, tap=tap, logits="none")
    engine.memory.learn_last(out.queries, due)
    for row in engine.rows:
        if row.row in due:
            row.dense_rows = row.committed - 1
    engine.stats.rectify_passes += 1
    engine.stats.rectified_tokens += sum(counts)
