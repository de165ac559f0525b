"""Sparse verification: T in-flight rows over one selected set, by token or by 16-token block."""

from __future__ import annotations

from typing import Any

from .plan import BLOCK_TOKENS, blocks_plan, verify_bytes, verify_plan
from .source import contiguous
from .verify import check_arrays, run_verify


def _check_set(name: str, indices: Any, counts: Any, batch: int) -> None:
    import mlx.core as mx

    if indices.dtype != mx.int32 or indices.ndim != 2 or indices.shape[0] != batch or indices.shape[1] < 1:
        raise ValueError(f"{name}: expected int32 [{batch}, at least 1], got {indices.dtype} {indices.shape}")
    if counts.dtype != mx.int32 or counts.shape not in ((), (batch,)):
        raise ValueError(f"counts: expected int32 of shape () or ({batch},), got {counts.dtype} {counts.shape}")


def sparse_verify(
    q: Any,
    k: Any,
    v: Any,
    indices: Any,
    counts: Any,
    lengths: Any,
    num_tokens: Any,
    scale: float,
    *,
    splits: int | None = None,
) -> Any:
    """Row t of sequence b sees {indices[b, :counts[b]]} and the in-flight rows lengths[b] ... lengths[b] + t (METHOD section 3).

    Arguments and result as `dense_verify`; indices int32 [B, k] ascending cache rows below lengths[b], counts int32 [B] or 0-d.
    """
    batch, rows, heads, kv_heads, dim, dtype = check_arrays(q, k, v, lengths, num_tokens)
    _check_set("indices", indices, counts, batch)
    plan = verify_plan(dim, dtype, rows, heads, kv_heads, batch, indices.shape[1] + rows)
    extra = {"indices": contiguous(indices), "counts": counts}
    return run_verify("sparse_verify", plan, q, k, v, extra, lengths, num_tokens, scale, splits=splits)


def sparse_verify_blocks(
    q: Any,
    k: Any,
    v: Any,
    blocks: Any,
    counts: Any,
    lengths: Any,
    num_tokens: Any,
    scale: float,
    *,
    splits: int | None = None,
) -> Any:
    """As `sparse_verify`, with blocks int32 [B, kb] ascending: block x is the cache rows [16 x, min(16 x + 16, lengths[b]))."""
    batch, rows, heads, kv_heads, dim, dtype = check_arrays(q, k, v, lengths, num_tokens)
    _check_set("blocks", blocks, counts, batch)
    plan = blocks_plan(dim, dtype, rows, heads, kv_heads, batch, blocks.shape[1])
    extra = {"blocks": contiguous(blocks), "counts": counts}
    return run_verify("sparse_verify_blocks", plan, q, k, v, extra, lengths, num_tokens, scale, "RB", splits)


def sparse_verify_bytes(
    head_dim: int,
    dtype: str,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    counts: list[int],
    num_tokens: list[int],
    blocks: bool = False,
) -> int:
    """Bytes of K and V one call must read; `counts` are tokens, or full blocks with `blocks`."""
    shape = (head_dim, dtype, num_rows, num_heads, num_kv_heads, len(counts), max(counts))
    plan = blocks_plan(*shape) if blocks else verify_plan(*shape)
    size = BLOCK_TOKENS if blocks else 1
    keys = [n * size + t if t else 0 for n, t in zip(counts, num_tokens, strict=True)]
    return verify_bytes(head_dim, dtype, num_rows, num_heads, num_kv_heads, keys, plan.row_blocks)
