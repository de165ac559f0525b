"""Calls the launchers on a Case under the emulator, and hands back float32."""

from __future__ import annotations

import numpy as np

from tests.metal.reference import TOLERANCE, Case, relative_rms


def to_mlx(x: np.ndarray, dtype: str):
    """An mlx array of `dtype`."""
    import mlx.core as mx

    return mx.array(x).astype(getattr(mx, dtype))


def to_host(x) -> np.ndarray:
    """float32 values of an mlx array."""
    import mlx.core as mx

    return np.array(x.astype(mx.float32))


def call(case: Case, form: str, splits: int | None = None, *, sliced: bool = False) -> np.ndarray:
    """Output of dense, sparse or blocks [B, T, Hq, D]; `sliced` passes strided views of larger caches."""
    import mlx.core as mx

    from dustin.metal_kernels.dense_verify import dense_verify
    from dustin.metal_kernels.sparse_verify import sparse_verify, sparse_verify_blocks

    q, k, v = (to_mlx(x, case.dtype) for x in (case.q, case.k, case.v))
    if sliced:
        pad = [(0, 0), (0, 5), (0, 1), (0, 0)]
        k, v = (mx.pad(x, pad, constant_values=float("nan"))[:, : case.capacity, : case.num_kv_heads] for x in (k, v))
    lengths, tokens = mx.array(case.lengths, mx.int32), mx.array(case.num_tokens, mx.int32)
    if form == "dense":
        out = dense_verify(q, k, v, lengths, tokens, case.scale, splits=splits)
    elif form == "sparse":
        out = sparse_verify(
            q, k, v, mx.array(case.indices), mx.array(case.counts), lengths, tokens, case.scale, splits=splits
        )
    else:
        out = sparse_verify_blocks(
            q, k, v, mx.array(case.blocks), mx.array(case.block_counts), lengths, tokens, case.scale, splits=splits
        )
    return to_host(out)


def parity_problem(case: Case, form: str, got: np.ndarray) -> str:
    """Empty when the output matches the reference; else what is wrong. Coded cases count rows exactly."""
    want = case.expected(form)
    if case.coded:
        seen = case.visible(form)[:, :, None, None]
        if not np.isfinite(got).all():
            return "not finite"
        wrong = np.rint(got * seen) != np.rint(want * seen)
        return f"{int(wrong.sum())} counts differ" if wrong.any() else ""
    error = relative_rms(got, want)
    return "" if error <= TOLERANCE[case.dtype] else f"relative RMS {error:.3g} above {TOLERANCE[case.dtype]}"
