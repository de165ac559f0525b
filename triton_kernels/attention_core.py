"""What dense and sparse verification share: the online softmax over one tile, and the deterministic merge of key splits.

All g = Hq/Hkv query heads times T in-flight rows of one kv head are the rows of one tile (row m is query t = m // g, head
m % g of the group), so K and V are read once. Keys are split over programs; each writes an unnormalised fp32 partial
(o, m, l), and partials merge in split order, so the result does not depend on which program finishes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .runtime import begin_dependent, num_multiprocessors, power_of_two

# Bits of a NaN that no instruction makes (0xFFC0DEAD): a word of AttentionWorkspace.handed that nobody has written.
EMPTY = -4137299


@dataclass(frozen=True)
class AttentionConfig:
    """A launch configuration. Sizes in rows; `waves` is how many programs a multiprocessor should get in all."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    waves: float = 2.0
    fused_splits: int = 8  # up to this many splits merge in the last program, more in a second kernel
    max_splits: int = 64
    dependent: bool = True  # programmatic dependent launch
    ahead: bool = True  # sparse: start copying committed rows before the kernel before has ended (see sparse_verify)
    trigger: int = 0  # sparse, with `ahead`: the next kernel may start once this many tiles are read
    value_parts: int = 1  # sparse: programs that share the value dims of a head, each with all its keys (no merge)
    max_registers: int = 0  # a thread (0: the compiler's choice), so that programs of two kernels fit one multiprocessor
    prefetch_bytes: int = 0  # sparse, with `ahead`: ask the L2 for so many more bytes of K and V
    handed_splits: int = 0  # sparse: up to this many splits that merge in the last program hand it their partials (see hand_over)
    described: bool = False  # dense: tiles of K and V come by tensor descriptors where pages allow


class AttentionWorkspace:
    """Scratch of one stream, shared by all layers: partial outputs, their (m, l), zeroed arrival counters, and EMPTY words for
    partials that go from program to program.

    `num_rows` bounds B * Hkv * row tiles * splits * block_m, `num_handed` the rows of those partials (Plan.num_handed).
    Kernels leave the counters at zero and the words EMPTY.
    """

    def __init__(
        self, num_rows: int, head_dim: int, num_counters: int, device: torch.device | str, num_handed: int = 0
    ) -> None:
        self.handed = torch.full((num_handed * (power_of_two(head_dim) + 2),), EMPTY, dtype=torch.int32, device=device)
        self.outputs = torch.empty(num_rows * power_of_two(head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty(num_rows * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(num_counters, 1), dtype=torch.int32, device=device)

    def check(self, num_rows: int, head_dim: int, num_counters: int, like: torch.Tensor, num_handed: int = 0) -> None:
        """Raise ValueError when too small for a launch or on another device."""
        if self.stats.device != like.device:
            raise ValueError(f"workspace: expected device {like.device}, got {self.stats.device}")
        for name, need, have in (
            ("outputs", num_rows * power_of_two(head_dim), self.outputs.numel()),
            ("stats", num_rows * 2, self.stats.numel()),
            ("counters", num_counters, self.counters.numel()),
            ("handed", num_handed * (power_of_two(head_dim) + 2), self.handed.numel()),
        ):
            if have < need:
                raise ValueError(f"workspace.{name}: expected at least {need} elements, got {have}")


@dataclass(frozen=True)
class Plan:
    """Grid of a launch: `row_tiles` tiles of query rows and `splits` key splits for each (sequence, kv head)."""

    row_tiles: int
    splits: int
    num_rows: int
    num_counters: int
    fused: bool
    num_handed: int = 0  # rows of partials that go from program to program


def plan_attention(
    config: AttentionConfig, batch: int, num_kv_heads: int, rows: int, max_keys: int, device: torch.device
) -> Plan:
    """Choose the number of key splits from shapes alone (never from lengths, which live on the device)."""
    row_tiles = triton.cdiv(rows, config.block_m)
    programs = batch * num_kv_heads * row_tiles * config.value_parts
    processors = num_multiprocessors(device)
    # Past 16 splits the merge costs more than it spreads, unless the splits still leave processors idle.
    most = min(config.max_splits, max(16, processors // programs))
    splits = max(1, min(int(processors * config.waves // programs), most, triton.cdiv(max_keys, config.block_n)))
    num_rows = programs * splits * config.block_m if splits > 1 else 0
    handed = programs * (splits - 1) * config.block_m if splits <= min(config.handed_splits, config.fused_splits) else 0
    return Plan(row_tiles, splits, num_rows, programs if splits > 1 else 0, splits <= config.fused_splits, handed)


@triton.jit
def load_pages(pages, start, keys, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page numbers of keys start + [0, BLOCK_N): one when a page holds them all."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(pages + start // PAGE, mask=start < length, other=0)
    else:
        page = tl.load(pages + (start + keys) // PAGE, mask=start + keys < length, other=0)
    return page


@triton.jit
def tile_logits(q, k, scale_log2, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits [M, N] of q [M, D] and k [D, N]: unscaled, or scaled and in base 2 after a softcap."""
    s = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        # tanh by exp, exact at both ends; scale_log2 carries log2(e), softcap works on natural logits.
        x = s * (scale_log2 * 0.6931471805599453) / softcap
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))) * 1.4426950408889634
    return s


@triton.jit
def attend_tile(
    s, v, m_i, l_i, acc, scale_log2, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over tile_logits s [M, N], -inf where hidden; v [N, D]; m_i and l_i [M], acc [M, D] fp32 (base 2)."""
    factor = 1.0 if SOFTCAP else scale_log2
    # The maximum of unscaled logits, so that scaling and shifting are one instruction (a scale is above 0).
    m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
    # A row that has seen nothing yet keeps m = -inf; shifting by 0 instead keeps the exponentials free of NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return m_new, l_i, acc


@triton.jit
def store_rows(
    out, values, b, t, head, dims, keep, T, num_heads, D: tl.constexpr,
):  # fmt: skip
    """Write values [M, D] to out [B, T, Hq, D] where `keep` [M]."""
    # One 64-bit base: the rows of a sequence span less than 2^31 elements.
    out += b.to(tl.int64) * T * num_heads * D
    rows = (t * num_heads + head) * D  # [M]
    tl.store(out + rows[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=keep[:, None] & (dims[None, :] < D))


@triton.jit
def packed_out(out, starts, b, T, width):
    """`out` for store_rows where a sequence's rows of `width` elements begin at row starts[b]: those that are fed alone."""
    return out + (tl.load(starts + b).to(tl.int64) - b.to(tl.int64) * T) * width


@triton.jit
def finish_split(
    acc, m_i, l_i, out, part_o, part_ml, counters, group, split, active, b, t, head, dims, in_tile, valid, T, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Write the result of one split: directly when it is the only one, else as a partial; the last arrival merges."""
    if SPLITS == 1:
        store_rows(out, tl.where(valid[:, None], acc / l_i[:, None], 0.0), b, t, head, dims, in_tile, T, num_heads, D)
    else:
        if active == 1:
            store_rows(out, tl.where(valid[:, None], acc / l_i[:, None], 0.0), b, t, head, dims, in_tile, T, num_heads, D)
        else:
            rows = tl.arange(0, BLOCK_M)
            base = (group.to(tl.int64) * SPLITS + split) * BLOCK_M + rows  # [M]
            tl.store(part_ml + base * 2, m_i, mask=valid)
            tl.store(part_ml + base * 2 + 1, l_i, mask=valid)
            # `dims` may be a part of the head; the scratch row holds that part alone.
            columns = tl.arange(0, BLOCK_D)
            tl.store(part_o + base[:, None] * BLOCK_D + columns[None, :], acc, mask=valid[:, None])
            if FUSED:
                # All threads' stores precede the release of the counter; its acquire precedes the reads below.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu")
                if arrived == active - 1:
                    tl.store(counters + group, 0)
                    if SPLITS == 2:
                        merged = merge_two(
                            acc, m_i, l_i, part_o, part_ml, group, split, rows, columns, valid, BLOCK_D, BLOCK_M
                        )  # fmt: skip
                    else:
                        merged = merge_partials(
                            part_o, part_ml, group, active, rows, columns, valid, BLOCK_D, BLOCK_M, SPLITS
                        )  # fmt: skip
                    store_rows(out, merged, b, t, head, dims, in_tile, T, num_heads, D)


@triton.jit
def merge_two(
    acc, m_i, l_i, part_o, part_ml, group, split, rows, columns, valid, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """merge_partials in the last of two programs, whose own partial is still in registers."""
    base = (group.to(tl.int64) * 2 + 1 - split) * BLOCK_M + rows
    m_s = tl.load(part_ml + base * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
    l_s = tl.load(part_ml + base * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
    o_s = tl.load(part_o + base[:, None] * BLOCK_D + columns[None, :], mask=valid[:, None], other=0.0, cache_modifier=".cg")
    top = tl.maximum(m_i, m_s)
    shift = tl.where(top == float("-inf"), 0.0, top)
    # In split order, whichever program arrived last: a product fused into the sum is rounded differently from the other.
    is_first = split == 0
    w_0, w_1 = tl.exp2(tl.where(is_first, m_i, m_s) - shift), tl.exp2(tl.where(is_first, m_s, m_i) - shift)
    total = tl.where(is_first, l_i, l_s) * w_0 + tl.where(is_first, l_s, l_i) * w_1
    merged = tl.where(is_first, acc, o_s) * w_0[:, None] + tl.where(is_first, o_s, acc) * w_1[:, None]
    return tl.where(valid[:, None], merged / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)


@triton.jit
def merge_partials(
    part_o, part_ml, group, active, rows, dims, valid,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partials of `rows` in split order: [len(rows), BLOCK_D] fp32, zero where not valid."""
    first = group.to(tl.int64) * SPLITS * BLOCK_M + rows
    top = tl.full(rows.shape, float("-inf"), tl.float32)
    for s in range(active):
        m_s = tl.load(part_ml + (first + s * BLOCK_M) * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, m_s)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros(rows.shape, tl.float32)
    acc = tl.zeros([rows.shape[0], BLOCK_D], tl.float32)
    for s in range(active):
        base = first + s * BLOCK_M
        m_s = tl.load(part_ml + base * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
        l_s = tl.load(part_ml + base * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
        o_s = tl.load(part_o + base[:, None] * BLOCK_D + dims[None, :], mask=valid[:, None], other=0.0, cache_modifier=".cg")
        weight = tl.exp2(m_s - shift)
        total += l_s * weight
        acc += o_s * weight[:, None]
    return tl.where(valid[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)


# Any number of rows, and both lengths of a window, run on one kernel: none of them may compile another within a request.
@triton.jit(do_not_specialize=["T", "window"])
def merge_kernel(
    out, part_o, part_ml, lengths, num_tokens, slot_counts, starts, T, window, num_heads,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SPARSE: tl.constexpr,
    PDL: tl.constexpr, SETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Second kernel of the unfused merge: program (sequence and kv head, chunk of BLOCK_R rows, row tile)."""
    begin_dependent(PDL)
    h = tl.program_id(0) % HKV
    b = tl.program_id(0) // HKV
    tile = tl.program_id(2)
    group = (b * tl.num_programs(2) + tile) * HKV + h
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tile * BLOCK_M + row
    t = m // G
    fed = tl.minimum(tl.load(num_tokens + b), T)
    if (tile * BLOCK_M) // G >= fed:
        return
    length = tl.load(lengths + b)
    if SPARSE:
        active = sparse_split(tl.load(slot_counts + (b if SETS == 1 else b * HKV + h)) + fed, 0, SPLITS)[2]
    else:
        last = tl.minimum(((tile + 1) * BLOCK_M - 1) // G, fed - 1)
        active = dense_split(length, (tile * BLOCK_M) // G, last, window, 0, SPLITS, BLOCK_N, WINDOW)[2]
    if active == 1:
        return
    dims = tl.arange(0, BLOCK_D)
    in_tile = (m < T * G) & (row < BLOCK_M)
    if PACKED:
        out = packed_out(out, starts, b, T, num_heads * D)
        in_tile = in_tile & (t < fed)
    merged = merge_partials(part_o, part_ml, group, active, row, dims, in_tile & (t < fed), BLOCK_D, BLOCK_M, SPLITS)
    store_rows(out, merged, b, t, h * G + m % G, dims, in_tile, T, num_heads, D)


@triton.jit
def dense_split(length, first_row, last_row, window, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Keys [begin, stop) of a split and how many splits have any, for query rows first_row..last_row after `length` keys."""
    stop = length + last_row + 1
    start = tl.maximum(length + first_row - window + 1, 0) // BLOCK_N if WINDOW else 0
    tiles = tl.cdiv(stop, BLOCK_N) - start
    per_split = tl.cdiv(tiles, SPLITS)
    begin = (start + split * per_split) * BLOCK_N
    return begin, tl.minimum(begin + per_split * BLOCK_N, stop), tl.cdiv(tiles, per_split)


@triton.jit
def sparse_split(total, split, SPLITS: tl.constexpr):
    """Entries [begin, stop) of a split of `total` > 0 selected and in-flight keys, and how many splits have any."""
    # Sixteen-entry granularity balances the bytes of the splits better than whole tiles.
    per_split = tl.cdiv(tl.cdiv(total, SPLITS), 16) * 16
    begin = split * per_split
    return begin, tl.minimum(begin + per_split, total), tl.cdiv(total, per_split)


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The scale of the logits, 1 / sqrt(head_dim) by default. Raise ValueError unless above 0."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not scale > 0:
        raise ValueError(f"scale: expected above 0, got {scale}")
    return scale
