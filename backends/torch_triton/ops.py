"""Scores and the quota rule, over all sequences at once and without a host read (METHOD section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dustin.backends.torch_triton.cache import TorchCache, check_lengths
from dustin.backends.torch_triton.compact_keys import CompactKeys
from dustin.interfaces import Reselection, Tap, TokenSet

# Keys taken to fp32 at once when scoring.
_SCORE_CHUNK = 4096


def score(
    queries: Mapping[int, torch.Tensor],
    tap: Tap,
    cache: TorchCache,
    lengths: Sequence[int],
    *,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """[B, max(lengths)] fp32: attention mass of each committed token, the mean over (layer, row, head); -inf beyond lengths[b].

    `queries` maps a layer to [B, R, S, D], its S heads named by `tap.heads`. Raise ValueError when they do not fit.
    """
    if not queries:
        raise ValueError("queries is empty, expected captured queries of one layer or more")
    check_lengths("lengths", lengths, [0] * cache.batch, cache.lengths)
    total = torch.full((cache.batch, max(lengths)), float("-inf"), device=cache.device)
    for layer, q in queries.items():
        if q.shape[0] != cache.batch or q.shape[2] != len(tap.heads[layer]):
            raise ValueError(
                f"queries[{layer}] has shape {tuple(q.shape)}, expected {cache.batch} sequences and {len(tap.heads[layer])} heads"
            )
    for b, length in enumerate(lengths):
        if not length:
            continue
        mass = torch.zeros(length, device=cache.device)
        for layer, q in queries.items():
            mass += _mass(q[b], tap.heads[layer], cache.keys[layer][b, :length], num_heads, scale)
        total[b, :length] = mass / sum(q.shape[1] * q.shape[2] for q in queries.values())
    return total


def _mass(q: torch.Tensor, heads: Sequence[int], keys: torch.Tensor, num_heads: int, scale: float) -> torch.Tensor:
    """[n] fp32: sum over rows and heads of softmax_j(q.K_j * scale), q [R, S, D], keys [n, Hkv, D]. One kv head at a time."""
    group = num_heads // keys.shape[1]
    mass = torch.zeros(len(keys), device=keys.device)
    for kv_head in sorted({head // group for head in heads}):
        members = [i for i, head in enumerate(heads) if head // group == kv_head]
        rows = q[:, members].flatten(0, 1).float() * scale
        # fp32 throughout: bf16 products round scores of 100 to whole halves.
        chunks = keys[:, kv_head].split(_SCORE_CHUNK)
        logits = torch.cat([rows @ chunk.float().t() for chunk in chunks], 1)
        mass += torch.softmax(logits, 1).sum(0)
    return mass


def top_mask(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[..., n] bool: the `count` largest scores of each row, the lower index first among equals. No NaN among the scores."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _best(scores: torch.Tensor | None, candidates: torch.Tensor, count: int) -> torch.Tensor:
    """[B, n] bool: the top `count` candidates [B, n] by scores [B, any]; missing and NaN scores rank last."""
    if scores is None or count <= 0:
        return torch.zeros_like(candidates)
    lowest = torch.finfo(torch.float32).min
    ranked = torch.full(candidates.shape, lowest, device=candidates.device)
    width = min(scores.shape[1], ranked.shape[1])
    # A candidate's -inf still ranks above what is no candidate.
    ranked[:, :width] = torch.nan_to_num(scores[:, :width].float(), nan=lowest, neginf=lowest)
    return top_mask(ranked.masked_fill(~candidates, float("-inf")), count) & candidates


def host_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values on the host, from where a copy to `device` with non_blocking=True waits for nothing.

    On a GPU that takes pinned memory: copies from other memory may wait for the stream. torch gives a pinned block to nobody
    else before the copies from it have ended, so the tensor may be dropped at once.
    """
    return _pinned(torch.tensor(values, dtype=dtype), device)


def _pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory() if device.type == "cuda" and host.numel() else host


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host values on a device, without waiting for what runs there: torch.tensor(device=...) waits for all of it."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device, likewise."""
    return _pinned(host, device).to(device, non_blocking=True)


def select(
    target_scores: torch.Tensor | None,
    draft_scores: torch.Tensor | None,
    lengths: Sequence[int],
    budget: int,
    num_sink_tokens: int,
    num_recent_tokens: int,
    num_draft_selected: int,
    device: torch.device,
) -> TokenSet:
    """The quota rule (Backend.select). Raise ValueError on negative counts or a budget below the protected tokens."""
    if min(budget, num_sink_tokens, num_recent_tokens, num_draft_selected, *lengths) < 0:
        raise ValueError("budget, num_sink_tokens, num_recent_tokens, num_draft_selected, lengths: expected 0 or more each")
    if num_sink_tokens + num_recent_tokens > budget:
        raise ValueError(f"budget is {budget} tokens, expected {num_sink_tokens + num_recent_tokens} or more: the protected ones")
    if target_scores is None and draft_scores is None:
        num_recent_tokens = budget - num_sink_tokens
    rest = budget - num_sink_tokens - num_recent_tokens
    by_draft = 0 if draft_scores is None else rest if target_scores is None else min(num_draft_selected, rest)
    at = torch.arange(max(lengths), device=device)[None]
    end = on_device(list(lengths), torch.long, device)[:, None]
    inside = at < end
    chosen = inside & ((at < num_sink_tokens) | (at >= end - num_recent_tokens) | (end <= budget))
    for scores, count in ((draft_scores, by_draft), (target_scores, rest - by_draft)):
        chosen |= _best(scores, inside & ~chosen, count)
    counts = [min(length, budget) for length in lengths]
    return TokenSet(_indices(chosen, max(counts)), on_device(counts, torch.int32, device))


def _indices(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """[B, width] int32: ascending positions of the True entries of chosen [B, n]; unused entries are 0."""
    rank = torch.where(chosen, chosen.cumsum(1) - 1, width)
    at = torch.arange(chosen.shape[1], device=chosen.device, dtype=torch.int32).expand(chosen.shape)
    return torch.zeros(len(chosen), width + 1, dtype=torch.int32, device=chosen.device).scatter_(1, rank, at)[:, :width]


def reselected(
    token_set: TokenSet | None,
    q: torch.Tensor,
    cache: TorchCache,
    layer: int,
    num_tokens: Sequence[int],
    *,
    scale: float,
    compact: CompactKeys | None = None,
) -> TokenSet | None:
    """The set that the in-flight queries q [R, Hq, D] (sequence by sequence) choose where the set's reselection names `layer`;
    None elsewhere. Raise ValueError on heads that q lacks."""
    again = reselection_at(token_set, layer, q.shape[1])
    if again is None:
        return None
    heads, num_heads = again.heads[layer], q.shape[1]
    keys = cache.keys[layer]
    if again.rank and compact is not None:
        q = compact.queries(layer, q[:, None])[:, 0]
        codes = compact.store(cache, layer).unflatten(0, keys.shape[:2])
    scores = torch.full((cache.batch, max(cache.lengths)), float("-inf"), device=cache.device)
    start = 0
    for b, (length, count) in enumerate(zip(cache.lengths, num_tokens, strict=True)):
        rows = min(count, again.max_rows)
        if length and rows:
            if again.rank and compact is not None:
                read = compact.numbers_of(codes[b, :length])
            else:
                read = keys[b, :length]
            mass = _mass(q[start : start + rows, list(heads)], heads, read, num_heads, scale)
            scores[b, :length] = mass / (rows * len(heads))
        start += count
    windows = (again.num_sink_tokens, again.num_recent_tokens)
    return select(scores, None, cache.lengths, again.budget, *windows, 0, scores.device)


def choose(
    scores: torch.Tensor, lengths: torch.Tensor, budget: int, num_sink_tokens: int, num_recent_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [B, budget] int32 and counts [B] int32 of the quota rule by target scores alone, all lengths on the device."""
    at, end = torch.arange(scores.shape[1], device=scores.device)[None], lengths[:, None]
    inside = at < end
    chosen = inside & ((at < num_sink_tokens) | (at >= end - num_recent_tokens) | (end <= budget))
    # Of a row that fits, nothing is left to choose from.
    chosen |= _best(scores, inside & ~chosen, budget - num_sink_tokens - num_recent_tokens)
    return _indices(chosen, budget), lengths.clamp(max=budget).to(torch.int32)


def reselection_at(token_set: TokenSet | None, layer: int, num_heads: int) -> Reselection | None:
    """The reselection of a set where it names `layer` and the layer is neither dense nor has a set given. Raise ValueError on
    heads that the layer lacks."""
    again = None if token_set is None else token_set.reselection
    if token_set is None or again is None or layer not in again.heads:
        return None
    if layer in token_set.dense_layers or layer in token_set.by_layer:
        return None
    heads = again.heads[layer]
    if not heads or min(heads) < 0 or max(heads) >= num_heads:
        raise ValueError(f"reselection names heads {list(heads)} of layer {layer}, expected some of 0 to {num_heads - 1}")
    return again


def extend(token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
    """A new set: row b keeps entries below min(starts[b], stops[b]) and gains starts[b]..stops[b]-1; the same by layer."""
    if len(starts) != len(stops) or len(starts) != len(token_set.indices):
        raise ValueError(f"{len(starts)} starts and {len(stops)} stops, expected {len(token_set.indices)} of each")
    # indices [B, k]: the kept ones are a prefix because they ascend.
    device = token_set.indices.device
    start, stop = (on_device(list(x), torch.long, device)[:, None] for x in (starts, stops))
    at = torch.arange(token_set.indices.shape[1], device=device)[None]
    kept = ((at < token_set.counts[:, None]) & (token_set.indices < torch.minimum(start, stop))).sum(1, keepdim=True)
    grown = [max(0, b - a) for a, b in zip(starts, stops, strict=True)]
    at = torch.arange(token_set.indices.shape[1] + max(grown), device=device)[None]
    old = torch.nn.functional.pad(token_set.indices, (0, max(grown)))
    indices = torch.where(at < kept, old, (start + at - kept).to(torch.int32)).to(torch.int32)
    counts = (kept[:, 0] + on_device(grown, torch.long, device)).to(torch.int32)
    by_layer = {layer: extend(part, starts, stops) for layer, part in token_set.by_layer.items()}
    return TokenSet(indices, counts, token_set.dense_layers, by_layer)


def replace_set_rows(old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
    """Row b from `new` where rows[b], else from `old`; padded to the wider of the two. Layers' own sets come from `new`."""
    width = max(old.indices.shape[1], new.indices.shape[1])
    taken = on_device(list(rows), torch.bool, new.indices.device)
    wide = [torch.nn.functional.pad(part.indices, (0, width - part.indices.shape[1])) for part in (new, old)]
    indices = torch.where(taken[:, None], wide[0], wide[1])
    by_layer = {
        layer: replace_set_rows(old.by_layer[layer], part, rows) if layer in old.by_layer else part
        for layer, part in new.by_layer.items()
    }
    return TokenSet(indices, torch.where(taken, new.counts, old.counts), new.dense_layers, by_layer)
