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

from .attention_core import resolve_scale
from .runtime import FLOAT_DTYPES, INTERPRETED, check_counts, check_pools, check_tensor, power_of_two, precision_of
from .score_passes import score_logits_kernel, score_mass_kernel
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
    by_group: bool = False,
) -> torch.Tensor:
    """score_layers of one layer. `add` adds to scores instead of writing them."""
    return score_layers(
        [q], [k_pool], page_table, lengths, [groups], scores, num_rows=num_rows, weight=weight, add=add, scale=scale,
        softcap=softcap, keep_weights=keep_weights, workspace=workspace, config=config, by_group=by_group,
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
    by_group: bool = False,
) -> torch.Tensor:
    """Write (or add) to scores [B, Nmax] fp32: weight * sum over layers of the mean over rows and heads of softmax(q . K * scale).

    For each layer: queries [B, R, S, D] post-RoPE of its S scoring heads, `groups` from group_heads, K pool [pages,
    page_size, Hkv, D] of q's dtype, or int8 [pages, page_size, Hkv, D / 2] with numbers j and j + D / 2 of a key in the low and
    the high half of byte j. All layers share page_table [B, max_pages], lengths [B] int32 (the softmax runs over [0,
    lengths[b])) and num_rows [B] int32 valid rows (0: the row's scores become 0, or stay when adding). With add=False
    entries at and beyond lengths[b] become -inf. Layers of equal shape and strides share two launches, up to MAX_LAYERS.
    `by_group` (one layer): scores [B * KVH, Nmax], row b * KVH + i of kv group i alone, the mean over the heads of a group.
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
    parts = len(groups[0].heads) if by_group else 1
    if by_group and len(queries) > 1:
        raise ValueError(f"by_group: expected one layer, got {len(queries)}")
    check_counts(batch, first, lengths=lengths, num_rows=num_rows)
    check_tensor("scores", scores, (batch * parts, None), (torch.float32,), first)
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
        "PAGE": page_size, "SOFTCAP": softcap > 0, "KEEP": shape.keep, "DIRECT": shape.direct,
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
    score_mass_kernel[(triton.cdiv(nmax, shape.config.block_n * shape.mass_tiles), batch * parts)](
        *inputs, scores, *strides, scale_log2, softcap, weight * parts / groups[0].num_heads, TILES=shape.mass_tiles,
        BLOCK_R=power_of_two(shape.row_weights), ADD=add, BY_GROUP=by_group, **common,
    )  # fmt: skip
    return scores
