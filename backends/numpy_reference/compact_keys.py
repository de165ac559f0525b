"""Keys reduced to `rank` numbers of four bits in which queries still see what matters: the definition, in float64.

The keys' covariance as the queries weigh it, Cq^1/2 Ck Cq^1/2, gives the directions of each layer and kv head; codes are the
first `rank` coordinates of a key less the mean, in steps that cover REACH standard deviations of the fitting text's keys. That
text's rows are turned to places all over the context first: RoPE makes far keys differ from near ones by an angle alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dustin.backends.numpy_reference.cache import Floats
from dustin.backends.numpy_reference.rope import rotate

TURNS = 4
REACH = 2.8
LARGEST = 7


@dataclass(frozen=True, eq=False)
class CompactKeys:
    """Per layer: `mean` [Hkv, D], `encode` [Hkv, D, rank] (a key's codes) and `decode` [Hkv, D, rank] (a query's side)."""

    rank: int
    mean: Mapping[int, Floats]
    encode: Mapping[int, Floats]
    decode: Mapping[int, Floats]

    def codes_of(self, layer: int, keys: Floats) -> Floats:
        """Whole numbers of four bits [n, Hkv, rank] of keys [n, Hkv, D]."""
        coordinates = np.einsum("nhd,hdr->nhr", keys - self.mean[layer], self.encode[layer])
        return np.clip(np.rint(coordinates), -LARGEST, LARGEST)

    def queries(self, layer: int, q: Floats) -> Floats:
        """[B, T, Hq, rank] of q [B, T, Hq, D]: their products with codes are those of queries and keys."""
        decode = self.decode[layer]
        return np.einsum("bthd,hdr->bthr", q, np.repeat(decode, q.shape[2] // len(decode), axis=0))


def fit(
    queries: Mapping[int, Floats], keys: Mapping[int, Floats], rank: int, inverse: Floats, context: int
) -> CompactKeys:
    """From post-RoPE queries [T, Hq, D] and keys [T, Hkv, D] of each layer; `inverse` are RoPE's frequencies [D/2], `context`
    the places that rows are turned to. Raise ValueError on a rank that is odd or beyond the head dimension."""
    mean, encode, decode = {}, {}, {}
    for layer, k in keys.items():
        heads, dim = k.shape[1:]
        if not 2 <= rank <= dim or rank % 2:
            raise ValueError(f"rank is {rank}, expected an even number up to the head dimension {dim}")
        far_k, far_q = (_turned(x, inverse, context) for x in (k, queries[layer]))
        mean[layer] = far_k.mean(axis=0)
        into, outof = np.zeros((heads, dim, rank)), np.zeros((heads, dim, rank))
        group = far_q.shape[1] // heads
        for h in range(heads):
            moved = far_k[:, h] - mean[layer][h]
            asked = far_q[:, h * group : (h + 1) * group].reshape(-1, dim)
            values, vectors = np.linalg.eigh(asked.T @ asked / len(asked))
            root = np.sqrt(np.maximum(values, 1e-6 * values.max()))
            half, inverse_half = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
            best = np.linalg.eigh(half @ (moved.T @ moved / len(moved)) @ half)[1][:, ::-1][:, :rank]
            coordinates = moved @ (half @ best)
            step = np.maximum(np.sqrt((coordinates**2).mean(axis=0)) * REACH / LARGEST, 1e-12)
            into[h], outof[h] = half @ best / step, inverse_half @ best * step
        encode[layer], decode[layer] = into, outof
    return CompactKeys(rank, mean, encode, decode)


def _turned(x: Floats, inverse: Floats, context: int) -> Floats:
    """Rows [T, H, D] repeated TURNS times, each turned on by a distance below `context`."""
    rows = np.tile(x, (TURNS, 1, 1))
    far = np.arange(len(rows), dtype=np.int64) * 2654435761 % max(1, context)
    return np.stack([rotate(row, int(distance), inverse, 1.0) for row, distance in zip(rows, far, strict=True)])
