"""What score_heads is launched with: scoring heads grouped by kv head, launch sizes, scratch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from .runtime import INTERPRETED, power_of_two


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


@dataclass(frozen=True)
class ScoreConfig:
    """Launch sizes: keys a tile of pass 1 and of pass 2, tiles a program of pass 2, keys a chunk at least, stages, warps."""

    block_n: int = 64
    mass_n: int = 64
    mass_tiles: int = 4
    chunk: int = 1024
    num_stages: int = 5
    num_warps: int = 2
    hold: bool = False  # keep a program's page numbers in registers, so that the pipeline carries K alone


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
    """Sizes of one call, in elements."""

    config: ScoreConfig
    block_m: int
    chunk: int
    num_chunks: int
    num_weights: int
    num_tops: int
    num_stats: int
    num_lanes: int
    keep: bool

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
) -> ScoreShape:
    kv_groups, per_group = groups.heads.shape
    block_m = power_of_two(rows * per_group, 16)
    if block_m > 128:
        raise ValueError(f"q: expected rows * heads per kv head <= 128, got {rows} * {per_group}")
    if keep is None:
        # Keeping costs a write and a read of a weight for each row; reading K again costs its row.
        keep = 2 * min(dtype.itemsize, 4) * rows * per_group <= dim * dtype.itemsize
    if config is None:
        wide = dtype == torch.float32 or block_m * dim > 8192
        width = 32 if wide or block_m > 32 else 64
        config = ScoreConfig(32, 32, 2, 64, hold=True) if INTERPRETED else ScoreConfig(width, width)
    # Statistics of all chunks of a lane are combined in one tile: at most 64 of them.
    chunk = max(config.chunk, power_of_two(triton.cdiv(nmax, 64)))
    num_chunks = triton.cdiv(nmax, chunk)
    lanes = batch * kv_groups * block_m
    if keep and config.mass_n != config.block_n:
        raise ValueError(f"config: expected mass_n = block_n when weights are kept, got {config.mass_n}, {config.block_n}")
    weights, tops = (lanes * nmax, lanes * triton.cdiv(nmax, config.block_n)) if keep else (0, 0)
    return ScoreShape(config, block_m, chunk, num_chunks, weights, tops, lanes * num_chunks * 2, lanes, keep)


def workspace_for(
    batch: int,
    rows: int,
    groups: HeadGroups,
    nmax: int,
    dim: int,
    dtype: torch.dtype,
    keep_weights: bool | None = None,
    config: ScoreConfig | None = None,
) -> ScoreWorkspace:
    """Scratch that fits score_heads for these shapes (nmax = columns of `scores`)."""
    shape = score_shape(batch, rows, groups, nmax, dim, dtype, keep_weights, config)
    return shape.workspace(dtype, groups.heads.device)
