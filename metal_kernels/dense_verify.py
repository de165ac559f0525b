"""Dense attention of T in-flight rows: every K, V row is read once a KV head, for all g * T query rows."""

from __future__ import annotations

from typing import Any

from .plan import verify_bytes, verify_plan
from .verify import check_arrays, run_verify


def dense_verify(
    q: Any, k: Any, v: Any, lengths: Any, num_tokens: Any, scale: float, *, splits: int | None = None
) -> Any:
    """q [B, T, Hq, D]; whole caches k, v [B, Nmax, Hkv, D] (strided views allowed, last axis contiguous; never copied) with the
    in-flight rows already at lengths[b]...; lengths, num_tokens int32 [B] or 0-d. Row t sees [0, lengths[b] + t].

    Returns [B, T, Hq, D] in q's dtype, fp32 accumulation; rows at or beyond num_tokens[b] give 0. `splits` overrides the number
    of key splits. ValueError for shapes no kernel serves. Source: METHOD section 3 (count == N equals dense attention).
    """
    batch, rows, heads, kv_heads, dim, dtype = check_arrays(q, k, v, lengths, num_tokens)
    plan = verify_plan(dim, dtype, rows, heads, kv_heads, batch, k.shape[1])
    return run_verify("dense_verify", plan, q, k, v, {}, lengths, num_tokens, scale, splits=splits)


def dense_verify_bytes(
    head_dim: int,
    dtype: str,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    lengths: list[int],
    num_tokens: list[int],
) -> int:
    """Bytes of K and V one call must read."""
    plan = verify_plan(head_dim, dtype, num_rows, num_heads, num_kv_heads, len(lengths), max(lengths) + num_rows)
    keys = [n + t if t else 0 for n, t in zip(lengths, num_tokens, strict=True)]
    return verify_bytes(head_dim, dtype, num_rows, num_heads, num_kv_heads, keys, plan.row_blocks)
