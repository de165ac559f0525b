"""Inputs of the parity cases: one maker for each operation, from a generator of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dustin.interfaces import WarpBatch
from tests.parity.harness import Inputs, quantise


def _heads_code(batch: int, capacity: int, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """Values [B, Nmax, Hkv, D]: bits of (j + 3 h + 7 b), so a wrong token, head or sequence changes an integer count."""
    b, j, h, bit = np.ogrid[:batch, :capacity, :num_kv_heads, :head_dim]
    return (((j + 3 * h + 7 * b) >> np.minimum(bit, 62)) & 1).astype(np.float32)


def attention(
    rng: np.random.Generator,
    *,
    lengths: Sequence[int],
    num_tokens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rows: int | None = None,
    dtype: str = "fp32",
    budget: int | None = None,
    size: float = 1.0,
    coded: bool = False,
    tail: str = "nan",
    spare: int = 7,
) -> Inputs:
    """Inputs of dense_verify and (with `budget`) sparse_verify. `size` scales q; `tail` fills unused rows: NaN or stale numbers."""
    batch, (num_heads, num_kv_heads) = len(lengths), heads
    rows = rows or max(num_tokens)
    capacity = max(n + t for n, t in zip(lengths, num_tokens, strict=True)) + spare
    q = np.zeros((batch, rows, num_heads, head_dim)) if coded else size * rng.standard_normal((batch, rows, num_heads, head_dim))
    keys = rng.standard_normal((batch, capacity, num_kv_heads, head_dim))
    values = _heads_code(*keys.shape) if coded else rng.standard_normal(keys.shape)
    out: Inputs = {"q": quantise(q, dtype), "keys": quantise(keys, dtype), "values": quantise(values, dtype)}
    for b, (length, count) in enumerate(zip(lengths, num_tokens, strict=True)):
        out["q"][b, count:] = 0
        for name in ("keys", "values"):
            out[name][b, length + count :] = np.nan if tail == "nan" else 3.0
    out |= {"lengths": list(lengths), "num_tokens": list(num_tokens)}
    if budget is not None:
        counts = np.array([min(budget, length) for length in lengths], dtype=np.int32)
        indices = np.zeros((batch, budget), dtype=np.int32)
        for b, count in enumerate(counts):
            indices[b, :count] = np.sort(rng.choice(lengths[b], count, replace=False))
        out |= {"indices": indices, "counts": counts}
    return out


def scores(
    rng: np.random.Generator,
    *,
    lengths: Sequence[int],
    rows: int,
    scoring: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    size: float = 1.0,
) -> Inputs:
    """Inputs of score; unused key rows are NaN."""
    keys = quantise(rng.standard_normal((len(lengths), max(lengths) + 5, heads[1], head_dim)), dtype)
    for b, length in enumerate(lengths):
        keys[b, length:] = np.nan
    q = quantise(size * rng.standard_normal((len(lengths), rows, len(scoring), head_dim)), dtype)
    return {"q": q, "keys": keys, "heads": scoring, "num_heads": heads[0], "lengths": list(lengths)}


def selection(
    rng: np.random.Generator,
    *,
    lengths: Sequence[int],
    budget: int,
    sinks: int = 4,
    recent: int = 8,
    drafts: int = 0,
    given: str = "both",
    levels: int | None = None,
    lag: int = 0,
) -> Inputs:
    """Inputs of select. `levels` rounds scores to few values (ties); `lag`: the draft's scores end that many tokens earlier."""

    def draw(missing: int) -> np.ndarray:
        out = rng.random((len(lengths), max(lengths) - missing))
        out = out if levels is None else np.floor(out * levels) / levels
        for b, length in enumerate(lengths):
            out[b, max(length - missing, 0) :] = -np.inf
        return out.astype(np.float32)

    quota = {"budget": budget, "num_sink_tokens": sinks, "num_recent_tokens": recent, "num_draft_selected": drafts}
    target, draft = draw(0), draw(lag)
    return quota | {
        "target": target if given in ("both", "target") else None,
        "draft": draft if given in ("both", "draft") else None,
        "lengths": list(lengths),
    }


def _subset(rng: np.random.Generator, lengths: Sequence[int], most: int) -> Inputs:
    """Random ascending sets of up to `most` tokens."""
    counts = np.array([min(most, length) for length in lengths], dtype=np.int32)
    indices = np.zeros((len(lengths), most), dtype=np.int32)
    for b, count in enumerate(counts):
        indices[b, :count] = np.sort(rng.choice(lengths[b], count, replace=False))
    return {"indices": indices, "counts": counts}


def scores_within(rng: np.random.Generator, *, most: int = 20, **shape: Any) -> Inputs:
    """Inputs of score_within."""
    made = scores(rng, **shape)
    return made | _subset(rng, made["lengths"], most)


def pages(rng: np.random.Generator, *, page_size: int, **shape: Any) -> Inputs:
    """Inputs of page_scores."""
    return scores(rng, **shape) | {"page_size": page_size}


def ragged_scores(rng: np.random.Generator, *, width: int) -> Inputs:
    """Inputs of smooth."""
    values = rng.random((3, 40)).astype(np.float32)
    for b, length in enumerate((40, 17, 0)):
        values[b, length:] = -np.inf
    values[0, 5:9] = -np.inf
    return {"scores": values, "width": width}


def two_scores(rng: np.random.Generator, *, decay: float | list[float], old: int, new: int) -> Inputs:
    """Inputs of accumulate: both hold -inf in places, row 1 of `new` everywhere."""
    made = {}
    for name, width in (("old", old), ("new", new)):
        made[name] = rng.random((3, width)).astype(np.float32)
        made[name][rng.random((3, width)) < 0.3] = -np.inf
    made["new"][1] = -np.inf
    return made | {"decay": decay}


def massed(rng: np.random.Generator, *, mass: float, levels: int | None = None) -> Inputs:
    """Inputs of keep_mass: the set of row 2 is its whole prefix; scores in eighths add up exactly, so thresholds cannot flake."""
    lengths = [150, 90, 12, 64, 0]
    values = np.floor(rng.random((5, 150)) * (levels or 64)) / 8
    for b, length in enumerate(lengths):
        values[b, length:] = -np.inf
    shape = {"num_sink_tokens": 3, "num_recent_tokens": 5, "mass": mass, "lengths": lengths}
    return {"scores": values.astype(np.float32)} | _subset(rng, lengths, 40) | shape


def measured(rng: np.random.Generator) -> Inputs:
    """Inputs of measures: some rows near each other, one equal, some with another argmax."""
    reference = quantise(3 * rng.standard_normal((3, 4, 61)), "bf16")
    logits = quantise(reference + rng.standard_normal((3, 4, 61)) * np.array([0.1, 1.0, 3.0])[:, None, None], "bf16")
    logits[0, 0] = reference[0, 0]
    values = rng.random((3, 50)).astype(np.float32)
    values[1, 30:] = -np.inf
    tokens = rng.integers(0, 61, (3, 4))
    return {"reference": reference, "logits": logits, "tokens": tokens, "scores": values} | _subset(rng, [50, 30, 9], 16)


def greedy(
    rng: np.random.Generator, *, agree: Sequence[int], num_drafts: Sequence[int], width: int, vocab: int = 50, trouble: str = ""
) -> Inputs:
    """Inputs of accept_greedy: sequence b's first agree[b] drafts are right. `trouble`: ties, or NaN in a judged or unused row."""
    logits = quantise(rng.standard_normal((len(agree), width + 1, vocab)), "bf16")
    if trouble == "ties":
        logits[:] = np.floor(logits)
    drafts = logits[:, :width].argmax(axis=-1)
    for b, right in enumerate(agree):
        drafts[b, right:] = (drafts[b, right:] + 1 + rng.integers(0, vocab - 1, width - right)) % vocab
        if trouble == "nan-judged" and b == 0:
            logits[b, num_drafts[b], vocab // 2] = np.nan
        if trouble in ("nan-judged", "nan-unused"):
            logits[b, num_drafts[b] + 1 :] = np.nan
    return {"drafts": drafts.astype(np.int64), "num_drafts": list(num_drafts), "logits": logits}


def sampled(
    rng: np.random.Generator,
    *,
    agree: Sequence[int],
    num_drafts: Sequence[int],
    width: int,
    vocab: int = 40,
    one_hot: bool = False,
    zeros: bool = False,
) -> Inputs:
    """Inputs of accept_sampled: agree[b] drafts are accepted. Uniforms keep away from thresholds, so fp32 decides as float64.

    `zeros` cuts three quarters of each distribution, as top-k does: draws must never hit a token of mass 0.
    """
    batch = len(agree)

    def draw(rows: int) -> np.ndarray:
        weights = rng.random((batch, rows, vocab)) + 0.05
        weights[rng.random(weights.shape) < (0.75 if zeros else 0.0)] = 0.0
        weights[..., vocab // 2] += 0.05
        return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)

    p, q = draw(width + 1), draw(width)
    drafts = np.zeros((batch, width), dtype=np.int64)
    accept, following = rng.random((batch, width)), np.zeros(batch)
    for b, count in enumerate(num_drafts):
        for i in range(count):
            ratio = p[b, i].astype(np.float64) / (1.0 if one_hot else np.where(q[b, i] > 0, q[b, i], np.inf))
            taken = i < agree[b]
            drafts[b, i] = ratio.argmax() if taken else (ratio + (0 if one_hot else (q[b, i] == 0) * 9.0)).argmin()
            threshold = min(ratio[drafts[b, i]], 1.0)
            accept[b, i] = threshold * rng.uniform(0.05, 0.95) if taken else threshold + (1 - threshold) * rng.uniform(0.05, 0.95)
        n = min(agree[b], count)
        proposal = np.eye(vocab)[drafts[b, n]] if one_hot and n < count else (q[b, n] if n < count else 0.0)
        share = np.maximum(p[b, n].astype(np.float64) - proposal, 0.0)
        share /= share.sum()
        token = rng.choice(np.flatnonzero(share > 0.25 / vocab))
        following[b] = share[:token].sum() + 0.5 * share[token]
    out: Inputs = {"drafts": drafts, "num_drafts": list(num_drafts), "q": None if one_hot else q, "p": p}
    logits = np.zeros((batch, width + 1, vocab), dtype=np.float32)
    return out | {"logits": logits, "accept_uniforms": accept.tolist(), "next_uniforms": following.tolist()}


def warps(
    rng: np.random.Generator, *, size: float = 3.0, ties: bool = False, vocab: int = 60, rows: int = 3, inflight: int = 2
) -> Inputs:
    """Inputs of probabilities: eight sequences, each with another warp, and tokens in flight."""
    logits = size * rng.standard_normal((8, rows, vocab)).astype(np.float32)
    warp = WarpBatch(
        temperature=(0.0, 0.0, 1.0, 0.7, 1.3, 1.0, 0.8, 1.0),
        top_k=(0, 5, 5, 0, 0, 0, 12, 1),
        top_p=(1.0, 1.0, 1.0, 0.8, 1.0, 1.0, 0.9, 1.0),
        min_p=(0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.05, 0.0),
        repetition_penalty=(1.0, 1.3, 1.0, 1.0, 1.0, 1.2, 1.1, 1.0),
        presence_penalty=(0.0, 0.0, 0.0, 0.5, 0.0, 0.4, 0.0, 0.0),
        frequency_penalty=(0.0, 0.2, 0.0, 0.0, 0.0, 0.3, 0.0, -0.5),
    )
    context = rng.integers(0, vocab, (8, 20)).tolist()
    logits = np.floor(logits) if ties else logits
    return {"logits": logits, "warp": warp, "context": context, "inflight": rng.integers(0, vocab, (8, inflight))}


def cache_script(rng: np.random.Generator, *, dtype: str, batch: int = 3, heads: int = 2, head_dim: int = 32) -> Inputs:
    """Inputs of append_rollback: ragged appends and rollbacks, to 0 and to the full capacity, with rows that take no part."""
    capacity = 24
    plan: list[tuple[str, list[int]]] = [
        ("append", [5, 0, 9]),
        ("rollback", [3, 0, 9]),
        ("append", [6, 1, 6]),
        ("rollback", [9, 0, 10]),
        ("append", [0, 4, 14]),
        ("append", [2, 3, 0]),
        ("rollback", [10, 7, 0]),
        ("append", [3, 3, 3]),
    ]
    steps: list[tuple] = []
    for kind, counts in plan:
        if kind == "rollback":
            steps.append((kind, counts))
            continue
        k, v = (quantise(rng.standard_normal((batch, max(counts), heads, head_dim)), dtype) for _ in range(2))
        steps.append((kind, counts, k, v))
    return {"batch": batch, "capacity": capacity, "num_kv_heads": heads, "head_dim": head_dim, "steps": steps}


def routed(rng: np.random.Generator, *, num_drafts: Sequence[int], vocab: int = 97, width: int = 4) -> Inputs:
    """Inputs of favour: every second row of logits is peaked, so that the threshold of a half parts them widely."""
    logits = rng.standard_normal((len(num_drafts), width + 1, vocab))
    logits[:, ::2, 3] += 9.0
    drafts = rng.integers(0, vocab, (len(num_drafts), width))
    return {"logits": quantise(logits, "fp32"), "drafts": drafts, "num_drafts": list(num_drafts), "threshold": 0.5}
