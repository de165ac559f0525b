"""Importance of every committed token: mean softmax of a few scoring heads. K of their KV heads is read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .plan import ITEM_BYTES, check_shape, split_count, staged_tile
from .source import contiguous, kernel, scalar

MAX_QUERIES = 1024
KEYS_PER_GROUP = 1024
THREADS = 256


@functools.lru_cache(maxsize=256)
def _head_groups(heads: tuple[int, ...], group_size: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """KV heads in use and, for each, the positions in `heads` that read it, padded with -1."""
    by_head: dict[int, list[int]] = {}
    for slot, head in enumerate(heads):
        by_head.setdefault(head // group_size, []).append(slot)
    width = max(len(s) for s in by_head.values())
    return tuple(by_head), tuple(tuple(s + [-1] * (width - len(s))) for s in by_head.values())


def score_heads(
    q: Any, k: Any, heads: Sequence[int], num_heads: int, lengths: Any, scale: float, *, splits: int | None = None
) -> Any:
    """[B, Nmax] fp32: mean over rows and heads of softmax_j(q . K_j * scale) over [0, lengths[b]); -inf from lengths[b] on.

    q [B, R, S, D] post-RoPE queries of the S scoring `heads` (query-head numbers below num_heads) of one layer; k its whole cache
    [B, Nmax, Hkv, D]; lengths int32 [B] or 0-d. ValueError for shapes no kernel serves. Average layers outside.
    """
    import mlx.core as mx

    batch, rows, scoring, dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    dtype = str(q.dtype).rsplit(".", 1)[-1]
    check_shape(dim, dtype, 1, num_heads, kv_heads)
    if len(heads) != scoring or min(heads) < 0 or max(heads) >= num_heads:
        raise ValueError(f"heads: expected {scoring} numbers below {num_heads} (the S axis of q), got {tuple(heads)}")
    if rows * scoring > MAX_QUERIES:
        raise ValueError(
            f"queries R * S: expected at most {MAX_QUERIES}, got {rows * scoring}; score fewer rows or heads a call"
        )
    groups, slots = _head_groups(tuple(heads), num_heads // kv_heads)
    strips = -(-rows * len(slots[0]) // 8)
    most = 16 if dim <= 128 else 8
    blocks = -(-strips // most)
    tile, _ = staged_tile(dim, dtype, 1)
    splits = splits or split_count(capacity, tile, batch * len(groups) * blocks)
    threads = 32 * max(4, -(-strips // blocks))
    logits, stats = kernel(
        "score_heads", ["q", "k", "lengths", "kv_heads", "slots", "scale"], ["logits", "stats"], header="attention"
    )(
        inputs=[contiguous(q), k, lengths, mx.array(groups, mx.int32), mx.array(slots, mx.int32), scalar(scale)],
        template=[("T", q.dtype), ("D", dim), ("BK", tile)],
        grid=(splits * threads, batch * len(groups), blocks),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, rows * scoring, capacity), (batch, rows * scoring, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return kernel("score_mean", ["logits", "stats", "lengths"], ["scores"], header="attention")(
        inputs=[logits, stats, lengths],
        template=[("MAX_QUERIES", -(-rows * scoring // 32) * 32), ("KEYS", KEYS_PER_GROUP)],
        grid=(-(-capacity // KEYS_PER_GROUP) * THREADS, batch, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, capacity)],
        output_dtypes=[mx.float32],
    )[0]


def score_heads_bytes(head_dim: int, dtype: str, num_used_kv_heads: int, lengths: Sequence[int]) -> int:
    """Bytes of K one call must read (logits, 4 bytes a query and key, are written and read on top)."""
    return sum(lengths) * num_used_kv_heads * head_dim * ITEM_BYTES[dtype]


def score_heads_threadgroup_bytes(head_dim: int, dtype: str, num_queries: int) -> tuple[int, int]:
    """Threadgroup memory of score_heads.metal and score_mean.metal."""
    return staged_tile(head_dim, dtype, 1)[1], -(-num_queries // 32) * 32 * 8
