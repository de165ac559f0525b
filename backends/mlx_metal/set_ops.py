"""Scores within a set, page bounds, accumulated scores, sets cut by mass, and what calibration measures, on MLX arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from dustin.backends.mlx_metal.cache import MlxCache
from dustin.backends.mlx_metal.ops import check_queries, fit
from dustin.backends.mlx_metal.sets import facts_of, remember
from dustin.interfaces import RowComparison, Tap, TokenSet


def _groups(heads: Sequence[int], group: int) -> list[tuple[mx.array, int]]:
    """For each kv head that serves some of `heads`: which of them, and the kv head."""
    kv_heads = sorted({head // group for head in heads})
    return [(mx.array([i for i, head in enumerate(heads) if head // group == kv]), kv) for kv in kv_heads]


def _rows_of(q: mx.array, members: mx.array) -> mx.array:
    """[B, R * m, D] fp32 of the members' queries."""
    return q[:, :, members].flatten(1, 2).astype(mx.float32)


def _masses(logits: mx.array, valid: mx.array) -> mx.array:
    """[B, n]: sum over rows of the softmax of logits [B, rows, n] over valid [B, n]; 0 where nothing is valid."""
    weights = mx.softmax(mx.where(valid[:, None], logits, -mx.inf), axis=-1)
    return mx.where(valid, weights.sum(axis=1), 0.0)


def valid_entries(token_set: TokenSet) -> mx.array:
    """[B, k] bool."""
    return mx.arange(token_set.indices.shape[1])[None] < token_set.counts[:, None]


def score_within(
    queries: Mapping[int, mx.array],
    tap: Tap,
    cache: MlxCache,
    lengths: Sequence[int],
    within: TokenSet,
    *,
    num_heads: int,
    scale: float,
) -> mx.array:
    """[B, max(lengths)] fp32 (see Backend.score): the softmax over the set's keys alone."""
    check_queries(queries, tap, cache, lengths)
    columns = max(lengths)
    valid = valid_entries(within)
    sequences = mx.arange(cache.batch)[:, None]
    ordered = cache.lengths_array([0] * cache.batch)[:, None]
    places = mx.where(valid, within.indices, 0) + ordered
    mass = mx.zeros(valid.shape, mx.float32)
    for layer, q in queries.items():
        keys = cache.keys[layer][sequences, places]
        for members, kv in _groups(tap.heads[layer], num_heads // keys.shape[2]):
            logits = _rows_of(q, members) * scale @ keys[:, :, kv].astype(mx.float32).swapaxes(1, 2)
            mass = mass + _masses(logits, valid)
    mass = mass / sum(q.shape[1] * q.shape[2] for q in queries.values())
    # Unused entries go to a column of their own, which is cut off.
    out = mx.full((cache.batch, columns + 1), -mx.inf, mx.float32)
    out[sequences, mx.where(valid, mx.minimum(within.indices, columns), columns)] = mass
    out = out[:, :columns]
    mx.eval(out)
    return out


def page_scores(
    queries: Mapping[int, mx.array],
    tap: Tap,
    cache: MlxCache,
    lengths: Sequence[int],
    page_size: int,
    *,
    num_heads: int,
    scale: float,
) -> mx.array:
    """[B, max(lengths)] fp32 (see Backend.page_scores). Raise ValueError on no queries or no page."""
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, expected 1 or more")
    check_queries(queries, tap, cache, lengths)
    width = max(lengths)
    pages = -(-width // page_size)
    inside = mx.arange(pages * page_size)[None] < cache.lengths_array(lengths)[:, None]
    alive = inside[:, ::page_size]
    share = mx.zeros((cache.batch, pages), mx.float32)
    for layer, q in queries.items():
        low, high = _bounds(cache.keys[layer], inside, width, page_size)
        for members, kv in _groups(tap.heads[layer], num_heads // low.shape[2]):
            x = _rows_of(q, members)
            # max(q_d * low_d, q_d * high_d) is high_d for positive q_d, low_d for the others.
            bound = mx.maximum(x, 0) @ high[:, :, kv].swapaxes(1, 2) + mx.minimum(x, 0) @ low[:, :, kv].swapaxes(1, 2)
            share = share + _masses(bound * scale, alive)
    share = share / sum(q.shape[1] * q.shape[2] for q in queries.values())
    out = mx.where(inside, mx.repeat(share, page_size, axis=1), -mx.inf)[:, :width]
    mx.eval(out)
    return out


def _bounds(keys: mx.array, inside: mx.array, width: int, page_size: int) -> tuple[mx.array, mx.array]:
    """Elementwise minima and maxima [B, pages, Hkv, D] fp32 of each page's keys; 0 for pages without a token."""
    pages = inside.shape[1] // page_size
    padded = mx.pad(keys[:, :width].astype(mx.float32), [(0, 0), (0, pages * page_size - width), (0, 0), (0, 0)])
    paged = padded.reshape(keys.shape[0], pages, page_size, *keys.shape[2:])
    valid = inside.reshape(keys.shape[0], pages, page_size, 1, 1)
    alive = valid[:, :, 0]
    low = mx.where(valid, paged, mx.inf).min(axis=2)
    high = mx.where(valid, paged, -mx.inf).max(axis=2)
    return mx.where(alive, low, 0.0), mx.where(alive, high, 0.0)


def smooth(scores: mx.array, width: int) -> mx.array:
    """See Backend.smooth. Raise ValueError on an even width."""
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width is {width}, expected an odd number")
    size, finite = scores.shape[1], mx.isfinite(scores)
    edges = [(0, 0), (width // 2, width // 2)]
    padded = [mx.pad(x, edges) for x in (mx.where(finite, scores, 0.0), finite.astype(scores.dtype))]
    # A sum of shifts, not of cumulated sums: those lose small scores behind large ones.
    mass, count = (sum((x[:, i : i + size] for i in range(1, width)), x[:, :size]) for x in padded)
    return mx.where(finite, mass / mx.maximum(count, 1.0), scores)


def accumulate(old: mx.array, new: mx.array, decay: float | Sequence[float]) -> mx.array:
    """See Backend.accumulate."""
    factor = decay if isinstance(decay, int | float) else mx.array(list(decay), new.dtype)[:, None]
    width = max(old.shape[1], new.shape[1])
    before, fresh = fit(old, width, -mx.inf), fit(new, width, -mx.inf)
    known = mx.where(mx.isneginf(before), 0.0, before)
    return mx.where(mx.isneginf(fresh), before, factor * known + fresh)


def mass_at(scores: mx.array, indices: mx.array, valid: mx.array) -> mx.array:
    """[B, k] scores [B, Nmax] at indices [B, k]; what is not valid, missing or -inf is 0."""
    inside = valid & (indices < scores.shape[1])
    taken = mx.take_along_axis(scores, mx.where(inside, indices, 0), axis=1)
    return mx.where(inside & ~mx.isneginf(taken), taken, 0.0)


def keep_mass(
    token_set: TokenSet,
    scores: mx.array,
    lengths: Sequence[int],
    mass: float,
    num_sink_tokens: int,
    num_recent_tokens: int,
) -> TokenSet:
    """See Backend.keep_mass. Raise ValueError on a mass outside 0..1."""
    if not 0 <= mass <= 1:
        raise ValueError(f"mass is {mass}, expected 0 to 1")
    indices, counts = token_set.indices, token_set.counts
    width = indices.shape[1]
    ends = mx.array(list(lengths), mx.int32)[:, None]
    valid = valid_entries(token_set)
    values = mass_at(scores, indices, valid)
    protected = valid & ((indices < num_sink_tokens) | (indices >= ends - num_recent_tokens))
    # Protected first, then by score; the lower index wins a tie. Unused entries come last.
    order = descending(mx.where(protected, mx.inf, mx.where(valid, values, -mx.inf)))
    ranked = mx.take_along_axis(values, order, axis=1)
    whole = mx.where(mx.isneginf(scores), 0.0, scores).sum(axis=1, keepdims=True)
    enough = (mx.cumsum(ranked, axis=1) - ranked) >= mass * whole
    rank = mx.argsort(order, axis=1)
    kept = mx.take_along_axis(~enough, rank, axis=1) | protected | (counts[:, None] >= ends)
    kept = kept & valid
    packed = mx.sort(mx.where(kept, indices, 2**31 - 1), axis=1)
    sizes = kept.sum(axis=1).astype(mx.int32)
    packed = mx.where(mx.arange(width)[None] < sizes[:, None], packed, 0).astype(mx.int32)
    made = TokenSet(packed, sizes, token_set.dense_layers, token_set.by_layer)
    facts = facts_of(token_set)
    if facts is None:
        return made
    return remember(made, [c if c == n else None for c, n in zip(facts.counts, lengths, strict=True)], facts.bounds)


def order_keys(x: mx.array) -> mx.array:
    """uint64 keys of x [..., n] fp32, all different: larger for a larger value and, among equals, for the lower index; NaN last."""
    bits = mx.where(x == 0, 0.0, x).astype(mx.float32).view(mx.uint32)
    key = mx.where(bits >> 31, ~bits, bits | (1 << 31))
    key = mx.where(mx.isnan(x), mx.zeros((), mx.uint32), key)
    low = (x.shape[-1] - mx.arange(x.shape[-1])).astype(mx.uint64)
    return (key.astype(mx.uint64) << 32) | low


def descending(x: mx.array) -> mx.array:
    """Indices [..., n] of x [..., n] from the largest to the smallest; the lower index first among equals."""
    keys = mx.sort(order_keys(x), axis=-1)[..., ::-1]
    return (x.shape[-1] - (keys & 0xFFFFFFFF).astype(mx.int32)).astype(mx.int32)


def set_mass(token_set: TokenSet, scores: mx.array) -> list[float]:
    """See Measures.set_mass."""
    return mass_at(scores, token_set.indices, valid_entries(token_set)).sum(axis=1).tolist()


def log_softmax(logits: mx.array) -> mx.array:
    """fp32 log-softmax over the last axis."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def compare_logits(reference: mx.array, logits: mx.array, tokens: mx.array) -> RowComparison:
    """See Measures.compare_logits; one wait."""
    p, q = log_softmax(reference), log_softmax(logits)
    kl = (mx.exp(p) * mx.where(mx.isneginf(p), 0.0, p - q)).sum(axis=-1)
    best = mx.topk(reference.astype(mx.float32), 2, axis=-1)
    gap = mx.abs(best[..., 1] - best[..., 0])
    same = mx.argmax(reference, axis=-1) == mx.argmax(logits, axis=-1)
    chosen = [mx.take_along_axis(x, tokens[..., None], axis=-1)[..., 0] for x in (p, q)]
    mx.eval(kl, same, gap, *chosen)
    return RowComparison(*(np.array(x) for x in (kl, same, gap, *chosen)))
