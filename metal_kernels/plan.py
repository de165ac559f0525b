"""Tile sizes, threadgroup memory and bytes of every kernel, from shapes alone (plain Python: no mlx, no lengths).

Apple speed is unmeasured: the choices follow limits that hold by construction (32 KB of threadgroup memory, at most 512
threads, since register-heavy pipelines may get fewer than 1024) and the count of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 256)
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_ROWS = 16  # query rows T
MAX_THREADGROUP_BYTES = 32768
PAD = 8  # elements between staged rows; as in attention.metal
TARGET_GROUPS = 128  # threadgroups wanted in flight when choosing the number of key splits
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class VerifyPlan:
    """Launch of a verify kernel: BK keys a tile, SIMD-groups a threadgroup, key splits, row blocks (K,V read once each).

    `threadgroup_bytes` is what the text declares. `rows` is g * T.
    """

    tile: int
    simdgroups: int
    splits: int
    row_blocks: int
    rows: int
    threadgroup_bytes: int

    @property
    def threads(self) -> int:
        """Threads a threadgroup."""
        return 32 * self.simdgroups


def check_shape(head_dim: int, dtype: str, num_rows: int, num_heads: int, num_kv_heads: int) -> None:
    """ValueError naming what no kernel here supports, and what to do."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}; use the array path (dustin.metal_kernels.fallback)"
        )
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype: expected one of {tuple(ITEM_BYTES)}, got {dtype}; convert the cache")
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(
            f"query rows T: expected 1 to {MAX_ROWS}, got {num_rows}; split the call or use the array path"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads: expected a multiple of num_kv_heads ({num_kv_heads}), got {num_heads}")


def staged_tile(head_dim: int, dtype: str, arrays: int = 2) -> tuple[int, int]:
    """(BK, threadgroup bytes) of kernels that stage `arrays` tiles of BK rows: the largest of 32, 16, 8 that fits 24 KB."""
    row = (head_dim + PAD) * ITEM_BYTES[dtype] * arrays
    tile = next(n for n in (32, 16, 8) if n * row <= 24576)
    return tile, tile * row


def split_count(keys: int, tile: int, groups: int) -> int:
    """Key splits for `groups` threadgroups: enough to fill the chip, at least four tiles a split. From capacity, not length."""
    tiles = -(-keys // tile)
    return max(1, min(64, TARGET_GROUPS // max(groups, 1), tiles // 4))


def verify_plan(
    head_dim: int, dtype: str, num_rows: int, num_heads: int, num_kv_heads: int, batch: int, keys: int
) -> VerifyPlan:
    """Plan of dense_verify (keys = capacity) and sparse_verify (keys = k + T)."""
    check_shape(head_dim, dtype, num_rows, num_heads, num_kv_heads)
    rows = num_rows * num_heads // num_kv_heads
    strips = -(-rows // 8)
    most = 16 if head_dim <= 128 else 8
    blocks = -(-strips // most)
    tile, bytes_used = staged_tile(head_dim, dtype)
    return VerifyPlan(
        tile=tile,
        simdgroups=max(4, -(-strips // blocks)),
        splits=split_count(keys, tile, batch * num_kv_heads * blocks),
        row_blocks=blocks,
        rows=rows,
        threadgroup_bytes=bytes_used,
    )


def blocks_plan(
    head_dim: int, dtype: str, num_rows: int, num_heads: int, num_kv_heads: int, batch: int, blocks: int
) -> VerifyPlan:
    """Plan of sparse_verify_blocks: 4 SIMD-groups, `tile` here is RB, the query rows a threadgroup holds."""
    check_shape(head_dim, dtype, num_rows, num_heads, num_kv_heads)
    rows = num_rows * num_heads // num_kv_heads
    row = (head_dim + PAD) * ITEM_BYTES[dtype] + (4 * BLOCK_TOKENS + 4) * 4 + 3 * 4
    held = min(48, (MAX_THREADGROUP_BYTES - 256) // row // 8 * 8)
    row_blocks = -(-rows // held)
    splits = split_count(blocks + 1, 4, batch * num_kv_heads * row_blocks)
    return VerifyPlan(held, 4, splits, row_blocks, rows, held * row + 3 * 4 * 4)


def verify_bytes(
    head_dim: int,
    dtype: str,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    keys_read: list[int],
    row_blocks: int = 1,
) -> int:
    """Bytes of K and V that must be read: `keys_read[b]` rows (selected or committed, plus in-flight), once a row block."""
    del num_rows, num_heads
    return sum(keys_read) * num_kv_heads * head_dim * ITEM_BYTES[dtype] * 2 * row_blocks
