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
    finish_split,
    plan_attention,
    resolve_scale,
    sparse_split,
    store_rows,
    tile_logits,
)
from .attention_launch import check_attention, launch_options, merge_splits, scratch_for
from .hand_over import hand_over
from .runtime import (
    INTERPRETED,
    begin_dependent,
    check_counts,
    check_tensor,
    num_multiprocessors,
    power_of_two,
    precision_of,
    prefetch_instruction,
    prefetch_rows,
)
from .translate_slots import check_indices, translate_slots

MAX_QUERY_ROWS = 64


@triton.jit
def sparse_verify_kernel(
    q, k_pool, v_pool, slots, slot_counts, indices, lengths, num_tokens, out, part_o, part_ml, counters, handed,
    stride_qb, stride_qt, stride_qh, stride_s, stride_i, T, window, scale_log2, softcap, early,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, VALUES: tl.constexpr, ROW_TILES: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, AHEAD: tl.constexpr, TRIGGER: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr, SETS: tl.constexpr, HANDED: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key split, row tile, kv head, part of the value dims); the kv heads of a split read neighbouring memory.
    With SETS = HKV each kv head has a set of its own.

    AHEAD > 0: what says which committed rows to read is older than the kernel before, and so are those rows. Their first
    AHEAD entries (the depth of the pipeline) are copied before that kernel ends; queries and in-flight rows wait for it.
    """
    pid = tl.program_id(0)
    part = pid % VALUES
    h = (pid // VALUES) % HKV
    tile = (pid // (HKV * VALUES)) % ROW_TILES
    split = (pid // (HKV * VALUES * ROW_TILES)) % SPLITS
    b = pid // (HKV * VALUES * ROW_TILES * SPLITS)
    chosen_by = b if SETS == 1 else b * HKV + h
    slots += chosen_by.to(tl.int64) * stride_s
    if AHEAD == 0:
        begin_dependent(PDL)
    fed = tl.minimum(tl.load(num_tokens + b), T)
    count = tl.load(slot_counts + chosen_by)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // G
    head = h * G + m % G
    in_tile = m < T * G
    dims = tl.arange(0, BLOCK_D)
    value_dims = part * BLOCK_V + tl.arange(0, BLOCK_V)
    if (tile * BLOCK_M) // G >= fed:
        begin_dependent(PDL)
        if split == 0:
            store_rows(out, tl.zeros([BLOCK_M, BLOCK_V], tl.float32), b, t, head, value_dims, in_tile, T, HKV * G, D)
        return
    begin, stop, active = sparse_split(count + fed, split, SPLITS)
    if split >= active:
        # Every program waits, so that a kernel's end means that all kernels before it have ended.
        begin_dependent(PDL)
        return

    valid = in_tile & (t < fed)
    q += b.to(tl.int64) * stride_qb
    q_rows = t * stride_qt + head * stride_qh
    in_head = dims < D
    if AHEAD > 0:
        if begin + AHEAD > count:
            begin_dependent(PDL)
        if PREFETCH != "":
            # Entries past the pipeline's own depth go to the L2 only. Nothing read here is used below. (Asking for all the
            # rest at once when the wait is over was slower: it delays the copies that the first steps wait for.)
            stop_early = tl.minimum(tl.minimum(stop, count), begin + AHEAD + early)
            for first in range(begin + AHEAD, stop_early, 128):
                soon = tl.minimum(first + tl.arange(0, 128), stop_early - 1)
                old_rows = tl.load(slots + soon).to(tl.int64) * ROW + h * HEAD
                prefetch_rows(k_pool + old_rows, PREFETCH)
                if part == 0:
                    prefetch_rows(v_pool + old_rows, PREFETCH)
        q_tile = tl.zeros([BLOCK_M, BLOCK_D], q.dtype.element_ty)
    else:
        q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    length = tl.load(lengths + b) if WINDOW else 0
    # Slots are carried two steps ahead in registers: fetched by the pipeline that copies K and V, they would hold it up.
    # Past the end the last entry stands in: its row is finite, hidden, and needs no mask on the copies.
    place = tl.arange(0, BLOCK_N)
    slot = tl.load(slots + tl.minimum(begin + place, stop - 1))
    next_slot = tl.load(slots + tl.minimum(begin + BLOCK_N + place, stop - 1))
    k_head = k_pool + h * HEAD + dims
    v_head = v_pool + h * HEAD + value_dims
    for start in range(begin, stop, BLOCK_N):
        rows = slot.to(tl.int64) * ROW
        if D == BLOCK_D:
            k = tl.load(k_head[None, :] + rows[:, None])
            v = tl.load(v_head[None, :] + rows[:, None])
        else:
            k = tl.load(k_head[None, :] + rows[:, None], mask=in_head[None, :], other=0.0)
            v = tl.load(v_head[None, :] + rows[:, None], mask=(value_dims < D)[None, :], other=0.0)
        # An operation, though slots are never negative: a value handed on as it is would keep the loop from being pipelined.
        slot = tl.maximum(next_slot, 0)
        next_slot = tl.load(slots + tl.minimum(start + 2 * BLOCK_N + place, stop - 1))
        if AHEAD > 0:
            if start == begin:
                if PDL:
                    tl.extra.cuda.gdc_wait()
                q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)
            if PDL:
                # Late enough that what the next kernel reads ahead fills the end of this one.
                if start == begin + TRIGGER * BLOCK_N:
                    tl.extra.cuda.gdc_launch_dependents()
        s = tile_logits(q_tile, tl.trans(k), scale_log2, softcap, SOFTCAP, PRECISION)
        # Tiles of committed entries alone are visible to every row.
        if WINDOW or start + BLOCK_N > tl.minimum(count, stop):
            if PDL:
                # At the last tile at the latest. An effect keeps this a branch: selects would cost every tile.
                tl.extra.cuda.gdc_launch_dependents()
            # In-flight entry i is visible to row t when i <= t; committed entries are below zero there.
            entry = start + place
            visible = entry[None, :] <= tl.minimum(count + t, stop - 1)[:, None]
            if WINDOW:
                chosen = entry < count
                index = tl.load(indices + chosen_by.to(tl.int64) * stride_i + entry // UNIT, mask=chosen & (entry < stop), other=0)
                position = tl.where(chosen, index * UNIT + entry % UNIT, length + entry - count)
                visible = visible & (position[None, :] > length + t[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        m_i, l_i, acc = attend_tile(s, v, m_i, l_i, acc, scale_log2, SOFTCAP, PRECISION)

    group = ((b * ROW_TILES + tile) * HKV + h) * VALUES + part
    if HANDED and active > 1:
        hand_over(
            acc, m_i, l_i, handed, out, group, split, active, b, t, head, value_dims, in_tile, valid, T, HKV * G,
            D, BLOCK_V, BLOCK_M, SPLITS,
        )  # fmt: skip
    else:
        finish_split(
            acc, m_i, l_i, out, part_o, part_ml, counters, group, split, active, b, t, head, value_dims, in_tile, valid, T,
            HKV * G, D, BLOCK_V, BLOCK_M, SPLITS, FUSED,
        )  # fmt: skip


def choose_config(rows: int, head_dim: int, dtype: torch.dtype, splits: int = 0, chained: bool = True) -> AttentionConfig:
    """The measured configuration for `rows` = T * Hq/Hkv packed query rows where the processors hold `splits` programs a sequence
    and kv head at once (see one_wave). `chained`: behind launches of this kernel alone, as in the benchmark of attention."""
    if dtype == torch.float32:
        return AttentionConfig(16, 16 if head_dim > 64 else 32, 4, 2, waves=2.0, max_splits=8, ahead=False)
    block_m = min(power_of_two(rows, 16), 64 if head_dim > 128 else 128)
    if block_m > 64 or head_dim > 128:
        return AttentionConfig(block_m, 32, 8 if block_m > 64 else 4, 5, fused_splits=2, max_splits=16, ahead=False)
    apart = splits in (2, 8, 16) or (splits == 1 and rows <= 42) if chained else splits > 0 and rows > 16
    if apart and head_dim == 128:
        # Two programs do not fit one processor: the next layer's start as these end, so no processor ever gets two at once.
        # Measured at one, two, four and eight sequences of 64/8/128 and at 32 of 28/4/128 (42 rows), where three stages were
        # faster at four and at 16 of 64/8/128 (48 rows); between a model's products at 8, 16 and 32 of 28/4/128.
        return AttentionConfig(block_m, 64, 4, 4, waves=1.0, fused_splits=2, max_splits=16, handed_splits=2)
    return AttentionConfig(block_m, 64, 4, 3, waves=1.0, fused_splits=2, max_splits=16, trigger=3)


def one_wave(q: torch.Tensor, num_kv_heads: int) -> int:
    """Programs a sequence and kv head of q [B, T, Hq, D] that the processors hold at once, one each; 0 when they are fewer."""
    return num_multiprocessors(q.device) // (q.shape[0] * num_kv_heads)


def plan(q: torch.Tensor, num_kv_heads: int, max_keys: int, config: AttentionConfig | None = None) -> Plan:
    """The launch plan for q [B, T, Hq, D] over at most `max_keys` entries; it sizes an AttentionWorkspace."""
    batch, tokens, heads, dim = q.shape
    rows = tokens * (heads // num_kv_heads)
    config = config or choose_config(rows, dim, q.dtype, one_wave(q, num_kv_heads))
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
    settled: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """Attention of q [B, T, Hq, D] over {indices[b, :counts[b]]} and in-flight keys lengths[b] .. lengths[b] + t.

    k_pool, v_pool [pages, page_size, Hkv, D]; page_table [B, max_pages], lengths, num_tokens, counts [B] and indices
    [B, k] are int32 on the device, indices ascending (blocks of `block_size` tokens when above 1). With B * Hkv rows of indices,
    counts, slots and slot_counts, those of a sequence together, each kv head reads its own set. In-flight K, V already lie in
    the pool. Rows at or beyond num_tokens[b] come out zero. `slots`, `slot_counts` from `translate_slots`, made
    once a round, skip the translation here. `settled` promises that the launch right before this one wrote none of
    slots, slot_counts, num_tokens and no committed row: they are then read while it still runs. `debug` reads the
    indices back and checks their range and order.
    Returns [B, T, Hq, D]; allocates nothing when slots, slot_counts, out and workspace are passed. Raises ValueError.
    """
    check_attention(q, k_pool, v_pool, page_table, out, MAX_QUERY_ROWS, window, softcap, lengths=lengths, num_tokens=num_tokens)
    batch, tokens, num_heads, dim = q.shape
    page_size, num_kv_heads = k_pool.shape[1], k_pool.shape[2]
    sets = num_kv_heads if len(indices) == batch * num_kv_heads else 1
    check_tensor("indices", indices, (batch * sets, None), (torch.int32,), q, contiguous=False)
    check_counts(batch * sets, q, counts=counts)
    if debug:
        check_indices(indices, counts, lengths.repeat_interleave(sets), block_size)
    if slots is None or slot_counts is None:
        settled = False
        slots, slot_counts = translate_slots(
            indices, counts, lengths, num_tokens, page_table, page_size, tokens, block_size=block_size, sets=sets
        )
    max_entries = indices.shape[1] * block_size + tokens
    check_tensor("slots", slots, (batch * sets, max_entries), (torch.int32,), q)
    check_counts(batch * sets, q, slot_counts=slot_counts)
    group = num_heads // num_kv_heads
    config = config or choose_config(tokens * group, dim, q.dtype, one_wave(q, num_kv_heads))
    launch = plan(q, num_kv_heads, max_entries, config)
    out, workspace = scratch_for(q, launch, out, workspace)
    scale = resolve_scale(scale, dim)
    options = launch_options(config, not INTERPRETED)
    dependent = "launch_pdl" in options
    if not settled:
        # Beside programs of the launch before the device would place two of these on some processors, and every later layer of
        # a round would find the places as its predecessor left them: up to 1.15 times as long. So that launch ends first.
        options.pop("launch_pdl", None)
    parts = config.value_parts
    block_d = power_of_two(dim, 16)
    if parts > 1 and (block_d // parts < 16 or (launch.splits > 1 and not launch.fused)):
        raise ValueError(f"config.value_parts: expected 1 for head_dim {dim} with {launch.splits} splits, got {parts}")
    ahead = config.num_stages * config.block_n if settled and config.ahead else 0
    # Entries that a program asks for early, so that all programs together ask for at most `prefetch_bytes`.
    early = config.prefetch_bytes // (2 * dim * q.element_size() * batch * num_kv_heads * launch.splits)
    # Where a processor holds two programs of this kernel, those of the next one come too late to fetch early.
    alone = batch * launch.splits * launch.row_tiles * num_kv_heads * parts <= num_multiprocessors(q.device)
    prefetch = prefetch_instruction(dim * q.element_size()) if early > 0 and ahead and dependent and alone else ""
    sparse_verify_kernel[(batch * launch.splits * launch.row_tiles * num_kv_heads * parts,)](
        q, k_pool, v_pool, slots, slot_counts, indices, lengths, num_tokens,
        out, workspace.outputs, workspace.stats, workspace.counters, workspace.handed,
        q.stride(0), q.stride(1), q.stride(2), slots.stride(0), indices.stride(0), tokens, window,
        scale * math.log2(math.e), softcap, early,
        HKV=num_kv_heads, G=group, D=dim, BLOCK_D=block_d, BLOCK_V=block_d // parts, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, UNIT=block_size, SPLITS=launch.splits, VALUES=parts, ROW_TILES=launch.row_tiles,
        ROW=k_pool.stride(1), HEAD=k_pool.stride(2), AHEAD=ahead, TRIGGER=config.trigger, WINDOW=window > 0,
        SOFTCAP=softcap > 0, FUSED=launch.fused, PRECISION=precision_of(q.dtype), PREFETCH=prefetch, PDL=dependent,
        SETS=sets, HANDED=launch.num_handed > 0, **options,
    )  # fmt: skip
    merge_splits(out, workspace, lengths, num_tokens, slot_counts, window, launch, config, num_kv_heads, dependent, q.shape)
    return out
