"""What score_heads is launched with: scoring heads grouped by kv head, launch sizes, scratch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from .runtime import INTERPRETED, power_of_two

# Layers that one launch scores.
MAX_LAYERS = 4


@dataclass(frozen=True)
class HeadGroups:
    """Scoring heads grouped by kv head. `kv_heads` [KVH] int32; `heads` [KVH, H] int32 indexes the S axis of q, -1 pads."""

    kv_heads: torch.Tensor
    heads: torch.Tensor
    num_heads: int


@functools.cache
def _group(kv_head_of: tuple[int, ...], device: str) -> HeadGroups:
    members: dict[int, list[int]] = {}
    for s, kv in enumerate(kv_head_of):
        members.setdefault(kv, []).append(s)
    widest = max(map(len, members.values()))
    table = [members[kv] + [-1] * (widest - len(members[kv])) for kv in sorted(members)]
    return HeadGroups(
        torch.tensor(sorted(members), dtype=torch.int32, device=device),
        torch.tensor(table, dtype=torch.int32, device=device),
        len(kv_head_of),
    )


def group_heads(query_heads: Sequence[int], num_heads: int, num_kv_heads: int, device: torch.device | str) -> HeadGroups:
    """HeadGroups of scoring `query_heads` (in the order of q's S axis). Cached: call it before capturing a graph."""
    if not query_heads or min(query_heads) < 0 or max(query_heads) >= num_heads:
        raise ValueError(f"query_heads: expected heads in 0..{num_heads - 1}, got {list(query_heads)}")
    share = num_heads // num_kv_heads
    return _group(tuple(head // share for head in query_heads), str(device))


_joined: dict[tuple[int, ...], tuple[tuple[HeadGroups, ...], HeadGroups]] = {}


def group_layers(groups: tuple[HeadGroups, ...]) -> HeadGroups:
    """HeadGroups of several layers, layer after layer. Kept by identity, so that a captured graph finds them made."""
    if len(groups) == 1:
        return groups[0]
    key = tuple(map(id, groups))
    if key not in _joined:
        made = HeadGroups(torch.cat([g.kv_heads for g in groups]), torch.cat([g.heads for g in groups]), groups[0].num_heads)
        # The parts are kept too: an id is theirs only while they live.
        _joined[key] = groups, made
    return _joined[key][1]


@dataclass(frozen=True)
class ScoreConfig:
    """Launch sizes: keys a tile, keys a chunk (a program of pass 1) at least, stages, warps, tiles a program of pass 2 (0: by
    the rows). `direct` stores 16-bit weights from the registers that hold them."""

    block_n: int = 128
    chunk: int = 1024
    num_stages: int = 3
    num_warps: int = 4
    mass_tiles: int = 0
    direct: bool = False


class ScoreWorkspace:
    """Scratch of one scoring call, reusable by the next: weights and their tile maxima (optional), statistics, counters."""

    def __init__(
        self, num_weights: int, num_tops: int, num_stats: int, num_lanes: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        kept = torch.float32 if dtype == torch.float32 else torch.float16
        self.weights = torch.empty(max(num_weights, 1), dtype=kept, device=device)
        self.tops = torch.empty(max(num_tops, 1), dtype=torch.float32, device=device)
        self.stats = torch.empty(max(num_stats, 1), dtype=torch.float32, device=device)
        self.lse = torch.empty(num_lanes, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_lanes, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class ScoreShape:
    """Sizes of one call, in elements; `strips` of a tile's rows keep a maximum each, a key keeps `row_weights` weights."""

    config: ScoreConfig
    block_m: int
    chunk: int
    num_chunks: int
    num_weights: int
    num_tops: int
    num_stats: int
    num_lanes: int
    keep: bool
    strips: int
    row_weights: int
    mass_tiles: int
    direct: bool

    def workspace(self, dtype: torch.dtype, device: torch.device | str) -> ScoreWorkspace:
        return ScoreWorkspace(self.num_weights, self.num_tops, self.num_stats, self.num_lanes, dtype, device)


def score_shape(
    batch: int,
    rows: int,
    groups: HeadGroups,
    nmax: int,
    dim: int,
    dtype: torch.dtype,
    keep: bool | None,
    config: ScoreConfig | None = None,
    layers: int = 1,
) -> ScoreShape:
    kv_groups, per_group = groups.heads.shape
    # Queries are the columns of a product: at least 16, and 128 are as many as registers hold.
    block_m = power_of_two(rows * per_group, 16)
    if block_m > 128:
        raise ValueError(f"q: expected rows * heads per kv head <= 128, got {rows} * {per_group}")
    if keep is None:
        # Keeping costs a write and a read of a weight for each row; reading K again costs its row.
        keep = 2 * min(dtype.itemsize, 4) * rows * per_group <= dim * dtype.itemsize
    if config is None:
        if INTERPRETED:
            config = ScoreConfig(32, 64, 2)
        elif dtype == torch.float32:
            config = ScoreConfig(32, 1024, 2)
        else:
            # Long chunks as long as programs fill the processors several times.
            slabs = batch * layers * kv_groups
            chunk = next((c for c in (2048, 1024) if slabs * triton.cdiv(nmax, c) >= 512), 512)
            # Sixteen columns of a product are few enough for direct stores to gain; thirty-two lost by them.
            config = ScoreConfig(64 if block_m > 32 or dim > 128 else 128, chunk, direct=block_m == 16 and dim == 128)
    # Statistics of all chunks of a lane are combined in one tile: at most 64 of them.
    chunk = max(config.chunk, power_of_two(triton.cdiv(nmax, 64)))
    num_chunks = triton.cdiv(nmax, chunk)
    slabs = batch * layers * kv_groups
    lanes = slabs * block_m
    tiles = triton.cdiv(nmax, config.block_n)
    # As the rows of a product lie on four warps: sixteen to each, again every sixty-four.
    strips = config.num_warps if config.block_n >= 16 * config.num_warps else 1
    direct = config.direct and dtype != torch.float32
    # Whole vectors of four: of eight, stores would be wider but more. Stored directly, a thread writes two of a group of eight.
    grain = 8 if direct else 4
    row_weights = triton.cdiv(rows * per_group, grain) * grain
    if direct and rows * per_group <= 4:
        row_weights = power_of_two(rows * per_group, 2)
    weights, tops = (slabs * tiles * config.block_n * row_weights, lanes * tiles * strips) if keep else (0, 0)
    # Without kept weights a program has one tile: its products need the registers.
    tiles = 1 if row_weights > 16 else min(8, 64 // power_of_two(row_weights))
    mass_tiles = (config.mass_tiles or tiles) if keep else 1
    return ScoreShape(
        config, block_m, chunk, num_chunks, weights, tops, lanes * num_chunks * 2, lanes, keep, strips, row_weights, mass_tiles,
        direct,
    )  # fmt: skip


def workspace_for(
    batch: int,
    rows: int,
    groups: HeadGroups,
    nmax: int,
    dim: int,
    dtype: torch.dtype,
    keep_weights: bool | None = None,
    config: ScoreConfig | None = None,
    layers: int = 1,
) -> ScoreWorkspace:
    """Scratch that fits score_layers for `layers` layers of these shapes (nmax = columns of `scores`)."""
    shape = score_shape(batch, rows, groups, nmax, dim, dtype, keep_weights, config, layers)
    return shape.workspace(dtype, groups.heads.device)
