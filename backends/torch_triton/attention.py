"""Attention over a token-major cache without copies of it, and over gathered rows (METHOD section 2).

The g query heads of one kv head and the T rows of a sequence are packed into the row axis [Hkv, g*T, D]: a kv head is
read once and never repeated. Keys are cut into equal parts that threads share; parts join by their log-sum-exp, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dustin.backends.torch_triton.cache import TorchCache, check_lengths
from dustin.interfaces import TokenSet

# Rows up to which one masked pass over the last keys is cheaper than a causal pass with repeated heads.
_PACKED_ROWS = 64
_MIN_PART = 256
# Rows of a sliding layer computed at once: they share one span of keys, so that masks stay small.
_WINDOW_ROWS = 128
Pair = tuple[torch.Tensor, torch.Tensor]


def flash(q: torch.Tensor, kv: Pair, scale: float, mask: torch.Tensor | None = None, causal: bool = False) -> Pair:
    """Output and log-sum-exp [n, H, rows] of q [n, H, rows, D] over keys, values [n, keys, H, D] (any strides)."""
    k, v = (x.transpose(1, 2) for x in kv)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def num_parts(keys: int, num_kv_heads: int) -> int:
    """Parts that `keys` keys are cut into: enough for all threads, each of _MIN_PART keys or more, 0 for few keys."""
    return min(max(4, 2 * torch.get_num_threads() // num_kv_heads), keys // _MIN_PART)


def tail_mask(rows: int, group: int, before: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[g*T, before+T] additive: row t of each head sees the `before` keys and in-flight keys 0..t. None where all see all."""
    if rows == 1:
        return None
    return torch.full((rows, before + rows), float("-inf"), dtype=dtype).triu(before + 1).repeat(group, 1)


def join(outputs: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Attention over all parts from outputs [n, P, H, rows, D] and log-sum-exps [n, P, H, rows] of disjoint ones; fp32."""
    return (outputs * torch.softmax(lse, 1)[..., None]).sum(1)


def packed(q: torch.Tensor, main: Pair | None, tail: Pair | None, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[n, T, Hq, D] of q of that shape over main [n*P, c, Hkv, D] (seen by all rows) and tail [n, keys, Hkv, D] (masked)."""
    n, rows, num_heads, dim = q.shape
    heads = (main or tail)[0].shape[2]  # type: ignore[index]
    group = num_heads // heads
    x = q.view(n, rows, heads, group, dim).permute(0, 2, 3, 1, 4).reshape(n, heads, group * rows, dim)
    if main is None:
        out, _ = flash(x, tail, scale, mask)  # type: ignore[arg-type]
    else:
        parts = main[0].shape[0] // n
        out, lse = flash(x.repeat_interleave(parts, 0) if n > 1 else x.expand(parts, -1, -1, -1), main, scale)
        out, lse = out.view(n, parts, *x.shape[1:]), lse.view(n, parts, *x.shape[1:3])
        if tail is not None:
            last, last_lse = flash(x, tail, scale, mask)
            out, lse = torch.cat([out, last[:, None]], 1), torch.cat([lse, last_lse[:, None]], 1)
        out = join(out, lse).to(q.dtype) if out.shape[1] > 1 else out[:, 0]
    return out.view(n, heads, group, rows, dim).permute(0, 3, 1, 2, 4).reshape(q.shape)


def long_rows(q: torch.Tensor, kv: Pair, past: int, scale: float) -> torch.Tensor:
    """[T, Hq, D] of many rows q over keys, values [past+T, Hkv, D]: the past unmasked and packed, the chunk itself causal."""
    rows, num_heads, dim = q.shape
    heads = kv[0].shape[1]
    group = num_heads // heads
    own = tuple(x[None, past:].repeat_interleave(group, 2) for x in kv)
    out, lse = flash(q.transpose(0, 1)[None], own, scale, causal=True)  # type: ignore[arg-type]
    if past:
        x = q.view(rows, heads, group, dim).permute(1, 2, 0, 3).reshape(1, heads, group * rows, dim)
        old, old_lse = flash(x, (kv[0][None, :past], kv[1][None, :past]), scale)
        shape = (1, num_heads, rows)
        out = join(torch.stack([old.view(*shape, dim), out], 1), torch.stack([old_lse.reshape(shape), lse], 1)).to(q.dtype)
    return out[0].transpose(0, 1)


@dataclass
class Attention:
    """All sequences' attention of one forward; built once, called for every layer.

    `lengths` are the committed rows before this forward, `num_tokens` its rows; both per sequence. Raise ValueError on a
    set that does not fit the lengths.
    """

    lengths: Sequence[int]
    num_tokens: Sequence[int]
    scale: float
    _sparse: dict[int, tuple[TokenSet, _Gather]] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int], torch.Tensor | None] = field(default_factory=dict)

    def __call__(
        self, q: torch.Tensor, cache: TorchCache, layer: int, token_set: TokenSet | None, window: int | None
    ) -> torch.Tensor:
        """[R, Hq, D] from q of that shape (valid rows of all sequences, packed); in-flight K and V lie in the cache already."""
        keys, values = cache.keys[layer], cache.values[layer]
        gather = None if window is not None or token_set is None else self._gather(token_set, cache)
        if gather is None and sum(n > 0 for n in self.num_tokens) == 1:
            b = next(b for b, n in enumerate(self.num_tokens) if n)
            return self._row(q, keys[b], values[b], b, window)
        out, start = torch.empty_like(q), 0
        for b, rows in enumerate(self.num_tokens):
            if rows and (gather is None or b not in gather.taking):
                out[start : start + rows] = self._row(q[start : start + rows], keys[b], values[b], b, window)
            start += rows
        if gather is not None:
            gather(q, out, keys, values, self.scale)
        return out

    def _row(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, b: int, window: int | None) -> torch.Tensor:
        past, total = self.lengths[b], self.lengths[b] + self.num_tokens[b]
        if window is not None and total > window:
            return _windowed(q, keys[:total], values[:total], past, window, self.scale)
        if len(q) > _PACKED_ROWS:
            return long_rows(q, (keys[:total], values[:total]), past, self.scale)
        rows, (heads, dim) = len(q), keys.shape[1:]
        free = total if rows == 1 else past
        parts = num_parts(free, heads)
        cut = 0 if parts == 0 else parts * (free // parts)
        main = tail = mask = None
        if cut:
            main = tuple(x[:cut].view(parts, cut // parts, heads, dim) for x in (keys, values))
        if cut < total:
            tail = (keys[None, cut:total], values[None, cut:total])
            mask = self._mask(rows, q.shape[1] // heads, past - cut, q.dtype)
        return packed(q[None], main, tail, mask, self.scale)[0]  # type: ignore[arg-type]

    def _mask(self, rows: int, group: int, before: int, dtype: torch.dtype) -> torch.Tensor | None:
        key = (rows, group, before)
        if rows > 1 and key not in self._masks:
            self._masks[key] = tail_mask(rows, group, before, dtype)
        return self._masks.get(key)

    def _gather(self, token_set: TokenSet, cache: TorchCache) -> _Gather | None:
        if id(token_set) not in self._sparse:
            self._sparse[id(token_set)] = (token_set, _Gather(token_set, self.lengths, self.num_tokens, cache))
        gather = self._sparse[id(token_set)][1]
        return gather if gather.taking else None


class _Gather:
    """Which cache rows a set reads, as flat indices shared by all layers; sequences with equal counts run as one batch."""

    def __init__(self, token_set: TokenSet, lengths: Sequence[int], num_tokens: Sequence[int], cache: TorchCache) -> None:
        width = token_set.indices.shape[1]
        counts = check_lengths("token_set.counts", token_set.counts.tolist(), [0] * len(lengths), [width] * len(lengths))
        heads = cache.keys[0].shape[2]
        starts = [sum(num_tokens[:b]) for b in range(len(num_tokens))]
        groups: dict[tuple[int, int], list[int]] = {}
        # A sequence whose set is everything takes the dense path, so that it equals dense attention bit for bit.
        for b, rows in enumerate(num_tokens):
            if counts[b] > lengths[b]:
                raise ValueError(f"token_set.counts[{b}] is {counts[b]}, expected at most the {lengths[b]} committed rows")
            if rows and counts[b] < lengths[b]:
                groups.setdefault((rows, counts[b]), []).append(b)
        self.taking = frozenset(b for members in groups.values() for b in members)
        self._groups = []
        for (rows, count), members in groups.items():
            chosen = token_set.indices[members, :count].long()
            for row, b in zip(chosen, members, strict=True):
                if count and (row[0] < 0 or row[-1] >= lengths[b] or (row[1:] <= row[:-1]).any()):
                    raise ValueError(f"token_set.indices[{b}] are not ascending within 0..{lengths[b] - 1}")
            own = torch.tensor([[lengths[b] + t for t in range(rows)] for b in members], device=chosen.device)
            base = torch.tensor([[b * cache.capacity] for b in members], device=chosen.device)
            at = torch.tensor([[starts[b] + t for t in range(rows)] for b in members], device=chosen.device)
            parts = num_parts(count, heads)
            cut = 0 if parts == 0 else parts * (count // parts)
            tail = torch.cat([chosen[:, cut:], own], 1) + base
            self._groups.append((at, (chosen[:, :cut] + base).flatten(), tail, parts, count - cut))
        self._masks: dict[int, torch.Tensor | None] = {}

    def __call__(self, q: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """Fill the rows of `out` [R, Hq, D] that belong to sequences in `taking`."""
        stores = (keys.flatten(0, 1), values.flatten(0, 1))
        heads, dim = keys.shape[2:]
        for i, (at, main_rows, tail_rows, parts, before) in enumerate(self._groups):
            n, rows = at.shape
            main = tail = None
            if parts:
                main = tuple(x.index_select(0, main_rows).view(n * parts, -1, heads, dim) for x in stores)
            tail = tuple(x.index_select(0, tail_rows.flatten()).view(n, -1, heads, dim) for x in stores)
            if i not in self._masks:
                self._masks[i] = tail_mask(rows, q.shape[1] // heads, before, q.dtype)
            out[at] = packed(q[at], main, tail, self._masks[i], scale)  # type: ignore[arg-type]


def _windowed(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, window: int, scale: float) -> torch.Tensor:
    """[T, Hq, D] where row t sees the last `window` keys up to its own; keys, values [past+T, Hkv, D]."""
    group = q.shape[1] // keys.shape[1]
    out = []
    for start in range(0, len(q), _WINDOW_ROWS):
        block = q[start : start + _WINDOW_ROWS]
        low, high = max(0, past + start - window + 1), past + start + len(block)
        position = torch.arange(past + start, high)[:, None]
        seen = torch.arange(low, high)[None]
        hidden = (seen > position) | (seen <= position - window)
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf")).repeat(group, 1)
        out.append(packed(block[None], None, (keys[None, low:high], values[None, low:high]), mask, scale)[0])
    return torch.cat(out)
