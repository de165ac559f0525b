"""Mean softmax mass that a few query heads put on every committed token (METHOD section 3.1, both signals).

Pass 1 reads each K row once for all rows and heads that share its kv head and keeps, for every tile, the weights
relative to the maximum so far (2 bytes a row and key, 4 for fp32 inputs) and each chunk's (max, sum); the last chunk to
arrive combines those, in chunk order, to the exact log-sum-exp. Pass 2 rescales the weights and adds up rows and heads
in fixed order. Without `keep_weights` pass 2 reads K again instead, which pays when many rows score.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .dense_verify import locate
from .runtime import INTERPRETED, begin_dependent, check_counts, check_pools, check_tensor, power_of_two, precision_of
from .score_plan import HeadGroups, ScoreConfig, ScoreWorkspace, group_heads, score_shape, workspace_for

__all__ = ["HeadGroups", "ScoreConfig", "ScoreWorkspace", "group_heads", "score_heads", "workspace_for"]


@triton.jit
def head_logits(
    q_tile, k_pool, pages, held, first_page, start, keys, length, kv, dims, scale_log2, softcap,
    ROW: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, HELD: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [M, BLOCK_N] of keys start + [0, BLOCK_N); -inf at and beyond `length` when MASKED."""
    if HELD > 0:
        # Copies complete in order: a page number fetched in the same pipeline would make every step wait for the K before it.
        if PAGE % BLOCK_N == 0:
            page = tl.sum(tl.where(tl.arange(0, HELD) == start // PAGE - first_page, held, 0), 0).to(tl.int64)
            rows = (page * PAGE + start % PAGE + keys) * ROW + kv * HEAD
        else:
            which = tl.minimum((start + keys) // PAGE - first_page, HELD - 1)
            page = tl.gather(held, which, 0).to(tl.int64)
            rows = (page * PAGE + (start + keys) % PAGE) * ROW + kv * HEAD
    else:
        rows = locate(pages, start, keys, length, PAGE, BLOCK_N) * ROW + kv * HEAD
    if MASKED:
        stored = (start + keys < length)[None, :] & (dims < D)[:, None]
        k = tl.load(k_pool + rows[None, :] + dims[:, None], mask=stored, other=0.0)
    else:
        if D == BLOCK_D:
            k = tl.load(k_pool + rows[None, :] + dims[:, None])
        else:
            k = tl.load(k_pool + rows[None, :] + dims[:, None], mask=(dims < D)[:, None], other=0.0)
    s = tl.dot(q_tile, k, input_precision=PRECISION)
    if SOFTCAP:
        x = s * (scale_log2 * 0.6931471805599453) / softcap
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))) * 1.4426950408889634
    else:
        s = s * scale_log2
    if MASKED:
        s = tl.where((start + keys < length)[None, :], s, float("-inf"))
    return s


@triton.jit
def hold_pages(pages, first_page, length, PAGE: tl.constexpr, HELD: tl.constexpr):
    """HELD page numbers from `first_page` on (one unused when HELD is 0)."""
    place = first_page + tl.arange(0, HELD if HELD > 0 else 1)
    return tl.load(pages + place, mask=place * PAGE < length, other=0)


@triton.jit
def load_queries(
    q, head_table, b, group, rows, num_rows, dims, stride_qb, stride_qr, stride_qs,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Query tile [M, BLOCK_D] of a kv group and its valid rows [M]: row m is lookahead row m // H, group head m % H."""
    head = tl.load(head_table + group * H + rows % H)
    valid = (rows // H < num_rows) & (head >= 0)
    offset = b.to(tl.int64) * stride_qb + (rows // H).to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qs
    return tl.load(q + offset[:, None] + dims[None, :], mask=valid[:, None] & (dims < D)[None, :], other=0.0), valid


@triton.jit
def score_logits_kernel(
    q, k_pool, page_table, lengths, num_rows, kv_heads, head_table, weights, tops, lse, stats, counters,
    stride_qb, stride_qr, stride_qs, stride_pt, nmax, num_chunks, scale_log2, softcap,
    KVH: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    HELD: tl.constexpr,
    SOFTCAP: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pass 1, program (chunk of CHUNK keys, kv group, sequence)."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    fed = tl.load(num_rows + b)
    if (chunk * CHUNK >= length) | (fed <= 0):
        return
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    q_tile, valid = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D)
    kv = tl.load(kv_heads + group)
    pages = page_table + b.to(tl.int64) * stride_pt
    first_page = chunk * CHUNK // PAGE
    held = hold_pages(pages, first_page, length, PAGE, HELD)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Sums stay spread over the columns of a tile until the end: one reduction less in every step.
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    lane = (b.to(tl.int64) * KVH + group) * BLOCK_M + m
    kept = weights + lane[:, None] * nmax + keys[None, :]
    kept_tops = tops + lane * tl.cdiv(nmax, BLOCK_N)
    stop = tl.minimum((chunk + 1) * CHUNK, length)
    full_stop = chunk * CHUNK + (stop - chunk * CHUNK) // BLOCK_N * BLOCK_N
    for start in range(chunk * CHUNK, full_stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        s = head_logits(
            q_tile, k_pool, pages, held, first_page, start, keys, length, kv, dims, scale_log2, softcap,
            ROW, HEAD, D, BLOCK_D, BLOCK_N, PAGE, HELD, SOFTCAP, False, PRECISION,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        if KEEP:
            tl.store(kept + start, p.to(weights.dtype.element_ty), mask=valid[:, None])
            tl.store(kept_tops + start // BLOCK_N, m_new, mask=valid)
        sums = sums * tl.exp2(m_i - m_new)[:, None] + p
        m_i = m_new
    if full_stop < stop:
        s = head_logits(
            q_tile, k_pool, pages, held, first_page, full_stop, keys, length, kv, dims, scale_log2, softcap,
            ROW, HEAD, D, BLOCK_D, BLOCK_N, PAGE, HELD, SOFTCAP, True, PRECISION,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        if KEEP:
            inside = valid[:, None] & (full_stop + keys < length)[None, :]
            tl.store(kept + full_stop, p.to(weights.dtype.element_ty), mask=inside)
            tl.store(kept_tops + full_stop // BLOCK_N, m_new, mask=valid)
        sums = sums * tl.exp2(m_i - m_new)[:, None] + p
        m_i = m_new
    l_i = tl.sum(sums, 1)
    base = (lane * num_chunks + chunk) * 2
    tl.store(stats + base, m_i, mask=valid)
    tl.store(stats + base + 1, l_i, mask=valid)
    tl.debug_barrier()
    counter = counters + b * KVH + group
    used_chunks = tl.cdiv(length, CHUNK)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used_chunks - 1:
        chunks = tl.arange(0, BLOCK_C)
        base_all = (lane[:, None] * num_chunks + chunks[None, :]) * 2
        used = valid[:, None] & (chunks < used_chunks)[None, :]
        best = tl.load(stats + base_all, mask=used, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(stats + base_all + 1, mask=used, other=0.0, cache_modifier=".cg")
        top = tl.where(valid, tl.max(best, 1), 0.0)
        total = tl.sum(parts * tl.exp2(best - top[:, None]), 1)
        tl.store(lse + lane, top + tl.log2(tl.where(valid, total, 1.0)), mask=valid)
        tl.store(counter, 0)


@triton.jit
def kept_mass(weights, tops, rows, lse, valid, position, tile, length, nmax, BLOCK_N: tl.constexpr):
    """Mass [BLOCK_N] of one kv group from the weights that pass 1 kept of a tile."""
    mask = valid[:, None] & (position < length)[None, :]
    p = tl.load(weights + rows[:, None] * nmax + position[None, :], mask=mask, other=0.0).to(tl.float32)
    top = tl.load(tops + rows * tl.cdiv(nmax, BLOCK_N) + tile, mask=valid, other=0.0)
    return tl.sum(p * tl.exp2(top - lse)[:, None], 0)


@triton.jit
def score_mass_kernel(
    q, k_pool, page_table, lengths, num_rows, kv_heads, head_table, weights, tops, lse, scores,
    stride_qb, stride_qr, stride_qs, stride_pt, nmax, scale_log2, softcap, weight,
    KVH: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PAGE: tl.constexpr, HELD: tl.constexpr,
    SOFTCAP: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pass 2, program (TILES tiles of BLOCK_N keys, sequence): sums rows, then groups, in fixed order."""
    begin_dependent(PDL)
    begin = tl.program_id(0) * (TILES * BLOCK_N)
    b = tl.program_id(1)
    length = tl.load(lengths + b)
    fed = tl.load(num_rows + b)
    keys = tl.arange(0, BLOCK_N)
    row_scores = scores + b.to(tl.int64) * nmax
    if (begin >= length) | (fed <= 0):
        if not ADD:
            for start in range(begin, tl.minimum(begin + TILES * BLOCK_N, nmax), BLOCK_N):
                position = start + keys
                tl.store(row_scores + position, tl.where(position < length, 0.0, float("-inf")), mask=position < nmax)
        return
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    pages = page_table + b.to(tl.int64) * stride_pt
    share = weight / fed.to(tl.float32)
    # One group at a time needs its queries and log-sum-exp once; they are loaded ahead of the tiles.
    q_tile, valid = load_queries(q, head_table, b, 0, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D)
    lane = b.to(tl.int64) * KVH * BLOCK_M + m
    # Rows that do not count get an infinite log-sum-exp, hence mass 0.
    shift = tl.load(lse + lane, mask=valid, other=float("inf"))
    kv = tl.load(kv_heads)
    first_page = begin // PAGE
    held = hold_pages(pages, first_page, length, PAGE, HELD)
    for start in range(begin, tl.minimum(begin + TILES * BLOCK_N, nmax), BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        position = start + keys
        mass = tl.zeros([BLOCK_N], tl.float32)
        if KVH == 1:
            if KEEP:
                mass = kept_mass(weights, tops, lane, shift, valid, position, start // BLOCK_N, length, nmax, BLOCK_N)
            else:
                s = head_logits(
                    q_tile, k_pool, pages, held, first_page, start, keys, length, kv, dims, scale_log2, softcap,
                    ROW, HEAD, D, BLOCK_D, BLOCK_N, PAGE, HELD, SOFTCAP, True, PRECISION,
                )  # fmt: skip
                mass = tl.sum(tl.exp2(s - shift[:, None]), 0)
        else:
            for group in range(KVH):
                q_group, used = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D)
                rows = lane + group * BLOCK_M
                offset = tl.load(lse + rows, mask=used, other=float("inf"))
                if KEEP:
                    mass += kept_mass(weights, tops, rows, offset, used, position, start // BLOCK_N, length, nmax, BLOCK_N)
                else:
                    s = head_logits(
                        q_group, k_pool, pages, held, first_page, start, keys, length, tl.load(kv_heads + group), dims, scale_log2,
                        softcap,
                        ROW, HEAD, D, BLOCK_D, BLOCK_N, PAGE, HELD, SOFTCAP, True, PRECISION,
                    )  # fmt: skip
                    mass += tl.sum(tl.exp2(s - offset[:, None]), 0)
        mass = mass * share
        if ADD:
            mass += tl.load(row_scores + position, mask=position < length, other=0.0)
            tl.store(row_scores + position, mass, mask=position < length)
        else:
            tl.store(row_scores + position, tl.where(position < length, mass, float("-inf")), mask=position < nmax)


def score_heads(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    groups: HeadGroups,
    scores: torch.Tensor,
    *,
    num_rows: torch.Tensor,
    weight: float = 1.0,
    add: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    keep_weights: bool | None = None,
    workspace: ScoreWorkspace | None = None,
    config: ScoreConfig | None = None,
) -> torch.Tensor:
    """Write (or add) to scores [B, Nmax] fp32: weight * mean over rows and heads of softmax_j(q . K_j * scale).

    q [B, R, S, D] post-RoPE queries of the S scoring heads of one layer; `groups` from group_heads; num_rows [B] int32
    valid rows (0: the row's scores become 0, or stay when adding). k_pool [pages, page_size, Hkv, D]; page_table
    [B, max_pages]; lengths [B] int32: the softmax runs over [0, lengths[b]). With add=False entries at and beyond
    lengths[b] become -inf. To average L layers call L times with weight 1/L, add=True from the second on.
    Returns scores. Allocates nothing when `workspace` (see workspace_for) is passed. Raises ValueError on bad input.
    """
    check_tensor("q", q, (None, None, groups.num_heads, k_pool.shape[3]), (k_pool.dtype,), k_pool, contiguous=False)
    batch, rows, _, dim = q.shape
    check_pools(k_pool, None, page_table, batch)
    check_counts(batch, q, lengths=lengths, num_rows=num_rows)
    check_tensor("scores", scores, (batch, None), (torch.float32,), q)
    page_size = k_pool.shape[1]
    nmax = scores.shape[1]
    if nmax > page_table.shape[1] * page_size:
        raise ValueError(f"scores: expected at most {page_table.shape[1] * page_size} columns (the page table), got {nmax}")
    kv_groups, per_group = groups.heads.shape
    shape = score_shape(batch, rows, groups, nmax, dim, q.dtype, keep_weights, config)
    if workspace is None:
        workspace = shape.workspace(q.dtype, q.device)
    have = (workspace.weights.numel(), workspace.tops.numel(), workspace.stats.numel(), workspace.lse.numel())
    need = (shape.num_weights, shape.num_tops, shape.num_stats, shape.num_lanes)
    if any(h < n for h, n in zip(have, need, strict=True)):
        raise ValueError(f"workspace: expected at least {need} weights, tops, statistics, lanes, got {have}")
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    options = {} if INTERPRETED else {"launch_pdl": True}
    common = {
        "KVH": kv_groups, "H": per_group, "ROW": k_pool.stride(1), "HEAD": k_pool.stride(2), "D": dim,
        "BLOCK_D": power_of_two(dim, 16),
        "BLOCK_M": shape.block_m, "PAGE": page_size, "SOFTCAP": softcap > 0, "KEEP": shape.keep,
        "PRECISION": precision_of(q.dtype), "PDL": bool(options), "num_warps": shape.config.num_warps,
        "num_stages": shape.config.num_stages, **options,
    }  # fmt: skip
    strides = (q.stride(0), q.stride(1), q.stride(2), page_table.stride(0), nmax)
    scale_log2 = scale * math.log2(math.e)
    inputs = (q, k_pool, page_table, lengths, num_rows, groups.kv_heads, groups.heads, workspace.weights, workspace.tops)
    hold = shape.config.hold
    held_by_chunk = power_of_two(shape.chunk // page_size, 2) if hold else 0
    held_by_tiles = power_of_two(shape.config.mass_n * shape.config.mass_tiles // page_size + 1, 2) if hold else 0
    score_logits_kernel[(shape.num_chunks, kv_groups, batch)](
        *inputs, workspace.lse, workspace.stats, workspace.counters, *strides, shape.num_chunks, scale_log2, softcap,
        BLOCK_N=shape.config.block_n, BLOCK_C=power_of_two(shape.num_chunks), CHUNK=shape.chunk,
        HELD=held_by_chunk, **common,
    )  # fmt: skip
    score_mass_kernel[(triton.cdiv(nmax, shape.config.mass_n * shape.config.mass_tiles), batch)](
        *inputs, workspace.lse, scores, *strides, scale_log2, softcap, weight / groups.num_heads,
        BLOCK_N=shape.config.mass_n, TILES=shape.config.mass_tiles, HELD=held_by_tiles, ADD=add, **common,
    )  # fmt: skip
    return scores
