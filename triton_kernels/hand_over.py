"""Partials of key splits handed from program to program inside one launch, word by word, with no fence, counter or barrier.

A word of the scratch is EMPTY (a NaN that no instruction makes) until it is written, so that a word says itself whether it has
arrived; the program that takes it makes it EMPTY again. One trip through the L2 instead of three, and values stay in the threads
that hold them. NCCL's LL protocol flags its words likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_core import EMPTY, store_rows
from .runtime import INTERPRETED

EMPTY_WORD = tl.constexpr(EMPTY)
# A global of kernels: inline assembly exists on a GPU only.
IN_REGISTERS = tl.constexpr(not INTERPRETED)
# Stores of a word where operand 3 is not 0.
_STORE = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], %s; mov.u32 $0, 0; }"
STORE_VALUE, STORE_EMPTY = tl.constexpr(_STORE % "$2"), tl.constexpr(_STORE % "0xFFC0DEAD")


@triton.jit
def handed_words(handed, place, rows, columns, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where the words of the partial at `place` lie: outputs [M, D], maxima [M]; sums are BLOCK_M words behind those."""
    base = handed + place.to(tl.int64) * (BLOCK_M * (BLOCK_D + 2))
    # As the threads of a product hold it, so that what one instruction of a warp moves is contiguous; any order would be right.
    row = rows // 16 * 32 + rows // 8 % 2 * (BLOCK_M * 4) + rows % 8 * 4
    column = columns // 8 * (BLOCK_M * 8) + columns % 2 * (BLOCK_M * 2) + columns % 8 // 2
    return base + row[:, None] + column[None, :], base + BLOCK_M * BLOCK_D + rows


@triton.jit
def put(words, value, keep, EMPTIED: tl.constexpr = False):
    """Store int32 values where `keep`, from the threads that hold them, or with EMPTIED in place of each EMPTY."""
    if IN_REGISTERS:
        tl.inline_asm_elementwise(
            STORE_EMPTY if EMPTIED else STORE_VALUE, "=r,l,r,r",
            [tl.broadcast(words.to(tl.int64), value)[0], value, tl.broadcast(keep.to(tl.int32), value)[0]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(words, tl.full(value.shape, EMPTY_WORD, tl.int32) if EMPTIED else value, mask=keep)


@triton.jit
def take(words, like, keep):
    """Load int32 words where `keep` (0 elsewhere), into the threads that hold `like`."""
    if IN_REGISTERS:
        # An operand that is not used gives the place.
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; @p ld.relaxed.gpu.global.b32 $0, [$1]; }", "=r,l,r,r",
            [tl.broadcast(words.to(tl.int64), like)[0], like, tl.broadcast(keep.to(tl.int32), like)[0]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(words, mask=keep, other=0)


@triton.jit
def arrived(words, value):
    """`value`, or where it is EMPTY what the word becomes."""
    if IN_REGISTERS:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; mov.u32 $0, $2; setp.ne.u32 p, $0, 0xFFC0DEAD; @p bra DONE; "
            "AGAIN: ld.relaxed.gpu.global.b32 $0, [$1]; setp.eq.u32 p, $0, 0xFFC0DEAD; @p bra AGAIN; DONE: }", "=&r,l,r",
            [tl.broadcast(words.to(tl.int64), value)[0], value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.where(value == EMPTY_WORD, tl.load(words), value)


@triton.jit
def missing(o):
    """Whether a word of [M, D] is EMPTY."""
    return tl.max(tl.max((o == EMPTY_WORD).to(tl.int32), 1), 0) != 0


@triton.jit
def hand_over(
    acc, m_i, l_i, handed, out, group, split, active, b, t, head, dims, in_tile, valid, T, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge `active` > 1 splits in the last one, which takes the partials of the others as they arrive.

    A word that is not EMPTY has arrived: no fence, no counter, no barrier. The last split waits for programs of lower number
    only: a device starts programs in the order of their numbers, so those it waits for run or have ended.
    """
    rows = tl.arange(0, BLOCK_M)
    # `dims` may be a part of the head; a row of `handed` holds that part alone.
    columns = tl.arange(0, BLOCK_D)
    every = valid[:, None]
    if split < active - 1:
        words, tops = handed_words(handed, group * (SPLITS - 1) + split, rows, columns, BLOCK_D, BLOCK_M)
        put(words, acc.to(tl.int32, bitcast=True), every)
        put(tops + BLOCK_M, l_i.to(tl.int32, bitcast=True), valid)
        put(tops, m_i.to(tl.int32, bitcast=True), valid)
    else:
        for s in tl.static_range(SPLITS - 1):
            if s < active - 1:
                words, tops = handed_words(handed, group * (SPLITS - 1) + s, rows, columns, BLOCK_D, BLOCK_M)
                # The word that is written last is waited for; the others are then mostly there.
                like = m_i.to(tl.int32, bitcast=True)
                m_s = arrived(tops, take(tops, like, valid))
                o_s = take(words, acc.to(tl.int32, bitcast=True), every)
                l_s = arrived(tops + BLOCK_M, take(tops + BLOCK_M, like, valid))
                while missing(o_s):
                    o_s = take(words, o_s, every)
                # Empty again for the next launch: its programs write after this one has ended. Threads may share a word.
                tl.debug_barrier()
                put(words, o_s, every, EMPTIED=True)
                put(tops, m_s, valid, EMPTIED=True)
                put(tops + BLOCK_M, l_s, valid, EMPTIED=True)
                m_s = tl.where(valid, m_s.to(tl.float32, bitcast=True), float("-inf"))
                top = tl.maximum(m_s, m_i)
                shift = tl.where(top == float("-inf"), 0.0, top)
                w_s, w_i = tl.exp2(m_s - shift), tl.exp2(m_i - shift)
                l_i = l_s.to(tl.float32, bitcast=True) * w_s + l_i * w_i
                acc = o_s.to(tl.float32, bitcast=True) * w_s[:, None] + acc * w_i[:, None]
                m_i = top
        merged = tl.where(valid[:, None], acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None], 0.0)
        store_rows(out, merged, b, t, head, dims, in_tile, T, num_heads, D)
