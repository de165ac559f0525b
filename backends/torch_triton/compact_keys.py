"""A few bytes for every key in which queries still see what matters: keys reduced to `rank` numbers of four bits.

For each layer and kv head the keys' covariance as the queries weigh it, Cq^1/2 Ck Cq^1/2, gives the directions; codes are the
first `rank` coordinates of a key less the mean, in steps that cover REACH standard deviations of the fitting text's keys, two
to a byte: numbers j and j + rank / 2 are the low and the high half of byte j. It is fitted once a model, on a short text whose
keys and queries are turned to places all over the context: RoPE makes far keys differ from near ones by an angle alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin.backends.common.checks import SMALLER
from dustin.backends.torch_triton import rope
from dustin.backends.torch_triton.cuda_memory import named_shortage
from dustin.interfaces import Tap

# Committed rows that every forward on a GPU encodes anew: those of the rounds since the last one.
FRESH_ROWS = 16
# How often each row of the fitting text is turned elsewhere.
TURNS = 4
# Tokens of the fitting text read at once.
FIT_CHUNK = 512
# Standard deviations that the largest number stands for, and that number.
REACH = 2.8
LARGEST = 7


@dataclass(frozen=True, eq=False)
class CompactKeys:
    """Per layer, fp32: `mean` [Hkv, D], `encode` [Hkv, D, rank] (a key's codes) and `decode` [Hkv, D, rank] (a query's side)."""

    rank: int
    mean: Mapping[int, torch.Tensor]
    encode: Mapping[int, torch.Tensor]
    decode: Mapping[int, torch.Tensor]

    def codes_of(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """int8 [..., Hkv, rank / 2] of keys [..., Hkv, D]."""
        moved = keys.float() - self.mean[layer]
        numbers = torch.einsum("...hd,hdr->...hr", moved, self.encode[layer]).round_().clamp_(-LARGEST, LARGEST)
        low, high = numbers.to(torch.int8).chunk(2, -1)
        return (low & 15) | (high << 4)

    def numbers_of(self, codes: torch.Tensor) -> torch.Tensor:
        """fp32 [..., rank] of codes [..., rank / 2]."""
        return torch.cat([(codes << 4) >> 4, codes >> 4], -1).float()

    def queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[B, T, Hq, rank] in q's dtype of q [B, T, Hq, D]: their products with codes are those of queries and keys."""
        decode = self.decode[layer]
        group = q.shape[2] // len(decode)
        reduced = torch.einsum("bthgd,hdr->bthgr", q.unflatten(2, (-1, group)).float(), decode)
        return reduced.flatten(2, 3).to(q.dtype)

    def store(self, cache: Any, layer: int) -> torch.Tensor:
        """The codes [rows, Hkv, rank / 2] beside a layer's keys of a cache or its pool (see `flat_keys`), made at first use."""
        owner = getattr(cache, "pool", cache)
        # Kept as long as the keys: captured graphs hold their addresses.
        made = owner.compact.setdefault(self, {})
        if layer not in made:
            keys = cache.flat_keys(layer)
            with named_shortage("compact keys beside the KV cache", f"{SMALLER}, or leave --fidelity out"):
                made[layer] = torch.zeros(*keys.shape[:2], self.rank // 2, dtype=torch.int8, device=keys.device)
        return made[layer]

    @torch.inference_mode()
    def catch_up(self, cache: Any, layers: Iterable[int]) -> None:
        """Encode the committed rows that were written since the last call for these `layers`: those that choose, no others."""
        owner = (self, tuple(layers))
        known = cache.encoded_by(owner)
        for layer in owner[1]:
            keys, codes = cache.flat_keys(layer), self.store(cache, layer)
            for b, (have, n) in enumerate(zip(known, cache.lengths, strict=True)):
                rows = slice(b * cache.capacity + have, b * cache.capacity + n)
                codes[rows] = self.codes_of(layer, keys[rows])
        cache.mark_encoded(owner)


def fit(
    queries: Mapping[int, torch.Tensor],
    keys: Mapping[int, torch.Tensor],
    rank: int,
    inverse: torch.Tensor,
    context: int,
) -> CompactKeys:
    """From post-RoPE queries [T, Hq, D] and keys [T, Hkv, D] of each layer; `inverse` are RoPE's frequencies [D/2], `context`
    the places that rows are turned to. Raise ValueError on a rank that is odd or beyond the head dimension."""
    mean, encode, decode = {}, {}, {}
    for layer, k in keys.items():
        heads, dim = k.shape[1:]
        if not 2 <= rank <= dim or rank % 2:
            raise ValueError(f"rank is {rank}, expected an even number up to the head dimension {dim}")
        far_k, far_q = (_turned(x.float(), inverse, context) for x in (k, queries[layer]))
        mean[layer] = far_k.mean(0)
        moved = (far_k - mean[layer]).transpose(0, 1)
        asked = far_q.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        # Small, and double precision throughout: wherever the model runs, the same fit.
        of_keys, of_queries = ((x.transpose(1, 2) @ x / x.shape[1]).double().cpu() for x in (moved, asked))
        values, vectors = torch.linalg.eigh(of_queries)
        root = values.clamp(min=1e-6 * float(values.max())).sqrt()
        half, inverse_half = ((vectors * s[:, None]) @ vectors.transpose(1, 2) for s in (root, 1 / root))
        _, best = torch.linalg.eigh(half @ of_keys @ half)
        best = best.flip(-1)[..., :rank]
        into, outof = ((m @ best).float().to(k.device) for m in (half, inverse_half))
        spread = torch.einsum("hnd,hdr->hnr", moved, into).pow(2).mean(1).sqrt()
        step = (spread * (REACH / LARGEST)).clamp(min=1e-12)[:, None]
        encode[layer], decode[layer] = into / step, outof * step
    return CompactKeys(rank, mean, encode, decode)


def _turned(x: torch.Tensor, inverse: torch.Tensor, context: int) -> torch.Tensor:
    """Rows [T, H, D] repeated TURNS times, each turned on by a distance below `context` (the same on every machine)."""
    rows = x.repeat(TURNS, 1, 1)
    far = (torch.arange(len(rows), dtype=torch.long) * 2654435761 % max(1, context)).to(x.device)
    return rope.rotate(rows, *rope.table(far, inverse.to(x.device), 1.0))


def fit_model(model: Any, tokens: Sequence[int], rank: int, inverse: torch.Tensor) -> CompactKeys:
    """`fit` on a model's own reading of `tokens`. Raise ValueError where there are none, or more than the context holds."""
    spec = model.spec
    if not 0 < len(tokens) <= spec.context_length:
        raise ValueError(f"the text to fit has {len(tokens)} tokens, expected 1 to {spec.context_length}")
    layers = [layer for layer in range(spec.num_layers) if layer not in set(spec.sliding_layers)]
    tap = Tap({layer: tuple(range(spec.num_heads)) for layer in layers})
    cache = model.new_cache(1, len(tokens))
    read: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for first in range(0, len(tokens), FIT_CHUNK):
        part = torch.tensor([list(tokens[first : first + FIT_CHUNK])], dtype=torch.long, device=model.device)
        out = model.forward(part, [part.shape[1]], cache, tap=tap, logits="none")
        for layer in layers:
            read[layer].append(out.queries[layer][0])
    where = cache.places(torch.arange(len(tokens), device=model.device)[None])[0]
    keys = {layer: cache.flat_keys(layer)[where] for layer in layers}
    return fit({layer: torch.cat(parts) for layer, parts in read.items()}, keys, rank, inverse, spec.context_length)


def needed(compact: CompactKeys | None, rank: int) -> CompactKeys:
    """The compact keys of a model. Raise ValueError where they were not fitted, or for another rank."""
    if compact is None or compact.rank != rank:
        have = "none" if compact is None else f"rank {compact.rank}"
        raise ValueError(f"a set asks for compact keys of rank {rank}, the model has {have}: call fit_compact_keys first")
    return compact
