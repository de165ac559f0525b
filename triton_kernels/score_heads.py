"""Mean softmax mass that a few query heads put on every committed token (METHOD section 3.1, both signals).

Pass 1 reads each K row once for all rows and heads that share its kv head and keeps, for every tile of keys, the weights
relative to the maximum so far (2 bytes a row and key, 4 for fp32 inputs) and each chunk's (max, sum); the last chunk to
arrive combines those, in chunk order, to the exact log-sum-exp. Pass 2 rescales the weights and adds up layers, kv heads
and rows in fixed order. Without `keep_weights` pass 2 reads K again instead, which pays when many rows score.

Keys are the rows of every tile: on Hopper they feed the matrix units from shared memory as they lie in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .attention_core import load_pages, resolve_scale
from .runtime import FLOAT_DTYPES, INTERPRETED, begin_dependent, check_counts, check_pools, check_tensor, power_of_two, precision_of
from .score_plan import (
    MAX_LAYERS,
    HeadGroups,
    ScoreConfig,
    ScoreWorkspace,
    group_heads,
    group_layers,
    score_shape,
    workspace_for,
)

__all__ = ["HeadGroups", "ScoreConfig", "ScoreWorkspace", "group_heads", "score_heads", "score_layers", "workspace_for"]


@triton.jit
def of_layer(layer, of_0, of_1, of_2, of_3, LAYERS: tl.constexpr):
    """The pointer of a layer."""
    chosen = of_0
    if LAYERS > 1:
        if layer == 1:
            chosen = of_1
    if LAYERS > 2:
        if layer == 2:
            chosen = of_2
    if LAYERS > 3:
        if layer == 3:
            chosen = of_3
    return chosen


@triton.jit
def load_queries(
    q, head_table, b, group, rows, num_rows, dims, stride_qb, stride_qr, stride_qs, H: tl.constexpr, D: tl.constexpr,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Query tile [BLOCK_D, M] of a kv group from dimension FIRST on and its valid rows [M]: row m is lookahead row m // H, group
    head m % H."""
    head = tl.load(head_table + group * H + rows % H)
    valid = (rows // H < num_rows) & (head >= 0)
    offset = b.to(tl.int64) * stride_qb + (rows // H).to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qs
    return tl.load(q + offset[None, :] + (FIRST + dims)[:, None], mask=valid[None, :] & (dims < D)[:, None], other=0.0), valid


@triton.jit
def key_logits(
    q_tile, q_high, keys_of_head, page, start, keys, length, dims, scale_log2, softcap,
    ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr = False,
):  # fmt: skip
    """Logits [BLOCK_N, M] of keys start + [0, BLOCK_N), -inf at and beyond `length`, whatever lies there: unscaled, or scaled
    and in base 2 after a softcap. PACKED keys are bytes of two numbers: the low halves go with q_tile, the high ones with
    q_high (which is q_tile where they are not)."""
    if PAGE % BLOCK_N == 0:
        rows = keys_of_head + (page.to(tl.int64) * PAGE + start % PAGE) * ROW + (keys * ROW)[:, None]
    else:
        # Both are powers of two: a tile is whole pages.
        rows = keys_of_head + ((page * PAGE + keys % PAGE).to(tl.int64) * ROW)[:, None]
    if D == BLOCK_D:
        k = tl.load(rows + dims[None, :])
    else:
        k = tl.load(rows + dims[None, :], mask=(dims < D)[None, :], other=0.0)
    if PACKED:
        # Numbers of four bits are exact in any float type.
        pair = k.to(tl.int32)
        s = tl.dot(((pair << 28) >> 28).to(q_tile.dtype), q_tile, input_precision=PRECISION)
        s += tl.dot((pair >> 4).to(q_tile.dtype), q_high, input_precision=PRECISION)
    else:
        s = tl.dot(k, q_tile, input_precision=PRECISION)
    if SOFTCAP:
        x = s * (scale_log2 * 0.6931471805599453) / softcap
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))) * 1.4426950408889634
    if start + BLOCK_N > length:
        if PDL:
            # Long done. An effect keeps this a branch: selects would cost every tile.
            tl.extra.cuda.gdc_launch_dependents()
        s = tl.where((start + keys < length)[:, None], s, float("-inf"))
    return s


@triton.jit
def score_logits_kernel(
    q_0, q_1, q_2, q_3, k_0, k_1, k_2, k_3, page_table, lengths, num_rows, kv_heads, head_table,
    weights, tops, lse, stats, counters,
    stride_qb, stride_qr, stride_qs, stride_pt, nmax, num_chunks, scale_log2, softcap,
    LAYERS: tl.constexpr, KVH: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Pass 1, program (chunk of CHUNK keys, layer and kv group, sequence)."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    fed = tl.load(num_rows + b)
    if (chunk * CHUNK >= length) | (fed <= 0):
        return
    layer = group // KVH
    q = of_layer(layer, q_0, q_1, q_2, q_3, LAYERS)
    k_pool = of_layer(layer, k_0, k_1, k_2, k_3, LAYERS)
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    pages = page_table + b.to(tl.int64) * stride_pt
    keys_of_head = k_pool + tl.load(kv_heads + group) * HEAD
    page = load_pages(pages, chunk * CHUNK, keys, length, PAGE, BLOCK_N)
    next_page = load_pages(pages, chunk * CHUNK + BLOCK_N, keys, length, PAGE, BLOCK_N)
    factor = 1.0 if SOFTCAP else scale_log2
    q_tile, valid = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D)
    q_high = q_tile
    if PACKED:
        q_high, _ = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D, D)
    # A maximum for each strip of rows that one warp holds: no step of the loop has to wait for the other warps.
    PARTS: tl.constexpr = BLOCK_N // (STRIPS * STRIP)
    m_i = tl.full([STRIPS, BLOCK_M], float("-inf"), tl.float32)
    # Sums stay spread over the rows of a tile until the end: one reduction less in every step.
    sums = tl.zeros([PARTS, STRIPS, STRIP, BLOCK_M], tl.float32)
    slab = b.to(tl.int64) * tl.num_programs(1) + group
    lane = slab * BLOCK_M + m
    # Whole tiles are kept, in rows of a multiple of eight weights: what lies beyond the length counts for nothing.
    first_tile = slab * tl.cdiv(nmax, BLOCK_N)
    place = keys[:, None] * ROWS + m[None, :]
    strips = tl.arange(0, STRIPS)[:, None] * BLOCK_M + m[None, :]
    stop = tl.minimum((chunk + 1) * CHUNK, length)
    for start in range(chunk * CHUNK, stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        s = key_logits(
            q_tile, q_high, keys_of_head, page, start, keys, length, dims, scale_log2, softcap,
            ROW, D, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, PRECISION, PDL, PACKED,
        )  # fmt: skip
        # Fetched two steps ahead: in the pipeline that copies K it would make every step wait for the K before it. The
        # maximum is an operation: a value handed on as it is would keep the loop from being pipelined.
        page = tl.maximum(next_page, 0)
        next_page = load_pages(pages, start + 2 * BLOCK_N, keys, length, PAGE, BLOCK_N)
        s = tl.reshape(s, [PARTS, STRIPS, STRIP, BLOCK_M])
        # The maximum of unscaled logits, so that scaling and shifting are one instruction (a scale is above 0).
        m_new = tl.maximum(m_i, tl.max(tl.max(s, 0), 1) * factor)
        # A strip whose keys all lie beyond the length keeps -inf; shifting by 0 instead keeps the exponentials free of NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - shift[None, :, None, :])
        if KEEP:
            tile = first_tile + start // BLOCK_N
            kept = tl.reshape(p, [BLOCK_N, BLOCK_M]).to(weights.dtype.element_ty)
            tl.store(weights + tile * (BLOCK_N * ROWS) + place, kept, mask=(m < ROWS)[None, :])
            tl.store(tops + tile * (STRIPS * BLOCK_M) + strips, shift)
        sums = sums * tl.exp2(m_i - shift)[None, :, None, :] + p
        m_i = m_new
    best_of_chunk = tl.max(m_i, 0)
    l_i = tl.sum(tl.sum(tl.sum(sums, 0), 1) * tl.exp2(m_i - best_of_chunk[None, :]), 0)
    base = (lane * num_chunks + chunk) * 2
    tl.store(stats + base, best_of_chunk, mask=valid)
    tl.store(stats + base + 1, l_i, mask=valid)
    tl.debug_barrier()
    used_chunks = tl.cdiv(length, CHUNK)
    if tl.atomic_add(counters + slab, 1, sem="acq_rel", scope="gpu") == used_chunks - 1:
        chunks = tl.arange(0, BLOCK_C)
        base_all = (lane[:, None] * num_chunks + chunks[None, :]) * 2
        used = valid[:, None] & (chunks < used_chunks)[None, :]
        best = tl.load(stats + base_all, mask=used, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(stats + base_all + 1, mask=used, other=0.0, cache_modifier=".cg")
        top = tl.where(valid, tl.max(best, 1), 0.0)
        total = tl.sum(parts * tl.exp2(best - top[:, None]), 1)
        tl.store(lse + lane, top + tl.log2(tl.where(valid, total, 1.0)), mask=valid)
        tl.store(counters + slab, 0)


@triton.jit
def score_mass_kernel(
    q_0, q_1, q_2, q_3, k_0, k_1, k_2, k_3, page_table, lengths, num_rows, kv_heads, head_table,
    weights, tops, lse, scores,
    stride_qb, stride_qr, stride_qs, stride_pt, nmax, scale_log2, softcap, weight,
    LAYERS: tl.constexpr, KVH: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    TILES: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    KEEP: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Pass 2, program (TILES tiles of BLOCK_N keys, sequence): sums rows, then kv groups and layers, in fixed order."""
    begin_dependent(PDL)
    start = tl.program_id(0) * (TILES * BLOCK_N)
    # What pass 1 wrote last is read first: it still lies in the L2.
    b = tl.num_programs(1) - 1 - tl.program_id(1)
    length = tl.load(lengths + b)
    fed = tl.load(num_rows + b)
    position = start + tl.arange(0, TILES * BLOCK_N)
    row_scores = scores + b.to(tl.int64) * nmax
    if (start >= length) | (fed <= 0):
        if not ADD:
            tl.store(row_scores + position, tl.where(position < length, 0.0, float("-inf")), mask=position < nmax)
        return
    mass = tl.zeros([TILES * BLOCK_N], tl.float32)
    if KEEP:
        r = tl.arange(0, BLOCK_R)
        tiles = tl.cdiv(nmax, BLOCK_N)
        # Tiles of this program that pass 1 wrote.
        written = tl.cdiv(length, BLOCK_N) - tl.program_id(0) * TILES
        inside = tl.arange(0, TILES) < written
        for group in range(LAYERS * KVH):
            head = tl.load(head_table + group * H + r % H)
            valid = (r // H < fed) & (head >= 0)
            slab = b.to(tl.int64) * (LAYERS * KVH) + group
            first = slab * tiles + tl.program_id(0) * TILES
            place = tl.arange(0, TILES * BLOCK_N)[:, None] * ROWS + r[None, :]
            kept = (place < written * (BLOCK_N * ROWS)) & (r < ROWS)[None, :]
            p = tl.load(weights + first * (BLOCK_N * ROWS) + place, mask=kept, other=0.0)
            strips = tl.arange(0, TILES)[:, None, None] * STRIPS + tl.arange(0, STRIPS)[None, :, None]
            known = inside[:, None, None] & (r < BLOCK_M)[None, None, :]
            top = tl.load(tops + first * (STRIPS * BLOCK_M) + strips * BLOCK_M + r[None, None, :], mask=known, other=0.0)
            # Rows that do not count get an infinite log-sum-exp, hence mass 0.
            shift = tl.load(lse + slab * BLOCK_M + r, mask=valid, other=float("inf"))
            share = tl.exp2(top - shift[None, None, :])
            p = tl.reshape(p.to(tl.float32), [TILES, BLOCK_N // (STRIPS * STRIP), STRIPS, STRIP, BLOCK_R])
            mass += tl.reshape(tl.sum(p * share[:, None, :, None, :], 4), [TILES * BLOCK_N])
    else:
        m = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        keys = tl.arange(0, BLOCK_N)
        factor = 1.0 if SOFTCAP else scale_log2
        pages = page_table + b.to(tl.int64) * stride_pt
        page = load_pages(pages, start, keys, length, PAGE, BLOCK_N)
        for group in range(LAYERS * KVH):
            layer = group // KVH
            q = of_layer(layer, q_0, q_1, q_2, q_3, LAYERS)
            k_pool = of_layer(layer, k_0, k_1, k_2, k_3, LAYERS)
            q_tile, valid = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D)
            q_high = q_tile
            if PACKED:
                q_high, _ = load_queries(q, head_table, b, group, m, fed, dims, stride_qb, stride_qr, stride_qs, H, D, D)
            s = key_logits(
                q_tile, q_high, k_pool + tl.load(kv_heads + group) * HEAD, page, start, keys, length, dims, scale_log2, softcap,
                ROW, D, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, PRECISION, PDL, PACKED,
            )  # fmt: skip
            slab = b.to(tl.int64) * (LAYERS * KVH) + group
            shift = tl.load(lse + slab * BLOCK_M + m, mask=valid, other=float("inf"))
            mass += tl.sum(tl.exp2(s * factor - shift[None, :]), 1)
    mass = mass * (weight / fed.to(tl.float32))
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
    """score_layers of one layer. `add` adds to scores instead of writing them."""
    return score_layers(
        [q], [k_pool], page_table, lengths, [groups], scores, num_rows=num_rows, weight=weight, add=add, scale=scale,
        softcap=softcap, keep_weights=keep_weights, workspace=workspace, config=config,
    )  # fmt: skip


def score_layers(
    queries: Sequence[torch.Tensor],
    k_pools: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    groups: Sequence[HeadGroups],
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
    """Write (or add) to scores [B, Nmax] fp32: weight * sum over layers of the mean over rows and heads of softmax(q . K * scale).

    For each layer: queries [B, R, S, D] post-RoPE of its S scoring heads, `groups` from group_heads, K pool [pages,
    page_size, Hkv, D] of q's dtype, or int8 [pages, page_size, Hkv, D / 2] with numbers j and j + D / 2 of a key in the low and
    the high half of byte j. All layers share page_table [B, max_pages], lengths [B] int32 (the softmax runs over [0,
    lengths[b])) and num_rows [B] int32 valid rows (0: the row's scores become 0, or stay when adding). With add=False
    entries at and beyond lengths[b] become -inf. Layers of equal shape and strides share two launches, up to MAX_LAYERS.
    Returns scores. Allocates nothing when `workspace` (see workspace_for) is passed. Raises ValueError on bad input.
    """
    if not len(queries) == len(k_pools) == len(groups) or not queries:
        counts = (len(queries), len(k_pools), len(groups))
        raise ValueError(f"queries, k_pools, groups: expected one of each a layer, got {counts}")
    first, pool, batch = queries[0], k_pools[0], queries[0].shape[0]
    for q, k_pool, group in zip(queries, k_pools, groups, strict=True):
        packed = k_pool.dtype == torch.int8
        dtypes, width = (FLOAT_DTYPES, 2 * k_pool.shape[3]) if packed else ((k_pool.dtype,), k_pool.shape[3])
        check_tensor("q", q, (batch, None, group.num_heads, width), dtypes, k_pool, contiguous=False)
        check_pools(k_pool, None, page_table, batch, (*FLOAT_DTYPES, torch.int8))
    check_counts(batch, first, lengths=lengths, num_rows=num_rows)
    check_tensor("scores", scores, (batch, None), (torch.float32,), first)
    page_size = pool.shape[1]
    nmax = scores.shape[1]
    if nmax > page_table.shape[1] * page_size:
        raise ValueError(f"scores: expected at most {page_table.shape[1] * page_size} columns (the page table), got {nmax}")

    def alike(i: int) -> bool:
        same_heads = groups[i].heads.shape == groups[0].heads.shape and groups[i].num_heads == groups[0].num_heads
        same_strides = queries[i].stride() == first.stride() and k_pools[i].stride() == pool.stride()
        return same_heads and same_strides and queries[i].shape == first.shape

    together = next((i for i in range(len(queries)) if i == MAX_LAYERS or not alike(i)), len(queries))
    if together < len(queries):
        common = {"num_rows": num_rows, "weight": weight, "scale": scale, "softcap": softcap, "keep_weights": keep_weights}
        for part, more in ((slice(0, together), add), (slice(together, None), True)):
            # The workspace and the launch sizes are those of the first launch.
            fits = {"workspace": workspace, "config": config} if part.start == 0 else {}
            score_layers(
                queries[part], k_pools[part], page_table, lengths, groups[part], scores, add=more, **common, **fits
            )  # fmt: skip
        return scores
    # Of packed keys a tile holds bytes.
    rows, dim, layers = first.shape[1], pool.shape[3], len(queries)
    joined = group_layers(tuple(groups))
    kv_groups, per_group = groups[0].heads.shape
    shape = score_shape(batch, rows, groups[0], nmax, dim, first.dtype, keep_weights, config, layers)
    if workspace is None:
        workspace = shape.workspace(first.dtype, first.device)
    have = (workspace.weights.numel(), workspace.tops.numel(), workspace.stats.numel(), workspace.lse.numel())
    need = (shape.num_weights, shape.num_tops, shape.num_stats, shape.num_lanes)
    if any(h < n for h, n in zip(have, need, strict=True)):
        raise ValueError(f"workspace: expected at least {need} weights, tops, statistics, lanes, got {have}")
    scale = resolve_scale(scale, dim)
    options = {} if INTERPRETED else {"launch_pdl": True}
    common = {
        "LAYERS": layers, "KVH": kv_groups, "H": per_group, "ROWS": shape.row_weights, "ROW": pool.stride(1),
        "HEAD": pool.stride(2), "D": dim, "BLOCK_D": power_of_two(dim, 16), "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.config.block_n, "STRIPS": shape.strips, "STRIP": 16,
        "PAGE": page_size, "SOFTCAP": softcap > 0, "KEEP": shape.keep,
        "PRECISION": precision_of(first.dtype), "PDL": bool(options), "PACKED": pool.dtype == torch.int8,
        "num_warps": shape.config.num_warps,
        "num_stages": shape.config.num_stages, **options,
    }  # fmt: skip
    missing = MAX_LAYERS - layers
    inputs = (
        *queries, *([first] * missing), *k_pools, *([pool] * missing), page_table, lengths, num_rows,
        joined.kv_heads, joined.heads, workspace.weights, workspace.tops, workspace.lse,
    )  # fmt: skip
    strides = (first.stride(0), first.stride(1), first.stride(2), page_table.stride(0), nmax)
    scale_log2 = scale * math.log2(math.e)
    score_logits_kernel[(shape.num_chunks, layers * kv_groups, batch)](
        *inputs, workspace.stats, workspace.counters, *strides, shape.num_chunks, scale_log2, softcap,
        BLOCK_C=power_of_two(shape.num_chunks), CHUNK=shape.chunk, **common,
    )  # fmt: skip
    score_mass_kernel[(triton.cdiv(nmax, shape.config.block_n * shape.mass_tiles), batch)](
        *inputs, scores, *strides, scale_log2, softcap, weight / groups[0].num_heads, TILES=shape.mass_tiles,
        BLOCK_R=power_of_two(shape.row_weights), ADD=add, **common,
    )  # fmt: skip
    return scores
