"""The two passes of score_heads: logits with kept weights and log-sum-exps, then the masses."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_core import load_pages
from .runtime import INTERPRETED, begin_dependent

# A global of kernels.
IN_REGISTERS = tl.constexpr(not INTERPRETED)


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
def unpack_halves(packed):
    """Low and high numbers (fp16) of int8 bytes of two signed 4-bit numbers each. Conversions have a sixteenth of the rate of
    additions: a half of 0x6400 + n is 1024 + n as it stands, and four bytes are turned at once."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 x, a, b, low, high, sixteenth, less;
        xor.b32 x, $4, 0x88888888; mov.b32 low, 0xE408E408; mov.b32 high, 0xD480D480; mov.b32 sixteenth, 0x2C002C00;
        mov.b32 less, 0x64646464;
        prmt.b32 a, x, less, 0x4140; prmt.b32 b, x, less, 0x4342;
        and.b32 x, a, 0xFF0FFF0F; add.rn.f16x2 $0, x, low;
        and.b32 x, b, 0xFF0FFF0F; add.rn.f16x2 $1, x, low;
        and.b32 x, a, 0xFFF0FFF0; fma.rn.f16x2 $2, x, sixteenth, high;
        and.b32 x, b, 0xFFF0FFF0; fma.rn.f16x2 $3, x, sixteenth, high; }""",
        "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


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
    if PACKED and IN_REGISTERS and q_tile.dtype == tl.float16:
        low, high = unpack_halves(k)
        s = tl.dot(low, q_tile)
        s += tl.dot(high, q_high)
    elif PACKED:
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
def kept_place(keys, rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DIRECT: tl.constexpr):
    """Where in its tile the weight of a key [N] and row [M] is kept: the rows of a key side by side; DIRECT: eight rows of every
    key, then the next eight, as a warp holds a product, so that what one of its stores writes is contiguous."""
    if DIRECT and ROWS > 8:
        return keys[:, None] * 8 + (rows // 8 * (8 * BLOCK_N) + rows % 8)[None, :]
    else:
        return keys[:, None] * ROWS + rows[None, :]


@triton.jit
def store_here(pointers, values, valid):
    """Store uint32 values from the threads that hold them: no exchange through shared memory, no barrier. On a GPU only."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }", "=r,l,r,r",
        [tl.broadcast(pointers.to(tl.int64), values)[0], values, tl.broadcast(valid.to(tl.int32), values)[0]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def score_logits_kernel(
    q_0, q_1, q_2, q_3, k_0, k_1, k_2, k_3, page_table, lengths, num_rows, kv_heads, head_table,
    weights, tops, lse, stats, counters,
    stride_qb, stride_qr, stride_qs, stride_pt, nmax, num_chunks, scale_log2, softcap,
    LAYERS: tl.constexpr, KVH: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    KEEP: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr,
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
    # Whole tiles are kept: what lies beyond the length counts for nothing.
    first_tile = slab * tl.cdiv(nmax, BLOCK_N)
    place = kept_place(keys, m, ROWS, BLOCK_N, DIRECT)
    pair = tl.arange(0, BLOCK_M // 2) * 2
    pair_place = kept_place(keys, pair, ROWS, BLOCK_N, DIRECT)
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
            if DIRECT and PDL:
                halves = tl.reshape(kept.to(tl.uint16, bitcast=True).to(tl.uint32), [BLOCK_N, BLOCK_M // 2, 2])
                low, high = tl.split(halves)
                store_here(weights + tile * (BLOCK_N * ROWS) + pair_place, low | (high << 16), (pair < ROWS)[None, :])
                store_here(tops + tile * (STRIPS * BLOCK_M) + strips, shift.to(tl.uint32, bitcast=True), (m < ROWS)[None, :])
            else:
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
        # Not parts * 2^(best - top): a compiler makes that product part of the first addition between threads, and either of two
        # threads then has a sum of its own, an ulp apart.
        total = tl.sum(tl.exp2(best + tl.log2(parts) - top[:, None]), 1)
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
    KEEP: tl.constexpr, DIRECT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PACKED: tl.constexpr,
    BY_GROUP: tl.constexpr,
):  # fmt: skip
    """Pass 2, program (TILES tiles of BLOCK_N keys, sequence): sums rows, then kv groups and layers, in fixed order. BY_GROUP: a
    program for each kv group of a sequence, with scores of its own."""
    start = tl.program_id(0) * (TILES * BLOCK_N)
    # What pass 1 wrote last is read first: it still lies in the L2.
    b = tl.num_programs(1) - 1 - tl.program_id(1)
    row_scores = scores + b.to(tl.int64) * nmax
    first_group = 0
    if BY_GROUP:
        first_group = b % (LAYERS * KVH)
        b = b // (LAYERS * KVH)
    last_group = first_group + 1 if BY_GROUP else LAYERS * KVH
    # Older than pass 1, which waited for all before it.
    length = tl.load(lengths + b)
    fed = tl.load(num_rows + b)
    begin_dependent(PDL)
    position = start + tl.arange(0, TILES * BLOCK_N)
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
        for group in range(first_group, last_group):
            head = tl.load(head_table + group * H + r % H)
            valid = (r // H < fed) & (head >= 0)
            slab = b.to(tl.int64) * (LAYERS * KVH) + group
            first = slab * tiles + tl.program_id(0) * TILES
            key = tl.arange(0, TILES * BLOCK_N)
            if DIRECT:
                place = key[:, None] // BLOCK_N * (BLOCK_N * ROWS) + kept_place(key % BLOCK_N, r, ROWS, BLOCK_N, DIRECT)
            else:
                place = key[:, None] * ROWS + r[None, :]
            kept = (key < written * BLOCK_N)[:, None] & (r < ROWS)[None, :]
            p = tl.load(weights + first * (BLOCK_N * ROWS) + place, mask=kept, other=0.0)
            strips = tl.arange(0, TILES)[:, None, None] * STRIPS + tl.arange(0, STRIPS)[None, :, None]
            known = inside[:, None, None] & (r < (ROWS if DIRECT else BLOCK_M))[None, None, :]
            top = tl.load(tops + first * (STRIPS * BLOCK_M) + strips * BLOCK_M + r[None, None, :], mask=known, other=0.0)
            # Rows that do not count get an infinite log-sum-exp, hence mass 0.
            # (The mask does not wait for the table of heads.)
            shift = tl.load(lse + slab * BLOCK_M + r, mask=r // H < fed, other=float("inf"))
            shift = tl.where(valid, shift, float("inf"))
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
        for group in range(first_group, last_group):
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
