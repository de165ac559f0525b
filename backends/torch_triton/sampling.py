"""Warps, samplers and acceptance on the device (METHOD section 5). No randomness here: uniforms are passed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dustin.backends.common.checks import COLDEST, check_warp
from dustin.backends.torch_triton.cache import check_lengths
from dustin.backends.torch_triton.ops import on_device, top_mask
from dustin.interfaces import HostVerdict, TokenLogprobs, Verdict, WarpBatch


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[...] from [..., V]; torch returns the first of equal maxima."""
    return logits.argmax(-1)


def penalise(logits: torch.Tensor, seen: torch.Tensor, repetition: float, presence: float, frequency: float) -> torch.Tensor:
    """Logits [V] after penalties for the tokens `seen` [n]: repetition scales them, then frequency and presence subtract."""
    counts = torch.bincount(seen, minlength=len(logits))
    if len(counts) != len(logits):
        raise ValueError(f"a penalised token is {int(seen.max())}, expected one below the vocabulary size {len(logits)}")
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(counts > 0, scaled - frequency * counts - presence, logits)


def warp_rows(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[T, V] distributions: temperature, top-k, top-p, min-p, renormalised after each. Ties keep the lower index.

    Temperature 0 is one-hot at the argmax, as is a row with +inf. Rows with a NaN are one-hot at 0: finite, and reported
    by `Verdict.finite`.
    """
    size = logits.shape[-1]
    broken = logits.isnan().any(-1, keepdim=True)
    logits = torch.where(broken, torch.zeros_like(logits), logits)
    spiked = F.one_hot(logits.argmax(-1), size).to(logits.dtype)
    if temperature == 0:
        return spiked
    # The gap to the best token, so that a low temperature overflows nowhere.
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / max(temperature, COLDEST), -1)
    if 0 < top_k < size:
        p = _normalised(p * top_mask(logits, top_k))
    if top_p < 1:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        mass = p.gather(-1, order).double()
        before = F.pad(mass.cumsum(-1)[..., :-1], (1, 0))
        p = _normalised(p * torch.zeros_like(p).scatter(-1, order, (before < top_p).to(p.dtype)))
    if min_p > 0:
        p = _normalised(p * (p >= min_p * p.max(-1, keepdim=True).values))
    return torch.where(broken | logits.isposinf().any(-1, keepdim=True), spiked, p)


def _normalised(p: torch.Tensor) -> torch.Tensor:
    return p / p.sum(-1, keepdim=True)


def probabilities(
    logits: torch.Tensor, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: torch.Tensor | None
) -> torch.Tensor:
    """Warped distributions [B, T, V] fp32; penalties of row t count context[b] and the first I - (T - 1) + t of inflight."""
    batch, rows, _ = logits.shape
    width = 0 if inflight is None else inflight.shape[1]
    check_warp(warp, context, batch, rows, width)
    out = []
    for b in range(batch):
        block = logits[b].float()
        factors = (warp.repetition_penalty[b], warp.presence_penalty[b], warp.frequency_penalty[b])
        if context is not None and factors != (1.0, 0.0, 0.0):
            known = on_device(list(context[b]), torch.long, logits.device)
            lines = []
            for t in range(rows):
                tail = known[:0] if inflight is None else inflight[b, : width - (rows - 1) + t]
                lines.append(penalise(block[t], torch.cat([known, tail[tail >= 0]]), *factors))
            block = torch.stack(lines)
        out.append(warp_rows(block, warp.temperature[b], warp.top_k[b], warp.top_p[b], warp.min_p[b]))
    return torch.stack(out)


def draw(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """[B]: the first token whose cumulative share of weights [B, V] exceeds u in [0, 1)."""
    if not all(0 <= u < 1 for u in uniforms):
        raise ValueError(f"uniforms are {list(uniforms)}, expected 0 to 1, without 1")
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    wanted = on_device(list(uniforms), torch.double, weights.device)[:, None] * total
    # u * total may round up to total itself: the last token that has mass is then the answer.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)[:, 0]


def confidence(logits: torch.Tensor, distributions: torch.Tensor | None) -> torch.Tensor:
    """[B, 1] fp32 top probability of distributions [B, 1, V], or of softmax(logits [B, 1, V]) without them."""
    if distributions is not None:
        return distributions.float().amax(-1)
    values = logits.float()
    # The largest of a softmax, without making the others.
    return torch.exp(values.amax(-1) - torch.logsumexp(values, -1))


def favour(
    logits: torch.Tensor, drafts: torch.Tensor, num_drafts: Sequence[int], sureness: torch.Tensor, threshold: float
) -> torch.Tensor:
    """A copy of logits [B, G+1, V] with 1e30 at drafts[b, i] of row i < num_drafts[b] where sureness[b, i] >= threshold."""
    out = logits.clone()
    at = drafts.long()[..., None]
    front = out[:, : drafts.shape[1]]
    counts = on_device(list(num_drafts), torch.long, logits.device)
    judged = torch.arange(drafts.shape[1], device=logits.device)[None] < counts[:, None]
    sure = ((sureness >= threshold) & judged)[..., None]
    most = 6e4 if out.dtype == torch.float16 else 1e30
    front.scatter_(-1, at, front.gather(-1, at).masked_fill(sure, most))
    return out


def _check(drafts: torch.Tensor, num_drafts: Sequence[int], judged: torch.Tensor) -> None:
    batch, width = drafts.shape
    check_lengths("num_drafts", num_drafts, [0] * batch, [width] * batch)
    if tuple(judged.shape[:2]) != (batch, width + 1):
        raise ValueError(f"target rows have shape {tuple(judged.shape)}, expected [{batch}, {width + 1}, V]: one more than drafts")


def _finite(logits: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """[B] bool: no NaN in the judged rows 0..num_drafts[b] of logits [B, T, V]."""
    judged = torch.arange(logits.shape[1], device=logits.device)[None] <= num_drafts[:, None]
    return ~(logits.isnan().any(-1) & judged).any(-1)


def _prefix(kept: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """[B] int32: length of the leading run of True in kept [B, G], at most num_drafts[b]."""
    valid = torch.arange(kept.shape[1], device=kept.device)[None] < num_drafts[:, None]
    return (kept & valid).int().cumprod(-1).sum(-1).to(torch.int32)


def accept_greedy(drafts: torch.Tensor, num_drafts: Sequence[int], logits: torch.Tensor) -> Verdict:
    """The longest prefix of drafts [B, G] equal to the argmax of logits [B, G+1, V], then that argmax."""
    _check(drafts, num_drafts, logits)
    counts = on_device(list(num_drafts), torch.long, logits.device)
    best = first_argmax(logits)
    kept = _prefix(drafts == best[:, :-1], counts)
    return Verdict(kept, best.to(torch.int32), None, _finite(logits, counts))


def accept_sampled(
    drafts: torch.Tensor,
    num_drafts: Sequence[int],
    draft_probabilities: torch.Tensor | None,
    target_probabilities: torch.Tensor,
    finite_of: torch.Tensor,
    accept_uniforms: Sequence[Sequence[float]],
    next_uniforms: Sequence[float],
) -> Verdict:
    """Speculative sampling: accept d while u * q(d) < p(d), else draw from max(p - q, 0); after all, draw from the next p.

    drafts [B, G], draft_probabilities [B, >= G, V] or None for one-hot, target_probabilities [B, G+1, V],
    accept_uniforms [B, >= num_drafts[b]], next_uniforms [B].
    """
    _check(drafts, num_drafts, target_probabilities)
    batch, width = drafts.shape
    device, p = drafts.device, target_probabilities
    counts = on_device(list(num_drafts), torch.long, device)
    kept = torch.zeros(batch, dtype=torch.int32, device=device)
    weights = p[:, 0]
    if width:
        padded = [[*row, *[0.0] * width][:width] for row in accept_uniforms]
        u = on_device(padded, torch.double, device)
        at = drafts[..., None]
        q = None if draft_probabilities is None else draft_probabilities[:, :width]
        q_of_draft = 1.0 if q is None else _covering(q, width).gather(-1, at)[..., 0].double()
        kept = _prefix(u * q_of_draft < p[:, :width].gather(-1, at)[..., 0].double(), counts)
        rows = torch.arange(batch, device=device)
        refused = kept.long().clamp(max=width - 1)
        q_row = F.one_hot(drafts[rows, refused], p.shape[-1]).to(p.dtype) if q is None else _covering(q, width)[rows, refused]
        weights = p[rows, kept.long()]
        residual = (weights - q_row).clamp(min=0)
        # p == q up to rounding leaves no residual; p is then what the residual tends to.
        usable = (kept < counts) & (residual.sum(-1) > 0)
        weights = torch.where(usable[:, None], residual, weights)
    next_tokens = draw(weights, next_uniforms)
    tokens = F.pad(drafts, (0, 1)).scatter(1, kept.long()[:, None], next_tokens[:, None])
    return Verdict(kept, tokens.to(torch.int32), p, _finite(finite_of, counts))


def _covering(q: torch.Tensor, width: int) -> torch.Tensor:
    """q [B, n, V] with zero rows added up to `width`: rows may have fewer draft distributions than drafts are padded to."""
    return q if q.shape[1] >= width else F.pad(q, (0, 0, 0, width - q.shape[1]))


def read(verdict: Verdict, logits: torch.Tensor | None, top_logprobs: int | None) -> HostVerdict:
    """Host copy of a verdict, everything in one transfer (fp64 holds token numbers exactly)."""
    batch, width = verdict.tokens.shape
    parts = [verdict.num_accepted[:, None], verdict.finite[:, None], verdict.tokens]
    if top_logprobs is not None:
        if logits is None:
            raise ValueError("logits is None, expected [B, T, V]: top_logprobs was asked for")
        parts += [part.flatten(1) for part in _logprobs(logits[:, :width], verdict.tokens.long(), top_logprobs)]
    host = torch.cat([part.double() for part in parts], 1).tolist()
    kept, tokens, finite = unpacked(host)
    logprobs = None
    if top_logprobs is not None:
        logprobs = tuple(
            tuple(_token_logprobs(row[2 + width :], i, token, width, top_logprobs) for i, token in enumerate(emitted))
            for row, emitted in zip(host, tokens, strict=True)
        )
    return HostVerdict(kept, tokens, finite, logprobs)


def unpacked(host: list[list[float]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """Drafts kept, tokens emitted, whether logits were finite, of rows that begin with the first, the last and the tokens."""
    kept = tuple(int(row[0]) for row in host)
    tokens = tuple(tuple(int(t) for t in row[2 : 3 + n]) for row, n in zip(host, kept, strict=True))
    return kept, tokens, tuple(bool(row[1]) for row in host)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax at tokens [B, T]; the `top` best tokens [B, T, top] and theirs; a tie goes to the lower index."""
    values = torch.log_softmax(logits.float(), -1)
    chosen = values.gather(-1, tokens.clamp(min=0)[..., None])
    mask = top_mask(torch.nan_to_num(values, nan=float("-inf")), top)
    at = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :top]
    best = values.gather(-1, at)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    return chosen, at.gather(-1, order), best.gather(-1, order)


def _token_logprobs(row: list[float], i: int, token: int, width: int, top: int) -> TokenLogprobs:
    tokens = row[width + i * top : width + (i + 1) * top]
    values = row[width * (1 + top) + i * top : width * (1 + top) + (i + 1) * top]
    return TokenLogprobs(token, row[i], tuple(int(t) for t in tokens), tuple(values))
