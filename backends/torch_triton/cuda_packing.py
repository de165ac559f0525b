"""How many rows of a ragged call go through the products of a wide model: the checks of mode exact are of all lengths."""

from __future__ import annotations

from collections.abc import Sequence

# Narrower models are bound by launches, to which packing adds two a layer; up to so many rows in all a product takes as long as
# its weights are read.
LEAST_HIDDEN, LEAST_ROWS = 2560, 128
# Few sizes, each a recording of its own: so many eighths of all rows.
EIGHTHS = (6, 7)


def packed_size(counts: Sequence[int], width: int, hidden: int) -> int:
    """Rows that hold counts[b] <= `width` of each sequence, for a model of this hidden size; 0: all B * width may as well go."""
    total = len(counts) * width
    if hidden < LEAST_HIDDEN or total < LEAST_ROWS:
        return 0
    return next((size for size in (total * n // 8 for n in EIGHTHS) if sum(counts) <= size), 0)
