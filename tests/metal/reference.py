"""Float64 references of the Metal kernels, and inputs with poison wherever a kernel must not look."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that `dtype` holds exactly."""
    x = np.asarray(x, np.float32)
    if dtype != "bfloat16":
        return x.astype(dtype).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


@dataclass
class Case:
    """One ragged verification. lengths[b] committed rows of a cache of `capacity`; selected sets of at most `budget` rows."""

    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    capacity: int
    budget: int
    seed: int = 0
    coded: bool = False
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    indices: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)
    blocks: np.ndarray = field(init=False)
    block_counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        batch, dim = len(self.lengths), self.head_dim
        self.q = round_to(rng.normal(size=(batch, self.num_rows, self.num_heads, dim)) * 1.5, self.dtype)
        kv = (batch, self.capacity, self.num_kv_heads, dim)
        self.k, self.v = (round_to(rng.normal(size=kv), self.dtype) for _ in "kv")
        if self.coded:
            # q = 0 makes every weight equal; column d of row j holds bit d % 10 of j, so n * output counts rows exactly.
            self.q[:] = 0
            self.v[:] = ((np.arange(self.capacity)[:, None] >> (np.arange(dim) % 10)) & 1)[None, :, None, :]
        self.scale = dim**-0.5
        self.indices = np.zeros((batch, self.budget), np.int32)
        self.counts = np.zeros(batch, np.int32)
        chosen_blocks = []
        for b, n in enumerate(self.lengths):
            self.k[b, n + self.num_tokens[b] :] = np.nan  # dropped and unused rows
            self.v[b, n + self.num_tokens[b] :] = np.nan
            c = min(self.budget, n)
            self.counts[b] = c
            self.indices[b, :c] = np.sort(rng.permutation(n)[:c])
            some = rng.random(-(-n // 16)) < 0.5
            some[-1:] = True  # the last, partial block
            chosen_blocks.append(np.flatnonzero(some).astype(np.int32))
        self.block_counts = np.array([len(x) for x in chosen_blocks], np.int32)
        self.blocks = np.zeros((batch, max(1, int(self.block_counts.max()))), np.int32)
        for b, x in enumerate(chosen_blocks):
            self.blocks[b, : len(x)] = x

    def rows_of(self, b: int, form: str) -> np.ndarray:
        """Committed cache rows that sequence b may see: form dense, sparse or blocks."""
        n = self.lengths[b]
        if form == "dense":
            return np.arange(n)
        if form == "sparse":
            return self.indices[b, : self.counts[b]]
        rows = (self.blocks[b, : self.block_counts[b], None] * 16 + np.arange(16)).ravel()
        return rows[rows < n]

    def expected(self, form: str) -> np.ndarray:
        """Attention in float64 [B, T, Hq, D]; rows at or beyond num_tokens are 0."""
        out = np.zeros(self.q.shape)
        group = self.num_heads // self.num_kv_heads
        for b, n in enumerate(self.lengths):
            for t in range(self.num_tokens[b]):
                rows = np.concatenate([self.rows_of(b, form), np.arange(n, n + t + 1)]).astype(int)
                k = np.repeat(self.k[b, rows].astype(np.float64), group, axis=1)
                v = np.repeat(self.v[b, rows].astype(np.float64), group, axis=1)
                s = np.einsum("hd,khd->hk", self.q[b, t].astype(np.float64), k) * self.scale
                w = np.exp(s - s.max(axis=1, keepdims=True))
                out[b, t] = np.einsum("hk,khd->hd", w / w.sum(axis=1, keepdims=True), v)
        return out

    def visible(self, form: str) -> np.ndarray:
        """Number of rows each query row sees [B, T] (0 beyond num_tokens)."""
        seen = np.zeros((len(self.lengths), self.num_rows))
        for b in range(len(self.lengths)):
            for t in range(self.num_tokens[b]):
                seen[b, t] = len(self.rows_of(b, form)) + t + 1
        return seen


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the error over that of the reference; inf when anything is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    norm = float(np.sqrt(np.mean(np.square(want))))
    return float(np.sqrt(np.mean(np.square(got - want)))) / max(norm, 1e-30)


def expected_scores(
    q: np.ndarray, k: np.ndarray, heads: tuple[int, ...], group: int, lengths: tuple[int, ...], scale: float
):
    """Mean softmax [B, Nmax] float64, -inf from lengths[b] on. q [B, R, S, D], k [B, Nmax, Hkv, D]."""
    out = np.full(k.shape[:2], -np.inf)
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        rows = []
        for slot, head in enumerate(heads):
            s = q[b, :, slot].astype(np.float64) @ k[b, :n, head // group].astype(np.float64).T * scale
            w = np.exp(s - s.max(axis=1, keepdims=True))
            rows.append(w / w.sum(axis=1, keepdims=True))
        out[b, :n] = np.concatenate(rows).mean(axis=0)
    return out


def expected_set(target, draft, n: int, budget: int, sinks: int, recent: int, num_draft: int) -> list[int]:
    """The quota rule of one sequence, by sorting (lower index first among equals)."""
    if n <= budget:
        return list(range(n))
    held = set(range(sinks)) | set(range(n - recent, n))
    for scores, take in ((draft, num_draft), (target, budget - sinks - recent - num_draft)):
        order = sorted((j for j in range(n) if j not in held), key=lambda j: (-scores[j], j))
        held |= set(order[:take])
    return sorted(held)


def parity_case(dtype: str) -> Case:
    """The ragged case most tests use: a long, a short and a finished sequence; 70 + 3 keys fit no tile."""
    return Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, dtype, 90, 20)
