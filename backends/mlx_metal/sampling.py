"""Warps, samplers and acceptance on MLX arrays (METHOD section 5). No randomness here: uniforms are passed in.

Cumulative sums run over whole numbers (shares of 2**31): a GPU has no fp64, and a parallel fp32 sum is neither monotone nor the
same on every device. Whole numbers are both, so a token without mass is never drawn and a seed means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from dustin.backends.common.checks import COLDEST, check_lengths, check_warp
from dustin.backends.mlx_metal.set_ops import descending, log_softmax, order_keys
from dustin.interfaces import HostVerdict, TokenLogprobs, Verdict, WarpBatch

_WHOLE = 31


def shares(weights: mx.array) -> mx.array:
    """int64 [..., V] of weights [..., V] fp32, scaled so that they sum to about 2**31."""
    total = weights.sum(axis=-1, keepdims=True)
    return mx.round(weights / mx.where(total > 0, total, 1.0) * float(2**_WHOLE)).astype(mx.int64)


def penalise(logits: mx.array, counts: mx.array, repetition: float, presence: float, frequency: float) -> mx.array:
    """Logits [T, V] after penalties for tokens seen counts [T, V] times: repetition scales them, then the others subtract."""
    scaled = mx.where(logits > 0, logits / repetition, logits * repetition)
    return mx.where(counts > 0, scaled - frequency * counts - presence, logits)


def _seen(known: Sequence[int], inflight: mx.array | None, before: int, rows: int, size: int) -> mx.array:
    """[T, V] fp32: how often each token was seen by row t, in `known` and the first before + t of inflight [I]."""
    ids = np.asarray(known, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        raise ValueError(f"a penalised token is {int(ids.max())}, expected one below the vocabulary size {size}")
    counts = mx.broadcast_to(mx.array(np.bincount(ids, minlength=size).astype(np.float32)), (rows, size))
    if inflight is None or not inflight.shape[0]:
        return counts
    flight = mx.arange(inflight.shape[0])[None]
    live = ((flight < before + mx.arange(rows)[:, None]) & (inflight >= 0)[None]).astype(mx.float32)
    at = mx.broadcast_to(mx.maximum(inflight, 0)[None], live.shape)
    return mx.array(counts).at[mx.arange(rows)[:, None], at].add(live)


def one_hot(tokens: mx.array, size: int) -> mx.array:
    """[..., V] fp32 of tokens [...]."""
    return (tokens[..., None] == mx.arange(size)).astype(mx.float32)


def _normalised(p: mx.array) -> mx.array:
    return p / p.sum(axis=-1, keepdims=True)


def warp_rows(logits: mx.array, temperature: float, top_k: int, top_p: float, min_p: float) -> mx.array:
    """[T, V] distributions: temperature, top-k, top-p, min-p, renormalised after each. Ties keep the lower index.

    Temperature 0 is one-hot at the argmax, as is a row with +inf. Rows with a NaN are one-hot at 0: finite, and reported
    by `Verdict.finite`.
    """
    size = logits.shape[-1]
    broken = mx.isnan(logits).any(axis=-1, keepdims=True)
    logits = mx.where(broken, 0.0, logits)
    spiked = one_hot(mx.argmax(logits, axis=-1), size)
    if temperature == 0:
        return spiked
    # The gap to the best token, so that a low temperature overflows nowhere.
    p = mx.softmax((logits - logits.max(axis=-1, keepdims=True)) / max(temperature, COLDEST), axis=-1, precise=True)
    if 0 < top_k < size:
        keys = order_keys(logits)
        p = _normalised(mx.where(keys >= mx.sort(keys, axis=-1)[..., size - top_k, None], p, 0.0))
    if top_p < 1:
        order = descending(logits)
        mass = shares(mx.take_along_axis(p, order, axis=-1))
        before = mx.cumsum(mass, axis=-1) - mass
        limit = mx.array(round(top_p * 2**_WHOLE), mx.int64)
        p = _normalised(mx.where(mx.take_along_axis(before, mx.argsort(order, axis=-1), axis=-1) < limit, p, 0.0))
    if min_p > 0:
        p = _normalised(mx.where(p >= min_p * p.max(axis=-1, keepdims=True), p, 0.0))
    return mx.where(broken | mx.isposinf(logits).any(axis=-1, keepdims=True), spiked, p)


def probabilities(
    logits: mx.array, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: mx.array | None
) -> mx.array:
    """Warped distributions [B, T, V] fp32; penalties of row t count context[b] and the first I - (T - 1) + t of inflight."""
    batch, rows, size = logits.shape
    width = 0 if inflight is None else inflight.shape[1]
    check_warp(warp, context, batch, rows, width)
    out = []
    for b in range(batch):
        block = logits[b].astype(mx.float32)
        factors = (warp.repetition_penalty[b], warp.presence_penalty[b], warp.frequency_penalty[b])
        if context is not None and factors != (1.0, 0.0, 0.0):
            flight = None if inflight is None else inflight[b]
            block = penalise(block, _seen(context[b], flight, width - (rows - 1), rows, size), *factors)
        out.append(warp_rows(block, warp.temperature[b], warp.top_k[b], warp.top_p[b], warp.min_p[b]))
    return mx.stack(out)


def draw(weights: mx.array, uniforms: Sequence[float]) -> mx.array:
    """[B] int32: the first token whose cumulative share of weights [B, V] exceeds u in [0, 1)."""
    if not all(0 <= u < 1 for u in uniforms):
        raise ValueError(f"uniforms are {list(uniforms)}, expected 0 to 1, without 1")
    cumulative = mx.cumsum(shares(weights), axis=-1)
    u = mx.array([int(x * 2**_WHOLE) for x in uniforms], mx.int64)[:, None]
    # u * total / 2**31 is below total, so there is always a first one, and it has mass of its own.
    return mx.argmax(cumulative > ((u * cumulative[:, -1:]) >> _WHOLE), axis=-1).astype(mx.int32)


def _check(drafts: mx.array, num_drafts: Sequence[int], judged: mx.array) -> None:
    batch, width = drafts.shape
    check_lengths("num_drafts", num_drafts, [0] * batch, [width] * batch)
    if judged.shape[:2] != (batch, width + 1):
        raise ValueError(f"target rows have shape {judged.shape}, expected [{batch}, {width + 1}, V]: one more than drafts")


def _finite(logits: mx.array, num_drafts: mx.array) -> mx.array:
    """[B] bool: no NaN in the judged rows 0..num_drafts[b] of logits [B, T, V]."""
    judged = mx.arange(logits.shape[1])[None] <= num_drafts[:, None]
    return ~(mx.isnan(logits).any(axis=-1) & judged).any(axis=-1)


def _prefix(kept: mx.array, num_drafts: mx.array) -> mx.array:
    """[B] int32: length of the leading run of True in kept [B, G], at most num_drafts[b]."""
    if not kept.shape[1]:
        return mx.zeros(num_drafts.shape, mx.int32)
    valid = mx.arange(kept.shape[1])[None] < num_drafts[:, None]
    return mx.cumprod((kept & valid).astype(mx.int32), axis=-1).sum(axis=-1).astype(mx.int32)


def accept_greedy(drafts: mx.array, num_drafts: Sequence[int], logits: mx.array) -> Verdict:
    """The longest prefix of drafts [B, G] equal to the argmax of logits [B, G+1, V], then that argmax."""
    _check(drafts, num_drafts, logits)
    counts = mx.array(list(num_drafts), mx.int32)
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    return Verdict(_prefix(drafts == best[:, :-1], counts), best, None, _finite(logits, counts))


def confidence(logits: mx.array, distributions: mx.array | None) -> mx.array:
    """[B, 1] fp32 top probability of distributions [B, 1, V], or of softmax(logits [B, 1, V]) without them."""
    if distributions is not None:
        return distributions.astype(mx.float32).max(axis=-1)
    values = logits.astype(mx.float32)
    return mx.exp(values.max(axis=-1) - mx.logsumexp(values, axis=-1))


def favour(
    logits: mx.array, drafts: mx.array, num_drafts: Sequence[int], sureness: mx.array, threshold: float
) -> mx.array:
    """A copy of logits [B, G+1, V] with 1e30 (6e4 in fp16) at drafts[b, i] of row i < num_drafts[b] that is sure enough."""
    sure = 6e4 if logits.dtype == mx.float16 else 1e30
    columns = mx.arange(logits.shape[-1])[None, None]
    judged = mx.arange(drafts.shape[1])[None] < mx.array(list(num_drafts))[:, None]
    hit = (columns == drafts[..., None]) & ((sureness >= threshold) & judged)[..., None]
    hit = mx.concatenate([hit, mx.zeros((hit.shape[0], 1, hit.shape[2]), dtype=mx.bool_)], axis=1)
    return mx.where(hit, mx.array(sure, dtype=logits.dtype), logits)


def accept_sampled(
    drafts: mx.array,
    num_drafts: Sequence[int],
    draft_probabilities: mx.array | None,
    target_probabilities: mx.array,
    finite_of: mx.array,
    accept_uniforms: Sequence[Sequence[float]],
    next_uniforms: Sequence[float],
) -> Verdict:
    """Speculative sampling: accept d while u * q(d) < p(d), else draw from max(p - q, 0); after all, draw from the next p.

    drafts [B, G], draft_probabilities [B, >= G, V] or None for one-hot, target_probabilities [B, G+1, V],
    accept_uniforms [B, >= num_drafts[b]], next_uniforms [B].
    """
    _check(drafts, num_drafts, target_probabilities)
    (batch, width), p = drafts.shape, target_probabilities
    counts = mx.array(list(num_drafts), mx.int32)
    kept = mx.zeros((batch,), mx.int32)
    weights = p[:, 0]
    if width:
        u = mx.array([[*row, *[0.0] * width][:width] for row in accept_uniforms], mx.float32)
        at = drafts[..., None]
        q = None if draft_probabilities is None else _covering(draft_probabilities[:, :width], width)
        q_of_draft = 1.0 if q is None else mx.take_along_axis(q, at, axis=-1)[..., 0]
        kept = _prefix(u * q_of_draft < mx.take_along_axis(p[:, :width], at, axis=-1)[..., 0], counts)
        rows, refused = mx.arange(batch), mx.minimum(kept, width - 1)
        q_row = one_hot(drafts[rows, refused], p.shape[-1]) if q is None else q[rows, refused]
        weights = p[rows, kept]
        residual = mx.maximum(weights - q_row, 0.0)
        # p == q up to rounding leaves no residual; p is then what the residual tends to.
        usable = (kept < counts) & (residual.sum(axis=-1) > 0)
        weights = mx.where(usable[:, None], residual, weights)
    following = draw(weights, next_uniforms)
    padded = mx.pad(drafts, [(0, 0), (0, 1)])
    tokens = mx.where(mx.arange(width + 1)[None] == kept[:, None], following[:, None], padded)
    return Verdict(kept, tokens.astype(mx.int32), p, _finite(finite_of, counts))


def _covering(q: mx.array, width: int) -> mx.array:
    """q [B, n, V] with zero rows added up to `width`: rows may have fewer draft distributions than drafts are padded to."""
    return q if q.shape[1] >= width else mx.pad(q, [(0, 0), (0, width - q.shape[1]), (0, 0)])


def read(verdict: Verdict, logits: mx.array | None, top_logprobs: int | None) -> HostVerdict:
    """Host copy of a verdict: everything is computed in one go, and waited for once."""
    width = verdict.tokens.shape[1]
    parts = [verdict.num_accepted, verdict.finite, verdict.tokens]
    if top_logprobs is not None:
        if logits is None:
            raise ValueError("logits is None, expected [B, T, V]: top_logprobs was asked for")
        parts += _logprobs(logits[:, :width], verdict.tokens, top_logprobs)
    mx.eval(parts)
    kept, finite, all_tokens, *rest = (part.tolist() for part in parts)
    tokens = tuple(tuple(row[: n + 1]) for row, n in zip(all_tokens, kept, strict=True))
    logprobs = None
    if top_logprobs is not None:
        chosen, best, values = rest
        logprobs = tuple(
            tuple(TokenLogprobs(t, chosen[b][i], tuple(best[b][i]), tuple(values[b][i])) for i, t in enumerate(row))
            for b, row in enumerate(tokens)
        )
    return HostVerdict(tuple(kept), tokens, tuple(finite), logprobs)


def _logprobs(logits: mx.array, tokens: mx.array, top: int) -> list[mx.array]:
    """Log-softmax at tokens [B, T]; the `top` best tokens [B, T, top] and theirs; a tie goes to the lower index."""
    values = log_softmax(logits)
    chosen = mx.take_along_axis(values, mx.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    best = descending(mx.where(mx.isnan(values), -mx.inf, values))[..., :top]
    return [chosen, best, mx.take_along_axis(values, best, axis=-1)]
