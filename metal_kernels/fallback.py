"""The same operations with stock MLX arrays: take() and mx.fast.scaled_dot_product_attention. Runs wherever MLX runs.

Stock attention re-reads K, V once per query row and head, and leaves its fast path when T > 8 or T * Hq / Hkv > 32. Cache rows
beyond the in-flight ones must be finite here (stale values are fine, NaN is not): they are masked, not skipped.
"""

from __future__ import annotations

from typing import Any


def _column(x: Any, batch: int) -> Any:
    """[B, 1] from an int32 array of shape [B] or ()."""
    import mlx.core as mx

    return mx.broadcast_to(mx.reshape(x, (-1, 1)), (batch, 1))


def _attend(q: Any, k: Any, v: Any, mask: Any, num_tokens: Any, scale: float) -> Any:
    """q [B, T, Hq, D], k, v [B, K, Hkv, D], mask [B, 1, T, K] -> [B, T, Hq, D], 0 beyond num_tokens [B, 1] (None: all T)."""
    import mlx.core as mx

    out = stock_attention(q, k, v, scale, mask)
    if num_tokens is None:
        return out
    live = mx.arange(q.shape[1])[None] < num_tokens
    return mx.where(live[:, :, None, None], out, mx.zeros((), q.dtype))


def stock_attention(q: Any, k: Any, v: Any, scale: float, mask: Any) -> Any:
    """mx.fast.scaled_dot_product_attention with the token axis before the heads: q [B, T, Hq, D], k, v [B, K, Hkv, D]."""
    import mlx.core as mx

    turn, dtype = (0, 2, 1, 3), q.dtype
    if dtype != mx.float32 and mx.default_device() == mx.Device(mx.cpu):
        # MLX's CPU rounds the scores themselves to the array's dtype.
        q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    q, k, v = (x.transpose(turn) for x in (q, k, v))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask).transpose(turn).astype(dtype)


# Stock attention makes this mask itself, and its fast paths know it.
CAUSAL = ("causal", None)


def dense_plan(lengths: Any, num_tokens: Any, batch: int, rows: int, keys: int) -> tuple[Any, Any]:
    """(mask [B, 1, T, keys], num_tokens [B, 1]): what `dense_verify` needs besides q, k and v, the same for every layer."""
    import mlx.core as mx

    lengths, num_tokens = _column(lengths, batch), _column(num_tokens, batch)
    last = lengths + mx.minimum(mx.arange(rows)[None], mx.maximum(num_tokens - 1, 0))  # [B, T]
    mask = mx.arange(keys)[None, None] <= last[:, :, None]
    return mask[:, None], num_tokens


def dense_verify(q: Any, k: Any, v: Any, lengths: Any, num_tokens: Any, scale: float, plan: Any | None = None) -> Any:
    """As metal_kernels.dense_verify.dense_verify; reads all Nmax rows of the cache. `plan` is a `dense_plan` of these shapes, or
    CAUSAL where every sequence has T rows that end at the last row of k and v."""
    import mlx.core as mx

    if plan is CAUSAL:
        # Without a mask nothing else here would read the lengths, and reading them orders this after an in-place append.
        q = q + mx.minimum(_column(lengths, q.shape[0]), 0).astype(q.dtype)[:, :, None, None]
    mask, column = plan or dense_plan(lengths, num_tokens, *q.shape[:2], k.shape[1])
    return _attend(q, k, v, mask, column, scale)


def sparse_plan(indices: Any, counts: Any, lengths: Any, num_tokens: Any, batch: int, rows: int, keys: int) -> tuple[Any, ...]:
    """(sequences [B, 1], positions [B, k + T], mask [B, 1, T, k + T], num_tokens [B, 1]), the same for every layer."""
    import mlx.core as mx

    lengths, num_tokens, counts = (_column(x, batch) for x in (lengths, num_tokens, counts))
    flight = mx.arange(rows)[None]
    chosen = mx.arange(indices.shape[1])[None] < counts  # [B, k]
    # Unused slots read the first in-flight row: it is finite and masked anyway.
    positions = mx.concatenate(
        [mx.where(chosen, indices, lengths), lengths + mx.where(flight < num_tokens, flight, 0)], axis=1
    )
    positions = mx.minimum(positions, keys - 1)
    last = mx.minimum(mx.arange(rows)[None], mx.maximum(num_tokens - 1, 0))  # [B, T]
    seen = flight[:, None] <= last[:, :, None]  # [B, T, T]
    mask = mx.concatenate([mx.broadcast_to(chosen[:, None], (batch, rows, chosen.shape[1])), seen], axis=2)
    return mx.arange(batch)[:, None], positions, mask[:, None], num_tokens


def sparse_verify(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    counts: Any,
    lengths: Any,
    num_tokens: Any,
    scale: float,
    plan: Any | None = None,
) -> Any:
    """As metal_kernels.sparse_verify.sparse_verify: gathers the k + T rows of each sequence, then stock attention.

    `plan` is a `sparse_plan` of the same arrays and shapes.
    """
    where, positions, mask, column = plan or sparse_plan(indices, counts, lengths, num_tokens, *q.shape[:2], k.shape[1])
    return _attend(q, k[where, positions], v[where, positions], mask, column, scale)


def score_heads(q: Any, k: Any, heads: Any, num_heads: int, lengths: Any, scale: float) -> Any:
    """As metal_kernels.score_heads.score_heads: matmul and softmax in float32, a KV head at a time (its keys are cast once)."""
    import mlx.core as mx

    batch, rows, scoring = q.shape[:3]
    capacity, kv_heads = k.shape[1:3]
    inside = mx.arange(capacity)[None] < _column(lengths, batch)
    by_head: dict[int, list[int]] = {}
    for slot, head in enumerate(heads):
        by_head.setdefault(head // (num_heads // kv_heads), []).append(slot)
    mass = mx.zeros((batch, capacity), mx.float32)
    for kv_head, slots in by_head.items():
        queries = q[:, :, mx.array(slots)].reshape(batch, rows * len(slots), -1).astype(mx.float32) * scale
        logits = queries @ k[:, :, kv_head].astype(mx.float32).swapaxes(1, 2)
        mass = mass + mx.softmax(mx.where(inside[:, None], logits, -mx.inf), axis=-1).sum(axis=1)
    return mx.where(inside, mass / (rows * scoring), -mx.inf)


def append_kv(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, lengths: Any, num_tokens: Any
) -> tuple[Any, Any, Any, Any]:
    """As metal_kernels.append_kv.append_kv by a scatter, which MLX does in place when nothing else holds the cache."""
    import mlx.core as mx

    batch, rows = k_new.shape[:2]
    lengths, num_tokens = _column(lengths, batch), _column(num_tokens, batch)
    fits = lengths + num_tokens <= k_cache.shape[1]
    writes = fits & (num_tokens > 0)
    # Rows beyond num_tokens repeat the last valid row, so that duplicate positions carry equal values.
    step = mx.minimum(mx.arange(rows)[None], mx.maximum(num_tokens - 1, 0))
    where = mx.arange(batch)[:, None]
    positions = mx.minimum(lengths + step, k_cache.shape[1] - 1)
    for cache, new in ((k_cache, k_new), (v_cache, v_new)):
        cache[where, positions] = mx.where(writes[:, :, None, None], new[where, step], cache[where, positions])
    return k_cache, v_cache, lengths[:, 0], mx.where(fits, lengths + num_tokens, -1)[:, 0]


def _order_key(x: Any) -> Any:
    """uint32 in the order of floats; both zeros are one value, NaN is the lowest."""
    import mlx.core as mx

    bits = mx.where(x == 0, mx.zeros((), mx.float32), x).view(mx.uint32)
    key = mx.where(bits >> 31, ~bits, bits | (1 << 31))
    return mx.where(mx.isnan(x), mx.zeros((), mx.uint32), key)


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
    """As metal_kernels.select_tokens.select_tokens, by sorting (score, lower index) as one 64-bit key; lengths [B]."""
    import mlx.core as mx

    rest = budget - num_sink_tokens - num_recent_tokens
    if target_scores is None and draft_scores is None:
        return recent_tokens(lengths, budget, num_sink_tokens)
    share = rest if target_scores is None else min(num_draft_selected, rest) if draft_scores is not None else 0
    capacity = (draft_scores if target_scores is None else target_scores).shape[1]
    slots, ends = mx.arange(capacity, dtype=mx.int32)[None], lengths[:, None]
    held = (slots < ends) & ((slots < num_sink_tokens) | (slots >= ends - num_recent_tokens))
    for scores, take in ((draft_scores, share), (target_scores, rest - share)):
        if take == 0:
            continue
        low = (capacity - slots).astype(mx.uint64)  # never 0, so an open token beats every closed one
        key = mx.where(
            (slots < ends) & ~held, (_order_key(scores).astype(mx.uint64) << 32) | low, mx.zeros((), mx.uint64)
        )
        held = held | (key >= mx.maximum(mx.sort(key, axis=1)[:, -min(take, capacity), None], 1))
    chosen = mx.sort(mx.where(held, slots, capacity), axis=1)[:, :budget]
    if capacity < budget:
        chosen = mx.pad(chosen, [(0, 0), (0, budget - capacity)], constant_values=capacity)
    everything = mx.arange(budget, dtype=mx.int32)[None]
    chosen = mx.where(ends <= budget, mx.where(everything < ends, everything, 0), chosen)
    return chosen, mx.minimum(lengths, budget)


def recent_tokens(lengths: Any, budget: int, num_sink_tokens: int) -> tuple[Any, Any]:
    """Sinks and a window that fills the budget: (indices [B, budget], counts [B]) without any score; lengths [B]."""
    import mlx.core as mx

    slots = mx.arange(budget, dtype=mx.int32)[None]
    moved = mx.where(slots < num_sink_tokens, slots, lengths[:, None] - budget + slots)
    everything = mx.where(slots < lengths[:, None], slots, 0)
    return mx.where(lengths[:, None] <= budget, everything, moved), mx.minimum(lengths, budget)
