"""Warps, samplers and acceptance, one row at a time (METHOD section 5). No randomness here: uniforms are passed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dustin.backends.common.checks import COLDEST
from dustin.backends.numpy_reference.cache import Floats, check_lengths
from dustin.backends.numpy_reference.ops import Ints, softmax
from dustin.interfaces import Verdict, WarpBatch


def penalise(logits: Floats, seen: Ints, repetition: float, presence: float, frequency: float) -> Floats:
    """Logits [V] after penalties for the tokens `seen` [n]: repetition scales them, then frequency and presence subtract."""
    counts = np.bincount(seen, minlength=len(logits))
    if len(counts) != len(logits):
        raise ValueError(f"a penalised token is {int(seen.max())}, expected one below the vocabulary size {len(logits)}")
    scaled = np.where(logits > 0, logits / repetition, logits * repetition)
    return np.where(counts > 0, scaled - frequency * counts - presence, logits)


def one_hot(token: int, size: int) -> Floats:
    """[V] with all mass on `token`."""
    out = np.zeros(size)
    out[token] = 1.0
    return out


def warp_row(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """[V] distribution: temperature, top-k, top-p, min-p, renormalised after each. Ties keep the lower index.

    Temperature 0 is one-hot at the argmax, as is a row with +inf; lower ones than COLDEST count as that. Rows with a NaN are
    one-hot at 0: finite, and reported by `Verdict.finite`.
    """
    size = len(logits)
    if np.isnan(logits).any():
        return one_hot(0, size)
    best = int(logits.argmax())
    if temperature == 0 or np.isposinf(logits[best]):
        return one_hot(best, size)
    # The gap to the best token, so that a low temperature overflows nowhere.
    p = softmax((logits - logits[best]) / max(temperature, COLDEST))
    order = np.argsort(-logits, kind="stable")
    if 0 < top_k < size:
        p[order[top_k:]] = 0
        p = p / p.sum()
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        p[order[before >= top_p]] = 0
        p = p / p.sum()
    if min_p > 0:
        p[p < min_p * p.max()] = 0
        p = p / p.sum()
    return p


def probabilities(logits: Floats, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: Ints | None) -> Floats:
    """Warped distributions [B, T, V]; penalties as Backend.probabilities says."""
    batch, rows, size = logits.shape
    if len(warp.temperature) != batch:
        raise ValueError(f"warp has {len(warp.temperature)} rows, expected {batch}")
    if warp.penalised and context is None:
        raise ValueError("context is None, expected the committed tokens: a row has a penalty")
    if warp.penalised and rows > 1 and (inflight is None or inflight.shape[1] < rows - 1):
        raise ValueError(f"inflight is too short, expected {rows - 1} tokens a row: a row has a penalty")
    out = np.zeros(logits.shape)
    # The last row sees all of inflight: one draft step and a whole verification are counted alike.
    before = 0 if inflight is None else inflight.shape[1] - (rows - 1)
    for b in range(batch):
        factors = (warp.repetition_penalty[b], warp.presence_penalty[b], warp.frequency_penalty[b])
        for t in range(rows):
            row = logits[b, t]
            if context is not None and factors != (1.0, 0.0, 0.0):
                tail = [] if inflight is None else [int(token) for token in inflight[b, : before + t]]
                row = penalise(row, np.array([*context[b], *tail], dtype=np.int64), *factors)
            out[b, t] = warp_row(row, warp.temperature[b], warp.top_k[b], warp.top_p[b], warp.min_p[b])
    return out


def draw(weights: Floats, u: float) -> int:
    """The first token whose cumulative share of weights [V] exceeds u in [0, 1). Raise ValueError when no weight is positive."""
    if not 0 <= u < 1:
        raise ValueError(f"uniform is {u}, expected 0 to 1, without 1")
    cumulative = np.cumsum(weights)
    if not cumulative[-1] > 0:
        raise ValueError(f"weights sum to {cumulative[-1]}, expected a positive mass")
    above = np.flatnonzero(cumulative > u * cumulative[-1])
    return int(above[0]) if len(above) else int(np.flatnonzero(weights)[-1])


def sample(distributions: Floats, uniforms: Sequence[float]) -> Ints:
    """[B, 1] tokens from distributions [B, 1, V] by inverse CDF in token order, uniforms [B]."""
    if distributions.shape[1] != 1 or len(uniforms) != len(distributions):
        raise ValueError(f"probabilities {distributions.shape} and {len(uniforms)} uniforms, expected [B, 1, V] and B")
    return np.array([[draw(row[0], u)] for row, u in zip(distributions, uniforms, strict=True)], dtype=np.int64)


def confidence(logits: Floats, distributions: Floats | None) -> Floats:
    """[B, 1] top probability of distributions [B, 1, V], or of softmax(logits [B, 1, V]) without them."""
    return np.asarray((softmax(logits) if distributions is None else distributions).max(axis=-1))


def favour(logits: Floats, drafts: Ints, num_drafts: Sequence[int], sureness: Floats, threshold: float) -> Floats:
    """A copy of logits [B, G+1, V] with 1e30 at drafts[b, i] of row i < num_drafts[b] where sureness[b, i] >= threshold."""
    out = logits.copy()
    for b, i in np.argwhere(np.asarray(sureness) >= threshold):
        if i < num_drafts[b]:
            out[b, i, int(drafts[b, i])] = 1e30
    return out


def _check(drafts: Ints, num_drafts: Sequence[int], judged: Floats) -> None:
    batch, width = drafts.shape
    check_lengths("num_drafts", num_drafts, batch, [0] * batch, [width] * batch)
    if judged.shape[:2] != (batch, width + 1):
        raise ValueError(f"target rows have shape {judged.shape}, expected [{batch}, {width + 1}, V]: one more than drafts")


def finite_rows(logits: Floats, num_drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[B] bool: no NaN in the judged rows 0..num_drafts[b] of logits [B, T, V]."""
    return np.array([not np.isnan(logits[b, : n + 1]).any() for b, n in enumerate(num_drafts)], dtype=bool)


def accept_greedy(drafts: Ints, num_drafts: Sequence[int], logits: Floats) -> Verdict:
    """The longest prefix of drafts [B, G] equal to the argmax of logits [B, G+1, V], then that argmax."""
    _check(drafts, num_drafts, logits)
    best = logits.argmax(axis=-1)
    kept = np.zeros(len(drafts), dtype=np.int32)
    tokens = np.full((len(drafts), drafts.shape[1] + 1), -1, dtype=np.int32)
    for b, count in enumerate(num_drafts):
        n = 0
        while n < count and drafts[b, n] == best[b, n]:
            n += 1
        kept[b] = n
        tokens[b, : n + 1] = best[b, : n + 1]
    return Verdict(kept, tokens, None, finite_rows(logits, num_drafts))


def accept_sampled(
    drafts: Ints,
    num_drafts: Sequence[int],
    draft_probabilities: Floats | None,
    target_probabilities: Floats,
    finite_of: Floats,
    accept_uniforms: Sequence[Sequence[float]],
    next_uniforms: Sequence[float],
) -> Verdict:
    """Speculative sampling: accept d while u * q(d) < p(d), else draw from max(p - q, 0); after all, draw from the next p.

    drafts [B, G], draft_probabilities [B, G, V] or None for one-hot, target_probabilities [B, G+1, V],
    accept_uniforms [B, >= num_drafts[b]], next_uniforms [B].
    """
    _check(drafts, num_drafts, target_probabilities)
    size = target_probabilities.shape[-1]
    kept = np.zeros(len(drafts), dtype=np.int32)
    tokens = np.full((len(drafts), drafts.shape[1] + 1), -1, dtype=np.int32)
    for b, count in enumerate(num_drafts):
        weights = target_probabilities[b, count]
        n = count
        for i in range(count):
            p, token = target_probabilities[b, i], int(drafts[b, i])
            q = one_hot(token, size) if draft_probabilities is None else draft_probabilities[b, i]
            if not accept_uniforms[b][i] * q[token] < p[token]:
                residual = np.maximum(p - q, 0)
                # p == q up to rounding leaves no residual; p is then what the residual tends to.
                n, weights = i, residual if residual.sum() > 0 else p
                break
        kept[b] = n
        tokens[b, :n] = drafts[b, :n]
        tokens[b, n] = draw(weights, next_uniforms[b])
    return Verdict(kept, tokens, target_probabilities, finite_rows(finite_of, num_drafts))
