"""Softmax mass of every committed token for each kv head, by compact keys: score_heads for sets of the kv heads' own.

Two passes over codes of half a byte a number. Pass 1 sums exponentials in every chunk of keys about a maximum that the chunk's
first tile gives, so that a step needs no reduction across threads; pass 2 puts the chunks together, in order, and writes masses.
All query heads of a kv head score; what a key costs is one exponential a row and head and pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .runtime import (
    INTERPRETED,
    begin_dependent,
    check_counts,
    check_pools,
    check_tensor,
    num_multiprocessors,
    power_of_two,
    precision_of,
)
from .score_passes import IN_REGISTERS, unpack_halves

# Rows times heads of a kv head: columns of a product.
MAX_COLUMNS = 128
# What the first tile's maximum is raised by: later keys may exceed it by 2^157 before a sum overflows, and count from 2^-96 on.
MARGIN = tl.constexpr(30.0)
# Chunks of a sequence: the second pass puts them together in one tile.
MAX_CHUNKS = 64


@triton.jit
def tile_pages(pages, start, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of a tile of keys, of which it has one or two: numbers that all threads know. Looked up key by key they would
    have to be exchanged between threads."""
    first = tl.load(pages + start // PAGE, mask=start < length, other=0)
    second = first
    if BLOCK_N > PAGE:
        second = tl.load(pages + start // PAGE + 1, mask=start + PAGE < length, other=0)
    return first, second


@triton.jit
def load_codes(
    keys_of_head, first, second, start, keys, n, ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The low and the high numbers [BLOCK_N, HALF] of the codes at start + [0, BLOCK_N)."""
    if BLOCK_N <= PAGE:
        rows = keys_of_head + (first.to(tl.int64) * PAGE + start % PAGE) * ROW + (keys * ROW)[:, None]
    else:
        page = tl.where(keys < PAGE, first, second)
        rows = keys_of_head + ((page * PAGE + keys % PAGE).to(tl.int64) * ROW)[:, None]
    packed = tl.load(rows + n[None, :])
    if IN_REGISTERS and DTYPE == tl.float16:
        low, high = unpack_halves(packed)
    else:
        pair = packed.to(tl.int32)
        low, high = ((pair << 28) >> 28).to(DTYPE), (pair >> 4).to(DTYPE)
    return low, high


@triton.jit
def products(low, high, q_low, q_high, PRECISION: tl.constexpr):
    """[N, M] of codes' and queries' numbers, unscaled."""
    return tl.dot(high, q_high, tl.dot(low, q_low, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def load_columns(
    q, b, h, m, fed, n, stride_qb, stride_qr, G: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """The queries' low and high numbers [HALF, M] of a kv head, and which columns count [M]: column m is row m // G, head m % G."""
    valid = m < fed * G
    column = q + b.to(tl.int64) * stride_qb + (m // G).to(tl.int64) * stride_qr + (h * G + m % G) * RANK
    low = tl.load(column[None, :] + n[:, None], mask=valid[None, :], other=0.0)
    high = tl.load(column[None, :] + (HALF + n)[:, None], mask=valid[None, :], other=0.0)
    return low, high, valid


@triton.jit
def first_shift(low, high, q_low, q_high, inside, scale_log2, PRECISION: tl.constexpr):
    """What exponents [M] are taken about: the maximum over the keys of a tile that are there, and some more."""
    s = products(low, high, q_low, q_high, PRECISION)
    return tl.max(tl.where(inside[:, None], s, float("-inf")), 0) * scale_log2 + MARGIN


@triton.jit
def careful_sums(
    q_low, q_high, of_head, pages, begin, stop, keys, n, length, scale_log2,
    ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(shift, sum) [BLOCK_M] of a chunk about the maximum of all its keys."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        first, second = tile_pages(pages, start, length, PAGE, BLOCK_N)
        low, high = load_codes(of_head, first, second, start, keys, n, ROW, PAGE, BLOCK_N, q_low.dtype)
        top = tl.maximum(top, first_shift(low, high, q_low, q_high, start + keys < length, scale_log2, PRECISION))
    shift = top - MARGIN
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=1):
        first, second = tile_pages(pages, start, length, PAGE, BLOCK_N)
        low, high = load_codes(of_head, first, second, start, keys, n, ROW, PAGE, BLOCK_N, q_low.dtype)
        p = tl.exp2(products(low, high, q_low, q_high, PRECISION) * scale_log2 - shift[None, :])
        total += tl.sum(tl.where((start + keys < length)[:, None], p, 0.0), 0)
    return shift, total


@triton.jit
def powers(
    low, high, q_low, q_high, shift, start, keys, length, scale_log2, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """2^(logit - shift) [N, M] of a tile, 0 for keys beyond the length."""
    p = tl.exp2(products(low, high, q_low, q_high, PRECISION) * scale_log2 - shift[None, :])
    if start + BLOCK_N > length:
        p = tl.where((start + keys < length)[:, None], p, 0.0)
    return p


@triton.jit
def store_sums(
    place, sums, shift, q_low, q_high, of_head, pages, begin, stop, keys, n, length, scale_log2,
    ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a chunk's log-sum-exps in base 2 to `place` [BLOCK_M]. Sums and shifts apart could not be put together with those of
    other chunks: shifts may lie further apart than floats reach, where what they stand for does not."""
    total = tl.sum(sums, 0)
    if tl.max(total, 0) == float("inf"):
        # A key so far above the first tile's is all that counts: once more, about the maximum of all.
        shift, total = careful_sums(
            q_low, q_high, of_head, pages, begin, stop, keys, n, length, scale_log2, ROW, PAGE, BLOCK_N, BLOCK_M, PRECISION
        )
    tl.store(place, shift + tl.log2(total))


@triton.jit
def log_sums(stats, slab, m, valid, chunks, num_chunks, WIDTH: tl.constexpr, MOST: tl.constexpr):
    """Log-sum-exps [M] in base 2 of all chunks together; infinite, hence mass 0, for columns that do not count."""
    c = tl.arange(0, MOST)
    place = (slab * num_chunks + c[None, :]) * WIDTH + m[:, None]
    of_chunks = tl.load(stats + place, mask=(c < chunks)[None, :] & valid[:, None], other=float("-inf"))
    top = tl.where(valid, tl.max(of_chunks, 1), 0.0)
    total = tl.sum(tl.exp2(of_chunks - top[:, None]), 1)
    return tl.where(valid & (total > 0), top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))


@triton.jit(do_not_specialize=["stride_pt", "R", "num_chunks", "chunk_tiles"])
def packed_sums_kernel(
    q, codes, page_table, lengths, num_rows, stats, stride_qb, stride_qr, stride_pt, R, num_chunks, chunk_tiles, scale_log2,
    G: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, kv head, sequence): the log-sum-exp in base 2 of its keys' logits for every column."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    fed = tl.minimum(tl.load(num_rows + b), R)
    # Counted in tiles, so that a compiler sees where a tile may begin.
    begin = chunk * (chunk_tiles * BLOCK_N)
    if (begin >= length) | (fed <= 0):
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, HALF)
    keys = tl.arange(0, BLOCK_N)
    ROW: tl.constexpr = HKV * HALF
    q_low, q_high, _ = load_columns(q, b, h, m, fed, n, stride_qb, stride_qr, G, 2 * HALF, HALF)
    pages = page_table + b.to(tl.int64) * stride_pt
    of_head = codes + h * HALF
    stop = tl.minimum(begin + chunk_tiles * BLOCK_N, length)
    first, second = tile_pages(pages, begin, length, PAGE, BLOCK_N)
    next_first, next_second = tile_pages(pages, begin + BLOCK_N, length, PAGE, BLOCK_N)
    low, high = load_codes(of_head, first, second, begin, keys, n, ROW, PAGE, BLOCK_N, q.dtype.element_ty)
    shift = first_shift(low, high, q_low, q_high, begin + keys < length, scale_log2, PRECISION)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if MORE > 0:
        m_more = BLOCK_M + tl.arange(0, MORE)
        more_low, more_high, _ = load_columns(q, b, h, m_more, fed, n, stride_qb, stride_qr, G, 2 * HALF, HALF)
        shift_more = first_shift(low, high, more_low, more_high, begin + keys < length, scale_log2, PRECISION)
        sums_more = tl.zeros([BLOCK_N, MORE], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        low, high = load_codes(of_head, first, second, start, keys, n, ROW, PAGE, BLOCK_N, q.dtype.element_ty)
        # Two steps ahead, in registers; the maximum keeps the loop one that is pipelined (see score_logits_kernel).
        first, second = tl.maximum(next_first, 0), tl.maximum(next_second, 0)
        next_first, next_second = tile_pages(pages, start + 2 * BLOCK_N, length, PAGE, BLOCK_N)
        sums += powers(low, high, q_low, q_high, shift, start, keys, length, scale_log2, BLOCK_N, PRECISION)
        if MORE > 0:
            sums_more += powers(low, high, more_low, more_high, shift_more, start, keys, length, scale_log2, BLOCK_N, PRECISION)
    place = stats + ((b.to(tl.int64) * HKV + h) * num_chunks + chunk) * (BLOCK_M + MORE)
    store_sums(
        place + m, sums, shift, q_low, q_high, of_head, pages, begin, stop, keys, n, length, scale_log2,
        ROW, PAGE, BLOCK_N, BLOCK_M, PRECISION,
    )  # fmt: skip
    if MORE > 0:
        store_sums(
            place + m_more, sums_more, shift_more, more_low, more_high, of_head, pages, begin, stop, keys, n, length, scale_log2,
            ROW, PAGE, BLOCK_N, MORE, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_pt", "R", "num_chunks", "chunk_tiles", "span_tiles"])
def packed_mass_kernel(
    q, codes, page_table, lengths, num_rows, stats, scores, stride_qb, stride_qr, stride_pt, R, num_chunks, chunk_tiles,
    span_tiles, nmax, scale_log2,
    G: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, MORE: tl.constexpr, BLOCK_N: tl.constexpr,
    MOST: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (span keys, kv head, sequence): the mean over rows and heads of the softmax, -inf beyond the length."""
    begin_dependent(PDL)
    begin = tl.program_id(0) * (span_tiles * BLOCK_N)
    h = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    fed = tl.minimum(tl.load(num_rows + b), R)
    keys = tl.arange(0, BLOCK_N)
    row = scores + (b.to(tl.int64) * HKV + h) * nmax
    if (begin >= length) | (fed <= 0):
        for start in range(begin, tl.minimum(begin + span_tiles * BLOCK_N, nmax), BLOCK_N):
            tl.store(row + start + keys, tl.where(start + keys < length, 0.0, float("-inf")), mask=start + keys < nmax)
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, HALF)
    ROW: tl.constexpr = HKV * HALF
    WIDTH: tl.constexpr = BLOCK_M + MORE
    slab, chunks = b.to(tl.int64) * HKV + h, tl.cdiv(length, chunk_tiles * BLOCK_N)
    q_low, q_high, valid = load_columns(q, b, h, m, fed, n, stride_qb, stride_qr, G, 2 * HALF, HALF)
    lse = log_sums(stats, slab, m, valid, chunks, num_chunks, WIDTH, MOST)
    if MORE > 0:
        m_more = BLOCK_M + tl.arange(0, MORE)
        more_low, more_high, valid_more = load_columns(q, b, h, m_more, fed, n, stride_qb, stride_qr, G, 2 * HALF, HALF)
        lse_more = log_sums(stats, slab, m_more, valid_more, chunks, num_chunks, WIDTH, MOST)
    pages = page_table + b.to(tl.int64) * stride_pt
    of_head = codes + h * HALF
    first, second = tile_pages(pages, begin, length, PAGE, BLOCK_N)
    next_first, next_second = tile_pages(pages, begin + BLOCK_N, length, PAGE, BLOCK_N)
    weight = 1.0 / (fed * G).to(tl.float32)
    for start in range(begin, tl.minimum(begin + span_tiles * BLOCK_N, nmax), BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        low, high = load_codes(of_head, first, second, start, keys, n, ROW, PAGE, BLOCK_N, q.dtype.element_ty)
        first, second = tl.maximum(next_first, 0), tl.maximum(next_second, 0)
        next_first, next_second = tile_pages(pages, start + 2 * BLOCK_N, length, PAGE, BLOCK_N)
        mass = tl.sum(tl.exp2(products(low, high, q_low, q_high, PRECISION) * scale_log2 - lse[None, :]), 1)
        if MORE > 0:
            mass += tl.sum(tl.exp2(products(low, high, more_low, more_high, PRECISION) * scale_log2 - lse_more[None, :]), 1)
        at = start + keys
        tl.store(row + at, tl.where(at < length, mass * weight, float("-inf")), mask=at < nmax)


@dataclass(frozen=True)
class PackedConfig:
    """Launch sizes: keys a tile, keys a program of pass 1 (`chunk`) and of pass 2 (`span`), stages, warps."""

    block_n: int = 128
    chunk: int = 2048
    span: int = 1024
    num_stages: int = 3
    num_warps: int = 4
    max_registers: int = 128  # a thread of pass 1, so that the branch that is never taken costs no program (0: no limit)


def columns_of(count: int) -> tuple[int, int]:
    """(columns of a product, columns of a second one or 0) that hold `count`: every column costs an exponential a key."""
    return (32, 16) if 32 < count <= 48 else (power_of_two(count, 16), 0)


def choose_config(batch: int, kv_heads: int, nmax: int, columns: int, device: torch.device) -> PackedConfig:
    """The fastest of those measured on an H200 (32k keys, 4, 32 and 128 kv heads of sequences, 28 and 35 columns): long chunks as
    long as programs fill the processors several times, smaller tiles for more columns."""
    # One tile holds what all chunks say.
    least = power_of_two(triton.cdiv(nmax, MAX_CHUNKS))
    if INTERPRETED:
        return PackedConfig(16, max(64, least), 32, 2)
    slabs, enough = batch * kv_heads, 3.75 * num_multiprocessors(device)
    chunk = next((c for c in (4096, 2048) if slabs * triton.cdiv(nmax, c) >= enough), 1024)
    chunk = max(chunk, least)
    if columns <= 32:
        return PackedConfig(128, chunk, chunk // 2, 3)
    if columns > 48:
        return PackedConfig(64, chunk, chunk // 2, 3, 4 if columns <= 64 else 8, 0)
    return PackedConfig(64, chunk, chunk // 2, 4, max_registers=96 if chunk == 1024 else 128)


def packed_scores(
    q: torch.Tensor,
    codes: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    *,
    num_rows: torch.Tensor,
    scale: float,
    config: PackedConfig | None = None,
) -> torch.Tensor:
    """Write to scores [B * Hkv, Nmax] fp32, row b * Hkv + h: the mean over kv head h's query heads and sequence b's rows of
    softmax(q . K * scale) over [0, lengths[b]), and -inf at and beyond it.

    q [B, R, Hq, rank] (a row's heads contiguous), in float16 for codes to be unpacked without conversions; codes int8 [pages,
    page_size, Hkv, rank / 2] as packed_rows writes them; page_table [B, max_pages], lengths and num_rows [B] int32 (no more than
    R count; 0 rows: scores of 0). Returns scores. Raises ValueError on bad input.
    """
    check_tensor("codes", codes, (None, None, None, None), (torch.int8,), q)
    pages, page_size, kv_heads, half = codes.shape
    check_tensor("q", q, (None, None, None, 2 * half), (torch.float16, torch.bfloat16, torch.float32), codes, contiguous=False)
    batch, rows, num_heads, rank = q.shape
    check_pools(codes, None, page_table, batch, (torch.int8,))
    check_counts(batch, q, lengths=lengths, num_rows=num_rows)
    check_tensor("scores", scores, (batch * kv_heads, None), (torch.float32,), q)
    nmax, group = scores.shape[1], num_heads // kv_heads
    if num_heads % kv_heads or q.stride(2) != rank:
        raise ValueError(f"q: expected a multiple of {kv_heads} heads side by side, got {num_heads}, strides {q.stride()}")
    if nmax > page_table.shape[1] * page_size:
        raise ValueError(f"scores: expected at most {page_table.shape[1] * page_size} columns (the page table), got {nmax}")
    columns, more = columns_of(rows * group)
    if columns > MAX_COLUMNS:
        raise ValueError(f"q: expected rows * heads per kv head <= {MAX_COLUMNS}, got {rows} * {group}")
    config = config or choose_config(batch, kv_heads, nmax, columns + more, q.device)
    # A tile has two pages at most.
    block_n = min(config.block_n, 2 * page_size)
    if config.chunk % block_n or config.span % block_n:
        raise ValueError(f"config: expected chunk and span to be multiples of {block_n} keys, got {config.chunk}, {config.span}")
    chunks = triton.cdiv(nmax, config.chunk)
    if chunks > MAX_CHUNKS:
        raise ValueError(f"config.chunk: expected {triton.cdiv(nmax, MAX_CHUNKS)} keys or more of {nmax}, got {config.chunk}")
    stats = torch.empty(batch * kv_heads * chunks * (columns + more), dtype=torch.float32, device=q.device)
    options = {} if INTERPRETED else {"launch_pdl": True}
    common = {
        "G": group, "HKV": kv_heads, "HALF": half, "BLOCK_M": columns, "MORE": more, "BLOCK_N": block_n,
        "PAGE": page_size, "PRECISION": precision_of(q.dtype), "PDL": bool(options),
        "num_warps": config.num_warps, "num_stages": config.num_stages, **options,
    }  # fmt: skip
    inputs = (q, codes, page_table, lengths, num_rows, stats)
    sizes = (q.stride(0), q.stride(1), page_table.stride(0), rows, chunks, config.chunk // block_n)
    scale_log2 = scale * math.log2(math.e)
    # In fp32 a product takes three.
    capped = {"maxnreg": config.max_registers} if config.max_registers and not INTERPRETED and q.dtype != torch.float32 else {}
    packed_sums_kernel[(chunks, kv_heads, batch)](*inputs, *sizes, scale_log2, **common, **capped)
    packed_mass_kernel[(triton.cdiv(nmax, config.span), kv_heads, batch)](
        *inputs, scores, *sizes, config.span // block_n, nmax, scale_log2, MOST=MAX_CHUNKS, **common
    )
    return scores
