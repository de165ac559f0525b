"""Scores within a set, page bounds, accumulated scores, sets cut by mass, and what calibration measures. Plain torch operations.

`rows` of a layer are all keys of a cache as one [M, Hkv, D] (a view), and `places` [B, n] says where tokens lie in it; so the
plain and the paged cache share this code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from dustin.backends.torch_triton.ops import on_device
from dustin.interfaces import RowComparison, Tap, TokenSet

Rows = Callable[[int], torch.Tensor]
_NONE = float("-inf")


def score_within(
    queries: Mapping[int, torch.Tensor],
    tap: Tap,
    rows: Rows,
    places: torch.Tensor,
    within: TokenSet,
    columns: int,
    *,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """[B, columns] fp32 (see Backend.score): `places` [B, k] are those of `within`'s entries. Raise ValueError on no queries."""
    if not queries:
        raise ValueError("queries is empty, expected captured queries of one layer or more")
    batch, width = places.shape
    valid = torch.arange(width, device=places.device)[None] < within.counts[:, None]
    mass = torch.zeros(batch, width, device=places.device)
    for layer, q in queries.items():
        keys = rows(layer)[places.where(valid, 0)]
        for members, kv in _groups(tap.heads[layer], num_heads // keys.shape[2]):
            # fp32 throughout: bf16 products round scores of 100 to whole halves.
            logits = q[:, :, members].flatten(1, 2).float() @ keys[:, :, kv].float().transpose(1, 2) * scale
            mass += torch.softmax(logits.masked_fill(~valid[:, None], _NONE), -1).nan_to_num_(0.0).sum(1)
    mass /= sum(q.shape[1] * q.shape[2] for q in queries.values())
    # Unused entries go to a column of their own, which is cut off.
    at = torch.where(valid, within.indices[:, :width].long(), columns)
    return torch.full((batch, columns + 1), _NONE, device=places.device).scatter_(1, at, mass)[:, :columns]


def page_scores(
    queries: Mapping[int, torch.Tensor],
    tap: Tap,
    rows: Rows,
    places: torch.Tensor,
    lengths: Sequence[int],
    page_size: int,
    *,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """[B, n] fp32 (see Backend.page_scores); `places` [B, n] of all tokens. Raise ValueError on no queries or no page."""
    if not queries or page_size < 1:
        raise ValueError(f"{len(queries)} layers of queries and page_size {page_size}, expected 1 or more of each")
    batch, width = places.shape
    device = places.device
    pages = -(-width // page_size)
    padded = torch.nn.functional.pad(places, (0, pages * page_size - width))
    ends = on_device(list(lengths), torch.long, device)
    at = torch.arange(pages * page_size, device=device)
    inside = at[None] < ends[:, None]
    share = torch.zeros(batch, pages, device=device)
    for layer, q in queries.items():
        low, high = _bounds(rows(layer), padded.where(inside, 0), inside, page_size)
        for members, kv in _groups(tap.heads[layer], num_heads // low.shape[2]):
            x = q[:, :, members].flatten(1, 2).float()
            # max(q_d * low_d, q_d * high_d) is high_d for positive q_d, low_d for the others.
            bound = x.clamp(min=0) @ high[:, :, kv].transpose(1, 2) + x.clamp(max=0) @ low[:, :, kv].transpose(1, 2)
            bound = (bound * scale).masked_fill(~inside[:, None, ::page_size], _NONE)
            share += torch.softmax(bound, -1).nan_to_num_(0.0).sum(1)
    share /= sum(q.shape[1] * q.shape[2] for q in queries.values())
    return share.repeat_interleave(page_size, 1).masked_fill(~inside, _NONE)[:, :width]


def _bounds(
    rows: torch.Tensor, places: torch.Tensor, inside: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elementwise minima and maxima [B, pages, Hkv, D] fp32 of each page's keys; one sequence at a time, to bound memory."""
    parts = []
    for at, valid in zip(places, inside, strict=True):
        keys = rows[at].float().unflatten(0, (-1, page_size))
        hidden = ~valid.view(-1, page_size, 1, 1)
        parts.append((keys.masked_fill(hidden, math.inf).amin(1), keys.masked_fill(hidden, _NONE).amax(1)))
    low, high = (torch.stack(part) for part in zip(*parts, strict=True))
    # Pages without a token are masked later; infinities would turn 0 * inf into NaN first.
    return low.nan_to_num_(posinf=0.0), high.nan_to_num_(neginf=0.0)


def _groups(heads: Sequence[int], group: int) -> list[tuple[list[int], int]]:
    """For each kv head that serves some of `heads`: which of them, and the kv head."""
    kv_heads = sorted({head // group for head in heads})
    return [([i for i, head in enumerate(heads) if head // group == kv], kv) for kv in kv_heads]


def smooth(scores: torch.Tensor, width: int) -> torch.Tensor:
    """See Backend.smooth. Raise ValueError on an even width."""
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width is {width}, expected an odd number of tokens")
    finite = torch.isfinite(scores)
    parts = torch.stack([scores.masked_fill(~finite, 0.0), finite.to(scores.dtype)], 1).flatten(0, 1)[:, None]
    total, count = torch.nn.functional.avg_pool1d(parts, width, 1, width // 2).view(-1, 2, scores.shape[1]).unbind(1)
    return (total / count).masked_fill(~finite, _NONE)


def accumulate(old: torch.Tensor, new: torch.Tensor, decay: float | Sequence[float]) -> torch.Tensor:
    """See Backend.accumulate."""
    if not isinstance(decay, float):
        decay = on_device(list(decay), new.dtype, new.device)[:, None]  # type: ignore[assignment]
    width = max(old.shape[1], new.shape[1])
    before, fresh = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=_NONE) for x in (old, new))
    known = before.masked_fill(torch.isneginf(before), 0.0)
    return torch.where(torch.isneginf(fresh), before, decay * known + fresh)


def mass_at(scores: torch.Tensor, indices: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B, k] scores [B, Nmax] at indices [B, k]; what is not valid, missing or -inf is 0."""
    inside = valid & (indices < scores.shape[1])
    taken = scores.gather(1, indices.long().where(inside, 0))
    return taken.nan_to_num(neginf=0.0).where(inside, 0.0)


def keep_mass(
    token_set: TokenSet,
    scores: torch.Tensor,
    lengths: Sequence[int],
    mass: float,
    num_sink_tokens: int,
    num_recent_tokens: int,
) -> TokenSet:
    """See Backend.keep_mass. Raise ValueError on a mass outside 0..1."""
    if not 0 <= mass <= 1:
        raise ValueError(f"mass is {mass}, expected 0 to 1")
    indices, counts = token_set.indices, token_set.counts
    width, device = indices.shape[1], indices.device
    ends = on_device(list(lengths), torch.long, device)[:, None]
    valid = torch.arange(width, device=device)[None] < counts[:, None]
    values = mass_at(scores, indices, valid).double()
    protected = valid & ((indices < num_sink_tokens) | (indices >= ends - num_recent_tokens))
    # Protected first, then by score; stable, so that the lower index wins a tie. Unused entries come last.
    key = values.masked_fill(protected, math.inf).masked_fill(~valid, _NONE)
    order = key.argsort(dim=1, descending=True, stable=True)
    ranked = values.gather(1, order)
    whole = scores.double().nan_to_num(neginf=0.0).sum(1, keepdim=True)
    enough = (ranked.cumsum(1) - ranked) >= mass * whole
    kept = torch.zeros_like(valid).scatter_(1, order, ~enough | protected.gather(1, order))
    kept = valid & (kept | (counts[:, None] >= ends))
    rank = torch.where(kept, kept.cumsum(1) - 1, width)
    packed = torch.zeros(len(indices), width + 1, dtype=torch.int32, device=device).scatter_(1, rank, indices.to(torch.int32))
    return TokenSet(packed[:, :width].contiguous(), kept.sum(1).to(torch.int32), token_set.dense_layers, token_set.by_layer)


def set_mass(token_set: TokenSet, scores: torch.Tensor) -> list[float]:
    """See Measures.set_mass."""
    valid = torch.arange(token_set.indices.shape[1], device=scores.device)[None] < token_set.counts[:, None]
    return mass_at(scores, token_set.indices, valid).double().sum(1).tolist()


def compare_logits(reference: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> RowComparison:
    """See Measures.compare_logits; one transfer."""
    p, q = torch.log_softmax(reference.float(), -1), torch.log_softmax(logits.float(), -1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    best = reference.float().topk(2, -1).values
    # topk does not say which of equal maxima comes first: both sides take the lowest.
    same = first_best(reference) == first_best(logits)
    chosen = tokens[..., None]
    parts = [kl, same, best[..., 0] - best[..., 1], p.gather(-1, chosen)[..., 0], q.gather(-1, chosen)[..., 0]]
    host = torch.stack([part.double() for part in parts]).cpu().numpy()
    return RowComparison(host[0], host[1] > 0.5, host[2], host[3], host[4])


def first_best(logits: torch.Tensor) -> torch.Tensor:
    """The lowest index of the maximum of each row."""
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
