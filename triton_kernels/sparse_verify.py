"""Attention of T in-flight rows over a shared set of committed tokens (METHOD section 3: row r sees the set and rows 0..r).

One set serves every head and layer, so the keys come as pool rows (`slots`, see translate_slots): a layer reads one
int32 a key and then its K and V rows, each once for all packed query rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .attention_core import (
    AttentionConfig,
    AttentionWorkspace,
    Plan,
    attend_tile,
    check_query,
    finish_split,
    launch_options,
    merge_kernel,
    plan_attention,
    sparse_split,
    store_rows,
)
from .runtime import (
    INTERPRETED,
    begin_dependent,
    check_counts,
    check_pools,
    check_tensor,
    power_of_two,
    precision_of,
    prefetch_instruction,
    prefetch_rows,
)
from .translate_slots import check_indices, translate_slots

MAX_QUERY_ROWS = 64
# Slots a program holds in registers: 8 a thread.
MAX_HELD_SLOTS = 1024


@triton.jit
def sparse_verify_kernel(
    q, k_pool, v_pool, slots, slot_counts, indices, lengths, num_tokens, out, part_o, part_ml, counters,
    stride_qb, stride_qt, stride_qh, stride_s, stride_i, T, window, scale_log2, softcap, early,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, ROW_TILES: tl.constexpr, ROW: tl.constexpr,
    HEAD: tl.constexpr, HELD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key split, row tile, kv head); the kv heads of a split read neighbouring memory."""
    pid = tl.program_id(0)
    h = pid % HKV
    tile = (pid // HKV) % ROW_TILES
    split = (pid // (HKV * ROW_TILES)) % SPLITS
    b = pid // (HKV * ROW_TILES * SPLITS)
    slots += b.to(tl.int64) * stride_s
    if PREFETCH != "":
        # Committed rows are older than the kernel before: fetch the first `early` while it ends, no more than the L2
        # can hold beside what that kernel reads. Nothing read here is used below.
        old_count = tl.load(slot_counts + b, cache_modifier=".cg")
        old_begin, old_stop, _ = sparse_split(old_count + T, split, SPLITS)
        old_stop = tl.minimum(tl.minimum(old_stop, old_count), old_begin + early)
        for start in range(old_begin, old_stop, 128):
            entry = tl.minimum(start + tl.arange(0, 128), old_stop - 1)
            old_rows = tl.load(slots + entry, cache_modifier=".cg").to(tl.int64) * ROW + h * HEAD
            prefetch_rows(k_pool + old_rows, PREFETCH)
            prefetch_rows(v_pool + old_rows, PREFETCH)
    begin_dependent(PDL)
    fed = tl.minimum(tl.load(num_tokens + b), T)
    count = tl.load(slot_counts + b)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // G
    head = h * G + m % G
    in_tile = m < T * G
    dims = tl.arange(0, BLOCK_D)
    if (tile * BLOCK_M) // G >= fed:
        if split == 0:
            store_rows(out, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b, t, head, dims, in_tile, T, HKV * G, D)
        return
    begin, stop, active = sparse_split(count + fed, split, SPLITS)
    if split >= active:
        return

    valid = in_tile & (t < fed)
    q_rows = b.to(tl.int64) * stride_qb + t.to(tl.int64) * stride_qt + head * stride_qh
    in_head = dims < D
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    length = tl.load(lengths + b) if WINDOW else 0
    if HELD > 0:
        # Copies complete in order: a slot fetched in the same pipeline would make every step wait for K and V before it.
        place = tl.arange(0, HELD)
        held = tl.load(slots + begin + place, mask=begin + place < stop, other=0)
    for start in range(begin, stop, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        stored = entry < stop
        if HELD > 0:
            slot = tl.gather(held, tl.minimum(entry - begin, HELD - 1), 0)
        else:
            slot = tl.load(slots + entry, mask=stored, other=0)
        rows = slot.to(tl.int64) * ROW + h * HEAD
        loaded = stored[:, None] & in_head[None, :] if D != BLOCK_D else stored[:, None]
        loaded_k = stored[None, :] & in_head[:, None] if D != BLOCK_D else stored[None, :]
        k = tl.load(k_pool + rows[None, :] + dims[:, None], mask=loaded_k, other=0.0)
        v = tl.load(v_pool + rows[:, None] + dims[None, :], mask=loaded, other=0.0)
        # In-flight entry i is visible to row t when i <= t; committed entries are below zero here.
        visible = stored[None, :] & (entry[None, :] - count <= t[:, None])
        if WINDOW:
            chosen = entry < count
            index = tl.load(indices + b.to(tl.int64) * stride_i + entry // UNIT, mask=chosen & stored, other=0)
            position = tl.where(chosen, index * UNIT + entry % UNIT, length + entry - count)
            visible = visible & (position[None, :] > length + t[:, None] - window)
        m_i, l_i, acc = attend_tile(q_tile, k, v, visible, m_i, l_i, acc, scale_log2, softcap, SOFTCAP, True, PRECISION)

    group = (b * ROW_TILES + tile) * HKV + h
    finish_split(
        acc, m_i, l_i, out, part_o, part_ml, counters, group, split, active, b, t, head, dims, in_tile, valid, T, HKV * G,
        D, BLOCK_D, BLOCK_M, SPLITS, FUSED,
    )  # fmt: skip


def choose_config(rows: int, head_dim: int, dtype: torch.dtype) -> AttentionConfig:
    """The measured configuration for `rows` = T * Hq/Hkv packed query rows."""
    if dtype == torch.float32:
        return AttentionConfig(16, 16 if head_dim > 64 else 32, 4, 2, waves=2.0, max_splits=8)
    block_m = min(power_of_two(rows, 16), 64 if head_dim > 128 else 128)
    if block_m > 64 or head_dim > 128:
        return AttentionConfig(block_m, 32, 8 if block_m > 64 else 4, 5, waves=1.0, fused_splits=2, max_splits=16)
    return AttentionConfig(block_m, 32, 4, 7, waves=1.0, fused_splits=2, max_splits=16, prefetch_bytes=6 << 20)


def plan(q: torch.Tensor, num_kv_heads: int, max_keys: int, config: AttentionConfig | None = None) -> Plan:
    """The launch plan for q [B, T, Hq, D] over at most `max_keys` entries; it sizes an AttentionWorkspace."""
    batch, tokens, heads, dim = q.shape
    rows = tokens * (heads // num_kv_heads)
    config = config or choose_config(rows, dim, q.dtype)
    return plan_attention(config, batch, num_kv_heads, rows, max_keys, q.device)


def sparse_verify(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    slot_counts: torch.Tensor | None = None,
    block_size: int = 1,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    workspace: AttentionWorkspace | None = None,
    config: AttentionConfig | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Attention of q [B, T, Hq, D] over {indices[b, :counts[b]]} and in-flight keys lengths[b] .. lengths[b] + t.

    k_pool, v_pool [pages, page_size, Hkv, D]; page_table [B, max_pages], lengths, num_tokens, counts [B] and indices
    [B, k] are int32 on the device, indices ascending (blocks of `block_size` tokens when above 1). In-flight K, V already
    lie in the pool. Rows at or beyond num_tokens[b] come out zero. `slots`, `slot_counts` from `translate_slots`, made
    once a round, skip the translation here. `debug` reads the indices back and checks their range and order.
    Returns [B, T, Hq, D]; allocates nothing when slots, slot_counts, out and workspace are passed. Raises ValueError.
    """
    check_query(q, k_pool, out, MAX_QUERY_ROWS)
    batch, tokens, num_heads, dim = q.shape
    page_size, num_kv_heads = k_pool.shape[1], k_pool.shape[2]
    check_pools(k_pool, v_pool, page_table, batch)
    check_counts(batch, q, lengths=lengths, num_tokens=num_tokens, counts=counts)
    check_tensor("indices", indices, (batch, None), (torch.int32,), q, contiguous=False)
    if window < 0 or softcap < 0:
        raise ValueError(f"window, softcap: expected 0 (off) or more, got {window}, {softcap}")
    if debug:
        check_indices(indices, counts, lengths, block_size)
    if slots is None or slot_counts is None:
        slots, slot_counts = translate_slots(
            indices, counts, lengths, num_tokens, page_table, page_size, tokens, block_size=block_size
        )
    max_entries = indices.shape[1] * block_size + tokens
    check_tensor("slots", slots, (batch, max_entries), (torch.int32,), q)
    check_counts(batch, q, slot_counts=slot_counts)
    group = num_heads // num_kv_heads
    config = config or choose_config(tokens * group, dim, q.dtype)
    launch = plan(q, num_kv_heads, max_entries, config)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = AttentionWorkspace(launch.num_rows, dim, launch.num_counters, q.device)
    workspace.check(launch.num_rows, dim, launch.num_counters, q)
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    options = launch_options(config, not INTERPRETED)
    dependent = "launch_pdl" in options
    per_split = triton.cdiv(triton.cdiv(max_entries, launch.splits), 16) * 16
    held = power_of_two(per_split, 16) if config.hold and per_split <= MAX_HELD_SLOTS else 0
    # Entries each split asks for early, so that all programs together ask for at most `prefetch_bytes`.
    early = config.prefetch_bytes // (2 * dim * q.element_size() * batch * num_kv_heads * launch.splits)
    prefetch = prefetch_instruction(dim * q.element_size()) if early > 0 and not INTERPRETED else ""
    block_d = power_of_two(dim, 16)
    sparse_verify_kernel[(batch * launch.splits * launch.row_tiles * num_kv_heads,)](
        q, k_pool, v_pool, slots, slot_counts, indices, lengths, num_tokens,
        out, workspace.outputs, workspace.stats, workspace.counters,
        q.stride(0), q.stride(1), q.stride(2), slots.stride(0), indices.stride(0), tokens, window,
        scale * math.log2(math.e), softcap, early,
        HKV=num_kv_heads, G=group, D=dim, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n, UNIT=block_size,
        SPLITS=launch.splits, ROW_TILES=launch.row_tiles, ROW=k_pool.stride(1), HEAD=k_pool.stride(2),
        HELD=held, WINDOW=window > 0, SOFTCAP=softcap > 0, FUSED=launch.fused, PRECISION=precision_of(q.dtype),
        PREFETCH=prefetch, PDL=dependent, **options,
    )  # fmt: skip
    if launch.splits > 1 and not launch.fused:
        chunk = min(config.block_m, 4)
        extra = {"launch_pdl": True} if dependent else {}
        merge_kernel[(batch * num_kv_heads, triton.cdiv(min(config.block_m, tokens * group), chunk), launch.row_tiles)](
            out, workspace.outputs, workspace.stats, lengths, num_tokens, slot_counts, tokens, window, num_heads,
            HKV=num_kv_heads, G=group, D=dim, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_R=chunk, SPLITS=launch.splits, WINDOW=window > 0, SPARSE=True, PDL=dependent, num_warps=4, **extra,
        )  # fmt: skip
    return out
