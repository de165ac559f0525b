"""What the verify launchers share: checks of shapes and the merge of key splits."""

from __future__ import annotations

from typing import Any

from .plan import VerifyPlan
from .source import OUTPUT_FORMS, contiguous, kernel, scalar


def check_arrays(q: Any, k: Any, v: Any, lengths: Any, num_tokens: Any) -> tuple[int, int, int, int, int, str]:
    """(B, T, Hq, Hkv, D, dtype) of q [B, T, Hq, D] and caches [B, Nmax, Hkv, D]. ValueError names what does not fit."""
    import mlx.core as mx

    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q, k: expected [B, T, Hq, D] and [B, Nmax, Hkv, D], got {q.shape} and {k.shape}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k, v: expected equal shapes with B = {q.shape[0]} and D = {q.shape[3]}, got {k.shape} and {v.shape}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"dtype: expected q, k and v alike, got {q.dtype}, {k.dtype}, {v.dtype}; cast q to the cache's dtype"
        )
    for name, a in (("lengths", lengths), ("num_tokens", num_tokens)):
        if a.dtype != mx.int32 or a.shape not in ((), (q.shape[0],)):
            raise ValueError(f"{name}: expected int32 of shape () or ({q.shape[0]},), got {a.dtype} {a.shape}")
    return (*q.shape[:3], k.shape[2], q.shape[3], str(q.dtype).rsplit(".", 1)[-1])


def run_verify(
    name: str,
    plan: VerifyPlan,
    q: Any,
    k: Any,
    v: Any,
    extra: dict[str, Any],
    lengths: Any,
    num_tokens: Any,
    scale: float,
    tile_name: str = "BK",
    splits: int | None = None,
) -> Any:
    """Launch `name`.metal and, with more than one split, combine.metal. Returns [B, T, Hq, D] in q's dtype."""
    import mlx.core as mx

    batch, num_rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    splits = splits or plan.splits
    form = "direct" if splits == 1 else "split"
    arrays = {
        "q": contiguous(q),
        "k": k,
        "v": v,
        **extra,
        "lengths": lengths,
        "num_tokens": num_tokens,
        "scale": scalar(scale),
    }
    shapes = [(batch, kv_heads, splits, plan.rows, dim), (batch, kv_heads, splits, plan.rows, 2)]
    verify = kernel(
        name if form == "direct" else f"{name}_split",
        list(arrays),
        ["out"] if form == "direct" else ["partial", "stats"],
        header="attention",
        prefix=OUTPUT_FORMS[form],
        file=name,
    )
    result = verify(
        inputs=list(arrays.values()),
        template=[("T", q.dtype), ("D", dim), (tile_name, plan.tile), ("DIRECT", form == "direct")],
        grid=(splits * plan.threads, batch * kv_heads, plan.row_blocks),
        threadgroup=(plan.threads, 1, 1),
        output_shapes=[q.shape] if form == "direct" else shapes,
        output_dtypes=[q.dtype] if form == "direct" else [mx.float32, mx.float32],
    )
    return result[0] if form == "direct" else combine(result[0], result[1], batch, num_rows, heads, dim, q.dtype)


def combine(partial: Any, stats: Any, batch: int, num_rows: int, heads: int, dim: int, dtype: Any) -> Any:
    """Merge splits: partial [B, Hkv, splits, R, D] fp32 and stats [B, Hkv, splits, R, 2] (top, sum; base 2) -> [B, T, Hq, D].

    Reads the statistics and the partial sums of splits with mass; rows without any mass give 0. No threadgroup memory.
    """
    merge = kernel("combine", ["partial", "stats"], ["out"], header="attention")
    return merge(
        inputs=[partial, stats],
        template=[("T", dtype), ("D", dim)],
        grid=(32, heads, batch * num_rows),
        threadgroup=(32, 1, 1),
        output_shapes=[(batch, num_rows, heads, dim)],
        output_dtypes=[dtype],
    )[0]
