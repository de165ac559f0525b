"""Page bounds, accumulated scores, sets cut by mass, and what calibration measures: one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dustin.backends.numpy_reference.cache import Cache, Floats
from dustin.backends.numpy_reference.ops import Ints, softmax
from dustin.interfaces import RowComparison, Tap, TokenSet

Scores = npt.NDArray[np.floating]


def page_scores(
    queries: Mapping[int, Floats],
    tap: Tap,
    cache: Cache,
    lengths: Sequence[int],
    page_size: int,
    *,
    num_heads: int,
    scale: float,
) -> npt.NDArray[np.float32]:
    """See Backend.page_scores. Raise ValueError on no queries or a page below one token."""
    if not queries or page_size < 1:
        raise ValueError(f"{len(queries)} layers of queries and page_size {page_size}, expected 1 or more of each")
    total = np.full((cache.batch, max(lengths)), -np.inf)
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        shares = []
        for layer, captured in queries.items():
            keys = cache.keys[layer][b, :length]
            group = num_heads // keys.shape[1]
            starts = range(0, length, page_size)
            low, high = (np.stack([f(keys[i : i + page_size], axis=0) for i in starts]) for f in (np.min, np.max))
            for q in captured[b]:
                for one, head in zip(q, tap.heads[layer], strict=True):
                    kv = head // group
                    bound = np.maximum(one * low[:, kv], one * high[:, kv]).sum(axis=1) * scale
                    shares.append(softmax(bound))
        total[b, :length] = np.repeat(np.mean(shares, axis=0), page_size)[:length]
    return total.astype(np.float32)


def smooth(scores: Scores, width: int) -> Scores:
    """See Backend.smooth. Raise ValueError on an even width."""
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width is {width}, expected an odd number of tokens")
    out = np.full(scores.shape, -np.inf)
    for b, j in np.argwhere(np.isfinite(scores)):
        near = scores[b, max(0, j - width // 2) : j + width // 2 + 1]
        out[b, j] = near[np.isfinite(near)].mean(dtype=np.float64)
    return out.astype(np.float32)


def accumulate(old: Scores, new: Scores, decay: float | Sequence[float]) -> Scores:
    """See Backend.accumulate."""
    decay = np.broadcast_to(np.asarray(decay, dtype=np.float64), len(new))[:, None]
    width = max(old.shape[1], new.shape[1])
    before, fresh = (np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-np.inf) for x in (old, new))
    known = np.where(np.isneginf(before), 0.0, before)
    return np.where(np.isneginf(fresh), before, decay * known + fresh).astype(np.float32)


def keep_mass(
    token_set: TokenSet, scores: Scores, lengths: Sequence[int], *, mass: float, num_sink_tokens: int, num_recent_tokens: int
) -> TokenSet:
    """See Backend.keep_mass. Raise ValueError on a mass outside 0..1."""
    if not 0 <= mass <= 1:
        raise ValueError(f"mass is {mass}, expected 0 to 1")
    indices = np.full(np.shape(token_set.indices), -1, dtype=np.int32)
    counts = np.zeros(len(lengths), dtype=np.int32)
    for b, length in enumerate(lengths):
        row = np.asarray(token_set.indices)[b, : int(token_set.counts[b])]
        if len(row) < length:
            values = mass_at(scores[b], row)
            protected = (row < num_sink_tokens) | (row >= length - num_recent_tokens)
            order = np.lexsort((row, -values, ~protected))
            whole = mass_at(scores[b], np.arange(len(scores[b]))).sum()
            before = np.cumsum(values[order]) - values[order]
            row = np.sort(row[order][protected[order] | (before < mass * whole)])
        indices[b, : len(row)] = row
        counts[b] = len(row)
    return TokenSet(indices, counts, token_set.dense_layers, token_set.by_layer)


def mass_at(scores: Scores, tokens: Ints) -> Floats:
    """Scores of `tokens`; missing and -inf ones are 0."""
    out = np.zeros(len(tokens))
    inside = tokens < len(scores)
    out[inside] = scores[tokens[inside]]
    return np.where(np.isfinite(out), out, 0.0)


def set_mass(token_set: TokenSet, scores: Scores) -> Floats:
    """See Measures.set_mass."""
    rows = zip(np.asarray(token_set.indices), np.asarray(token_set.counts), scores, strict=True)
    return np.array([mass_at(score, row[: int(count)]).sum() for row, count, score in rows])


def compare_logits(reference: Floats, logits: Floats, tokens: Ints) -> RowComparison:
    """See Measures.compare_logits."""
    p, q = (x - x.max(axis=-1, keepdims=True) for x in (reference.astype(np.float64), logits.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (p, q))
    top = np.sort(reference, axis=-1)
    at = np.asarray(tokens)[..., None]
    return RowComparison(
        kl=(np.exp(p) * (p - q)).sum(axis=-1),
        same=reference.argmax(axis=-1) == logits.argmax(axis=-1),
        gap=top[..., -1] - top[..., -2],
        reference_logprob=np.take_along_axis(p, at, -1)[..., 0],
        logprob=np.take_along_axis(q, at, -1)[..., 0],
    )
