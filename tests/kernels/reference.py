"""Float64 references of the kernels in plain torch, the paged cases they run on, and the parity check."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Relative RMS against float64: tight enough that one wrong token among a thousand fails.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64; infinite when anything in `got` is not finite."""
    got, want = got.double(), want.double().to(got.device)
    if got.shape != want.shape or not torch.isfinite(got).all():
        return math.inf
    norm = want.norm()
    return float((got - want).norm() / norm) if norm > 0 else float(got.norm())


def check_parity(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """Raise AssertionError when `got` is further from `want` than its dtype allows; return the relative RMS."""
    error = relative_rms(got, want)
    if not error <= TOLERANCE[dtype or got.dtype]:
        raise AssertionError(f"relative RMS {error:.3g}, allowed {TOLERANCE[dtype or got.dtype]:.0e}")
    return error


@dataclass
class PagedCase:
    """Logical K, V [B, Nmax, Hkv, D] and the same rows in shuffled pages; every pool row that is not used is NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    num_tokens: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The leading arguments of dense_verify and sparse_verify."""
        return self.q, self.k_pool, self.v_pool, self.page_table, self.lengths, self.num_tokens


def paged_case(
    device: str,
    dtype: torch.dtype,
    *,
    lengths: list[int],
    num_tokens: list[int],
    tokens: int,
    heads: tuple[int, int, int],
    page_size: int,
    seed: int = 0,
) -> PagedCase:
    """Random inputs for `heads` = (Hq, Hkv, D)."""
    num_heads, num_kv_heads, dim = heads
    batch, generator = len(lengths), torch.Generator().manual_seed(seed)
    nmax = max(n + tokens for n in lengths)
    pages_each = -(-nmax // page_size)
    num_pages = batch * pages_each + 2
    page_table = torch.randperm(num_pages, generator=generator)[: batch * pages_each].reshape(batch, pages_each)
    k, v = (torch.randn(batch, nmax, num_kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    pools = [torch.full((num_pages * page_size, num_kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
    for b in range(batch):
        positions = torch.arange(lengths[b] + num_tokens[b])
        rows = page_table[b][positions // page_size] * page_size + positions % page_size
        pools[0][rows], pools[1][rows] = k[b, positions], v[b, positions]
    shape = (num_pages, page_size, num_kv_heads, dim)
    return PagedCase(
        torch.randn(batch, tokens, num_heads, dim, generator=generator).to(dtype).to(device),
        k.to(device),
        v.to(device),
        pools[0].reshape(shape).to(device),
        pools[1].reshape(shape).to(device),
        page_table.to(torch.int32).to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(num_tokens, dtype=torch.int32, device=device),
    )


def random_set(case: PagedCase, counts: list[int], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending random indices [B, max(counts)] int32 below each length; entries beyond the count are out of range."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)
    for b, count in enumerate(counts):
        indices[b, :count] = torch.randperm(int(case.lengths[b]), generator=generator)[:count].sort().values.int()
    return indices.to(case.q.device), torch.tensor(counts, dtype=torch.int32, device=case.q.device)


def softcapped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), or the logits when the cap is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def attention(
    case: PagedCase,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    future: int = 0,
) -> torch.Tensor:
    """METHOD section 3: row t of b attends to the set (or all) of [0, N) and in-flight keys N..N+t (+ `future`, a bug)."""
    batch, tokens, num_heads, dim = case.q.shape
    group = num_heads // case.k.shape[2]
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    for b in range(batch):
        length, fed = int(case.lengths[b]), int(case.num_tokens[b])
        chosen = torch.arange(length, device=out.device)
        if indices is not None and counts is not None:
            chosen = indices[b, : int(counts[b])].long()
        for t in range(fed):
            flying = torch.arange(length, length + min(t + 1 + future, fed), device=out.device)
            keys = torch.cat([chosen, flying])
            if window:
                keys = keys[keys > length + t - window]
            k = case.k[b, keys].double().repeat_interleave(group, 1)
            v = case.v[b, keys].double().repeat_interleave(group, 1)
            logits = torch.einsum("hd,nhd->hn", case.q[b, t].double(), k) / math.sqrt(dim)
            out[b, t] = torch.einsum("hn,nhd->hd", softcapped(logits, softcap).softmax(-1), v)
    return out


def head_scores(
    case: PagedCase, queries: torch.Tensor, kv_head_of: list[int], num_rows: list[int], columns: int, softcap: float = 0.0
) -> torch.Tensor:
    """METHOD section 3.1: mean over rows and heads of the softmax over [0, N); queries [B, R, S, D]; -inf beyond."""
    batch, _, num_heads, dim = queries.shape
    out = torch.full((batch, columns), -math.inf, dtype=torch.float64, device=queries.device)
    for b in range(batch):
        length = int(case.lengths[b])
        out[b, :length] = 0
        for r in range(num_rows[b]):
            for s in range(num_heads):
                logits = case.k[b, :length, kv_head_of[s]].double() @ queries[b, r, s].double() / math.sqrt(dim)
                out[b, :length] += softcapped(logits, softcap).softmax(0) / (num_rows[b] * num_heads)
    return out


def choose(
    target: list[float] | None, draft: list[float] | None, length: int, budget: int, sinks: int, recent: int, by_draft: int
) -> list[int]:
    """METHOD section 3.2 for one sequence, by sorting: ties to the lower index, ascending result."""
    if length <= budget:
        return list(range(length))
    if target is None and draft is None:
        return [*range(sinks), *range(length - budget + sinks, length)]
    chosen = set(range(sinks)) | set(range(length - recent, length))
    free = budget - len(chosen)
    quotas = [(draft, free if target is None else by_draft), (target, free)]
    for scores, quota in quotas:
        if scores is not None:
            order = sorted((j for j in range(length) if j not in chosen), key=lambda j: (-scores[j], j))
            chosen.update(order[: min(quota, budget - len(chosen))])
    return sorted(chosen)


def sample_next(weights: torch.Tensor, uniform: float) -> int:
    """Inverse CDF in token order."""
    above = (weights.double().cumsum(0) > uniform * weights.double().sum()).nonzero()
    return int(above[0]) if len(above) else int(weights.nonzero()[-1])


def speculative_sample(
    drafts: list[int], q: torch.Tensor | None, p: torch.Tensor, uniforms: list[float], next_uniform: float
) -> list[int]:
    """METHOD section 5, step 4, for one sequence: the accepted drafts and the next token. p [G+1, V], q [G, V] or None."""
    for i, token in enumerate(drafts):
        q_i = q[i].double() if q is not None else torch.nn.functional.one_hot(torch.tensor(token), p.shape[1]).double()
        if not uniforms[i] * float(q_i[token]) < float(p[i, token]):
            rest = (p[i].double() - q_i).clamp(min=0)
            return [*drafts[:i], sample_next(rest if rest.sum() > 0 else p[i], next_uniform)]
    return [*drafts, sample_next(p[len(drafts)], next_uniform)]
