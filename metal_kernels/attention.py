"""The one call a backend makes: attention of T in-flight rows, dense or over a set, by kernel or array as the gate says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import dense_verify, fallback, sparse_verify
from .gate import Decision, Gate, bucket
from .plan import HEAD_DIMS, MAX_ROWS


def verify_attention(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    num_tokens: Any,
    scale: float,
    indices: Any | None = None,
    counts: Any | None = None,
    *,
    gate: Gate,
    plans: dict[Any, Any] | None = None,
) -> tuple[Any, Decision]:
    """(output [B, T, Hq, D], decision). Arguments as `dense_verify` and, with indices and counts, `sparse_verify`.

    Shapes that no kernel serves (head_dim, T > 16) take the array path, and the decision says so. `plans` keeps the array
    path's masks and positions over the layers of one forward: give the same dict only with the same lengths and num_tokens.
    """
    batch, rows, heads, dim = q.shape
    if indices is None:
        operation, arguments, keys = "dense_verify", (q, k, v, lengths, num_tokens, scale), k.shape[1]
        kernel = lambda: dense_verify.dense_verify(*arguments)  # noqa: E731
        plan = functools.partial(fallback.dense_plan, lengths, num_tokens, batch, rows, k.shape[1])
        array = lambda: fallback.dense_verify(*arguments, _kept(plans, (None, k.shape[1]), plan))  # noqa: E731
    else:
        operation, arguments, keys = (
            "sparse_verify",
            (q, k, v, indices, counts, lengths, num_tokens, scale),
            indices.shape[1],
        )
        kernel = lambda: sparse_verify.sparse_verify(*arguments)  # noqa: E731
        plan = functools.partial(fallback.sparse_plan, indices, counts, lengths, num_tokens, batch, rows, k.shape[1])
        array = lambda: fallback.sparse_verify(*arguments, _kept(plans, (id(indices), k.shape[1]), plan))  # noqa: E731
    if dim not in HEAD_DIMS or rows > MAX_ROWS:
        return array(), Decision(
            "array", f"no kernel for head_dim {dim}, T {rows} (head_dim in {HEAD_DIMS}, T up to {MAX_ROWS})"
        )
    shape = {
        "dtype": str(q.dtype).rsplit(".", 1)[-1],
        "dim": dim,
        "heads": heads,
        "kv_heads": k.shape[2],
        "rows": rows,
        "batch": bucket(batch),
        "keys": bucket(keys),
    }
    decision = gate.decide(operation, shape, kernel, array)
    return (kernel if decision.path == "kernel" else array)(), decision


def _kept(plans: dict[Any, Any] | None, key: Any, make: Callable[[], Any]) -> Any:
    if plans is None:
        return make()
    if key not in plans:
        plans[key] = make()
    return plans[key]
