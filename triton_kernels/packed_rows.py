"""What a layer needs before its rows choose a set by compact keys: codes of the newest keys, and the queries' side of the products.

One launch in place of about twenty elementwise ones, none of which has enough to do to fill a processor. Prompts, whose keys are
many, are encoded by a launch of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import FLOAT_DTYPES, INTERPRETED, begin_dependent, check_counts, check_pools, check_tensor, power_of_two

# The largest number of four bits, signed.
LARGEST = 7
# Keys that a program encodes: as many as fill its registers, since each reads the whole base.
ENCODED_ROWS = 64


@triton.jit
def encode_tile(
    k_pool, codes, pages, position, there, mean, encode, h, base, n,
    HKV: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write the codes of kv head h of a sequence's keys at `position` [ROWS] that are `there`; `base` + d * 2 HALF [1, HALF] is
    where the low numbers of dimension d lie in `encode`."""
    part = tl.arange(0, STEP)
    page = tl.load(pages + position // PAGE, mask=there, other=0).to(tl.int64)
    place = page * PAGE + position % PAGE
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    for start in range(0, D, STEP):
        d = start + part
        in_head = d < D
        key = tl.load(k_pool + (place * ROW + h * HEAD)[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        moved = key.to(tl.float32) - tl.load(mean + h * D + d, mask=in_head, other=0.0)[None, :]
        wide = encode + base + (d * (2 * HALF))[:, None]
        low += tl.dot(moved, tl.load(wide, mask=in_head[:, None], other=0.0), input_precision="tf32x3")
        high += tl.dot(moved, tl.load(wide + HALF, mask=in_head[:, None], other=0.0), input_precision="tf32x3")
    # To the nearest, halves to even: the constant leaves no room for a fraction.
    magic: tl.constexpr = 12582912.0
    first = tl.minimum(tl.maximum((low + magic) - magic, -LARGEST), LARGEST).to(tl.int32)
    second = tl.minimum(tl.maximum((high + magic) - magic, -LARGEST), LARGEST).to(tl.int32)
    byte = (first & 15) | (second << 4)
    tl.store(codes + ((place * HKV + h) * HALF)[:, None] + n[None, :], byte.to(tl.int8), mask=there[:, None])


@triton.jit(do_not_specialize=["stride_pt"])
def packed_keys_kernel(
    k_pool, codes, page_table, begins, ends, mean, encode, stride_pt,
    HKV: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    ROW: tl.constexpr, HEAD: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Program (ROWS keys from the sequence's first one on, kv head, sequence)."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    end = tl.load(ends + b)
    first = tl.load(begins + b) + tl.program_id(0) * ROWS
    if first >= end:
        return
    position = first + tl.arange(0, ROWS)
    n = tl.arange(0, HALF)
    base = h * (D * 2 * HALF) + n[None, :]
    encode_tile(
        k_pool, codes, page_table + b * stride_pt, position.to(tl.int64), position < end, mean, encode, h, base, n,
        HKV, D, STEP, HALF, ROWS, PAGE, ROW, HEAD, LARGEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_pt", "num_rows"])
def packed_rows_kernel(
    q, k_pool, codes, page_table, lengths, mean, encode, decode, out, stride_qb, stride_qt, stride_pt, num_rows,
    FRESH: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (0: keys, then tiles of BLOCK_M query rows; kv head, sequence); HALF numbers are in either half of a byte."""
    begin_dependent(PDL)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    part = tl.arange(0, STEP)
    n = tl.arange(0, HALF)
    # Bases are [Hkv, D, 2 * HALF].
    base = h * (D * 2 * HALF) + n[None, :]
    if tl.program_id(0) == 0:
        position = tl.load(lengths + b).to(tl.int64) - FRESH + tl.arange(0, FRESH)
        encode_tile(
            k_pool, codes, page_table + b * stride_pt, position, position >= 0, mean, encode, h, base, n,
            HKV, D, STEP, HALF, FRESH, PAGE, ROW, HEAD, LARGEST,
        )  # fmt: skip
    else:
        m = (tl.program_id(0) - 1) * BLOCK_M + tl.arange(0, BLOCK_M)
        t = m // G
        head = h * G + m % G
        fed = m < num_rows * G
        source = q + b * stride_qb + t * stride_qt + head * D
        front = tl.zeros([BLOCK_M, HALF], tl.float32)
        back = tl.zeros([BLOCK_M, HALF], tl.float32)
        for start in range(0, D, STEP):
            d = start + part
            in_head = d < D
            x = tl.load(source[:, None] + d[None, :], mask=fed[:, None] & in_head[None, :], other=0.0).to(tl.float32)
            wide = decode + base + (d * (2 * HALF))[:, None]
            front += tl.dot(x, tl.load(wide, mask=in_head[:, None], other=0.0), input_precision="tf32x3")
            back += tl.dot(x, tl.load(wide + HALF, mask=in_head[:, None], other=0.0), input_precision="tf32x3")
        target = out + ((b * num_rows + t) * (HKV * G) + head)[:, None] * (2 * HALF) + n[None, :]
        tl.store(target, front.to(out.dtype.element_ty), mask=fed[:, None])
        tl.store(target + HALF, back.to(out.dtype.element_ty), mask=fed[:, None])


def check_codes(
    k_pool: torch.Tensor, codes: torch.Tensor, mean: torch.Tensor, **bases: torch.Tensor
) -> tuple[int, dict[str, int]]:
    """(rank, what every launch over these is compiled for). Raise ValueError on shapes that do not belong together."""
    pages, page_size, kv_heads, dim = k_pool.shape
    rank = next(iter(bases.values())).shape[-1]
    if rank < 32 or rank != power_of_two(rank):
        raise ValueError(f"rank: expected a power of two from 32 on, got {rank}")
    check_tensor("codes", codes, (pages * page_size, kv_heads, rank // 2), (torch.int8,), k_pool)
    check_tensor("mean", mean, (kv_heads, dim), (torch.float32,), k_pool)
    for name, base in bases.items():
        check_tensor(name, base, (kv_heads, dim, rank), (torch.float32,), k_pool)
    sizes = {"HKV": kv_heads, "D": dim, "STEP": 16 if dim % 32 else 32, "HALF": rank // 2, "PAGE": page_size}
    return rank, sizes | {"ROW": k_pool.stride(1), "HEAD": k_pool.stride(2), "LARGEST": LARGEST}


def packed_keys(
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    page_table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    mean: torch.Tensor,
    encode: torch.Tensor,
    *,
    most: int,
) -> None:
    """Codes of each sequence's keys from begins[b] to ends[b] (exclusive), in place; `most` is the largest number of them.

    Tensors as in packed_rows; begins and ends [B] int32. Raises ValueError on bad input.
    """
    batch = len(page_table)
    check_pools(k_pool, None, page_table, batch)
    check_counts(batch, k_pool, begins=begins, ends=ends)
    _, sizes = check_codes(k_pool, codes, mean, encode=encode)
    if most < 0:
        raise ValueError(f"most: expected 0 or more keys, got {most}")
    rows = 16 if INTERPRETED else ENCODED_ROWS
    grid = (triton.cdiv(most, rows), k_pool.shape[2], batch)
    if most:
        packed_keys_kernel[grid](
            k_pool, codes, page_table, begins, ends, mean, encode, page_table.stride(0), ROWS=rows, **sizes, num_warps=4
        )


def packed_rows(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    codes: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    mean: torch.Tensor,
    encode: torch.Tensor,
    decode: torch.Tensor,
    *,
    num_rows: int,
    fresh: int = 16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of each sequence's last `fresh` committed keys, in place, and the first `num_rows` query rows in the compact basis.

    q [B, T, Hq, D] post-RoPE (a head's rows contiguous); k_pool [pages, page_size, Hkv, D]; codes int8 [pages * page_size, Hkv,
    rank / 2], numbers j and j + rank / 2 of a key in the low and high half of byte j; page_table [B, max_pages], lengths [B]
    int32; mean [Hkv, D], encode and decode [Hkv, D, rank] fp32. Returns [B, num_rows, Hq, rank] in q's dtype, or in float16 for
    bfloat16 (finer, and what score_heads unpacks codes for). Rows at and beyond a sequence's tokens are computed all the same.
    Raises ValueError on bad input.
    """
    check_tensor("q", q, (None, None, None, k_pool.shape[3]), FLOAT_DTYPES, k_pool, contiguous=False)
    batch, tokens, num_heads, dim = q.shape
    check_pools(k_pool, None, page_table, batch)
    check_counts(batch, q, lengths=lengths)
    kv_heads = k_pool.shape[2]
    rank, sizes = check_codes(k_pool, codes, mean, encode=encode, decode=decode)
    if not 1 <= num_rows <= tokens or fresh < 16 or fresh != power_of_two(fresh):
        raise ValueError(f"num_rows, fresh: expected 1 to {tokens} and a power of two from 16 on, got {num_rows} and {fresh}")
    if num_heads % kv_heads or q.stride(2) != dim:
        raise ValueError(f"q: expected a multiple of {kv_heads} heads side by side, got {num_heads}, strides {q.stride()}")
    if out is None:
        kind = torch.float16 if q.dtype == torch.bfloat16 else q.dtype
        out = torch.empty(batch, num_rows, num_heads, rank, dtype=kind, device=q.device)
    check_tensor("out", out, (batch, num_rows, num_heads, rank), FLOAT_DTYPES, q)
    group = num_heads // kv_heads
    block_m = power_of_two(min(num_rows * group, 32), 16)
    options = {} if INTERPRETED else {"launch_pdl": True}
    packed_rows_kernel[(1 + triton.cdiv(num_rows * group, block_m), kv_heads, batch)](
        q, k_pool, codes, page_table, lengths, mean, encode, decode, out,
        q.stride(0), q.stride(1), page_table.stride(0), num_rows,
        FRESH=fresh, G=group, BLOCK_M=block_m, **sizes, PDL=bool(options), num_warps=4, **options,
    )  # fmt: skip
    return out
