"""New K, V rows into a preallocated cache, in place: nothing is copied but the rows."""

from __future__ import annotations

from typing import Any

from .plan import ITEM_BYTES
from .source import contiguous, kernel


def append_kv(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, lengths: Any, num_tokens: Any
) -> tuple[Any, Any, Any, Any]:
    """(k_cache, v_cache, starts, ends): rows k_new, v_new [B, T, Hkv, D] at lengths[b]...; b writes num_tokens[b] of them.

    The buffers of the given caches [B, Nmax, Hkv, D] ARE CHANGED. The returned handles share them: use only those from
    here on, and pass `starts` [B] int32 (equal to lengths) as the lengths of the attention over the new rows. MLX places
    GPU barriers by output buffers, and the cache is none: reading `starts` is what orders that kernel after the writes.
    `ends` [B] int32 are the new lengths, -1 where the rows do not fit (nothing is written then). lengths, num_tokens int32
    [B] or 0-d. ValueError for shapes that do not match.
    """
    import mlx.core as mx

    if k_new.ndim != 4 or k_new.shape != v_new.shape or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_new, v_new: expected [B, T, Hkv, D] alike and equal caches, got {k_new.shape} and {v_new.shape}"
        )
    batch, rows, kv_heads, dim = k_new.shape
    if (k_cache.shape[0], *k_cache.shape[2:]) != (batch, kv_heads, dim) or dim % 4:
        raise ValueError(
            f"k_cache: expected [{batch}, Nmax, {kv_heads}, {dim}] with D a multiple of 4, got {k_cache.shape}"
        )
    if not k_new.dtype == v_new.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"dtype: expected rows and caches alike, got {k_new.dtype} and {k_cache.dtype}; cast the rows")
    write = kernel(
        "append_kv",
        ["k_cache", "v_cache", "k_new", "v_new", "lengths", "num_tokens"],
        ["starts", "ends"],
        header="attention",
    )
    starts, ends = write(
        inputs=[k_cache, v_cache, contiguous(k_new), contiguous(v_new), lengths, num_tokens],
        template=[("T", k_new.dtype)],
        grid=(kv_heads * dim // 4, rows, batch),
        threadgroup=(min(256, kv_heads * dim // 4), 1, 1),
        output_shapes=[(batch,), (batch,)],
        output_dtypes=[mx.int32, mx.int32],
    )
    k_out, v_out = mx.depends([k_cache, v_cache], [ends])
    return k_out, v_out, starts, ends


def append_kv_bytes(head_dim: int, dtype: str, num_kv_heads: int, num_tokens: list[int]) -> int:
    """Bytes one call must read, and as many it writes."""
    return sum(num_tokens) * num_kv_heads * head_dim * ITEM_BYTES[dtype] * 2
