"""Rounds of sparse verification made of the kernels alone: append, score, select, verify, drop by length; checked in float64.

Two layers share one set. The batch is ragged, one sequence is shorter than the budget, one finishes after the first round.
"""

from __future__ import annotations

import numpy as np

from tests.metal.emulator.dropin import installed, to_numpy
from tests.metal.helpers import to_host
from tests.metal.reference import Case, expected_scores, expected_set, relative_rms

ROWS, HEADS, KV_HEADS, DIM, CAPACITY, BUDGET = 4, 10, 2, 64, 160, 40
SINKS, RECENT, LAYERS, SCORING = 2, 6, 2, (0, 3, 7)


def test_three_rounds() -> None:
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv
    from dustin.metal_kernels.score_heads import score_heads
    from dustin.metal_kernels.select_tokens import select_tokens
    from dustin.metal_kernels.sparse_verify import sparse_verify

    rng = np.random.default_rng(11)
    lengths, accepted = [120, 30, 75], ([2, 0, 4], [1, 3, 4], [4, 1, 4])
    shape = (3, CAPACITY, KV_HEADS, DIM)
    host = [[np.full(shape, np.nan, np.float32) for _ in "kv"] for _ in range(LAYERS)]
    for layer in host:
        for cache in layer:
            for b, n in enumerate(lengths):
                cache[b, :n] = rng.normal(size=(n, KV_HEADS, DIM))
    caches = [[mx.array(c) for c in layer] for layer in host]
    mx.eval(caches)
    addresses = [to_numpy(c).ctypes.data for layer in caches for c in layer]
    with installed(order="shuffled") as log:
        for step, kept in enumerate(accepted):
            tokens = [ROWS, ROWS, 0 if step else ROWS]
            n, t = mx.array(lengths, mx.int32), mx.array(tokens, mx.int32)
            history = rng.normal(size=(3, 1, len(SCORING), DIM)).astype(np.float32)
            scores = score_heads(mx.array(history), caches[0][0], SCORING, HEADS, n, DIM**-0.5)
            quota = {"budget": BUDGET, "num_sink_tokens": SINKS, "num_recent_tokens": RECENT, "num_draft_selected": 0}
            indices, counts = select_tokens(scores, None, n, **quota)
            want = expected_scores(history, host[0][0], SCORING, HEADS // KV_HEADS, lengths, DIM**-0.5).astype(
                np.float32
            )
            device = np.array(scores)
            assert relative_rms(device[np.isfinite(want)], want[np.isfinite(want)]) <= 1e-5
            for b in range(3):
                chosen = np.array(indices)[b, : int(counts[b])].tolist()
                assert chosen == expected_set(device[b], device[b], lengths[b], BUDGET, SINKS, RECENT, 0)
            for layer in range(LAYERS):
                new = [rng.normal(size=(3, ROWS, KV_HEADS, DIM)).astype(np.float32) for _ in "kv"]
                q = rng.normal(size=(3, ROWS, HEADS, DIM)).astype(np.float32)
                k, v, starts, _ = append_kv(*caches[layer], *(mx.array(x) for x in new), n, t)
                caches[layer] = [k, v]
                out = to_host(sparse_verify(mx.array(q), k, v, indices, counts, starts, t, DIM**-0.5))
                for cache, rows in zip(host[layer], new, strict=True):
                    for b in range(3):
                        cache[b, lengths[b] : lengths[b] + tokens[b]] = rows[b, : tokens[b]]
                case = Case(tuple(lengths), tuple(tokens), ROWS, HEADS, KV_HEADS, DIM, "float32", CAPACITY, BUDGET)
                case.q, case.k, case.v = q, *host[layer]
                case.indices, case.counts = np.array(indices), np.array(counts)
                assert relative_rms(out, case.expected("sparse")) <= 1e-5
            lengths = [m + (a if x else 0) for m, a, x in zip(lengths, kept, tokens, strict=True)]
    assert not log.findings
    assert [to_numpy(c).ctypes.data for layer in caches for c in layer] == addresses  # no cache was ever copied
