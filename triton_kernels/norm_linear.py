"""The normed products of a decoding step: queries, keys and values with RoPE and append, and the gated half of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_linear import (
    LinearConfig,
    Stream,
    check_linear,
    launch_options,
    load_rows,
    load_weights,
    prefetch_options,
    prefetch_weights,
    swapped_product,
)
from .runtime import begin_dependent, check_counts, check_pools, check_tensor, power_of_two


@triton.jit
def pair_kernel(
    x, squares, w, bias, out, k_pool, v_pool, page_table, lengths, num_tokens, cos, sin,
    M, tiles, stride_pt, T, positions, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr,
    ROPE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, STAGES: tl.constexpr, THREADS: tl.constexpr,
    BYTES: tl.constexpr, INSTRUCTION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of column pairs): product, RMS norm, then RoPE and append (pairs d, d + D/2 of a head) or silu(gate) * up."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK_N)
    if ROPE:
        blocks: tl.constexpr = D // (2 * BLOCK_N)
        head = pid // blocks
        first = head * D + (pid % blocks) * BLOCK_N
        offset: tl.constexpr = D // 2
        inside = lane < BLOCK_N
        ragged: tl.constexpr = False
    else:
        first = pid * BLOCK_N
        offset: tl.constexpr = N
        inside = first + lane < N
        ragged: tl.constexpr = N % BLOCK_N != 0
    columns = first + lane
    once: tl.constexpr = PARTS * BLOCK_K >= K and not SWAP
    if once:
        # All of this program's weights are under way before the kernel before has ended.
        b1 = load_weights(w, columns, inside, 0, K, BLOCK_K, PARTS, ragged)
        b2 = load_weights(w, columns + offset, inside, 0, K, BLOCK_K, PARTS, ragged)
    elif BYTES > 0:
        safe = tl.minimum(first, N - BLOCK_N) if ragged else first
        prefetch_weights(w, safe, offset, 0, K, K, BLOCK_N, 2, THREADS, BYTES, INSTRUCTION)
    rows = tl.arange(0, BLOCK_M)
    fed = rows < M
    # What the end needs is asked for here, so that no load waits for another there. All of it but the squares is older than the
    # kernel before: weights, and the inputs of the whole forward.
    if BIAS:
        bias1 = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        bias2 = tl.load(bias + columns + offset, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ROPE:
        half: tl.constexpr = D // 2
        d = (pid % blocks) * BLOCK_N + lane
        b = (rows // T).to(tl.int64)
        t = rows % T
        position = tl.load(lengths + b, mask=fed, other=0).to(tl.int64) + t
        taken = fed & (t < tl.load(num_tokens + b, mask=fed, other=0))
        angle = tl.minimum(position, positions - 1)[:, None] * half + d[None, :]
        turned = fed[:, None] & (head < HQ + HKV)
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        page = tl.load(page_table + b * stride_pt + position // PAGE, mask=taken & (head >= HQ), other=0).to(tl.int64)
        slot = (page * PAGE + position % PAGE) * ROW
    begin_dependent(PDL)
    tile = tl.arange(0, BLOCK_T)
    part = tl.load(squares + tile[:, None] * M + rows[None, :], mask=(tile < tiles)[:, None] & fed[None, :], other=0.0)
    if once:
        a = load_rows(x, rows, fed, 0, K, BLOCK_K, PARTS)
        y1 = tl.dot(a, b1)
        y2 = tl.dot(a, b2)
        if PARTS > 1:
            y1 = tl.sum(y1, 0)
            y2 = tl.sum(y2, 0)
    elif SWAP:
        # Both halves are one tile, split afterwards.
        place = tl.arange(0, 2 * BLOCK_N)
        at = first + place % BLOCK_N
        stacked = at + tl.where(place < BLOCK_N, 0, offset)
        y = swapped_product(w, x, stacked, at < N, rows, 0, K, M, K, BLOCK_M, BLOCK_K, ragged, STAGES)
        y1, y2 = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_N, BLOCK_M)), (2, 1, 0)))
    else:
        y1 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        y2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            a = load_rows(x, rows, fed, k, K, BLOCK_K, 1)
            y1 = tl.dot(a, load_weights(w, columns, inside, k, K, BLOCK_K, 1, ragged), y1)
            y2 = tl.dot(a, load_weights(w, columns + offset, inside, k, K, BLOCK_K, 1, ragged), y2)
    # 1 / rms of each row, from the sums of squares of its tiles.
    inverse = tl.where(fed, tl.rsqrt(tl.sum(part, 0) / K + eps), 0.0)[:, None]
    y1 *= inverse
    y2 *= inverse
    if BIAS:
        y1 += bias1
        y2 += bias2
    y1 = y1.to(out.dtype.element_ty).to(tl.float32)
    y2 = y2.to(out.dtype.element_ty).to(tl.float32)
    if ROPE:
        # Values are not turned: their cosine is 1.
        y1, y2 = y1 * c - y2 * s, y2 * c + y1 * s
        if head < HQ:
            target = out + (rows.to(tl.int64) * HQ + head)[:, None] * D + d[None, :]
            tl.store(target, y1.to(out.dtype.element_ty), mask=fed[:, None])
            tl.store(target + half, y2.to(out.dtype.element_ty), mask=fed[:, None])
        else:
            if head < HQ + HKV:
                target = k_pool + (slot + (head - HQ) * HEAD)[:, None] + d[None, :]
            else:
                target = v_pool + (slot + (head - HQ - HKV) * HEAD)[:, None] + d[None, :]
            tl.store(target, y1.to(out.dtype.element_ty), mask=taken[:, None])
            tl.store(target + half, y2.to(out.dtype.element_ty), mask=taken[:, None])
    else:
        silu = (y1 / (1.0 + tl.exp(-y1))).to(out.dtype.element_ty).to(tl.float32)
        target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, (silu * y2).to(out.dtype.element_ty), mask=fed[:, None] & inside[None, :])


def _pair(
    x: torch.Tensor, squares: torch.Tensor, tiles: int, weight: torch.Tensor, bias: torch.Tensor | None,
    eps: float, config: LinearConfig, grid: int, out: torch.Tensor, pairs: int, rope: tuple[object, ...], shape: dict[str, object],
) -> None:  # fmt: skip
    rows, depth = x.shape
    check_tensor("squares", squares, (None,), (torch.float32,), x)
    if squares.numel() < tiles * rows:
        raise ValueError(f"squares: expected at least {tiles * rows} elements, got {squares.numel()}")
    k_pool, v_pool, table, lengths, fed, cos, sin, stride, tokens, positions = rope
    line, instruction = prefetch_options(2 * config.block_n, depth, grid, config)
    options = launch_options(config.num_warps)
    pair_kernel[(grid,)](
        x, squares, weight, x if bias is None else bias, out, k_pool, v_pool, table, lengths, fed, cos, sin,
        rows, tiles, stride, tokens, positions, eps,
        N=pairs, K=depth, BLOCK_M=power_of_two(rows, 16), BLOCK_N=config.block_n, BLOCK_K=config.block_k, PARTS=config.parts,
        BLOCK_T=power_of_two(tiles), BIAS=bias is not None, SWAP=config.swap, STAGES=config.num_stages,
        THREADS=32 * config.num_warps, BYTES=line, INSTRUCTION=instruction,
        PDL="launch_pdl" in options, **shape, **options,
    )  # fmt: skip


def norm_qkv(
    stream: Stream,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    config: LinearConfig,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [B, T, Hq, D] of the normed stream, rotated; keys and values go to the pages of the fed rows.

    weight [(Hq + 2 Hkv) D, H]; cos, sin [positions, D / 2] fp32; pools and counts as in rope_append. All query rows are
    written, fed or not. Raise ValueError on bad input.
    """
    x = stream.scaled
    check_linear(x, weight, bias)
    num_kv_heads, dim = k_pool.shape[2], k_pool.shape[3]
    num_heads = weight.shape[0] // dim - 2 * num_kv_heads
    if weight.shape[0] % dim or num_heads < 1:
        raise ValueError(f"weight: expected (Hq + {2 * num_kv_heads}) * {dim} rows, got {weight.shape[0]}")
    if (dim // 2) % config.block_n:
        raise ValueError(f"config: expected block_n that divides half a head ({dim // 2}), got {config.block_n}")
    batch = lengths.shape[0]
    check_pools(k_pool, v_pool, page_table, batch)
    check_counts(batch, x, lengths=lengths, num_tokens=num_tokens)
    check_tensor("cos", cos, (None, dim // 2), (torch.float32,), x)
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,), x)
    if x.shape[0] % batch:
        raise ValueError(f"stream: expected a multiple of {batch} rows, got {x.shape[0]}")
    tokens = x.shape[0] // batch
    shape = (batch, tokens, num_heads, dim)
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, shape, (x.dtype,), x)
    _pair(
        x, stream.scratch.squares, stream.tiles, weight, bias, eps, config, weight.shape[0] // (2 * config.block_n), out,
        weight.shape[0],
        (k_pool, v_pool, page_table, lengths, num_tokens, cos, sin, page_table.stride(0), tokens, cos.shape[0]),
        {"ROPE": True, "HQ": num_heads, "HKV": num_kv_heads, "D": dim, "PAGE": k_pool.shape[1], "ROW": k_pool.stride(1),
         "HEAD": k_pool.stride(2)},
    )  # fmt: skip
    return out


def norm_gate_up(
    stream: Stream, weight: torch.Tensor, *, eps: float, config: LinearConfig, out: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(gate) * up [M, I] of the normed stream; weight [2 I, H] holds gate, then up. Raise ValueError on bad input."""
    x = stream.scaled
    check_linear(x, weight, None)
    size = weight.shape[0] // 2
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, (x.shape[0], size), (x.dtype,), x)
    squares = stream.scratch.squares
    _pair(
        x, squares, stream.tiles, weight, None, eps, config, triton.cdiv(size, config.block_n), out, size,
        (x, x, squares, squares, squares, squares, squares, 0, 1, 1),
        {"ROPE": False, "HQ": 1, "HKV": 1, "D": 2, "PAGE": 1, "ROW": 1, "HEAD": 1},
    )  # fmt: skip
    return out
