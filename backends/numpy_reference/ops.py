"""Attention, scores and the quota rule, one query row at a time (METHOD sections 2 and 3).

Nothing is batched over sequences or rows: what a row computes cannot depend on its neighbours, so a batch equals its
singles and many rows equal single steps, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dustin.backends.numpy_reference.cache import Cache, Floats, check_lengths
from dustin.backends.numpy_reference.compact_keys import CompactKeys
from dustin.interfaces import Tap, TokenSet

Ints = npt.NDArray[np.int64]


def softmax(logits: Floats) -> Floats:
    """Softmax over the last axis. A row of +inf entries puts its mass on the first of them; NaN stays NaN."""
    top = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - top)
    spiked = np.isposinf(top)[..., 0]
    if spiked.any():
        weights[spiked] = np.eye(logits.shape[-1])[logits[spiked].argmax(axis=-1)]
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def set_of_layer(token_set: TokenSet | None, layer: int) -> TokenSet | None:
    """The set that `layer` reads: its own in `by_layer`, none (dense) in `dense_layers`, else the shared one."""
    if token_set is None or layer in token_set.by_layer:
        return None if token_set is None else token_set.by_layer[layer]
    return None if layer in token_set.dense_layers else token_set


def selected(token_set: TokenSet | None, b: int, length: int) -> Ints:
    """Indices of sequence b: [0, length) when the set is None. Raise ValueError on a set that is no ascending part of that."""
    if token_set is None:
        return np.arange(length)
    count = int(token_set.counts[b])
    if not 0 <= count <= np.shape(token_set.indices)[1]:
        raise ValueError(f"token_set.counts[{b}] is {count}, expected 0 to {np.shape(token_set.indices)[1]}")
    chosen = np.asarray(token_set.indices)[b, :count].astype(np.int64)
    if count and (chosen[0] < 0 or chosen[-1] >= length or (np.diff(chosen) <= 0).any()):
        raise ValueError(f"token_set.indices[{b}] is {chosen.tolist()}, expected ascending indices in 0..{length - 1}")
    return chosen


def head_logits(q: Floats, keys: Floats, heads: Sequence[int], group: int, scale: float, softcap: float | None) -> Floats:
    """Logits [S, n] of q [S, D] (query heads `heads`) against keys [n, Hkv, D]; head h reads kv head h // group."""
    picked = keys[:, [head // group for head in heads]]
    logits = np.einsum("sd,nsd->sn", q, picked) * scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


@dataclass(frozen=True)
class Attention:
    """The SparseAttention operation. `scale` multiplies q.K (None = 1/sqrt(D)); `window` is the sliding width in tokens.

    A layer with a window keeps it and ignores the token set. `softcap` c turns a logit x into c * tanh(x / c).
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def __call__(
        self,
        q: Floats,
        cache: Cache,
        layer: int,
        lengths: Sequence[int],
        num_tokens: Sequence[int],
        token_set: TokenSet | None,
    ) -> Floats:
        """[B, T, Hq, D] from q of that shape; in-flight K and V lie in the cache at lengths[b]... already.

        Rows at or beyond num_tokens[b] are 0. Raise ValueError on lengths beyond the cache or a bad set.
        """
        batch, rows, num_heads, head_dim = q.shape
        num_kv_heads = cache.keys[layer].shape[2]
        if num_heads % num_kv_heads or head_dim != cache.keys[layer].shape[3]:
            raise ValueError(f"q has shape {q.shape}, expected a multiple of {num_kv_heads} heads of {cache.keys[layer].shape[3]}")
        check_lengths("num_tokens", num_tokens, batch, [0] * batch, [rows] * batch)
        check_lengths("lengths", lengths, batch, [0] * batch, [cache.capacity - n for n in num_tokens])
        scale = 1 / math.sqrt(head_dim) if self.scale is None else self.scale
        group, heads = num_heads // num_kv_heads, range(num_heads)
        out = np.zeros(q.shape)
        for b in range(batch):
            chosen = None if num_tokens[b] == 0 else selected(None if self.window else token_set, b, lengths[b])
            for r in range(num_tokens[b]):
                position = lengths[b] + r
                seen = np.concatenate([chosen, np.arange(lengths[b], position + 1)])  # type: ignore[list-item]
                if self.window is not None:
                    seen = seen[seen > position - self.window]
                weights = softmax(head_logits(q[b, r], cache.keys[layer][b, seen], heads, group, scale, self.softcap))
                values = cache.values[layer][b, seen][:, [head // group for head in heads]]
                out[b, r] = np.einsum("hn,nhd->hd", weights, values)
        return out


def score(
    queries: Mapping[int, Floats],
    tap: Tap,
    cache: Cache,
    lengths: Sequence[int],
    *,
    num_heads: int,
    scale: float,
    softcap: float | None,
    within: TokenSet | None = None,
) -> npt.NDArray[np.float32]:
    """[B, max(lengths)] fp32: attention mass of each committed token, the mean over (layer, row, head); -inf beyond lengths[b].

    `queries` maps a layer to [B, R, S, D], its S heads named by `tap.heads`; `within` leaves the other tokens unread, at -inf.
    Raise ValueError when they do not fit.
    """
    if not queries:
        raise ValueError("queries is empty, expected captured queries of one layer or more")
    batch = cache.batch
    check_lengths("lengths", lengths, batch, [0] * batch, cache.lengths)
    total = np.full((batch, max(lengths)), -np.inf)
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        masses = []
        for layer, captured in queries.items():
            heads = tap.heads[layer]
            if captured.shape[0] != batch or captured.shape[2] != len(heads):
                raise ValueError(f"queries[{layer}] has shape {captured.shape}, expected {batch} sequences and {len(heads)} heads")
            chosen = selected(within, b, length)
            keys = cache.keys[layer][b, chosen]
            for q in captured[b]:
                masses.append(softmax(head_logits(q, keys, heads, num_heads // keys.shape[1], scale, softcap)))
        total[b, chosen] = np.concatenate(masses).mean(axis=0)
    return total.astype(np.float32)


def best(scores: npt.NDArray[np.floating] | None, candidates: Ints, count: int) -> Ints:
    """The `count` candidates (ascending indices) of the highest score; a tie goes to the lower index, NaN and -inf come last."""
    if count == 0 or scores is None:
        return candidates[:0]
    values = np.full(len(candidates), -np.inf)
    inside = candidates < len(scores)
    values[inside] = scores[candidates[inside]]
    values[np.isnan(values)] = -np.inf
    return candidates[np.argsort(-values, kind="stable")[:count]]


def select_row(
    target: npt.NDArray[np.floating] | None,
    draft: npt.NDArray[np.floating] | None,
    length: int,
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
) -> Ints:
    """The quota rule of one sequence: ascending indices, min(budget, length) of them (METHOD 3, item 2)."""
    if length <= budget:
        return np.arange(length)
    if target is None and draft is None:
        num_recent_tokens = budget - num_sink_tokens
    protected = np.union1d(np.arange(num_sink_tokens), np.arange(length - num_recent_tokens, length))
    rest = budget - len(protected)
    by_draft = 0 if draft is None else rest if target is None else min(num_draft_selected, rest)
    open_tokens = np.setdiff1d(np.arange(length), protected)
    from_draft = best(draft, open_tokens, by_draft)
    from_target = best(target, np.setdiff1d(open_tokens, from_draft), rest - by_draft)
    return np.sort(np.concatenate([protected, from_draft, from_target]))


def select(
    target_scores: npt.NDArray[np.floating] | None,
    draft_scores: npt.NDArray[np.floating] | None,
    lengths: Sequence[int],
    *,
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
) -> TokenSet:
    """`select_row` for each sequence; unused entries of indices [B, budget] are -1, so that reading them fails.

    Scores are [B, n] with any n; missing entries count as -inf. Raise ValueError on negative counts or a budget below the
    protected tokens.
    """
    if min(budget, num_sink_tokens, num_recent_tokens, num_draft_selected, *lengths) < 0:
        raise ValueError("budget, num_sink_tokens, num_recent_tokens, num_draft_selected, lengths: expected 0 or more each")
    if num_sink_tokens + num_recent_tokens > budget:
        raise ValueError(f"budget is {budget} tokens, expected {num_sink_tokens + num_recent_tokens} or more: the protected ones")
    indices = np.full((len(lengths), budget), -1, dtype=np.int32)
    counts = np.zeros(len(lengths), dtype=np.int32)
    for b, length in enumerate(lengths):
        target = None if target_scores is None else target_scores[b]
        draft = None if draft_scores is None else draft_scores[b]
        row = select_row(target, draft, length, budget, num_sink_tokens, num_recent_tokens, num_draft_selected)
        indices[b, : len(row)] = row
        counts[b] = len(row)
    return TokenSet(indices, counts)


def reselected(
    token_set: TokenSet | None,
    q: Floats,
    cache: Cache,
    layer: int,
    num_tokens: Sequence[int],
    scale: float,
    softcap: float | None,
    compact: CompactKeys | None = None,
) -> TokenSet | None:
    """The set that the in-flight queries q [B, T, Hq, D] choose where the set's reselection names `layer`; None elsewhere, and
    for layers that are dense or have a set given. Committed rows are cache.lengths. Raise ValueError on heads that q lacks, and
    on a rank whose compact keys were not fitted."""
    again = None if token_set is None else token_set.reselection
    if token_set is None or again is None or layer not in again.heads:
        return None
    if layer in token_set.dense_layers or layer in token_set.by_layer:
        return None
    heads = list(again.heads[layer])
    if not heads or min(heads) < 0 or max(heads) >= q.shape[2]:
        raise ValueError(f"reselection names heads {heads} of layer {layer}, expected some of 0 to {q.shape[2] - 1}")
    if again.rank and (compact is None or compact.rank != again.rank):
        raise ValueError(f"a set asks for compact keys of rank {again.rank}: call fit_compact_keys first")
    asked = compact.queries(layer, q) if compact is not None and again.rank else q
    scores = np.full((cache.batch, max(cache.lengths)), -np.inf)
    for b, length in enumerate(cache.lengths):
        rows = min(num_tokens[b], again.max_rows)
        if not length or not rows:
            continue
        keys = cache.keys[layer][b, :length]
        if compact is not None and again.rank:
            keys = compact.codes_of(layer, keys)
        group = q.shape[2] // keys.shape[1]
        masses = [softmax(head_logits(asked[b, r, heads], keys, heads, group, scale, softcap)) for r in range(rows)]
        scores[b, :length] = np.concatenate(masses).mean(axis=0)
    return select(
        scores.astype(np.float32), None, cache.lengths, budget=again.budget, num_sink_tokens=again.num_sink_tokens,
        num_recent_tokens=again.num_recent_tokens, num_draft_selected=0,
    )  # fmt: skip
