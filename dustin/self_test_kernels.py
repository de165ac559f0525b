"""Checks of single kernels: every Triton kernel on a GPU, every Metal kernel on Metal or its stand-in of MLX arrays.

A kernel that no check names is found by a test, which compares this module with the folders of the kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dustin.self_test import TOLERANCE, Case, Check, Outputs, Result, acceptance_inputs
from dustin.self_test_own_sets import own_set_checks
from dustin.self_test_step import step_checks

_PAGE = 16


def triton_checks() -> Iterator[Check | Result]:
    """One check a kernel in float16 on the GPU; in Triton's interpreter when TRITON_INTERPRET=1; otherwise why not."""
    import torch

    if importlib.util.find_spec("triton") is None:
        yield Result("triton", "all kernels", "skipped", "triton is not installed; kernels run on an NVIDIA GPU only")
        return
    from dustin.triton_kernels.runtime import INTERPRETED

    if not torch.cuda.is_available() and not INTERPRETED:
        yield Result("triton", "all kernels", "skipped", "torch finds no NVIDIA GPU here")
        return
    device = "cpu" if INTERPRETED else "cuda"
    case = Case(head_dim=16, num_heads=4) if INTERPRETED else Case(head_dim=128, num_heads=16)
    paged = _Paged(case, device)
    for make in (_triton_attention, _triton_cache, _triton_selection, _triton_acceptance):
        yield from make(paged)
    yield from step_checks(device)
    yield from own_set_checks(device)


class _Paged:
    """The case in shuffled pages; rows that hold nothing are NaN."""

    def __init__(self, case: Case, device: str) -> None:
        import torch

        self.case, self.device = case, device
        batch, pages = len(case.lengths), -(-case.capacity // _PAGE)
        rng = np.random.default_rng(2)
        self.table = rng.permutation(batch * pages + 1)[: batch * pages].reshape(batch, pages).astype(np.int32)
        self.page_table = torch.from_numpy(self.table).to(device)
        self.lengths, self.num_tokens = self.ints(case.lengths), self.ints(case.num_tokens)
        self.indices, self.counts = self.ints(case.indices), self.ints(case.counts)
        self.q = self.half(case.q)
        self.k_pool, self.v_pool = self.pools()

    def pools(self) -> tuple[Any, Any]:
        """Fresh pools [pages, page_size, Hkv, D] with the case's keys and values."""
        return self._pool(self.case.keys), self._pool(self.case.values)

    def _pool(self, rows: np.ndarray) -> Any:
        import torch

        batch, pages = self.table.shape
        padded = np.full((batch, pages * _PAGE, *rows.shape[2:]), np.nan, np.float32)
        padded[:, : rows.shape[1]] = rows
        pool = np.full((batch * pages + 1, _PAGE, *rows.shape[2:]), np.nan, np.float32)
        pool[self.table.ravel()] = padded.reshape(batch * pages, _PAGE, *rows.shape[2:])
        return torch.from_numpy(pool.astype(np.float16)).to(self.device)

    def rows(self, pool: Any) -> np.ndarray:
        """The valid rows of a pool [B, Nmax, Hkv, D], 0 elsewhere."""
        host = pool.cpu().float().numpy()[self.table.ravel()]
        batch, pages = self.table.shape
        return self.case.valid(host.reshape(batch, pages * _PAGE, *host.shape[2:])[:, : self.case.capacity])

    def ints(self, values: Any) -> Any:
        """int32 on the device."""
        import torch

        return torch.from_numpy(np.asarray(values, np.int32)).to(self.device)

    def half(self, values: np.ndarray) -> Any:
        """float16 on the device."""
        import torch

        return torch.from_numpy(values.astype(np.float16)).to(self.device)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The leading arguments of the attention kernels."""
        return self.q, self.k_pool, self.v_pool, self.page_table, self.lengths, self.num_tokens


def _host(x: Any) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() else x).numpy()


def _triton(name: str, run: Callable[[], Outputs], want: Outputs, tolerance: float = TOLERANCE["float16"]) -> Check:
    return Check("triton", name, run, want, tolerance)


def _triton_attention(p: _Paged) -> Iterator[Check]:
    def dense() -> Outputs:
        from dustin.triton_kernels.dense_verify import dense_verify

        return {"out": _host(dense_verify(*p.inputs))}

    def sparse() -> Outputs:
        from dustin.triton_kernels.sparse_verify import sparse_verify

        return {"out": _host(sparse_verify(*p.inputs, p.indices, p.counts))}

    def translate() -> Outputs:
        from dustin.triton_kernels.translate_slots import translate_slots

        slots, counts = translate_slots(p.indices, p.counts, p.lengths, p.num_tokens, p.page_table, _PAGE, p.case.rows)
        used = np.arange(slots.shape[1])[None] < _host(counts)[:, None]
        return {"slots": np.where(used, _host(slots), 0), "counts": _host(counts)}

    case = p.case
    used = np.arange(case.budget)[None] < case.counts[:, None]
    rows = np.take_along_axis(p.table, case.indices // _PAGE, 1) * _PAGE + case.indices % _PAGE
    width = ((0, 0), (0, case.rows))
    yield _triton("dense_verify", dense, {"out": case.attention(False)})
    yield _triton("sparse_verify", sparse, {"out": case.attention(True)})
    yield _triton("translate_slots", translate, {"slots": np.pad(np.where(used, rows, 0), width), "counts": case.counts})


def _triton_cache(p: _Paged) -> Iterator[Check]:
    import torch

    case = p.case
    new_k, new_v = p.half(case.new_keys), p.half(case.new_values)
    angles = np.random.default_rng(4).random((case.capacity, case.head_dim // 2)).astype(np.float32) * 6
    cos, sin = (torch.from_numpy(f(angles)).to(p.device) for f in (np.cos, np.sin))

    def append() -> Outputs:
        from dustin.triton_kernels.append_kv import append_kv

        pools = p.pools()
        append_kv(new_k, new_v, *pools, p.page_table, p.lengths, p.num_tokens)
        return {"keys": p.rows(pools[0]), "values": p.rows(pools[1])}

    def rope() -> Outputs:
        from dustin.triton_kernels.rope_append import rope_append

        pools = p.pools()
        q = rope_append(p.q, new_k, new_v, *pools, p.page_table, p.lengths, p.num_tokens, cos, sin)
        return {"q": _rows_fed(case, _host(q)), "keys": p.rows(pools[0]), "values": p.rows(pools[1])}

    positions = np.array(case.lengths)[:, None] + np.arange(case.rows)[None]
    rotated = case.appended()
    keys = case.keys.astype(np.float64)
    turned = _rotate(case.new_keys, angles[positions])
    for b, (length, fed) in enumerate(zip(case.lengths, case.num_tokens, strict=True)):
        keys[b, length : length + fed] = turned[b, :fed]
    want_q = _rows_fed(case, _rotate(case.q, angles[positions]))
    yield _triton("append_kv", append, case.appended())
    yield _triton("rope_append", rope, {"q": want_q, "keys": case.valid(keys), "values": rotated["values"]})


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [B, T, H, D] with halves rotated against each other by angles [B, T, D/2], float64."""
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = np.cos(angles.astype(np.float64))[:, :, None], np.sin(angles.astype(np.float64))[:, :, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def _rows_fed(case: Case, rows: np.ndarray) -> np.ndarray:
    fed = np.arange(case.rows)[None, :, None, None] < np.array(case.num_tokens)[:, None, None, None]
    return np.where(fed, rows, 0)


def _triton_selection(p: _Paged) -> Iterator[Check]:
    import torch

    case = p.case

    def prepared() -> tuple[Any, Any, Any, Any]:
        from dustin.triton_kernels.score_heads import group_heads

        groups = group_heads(case.scoring, case.num_heads, case.num_kv_heads, p.device)
        scores = torch.zeros(len(case.lengths), case.capacity, device=p.device)
        queries = p.half(np.ascontiguousarray(case.q[:, :1, list(case.scoring)]))
        return queries, groups, scores, p.ints([1] * len(case.lengths))

    def score() -> Outputs:
        from dustin.triton_kernels.score_heads import score_heads

        queries, groups, scores, one = prepared()
        return {"scores": _host(score_heads(queries, p.k_pool, p.page_table, p.lengths, groups, scores, num_rows=one))}

    def layers() -> Outputs:
        from dustin.triton_kernels.score_heads import score_layers

        queries, groups, scores, one = prepared()
        place = ([queries, queries], [p.k_pool, p.v_pool], p.page_table, p.lengths, [groups, groups], scores)
        return {"scores": _host(score_layers(*place, num_rows=one, weight=0.5))}

    def select() -> Outputs:
        from dustin.triton_kernels.select_tokens import select_tokens

        scores = [torch.from_numpy(x).to(p.device) for x in case.scores]
        indices, counts = select_tokens(*scores, p.lengths, **case.quota)
        return {"indices": _host(indices), "counts": _host(counts)}

    yield _triton("score_heads", score, {"scores": case.scored()})
    yield _triton("score_layers", layers, {"scores": case.scored(2)})
    yield _triton("select_tokens", select, case.selected())


def _triton_acceptance(p: _Paged) -> Iterator[Check]:
    import torch

    i = acceptance_inputs()
    drafts, limits = torch.from_numpy(i["drafts"]).to(p.device), p.ints(i["num_drafts"])
    logits, q, distributions = (torch.from_numpy(i[name]).to(p.device) for name in ("logits", "q", "p"))
    flat = logits.flatten(0, 1)
    best = i["logits"].argmax(-1).astype(np.int32)

    def argmax() -> Outputs:
        from dustin.triton_kernels.argmax_rows import argmax_rows

        tokens, finite = argmax_rows(flat)
        return {"tokens": _host(tokens), "finite": _host(finite)}

    def greedy() -> Outputs:
        from dustin.triton_kernels.accept import accept_greedy

        finite = torch.ones(best.shape, dtype=torch.bool, device=p.device)
        kept, tokens, _ = accept_greedy(drafts, limits, p.ints(best), finite)
        return {"num_accepted": _host(kept), "tokens": _host(tokens)}

    def sampled() -> Outputs:
        from dustin.triton_kernels.accept import accept_sampled

        uniforms = [torch.tensor(i[name], dtype=torch.float64, device=p.device) for name in ("accept", "next")]
        kept, tokens = accept_sampled(drafts, limits, q, distributions, *uniforms)
        return {"num_accepted": _host(kept), "tokens": _host(tokens)}

    ones = np.ones(best.size, dtype=bool)
    yield _triton("argmax_rows", argmax, {"tokens": best.ravel(), "finite": ones})
    yield _triton("accept_greedy", greedy, _accepted(i, greedy=True))
    yield _triton("accept_sampled", sampled, _accepted(i, greedy=False))


def _accepted(i: Outputs, greedy: bool) -> Outputs:
    """The reference's verdict, with 0 beyond the tokens."""
    from dustin.backends.numpy_reference import sampling

    if greedy:
        found = sampling.accept_greedy(i["drafts"], i["num_drafts"], i["logits"])
    else:
        rest = (i["q"], i["p"], i["logits"], i["accept"], i["next"])
        found = sampling.accept_sampled(i["drafts"], i["num_drafts"], *rest)
    return {"num_accepted": found.num_accepted, "tokens": np.maximum(found.tokens, 0)}


def metal_checks(kernels: bool) -> Iterator[Check | Result]:
    """The Metal kernels (float16) where Metal is; elsewhere the array path that stands in for them (float32)."""
    import mlx.core as mx

    group = "metal" if kernels else "mlx array path"
    if not kernels:
        yield Result("metal", "all kernels", "skipped", "Metal is not available here; MLX arrays stand in for the kernels")
    # The array path masks unused rows instead of leaving them out, so they must be finite there.
    case = Case() if kernels else Case(tail=0.0, precision=np.float32)
    dtype = mx.float16 if kernels else mx.float32
    tolerance = TOLERANCE["float16" if kernels else "float32"]
    functions = metal_functions(kernels)

    def array(x: np.ndarray) -> Any:
        return mx.array(x).astype(dtype)

    def host(x: Any) -> np.ndarray:
        return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)

    q, k, v = array(case.q), array(case.keys), array(case.values)
    lengths, fed = mx.array(case.lengths, mx.int32), mx.array(case.num_tokens, mx.int32)
    chosen, scale = (mx.array(case.indices), mx.array(case.counts)), case.head_dim**-0.5

    def append() -> Outputs:
        new = array(case.new_keys), array(case.new_values)
        keys, values, _, ends = functions["append_kv"](array(case.keys) + 0, array(case.values) + 0, *new, lengths, fed)
        mx.eval(keys, values, ends)
        return {"keys": case.valid(host(keys)), "values": case.valid(host(values)), "ends": host(ends)}

    def blocks() -> Outputs:
        every = [-(-n // 16) for n in case.lengths]
        numbers = np.arange(max(every), dtype=np.int32)[None].repeat(len(every), 0)
        chosen = mx.array(numbers), mx.array(every, mx.int32)
        return {"out": host(functions["sparse_verify_blocks"](q, k, v, *chosen, lengths, fed, scale))}

    def select() -> Outputs:
        indices, counts = functions["select_tokens"](mx.array(case.scores[0]), mx.array(case.scores[1]), lengths, **case.quota)
        return {"indices": host(indices), "counts": host(counts)}

    def score() -> Outputs:
        queries = mx.contiguous(q[:, :1][:, :, mx.array(case.scoring)])
        return {"scores": host(functions["score_heads"](queries, k, case.scoring, case.num_heads, lengths, scale))}

    ends = np.array(case.lengths) + np.array(case.num_tokens)
    dense = {"out": case.attention(False)}
    runs: dict[str, tuple[Callable[[], Outputs], Outputs]] = {
        "dense_verify": (lambda: {"out": host(functions["dense_verify"](q, k, v, lengths, fed, scale))}, dense),
        "sparse_verify": (
            lambda: {"out": host(functions["sparse_verify"](q, k, v, *chosen, lengths, fed, scale))},
            {"out": case.attention(True)},
        ),
        # All blocks chosen: what every row sees is everything.
        "sparse_verify_blocks": (blocks, dense),
        "score_heads": (score, {"scores": case.scored()}),
        "select_tokens": (select, case.selected()),
        "append_kv": (append, case.appended() | {"ends": ends}),
    }
    for name, (run, want) in runs.items():
        if name in functions:
            yield Check(group, name, run, want, tolerance)


def metal_functions(kernels: bool) -> dict[str, Callable[..., Any]]:
    """name -> launcher of the Metal kernel, or the function of MLX arrays that stands in for it."""
    from dustin.metal_kernels import append_kv, dense_verify, fallback, score_heads, select_tokens, sparse_verify

    names = ("dense_verify", "sparse_verify", "sparse_verify_blocks", "score_heads", "select_tokens", "append_kv")
    places: dict[str, Any] = {name: fallback for name in names}
    if kernels:
        modules = (dense_verify, sparse_verify, sparse_verify, score_heads, select_tokens, append_kv)
        places = dict(zip(names, modules, strict=True))
    return {name: getattr(place, name) for name, place in places.items() if hasattr(place, name)}
