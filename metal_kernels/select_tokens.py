"""The quota rule on the device: protect sinks and recent, top m by draft score, fill by target score, ascending."""

from __future__ import annotations

from typing import Any

from .fallback import recent_tokens
from .source import contiguous, kernel

THREADS = 512
THREADGROUP_BYTES = 256 * 4 + 2 * 4 + 32 * 4


def select_tokens(
    target_scores: Any | None,
    draft_scores: Any | None,
    lengths: Any,
    *,
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
) -> tuple[Any, Any]:
    """(indices [B, budget] int32 ascending, counts [B] int32) from scores [B, Nmax] fp32; lengths int32 [B] (or 0-d with scores).

    Ties go to the lower index; protected and chosen tokens are out of the running; entries beyond counts[b] are 0. A missing
    score gives its share to the other; with neither, the recent window fills the budget. Sequences with lengths[b] <= budget get
    all rows. ValueError when the protected tokens exceed the budget. Source: METHOD section 3, point 2.
    """
    import mlx.core as mx

    if num_sink_tokens + num_recent_tokens > budget:
        raise ValueError(
            f"budget: expected at least sinks + recent = {num_sink_tokens + num_recent_tokens}, got {budget}"
        )
    rest = budget - num_sink_tokens - num_recent_tokens
    draft = min(num_draft_selected, rest) if draft_scores is not None else 0
    if target_scores is None and draft_scores is None:
        if lengths.ndim != 1:
            raise ValueError("lengths: expected [B] when there are no scores, got a 0-d array")
        return recent_tokens(lengths, budget, num_sink_tokens)
    if target_scores is None:
        draft = rest
    target_scores = draft_scores if target_scores is None else target_scores
    draft_scores = target_scores if draft_scores is None else draft_scores
    batch, capacity = target_scores.shape
    if draft_scores.shape != target_scores.shape:
        raise ValueError(f"draft_scores: expected the target's shape {target_scores.shape}, got {draft_scores.shape}")
    for name, scores in (("target_scores", target_scores), ("draft_scores", draft_scores)):
        if scores.dtype != mx.float32:
            raise ValueError(f"{name}: expected float32, got {scores.dtype}; cast first")
    words = -(-capacity // 32)
    parameters = mx.array([num_sink_tokens, num_recent_tokens, draft, budget], mx.int32)
    indices, counts, _ = kernel(
        "select_tokens", ["target", "draft", "lengths", "params"], ["indices", "counts", "marks"], header="select"
    )(
        inputs=[contiguous(target_scores), contiguous(draft_scores), lengths, parameters],
        grid=(THREADS, batch, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, budget), (batch,), (batch, words)],
        output_dtypes=[mx.int32, mx.int32, mx.uint32],
    )
    return indices, counts


def select_tokens_bytes(lengths: list[int], both: bool = True) -> int:
    """Bytes one call must read: each of the two scores once. The radix search reads them six times, from cache if it fits."""
    return sum(lengths) * 4 * (2 if both else 1)
