"""Deliberately wrong kernels: each is one textual change of the generated source and the ways it must be found."""

from __future__ import annotations

from dataclasses import dataclass

_TILE_DONE = "threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile before is used up"
_STAGED = (
    "tile * BK, total, k_tile, v_tile, lane, group, groups);\n    threadgroup_barrier(mem_flags::mem_threadgroup);"
)
_WORD_READ = "simdgroup_barrier(mem_flags::mem_device);  // every lane has read the word"
_FOUND = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    prefix |= found[0] << shift;"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the kernel of `operation` (dense, sparse, blocks, combine, score, select, append).

    `found_by` lists kinds of findings, "parity" (relative RMS), "coded" (exact counts) or "lint"; all must fire.
    """

    name: str
    operation: str
    old: str
    new: str
    found_by: tuple[str, ...]


FAULTS = [
    Fault("no barrier before restaging", "dense", _TILE_DONE, "", ("race",)),
    Fault("no barrier after staging", "sparse", _STAGED, _STAGED.split("\n")[0], ("race",)),
    Fault(
        "device flag on a threadgroup barrier",
        "sparse",
        _STAGED,
        _STAGED.replace("mem_threadgroup", "mem_device"),
        ("race",),
    ),
    Fault("no flag on a barrier", "dense", _TILE_DONE, "threadgroup_barrier(mem_flags::mem_none);", ("race",)),
    Fault(
        "SIMD-group barrier in place of a threadgroup one",
        "dense",
        _TILE_DONE,
        _TILE_DONE.replace("threadgroup_b", "simdgroup_b", 1),
        ("race",),
    ),
    Fault(
        "index one too high",
        "sparse",
        "return j < committed ? indices[j]",
        "return j < committed ? indices[j] + 1",
        ("coded",),
    ),
    Fault(
        "first index twice",
        "sparse",
        "return j < committed ? indices[j]",
        "return j < committed ? indices[max(j, 1)]",
        ("coded",),
    ),
    Fault(
        "in-flight row one too early", "sparse", "length + j - committed;", "length + j - committed - 1;", ("coded",)
    ),
    Fault("tail of the token list read", "dense", "own < BK && first + own < total ?", "own < BK ?", ("parity",)),
    Fault(
        "stale rows not zeroed",
        "dense",
        "vec<T, W> x = vec<T, W>(T(0));",
        "vec<T, W> x = vec<T, W>(T(NAN));",
        ("parity",),
    ),
    Fault(
        "future token visible", "dense", "key - committed <= step", "key - committed <= step + 1", ("parity", "coded")
    ),
    Fault("own token hidden", "sparse", "key - committed <= step", "key - committed < step", ("parity", "coded")),
    Fault(
        "last tile dropped",
        "sparse",
        "const int tiles = (total + BK - 1) / BK",
        "const int tiles = total / BK",
        ("coded",),
    ),
    Fault("infinite mask", "split", "#define LOWEST -3.0e38f", "#define LOWEST -INFINITY", ("parity",)),
    Fault(
        "fp16 partial sums",
        "split",
        "partial[slot * D + i * 8 + column + e] = x;",
        "partial[slot * D + i * 8 + column + e] = float(half(x));",
        ("parity",),
    ),
    Fault("head stride forgotten", "dense", "place.head * v_strides[2]", "0 * v_strides[2]", ("parity",)),
    Fault(
        "head stride in the wrong unit",
        "dense",
        "place.head * v_strides[2]",
        "place.head * 64 * v_strides[2] * 8",
        ("bounds",),
    ),
    Fault("scale forgotten", "dense", "scale * 1.44269504f", "1.44269504f", ("parity",)),
    Fault("running sum not faded", "dense", "state.sum * fade + sum", "state.sum + sum", ("parity",)),
    Fault("last query row not written", "dense", "r >= p.rows) return;", "r >= p.rows - 1) return;", ("unwritten",)),
    Fault(
        "output one element off",
        "dense",
        "out[row_offset * D + i * 8 + column + e]",
        "out[row_offset * D + i * 8 + column + e + 1]",
        ("bounds",),
    ),
    Fault(
        "two rows on one output",
        "dense",
        "out[row_offset * D + i",
        "out[(row_offset & ~1L) * D + i",
        ("race", "unwritten"),
    ),
    Fault("finished rows keep a value", "dense", "const float x = live ?", "const float x = true ?", ("parity",)),
    Fault(
        "write into the cache",
        "dense",
        "attend<T, D, BK, DIRECT>(q, k +",
        "((device T*)k)[0] = T(0.0f);\nattend<T, D, BK, DIRECT>(q, k +",
        ("input",),
    ),
    Fault(
        "33 KB of threadgroup memory",
        "dense",
        "threadgroup T v_tile[BK * (D + PAD)];",
        "threadgroup T v_tile[BK * (D + PAD)];\nthreadgroup float more[6150];",
        ("threadgroup memory",),
    ),
    Fault(
        "threadgroup tile 8 elements short",
        "dense",
        "threadgroup T v_tile[BK * (D + PAD)];",
        "threadgroup T v_tile[BK * (D + PAD) - PAD - 8];",
        ("bounds",),
    ),
    Fault(
        "SIMD function in a divergent branch",
        "dense",
        "  sum += simd_shuffle_xor(sum, ushort(8));",
        "  if (lane < 16) sum += simd_shuffle_xor(sum, ushort(8));",
        ("divergence",),
    ),
    Fault(
        "early return before a barrier",
        "dense",
        "const bool busy = ",
        "if (group == 3) return;\n  const bool busy = ",
        ("divergence",),
    ),
    Fault("misaligned vector load", "dense", "(source + offset + d)", "(source + offset + d + 1)", ("alignment",)),
    Fault("pointer into the wrong address space", "dense", "threadgroup T* k_tile,", "device T* k_tile,", ("lint",)),
    Fault("splits merged without their maxima", "combine", "exp2(stats[at * 2] - top)", "1.0f", ("parity",)),
    Fault("empty splits read", "combine", "if (part == 0.0f) continue;", "", ("parity",)),
    Fault("partial block read as a full one", "blocks", "if (keys >= 8) {", "if (keys >= 1) {", ("parity",)),
    Fault(
        "no barrier between scores and softmax",
        "blocks",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  for (int r = group; r < strips * 8",
        "  for (int r = group; r < strips * 8",
        ("race",),
    ),
    Fault(
        "maximum replaced while lanes still read it",
        "blocks",
        "simdgroup_barrier(mem_flags::mem_threadgroup);  // every",
        "// every",
        ("race",),
    ),
    Fault(
        "block of 15 tokens", "blocks", "size = min(16, length - start);", "size = min(15, length - start);", ("coded",)
    ),
    Fault("score of one key too many", "score", "  if (j < length) {", "  if (j <= length) {", ("parity",)),
    Fault(
        "statistics of one split lost",
        "score",
        "for (int s = lane; s < splits; s += 32) sum +=",
        "for (int s = lane + 1; s < splits; s += 32) sum +=",
        ("parity",),
    ),
    Fault(
        "norms read before they are all written",
        "score",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n}\nfor (int j",
        "}\nfor (int j",
        ("race",),
    ),
    Fault("threshold read too early", "select", _FOUND, _FOUND.split("\n")[1], ("uninitialised", "parity")),
    Fault(
        "threadgroup flag on a device barrier",
        "select",
        "threadgroup_barrier(mem_flags::mem_device);\nif (num",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nif (num",
        ("race",),
    ),
    Fault("word written while lanes still read it", "select", _WORD_READ, "", ("race",)),
    Fault("one tie too many", "select", "mine < left", "mine <= left", ("bounds",)),
    Fault("ties to the higher index", "select", "mine < left", "mine >= int(equals[0]) - left", ("parity",)),
    Fault(
        "counter without an atomic",
        "select",
        "atomic_fetch_add_explicit(&bins[(key >> shift) & 255u], 1u, memory_order_relaxed)",
        "bins[(key >> shift) & 255u].value += 1u",
        ("race",),
    ),
    Fault(
        "append one row late",
        "append",
        "(length + t) * k_cache_strides[1]",
        "(length + t + 1) * k_cache_strides[1]",
        ("parity",),
    ),
    Fault(
        "append past the capacity",
        "append",
        "const bool fits = length + valid <= k_cache_shape[1];",
        "const bool fits = true;",
        ("bounds",),
    ),
    Fault("append ignores num_tokens", "append", "t >= valid || !fits", "!fits", ("parity",)),
]
