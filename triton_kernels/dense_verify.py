"""Dense attention of T in-flight rows over the whole paged cache (METHOD section 5, step 3, without a set).

Also serves decoding (T = 1), the 32-64 row dense check of `exact`, and prefill chunks: more rows are more row tiles.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_core import (
    AttentionConfig,
    AttentionWorkspace,
    Plan,
    attend_tile,
    dense_split,
    finish_split,
    load_pages,
    packed_out,
    plan_attention,
    resolve_scale,
    store_rows,
    tile_logits,
)
from .attention_launch import check_attention, launch_options, merge_splits, scratch_for
from .runtime import INTERPRETED, begin_dependent, check_tensor, power_of_two, precision_of

MAX_QUERY_ROWS = 8192
# Prompts, which have more rows a sequence than this, are split into a power of two: few kernels serve them all.
FEW_ROWS = 64


# Prompts have any number of rows, and so of row tiles: neither may compile a kernel of its own (one tile alone does).
@triton.jit(do_not_specialize_on_alignment=["T", "ROW_TILES"])
def dense_verify_kernel(
    q, k_pool, v_pool, page_table, lengths, num_tokens, starts, out, part_o, part_ml, counters,
    stride_qb, stride_qt, stride_qh, stride_pt, T, window, scale_log2, softcap, ROW_TILES,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, DESCRIBED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key split, row tile, kv head); neighbours share the sequence's pages.

    DESCRIBED: k_pool, v_pool are tensor descriptors of [rows, columns] that give tiles [BLOCK_N, D].
    """
    begin_dependent(PDL)
    pid = tl.program_id(0)
    h = pid % HKV
    tile = (pid // HKV) % ROW_TILES
    split = (pid // (HKV * ROW_TILES)) % SPLITS
    b = pid // (HKV * ROW_TILES * SPLITS)
    length = tl.load(lengths + b)
    fed = tl.minimum(tl.load(num_tokens + b), T)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // G
    head = h * G + m % G
    in_tile = m < T * G
    if PACKED:
        out = packed_out(out, starts, b, T, HKV * G * D)
        in_tile = in_tile & (t < fed)
    dims = tl.arange(0, BLOCK_D)
    first_row = (tile * BLOCK_M) // G
    if first_row >= fed:
        if split == 0:
            store_rows(out, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b, t, head, dims, in_tile, T, HKV * G, D)
        return
    last_row = tl.minimum(((tile + 1) * BLOCK_M - 1) // G, fed - 1)
    begin, stop, active = dense_split(length, first_row, last_row, window, split, SPLITS, BLOCK_N, WINDOW)
    if split >= active:
        return

    valid = in_tile & (t < fed)
    q += b.to(tl.int64) * stride_qb
    q_rows = t * stride_qt + head * stride_qh
    in_head = dims < D
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages = page_table + b.to(tl.int64) * stride_pt
    keys = tl.arange(0, BLOCK_N)
    # Every row sees every key up to length + first_row: those tiles need no mask.
    plain_stop = begin if WINDOW else tl.maximum(tl.minimum((length + first_row + 1) // BLOCK_N * BLOCK_N, stop), begin)
    if not DESCRIBED:
        k_head = k_pool + h * HEAD
        v_head = v_pool + h * HEAD
    page = load_pages(pages, begin, keys, stop, PAGE, BLOCK_N)
    next_page = load_pages(pages, begin + BLOCK_N, keys, stop, PAGE, BLOCK_N)
    for start in range(begin, plain_stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        if DESCRIBED:
            row = page * PAGE + start % PAGE
        else:
            rows = tile_rows(page, start, keys, PAGE, BLOCK_N, ROW)
        # Fetched two steps ahead: in the pipeline that copies K and V it would make every step wait for the copies before
        # it. The maximum is an operation: a value handed on as it is would keep the loop from being pipelined.
        page = tl.maximum(next_page, 0)
        next_page = load_pages(pages, start + 2 * BLOCK_N, keys, stop, PAGE, BLOCK_N)
        if DESCRIBED:
            k = tl.trans(k_pool.load([row, h * HEAD]))
            v = v_pool.load([row, h * HEAD])
        elif D == BLOCK_D:
            k = tl.load(k_head + rows[None, :] + dims[:, None])
            v = tl.load(v_head + rows[:, None] + dims[None, :])
        else:
            k = tl.load(k_head + rows[None, :] + dims[:, None], mask=in_head[:, None], other=0.0)
            v = tl.load(v_head + rows[:, None] + dims[None, :], mask=in_head[None, :], other=0.0)
        s = tile_logits(q_tile, k, scale_log2, softcap, SOFTCAP, PRECISION)
        m_i, l_i, acc = attend_tile(s, v, m_i, l_i, acc, scale_log2, SOFTCAP, PRECISION)
    for start in range(plain_stop, stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        page = load_pages(pages, start, keys, stop, PAGE, BLOCK_N)
        position = start + keys
        stored = position < stop
        if DESCRIBED:
            row = page * PAGE + start % PAGE
            k = tl.trans(k_pool.load([row, h * HEAD]))
            # What nobody wrote may be NaN, which a weight of zero would let through.
            v = tl.where(stored[:, None], v_pool.load([row, h * HEAD]), 0.0)
        else:
            rows = tile_rows(page, start, keys, PAGE, BLOCK_N, ROW)
            k = tl.load(k_head + rows[None, :] + dims[:, None], mask=stored[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_head + rows[:, None] + dims[None, :], mask=stored[:, None] & in_head[None, :], other=0.0)
        visible = (position[None, :] < stop) & (position[None, :] <= length + t[:, None])
        if WINDOW:
            visible = visible & (position[None, :] > length + t[:, None] - window)
        s = tl.where(visible, tile_logits(q_tile, k, scale_log2, softcap, SOFTCAP, PRECISION), float("-inf"))
        m_i, l_i, acc = attend_tile(s, v, m_i, l_i, acc, scale_log2, SOFTCAP, PRECISION)

    group = (b * ROW_TILES + tile) * HKV + h
    finish_split(
        acc, m_i, l_i, out, part_o, part_ml, counters, group, split, active, b, t, head, dims, in_tile, valid, T, HKV * G,
        D, BLOCK_D, BLOCK_M, SPLITS, FUSED,
    )  # fmt: skip


@triton.jit
def tile_rows(page, start, keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ROW: tl.constexpr):
    """Pool offsets [BLOCK_N] int64 of keys start + [0, BLOCK_N), a multiple of BLOCK_N, from their page numbers."""
    if PAGE % BLOCK_N == 0:
        return (page.to(tl.int64) * PAGE + start % PAGE) * ROW + keys * ROW
    else:
        # Both are powers of two: a tile is whole pages.
        return (page * PAGE + keys % PAGE).to(tl.int64) * ROW


def choose_config(rows: int, head_dim: int, dtype: torch.dtype) -> AttentionConfig:
    """The measured configuration for `rows` = T * Hq/Hkv packed query rows."""
    if dtype == torch.float32:
        return AttentionConfig(16, 16 if head_dim > 64 else 32, 4, 2, waves=4.0)
    block_n = 32 if head_dim > 128 else 64
    if head_dim == 128 and rows <= 16:
        # A tile as small as the rows would let three programs onto some processors while others get one, and the plain step
        # of 32 sequences waits for those: 19.2 ms, and 17.2 with this one (7B, 32k, one H200).
        return AttentionConfig(64, block_n, 4, 3, waves=2.0, described=True)
    if rows <= 64:
        return AttentionConfig(power_of_two(rows, 16), block_n, 4, 3, waves=2.0)
    if head_dim == 128 and rows <= 128:
        # One tile reads every key once. As many programs as processors, so that none runs alone in a second wave.
        return AttentionConfig(128, block_n, 8, 3, waves=1.0, described=True)
    # Two programs of 64 rows a processor overlap one's products with the other's softmax: faster than one of 128 rows.
    return AttentionConfig(64, block_n, 8 if head_dim > 128 else 4, 3, waves=4.0, described=head_dim == 128)


def described(config: AttentionConfig, k_pool: torch.Tensor, v_pool: torch.Tensor) -> tuple[object, object] | None:
    """Tensor descriptors of both pools for tiles of config.block_n rows of a head; None where the layout does not allow them.

    The copy engine then computes the addresses, which leaves a program's registers to its rows.
    """
    page_size, num_kv_heads, dim = k_pool.shape[1:]
    row, head, size = k_pool.stride(1), k_pool.stride(2), k_pool.element_size()
    aligned = all(n * size % 16 == 0 for n in (row, head, dim)) and all(x.data_ptr() % 16 == 0 for x in (k_pool, v_pool))
    if not config.described or page_size % config.block_n or dim & (dim - 1) or not aligned:
        return None
    shape = [k_pool.shape[0] * page_size, (num_kv_heads - 1) * head + dim]
    return tuple(TensorDescriptor(x, shape, [row, 1], [config.block_n, dim]) for x in (k_pool, v_pool))  # type: ignore[return-value]


def plan(q: torch.Tensor, num_kv_heads: int, max_keys: int, config: AttentionConfig | None = None) -> Plan:
    """The launch plan for q [B, T, Hq, D]; `num_rows` and `num_counters` size an AttentionWorkspace."""
    batch, tokens, heads, dim = q.shape
    rows = tokens * (heads // num_kv_heads)
    config = config or choose_config(rows, dim, q.dtype)
    launch = plan_attention(config, batch, num_kv_heads, rows, max_keys, q.device)
    if tokens > FEW_ROWS and launch.splits & (launch.splits - 1):
        config = replace(config, max_splits=1 << (launch.splits.bit_length() - 1))
        launch = plan_attention(config, batch, num_kv_heads, rows, max_keys, q.device)
    return launch


def dense_verify(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    max_keys: int | None = None,
    out: torch.Tensor | None = None,
    workspace: AttentionWorkspace | None = None,
    config: AttentionConfig | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [B, T, Hq, D] over committed keys [0, lengths[b]) and in-flight keys up to each row's own.

    k_pool, v_pool [pages, page_size, Hkv, D] (rows may be strided, see check_pools); page_table [B, max_pages] int32;
    lengths, num_tokens [B] int32 on the device. In-flight K, V already lie at positions lengths[b] .. lengths[b] +
    num_tokens[b] - 1. Row t sees key j when
    j <= lengths[b] + t, and j > lengths[b] + t - window when `window` > 0. Rows at or beyond num_tokens[b] come out
    zero. `max_keys` bounds lengths + T (default: what the page table holds) and only steers the number of splits.
    Returns [B, T, Hq, D]; with `starts` [B] int32 `out` [R, Hq, D], where row t of sequence b is starts[b] + t, fed rows alone.
    Nothing is allocated when `out` and `workspace` are passed. Raises ValueError on bad input.
    """
    given = {"lengths": lengths, "num_tokens": num_tokens}
    check_attention(q, k_pool, v_pool, page_table, out if starts is None else None, MAX_QUERY_ROWS, window, softcap, **given)
    if starts is not None:
        check_tensor("starts", starts, (len(q),), (torch.int32,), q)
        if out is None:
            raise ValueError("out: expected the packed rows [R, Hq, D] that starts points into, got None")
        check_tensor("out", out, (None, *q.shape[2:]), (q.dtype,), q)
    batch, tokens, num_heads, dim = q.shape
    page_size, num_kv_heads = k_pool.shape[1], k_pool.shape[2]
    capacity = page_table.shape[1] * page_size
    group = num_heads // num_kv_heads
    config = config or choose_config(tokens * group, dim, q.dtype)
    launch = plan(q, num_kv_heads, min(max_keys or capacity, capacity), config)
    out, workspace = scratch_for(q, launch, out, workspace)
    scale = resolve_scale(scale, dim)
    options = launch_options(config, not INTERPRETED)
    dependent = "launch_pdl" in options
    block_d = power_of_two(dim, 16)
    tiles = described(config, k_pool, v_pool)
    keys, values = tiles or (k_pool, v_pool)
    dense_verify_kernel[(batch * launch.splits * launch.row_tiles * num_kv_heads,)](
        q, keys, values, page_table, lengths, num_tokens, lengths if starts is None else starts, out,
        workspace.outputs, workspace.stats, workspace.counters,
        q.stride(0), q.stride(1), q.stride(2), page_table.stride(0), tokens, window, scale * math.log2(math.e), softcap,
        launch.row_tiles,
        HKV=num_kv_heads, G=group, D=dim, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n, PAGE=page_size,
        SPLITS=launch.splits, ROW=k_pool.stride(1), HEAD=k_pool.stride(2),
        WINDOW=window > 0, SOFTCAP=softcap > 0, FUSED=launch.fused, PRECISION=precision_of(q.dtype), PDL=dependent,
        DESCRIBED=tiles is not None, PACKED=starts is not None, **options,
    )  # fmt: skip
    merge_splits(out, workspace, lengths, num_tokens, None, window, launch, config, num_kv_heads, dependent, q.shape, starts)
    return out
