"""Scores and the quota rule on MLX arrays, by Metal kernel or array path as the gate says (METHOD section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from dustin.backends.common.checks import check_lengths
from dustin.backends.mlx_metal.cache import MlxCache
from dustin.backends.mlx_metal.sets import remember
from dustin.interfaces import Tap, TokenSet
from dustin.metal_kernels import fallback
from dustin.metal_kernels.gate import Gate, bucket
from dustin.metal_kernels.plan import HEAD_DIMS
from dustin.metal_kernels.score_heads import MAX_QUERIES, score_heads
from dustin.metal_kernels.select_tokens import select_tokens


def check_queries(queries: Mapping[int, mx.array], tap: Tap, cache: MlxCache, lengths: Sequence[int]) -> None:
    """Raise ValueError where captured queries, scoring heads, cache and lengths do not fit."""
    if not queries:
        raise ValueError("queries is empty, expected captured queries of one layer or more")
    check_lengths("lengths", lengths, [0] * cache.batch, cache.lengths)
    for layer, q in queries.items():
        if q.shape[0] != cache.batch or q.shape[2] != len(tap.heads[layer]):
            raise ValueError(
                f"queries[{layer}] has shape {q.shape}, expected {cache.batch} sequences and {len(tap.heads[layer])} heads"
            )


def score(
    queries: Mapping[int, mx.array],
    tap: Tap,
    cache: MlxCache,
    lengths: Sequence[int],
    *,
    num_heads: int,
    scale: float,
    gate: Gate,
) -> mx.array:
    """[B, max(lengths)] fp32: attention mass of each committed token, the mean over (layer, row, head); -inf beyond lengths[b].

    `queries` maps a layer to [B, R, S, D], its S heads named by `tap.heads`. Raise ValueError when they do not fit.
    """
    check_queries(queries, tap, cache, lengths)
    width = max(lengths)
    if not width:
        return mx.full((cache.batch, 0), -mx.inf, mx.float32)
    ends = cache.lengths_array(lengths)
    total = sum(q.shape[1] * q.shape[2] for q in queries.values())
    mass = None
    for layer, q in queries.items():
        keys = cache.keys[layer][:, :width]
        part = layer_score(q.astype(keys.dtype), keys, tap.heads[layer], ends, num_heads, scale, gate)
        part = part * (q.shape[1] * q.shape[2] / total)
        mass = part if mass is None else mass + part
    # Evaluated here: a pending reader of the keys would make the next append copy them.
    mx.eval(mass)
    return mass


def layer_score(
    q: mx.array, keys: mx.array, heads: Sequence[int], ends: mx.array, num_heads: int, scale: float, gate: Gate
) -> mx.array:
    arguments = (keys, tuple(heads), num_heads, ends, scale)
    """[B, keys] fp32: `score` of one layer's queries [B, R, S, D] over keys [B, keys, Hkv, D]; `ends` [B] are their lengths."""
    batch, rows, scoring, dim = q.shape
    if dim not in HEAD_DIMS or scoring > MAX_QUERIES:
        return fallback.score_heads(q, *arguments)
    most = MAX_QUERIES // scoring
    if rows > most:
        # More rows (a prompt's end) than the kernel takes go in parts.
        parts = [(q[:, t : t + most], min(most, rows - t)) for t in range(0, rows, most)]
        scores = [layer_score(part, keys, heads, ends, num_heads, scale, gate) * (n / rows) for part, n in parts]
        return sum(scores[1:], scores[0])
    shape = {"dtype": str(q.dtype).rsplit(".", 1)[-1], "dim": dim, "heads": scoring, "kv_heads": keys.shape[2], "rows": rows}
    shape |= {"batch": bucket(batch), "keys": bucket(keys.shape[1])}
    kernel: Callable[[], Any] = lambda: score_heads(q, *arguments)  # noqa: E731
    array: Callable[[], Any] = lambda: fallback.score_heads(q, *arguments)  # noqa: E731

    def finite(f: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: mx.where(mx.isinf(x := f()), mx.zeros((), x.dtype), x)

    decision = gate.decide("score_heads", shape, finite(kernel), finite(array))
    return (kernel if decision.path == "kernel" else array)()


def select(
    target_scores: mx.array | None,
    draft_scores: mx.array | None,
    lengths: Sequence[int],
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
    gate: Gate,
) -> TokenSet:
    """The quota rule (Backend.select). Raise ValueError on negative counts or a budget below the protected tokens."""
    if min(budget, num_sink_tokens, num_recent_tokens, num_draft_selected, *lengths) < 0:
        raise ValueError("budget, num_sink_tokens, num_recent_tokens, num_draft_selected, lengths: expected 0 or more each")
    if num_sink_tokens + num_recent_tokens > budget:
        raise ValueError(f"budget is {budget} tokens, expected {num_sink_tokens + num_recent_tokens} or more: the protected ones")
    counts = tuple(min(n, budget) for n in lengths)
    ends = mx.array(list(lengths), mx.int32)
    width = max(counts)
    if not width:
        return remember(TokenSet(mx.zeros((len(lengths), 1), mx.int32), ends), counts, lengths)
    if all(n <= budget for n in lengths):
        indices = mx.minimum(mx.arange(width, dtype=mx.int32)[None], mx.maximum(ends[:, None] - 1, 0))
    else:
        # Scores of any width: what is missing counts as -inf, what lies beyond every length as nothing.
        scores = [None if s is None else fit(s, max(lengths), -mx.inf) for s in (target_scores, draft_scores)]
        quota = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
        indices = _indices(*scores, ends, quota | {"budget": budget, "num_draft_selected": num_draft_selected}, gate)
    return remember(TokenSet(indices[:, :width], mx.array(list(counts), mx.int32)), counts, lengths)


def _indices(target: mx.array | None, draft: mx.array | None, ends: mx.array, quota: dict[str, int], gate: Gate) -> mx.array:
    array: Callable[[], Any] = lambda: fallback.select_tokens(target, draft, ends, **quota)[0]  # noqa: E731
    kernel: Callable[[], Any] = lambda: select_tokens(target, draft, ends, **quota)[0]  # noqa: E731
    scores = target if target is not None else draft
    if scores is None:
        return array()
    shape = {"dtype": "float32", "batch": bucket(scores.shape[0]), "keys": bucket(scores.shape[1]), **quota}
    return (kernel if gate.decide("select_tokens", shape, kernel, array).path == "kernel" else array)()


def fit(x: mx.array, width: int, blank: float) -> mx.array:
    """[B, width] of x [B, any], cut or filled up with `blank`."""
    x = x[:, :width]
    return x if x.shape[1] == width else mx.pad(x, [(0, 0), (0, width - x.shape[1])], constant_values=blank)
