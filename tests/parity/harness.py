"""The judge of the parity tests: runs an implementation on a case and compares it with the float64 specification.

An implementation is a function `impl(inputs) -> outputs` of numpy values: a kernel's or backend's adapter converts to its own
arrays of dtype `case.dtype`, calls, and converts back. Input values are exact in that dtype. What each operation gets and gives:

| op | inputs | outputs |
|---|---|---|
| dense_verify | q [B,T,Hq,D], keys, values [B,Nmax,Hkv,D] (in-flight rows at lengths[b]...), lengths, num_tokens | out, as q |
| sparse_verify | the same, indices [B,k], counts [B] | out |
| score | q [B,R,S,D], heads, num_heads, keys, lengths | scores [B, >= max(lengths)] |
| score_within | as score, indices [B,k], counts [B] | scores |
| page_scores | as score, page_size | scores |
| accumulate | old, new [B,n], decay | scores |
| smooth | scores [B,n], width | scores |
| keep_mass | scores [B,n], indices, counts, lengths, mass, num_sink/recent_tokens | indices, counts |
| measures | reference, logits [B,T,V], tokens [B,T], scores [B,n], indices, counts | kl, same, gap, logprobs, mass |
| select | target, draft ([B,n] or None), lengths, budget, num_sink/recent_tokens, num_draft_selected | indices, counts |
| accept_greedy | drafts [B,G], num_drafts, logits [B,G+1,V] | num_accepted, tokens, finite |
| accept_sampled | drafts, num_drafts, q ([B,G,V] or None), p [B,G+1,V], logits, accept_uniforms, next_uniforms | the same |
| probabilities | logits [B,T,V], warp (WarpBatch), context, inflight | probabilities [B,T,V] |
| favour | logits [B,G+1,V], drafts [B,G], num_drafts, threshold | logits, sure (confidence of each row's own logits [B,G]) |
| append_rollback | batch, capacity, num_kv_heads, head_dim, steps | lengths (after each step), dropped, keys, values |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dustin.backends.numpy_reference import ops, sampling, set_ops
from dustin.backends.numpy_reference.cache import Cache
from dustin.interfaces import Tap, TokenSet

Inputs = dict[str, Any]
Implementation = Callable[[Inputs], dict[str, Any]]

# Relative RMS against float64, one bound a dtype. Tight enough that a wrong index fails (see the coded cases for the rest).
TOLERANCES = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}


class ParityError(AssertionError):
    """An implementation differs from the specification."""


@dataclass(frozen=True)
class Case:
    """One row of the table. `make` builds the inputs from a seeded generator; `coded` marks q = 0 and v[j] = bits of j."""

    name: str
    op: str
    make: Callable[[np.random.Generator], Inputs]
    dtype: str = "fp32"
    coded: bool = False

    @property
    def tolerance(self) -> float:
        """Relative RMS that an output may differ by."""
        return TOLERANCES[self.dtype]


def quantise(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to `dtype` (fp32, fp16, bf16; nearest even), held in float32."""
    single = np.asarray(x, dtype=np.float32)
    if dtype == "fp16":
        return single.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = single.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(single), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))
    return single


@functools.lru_cache(maxsize=512)
def inputs_of(case: Case) -> Inputs:
    """The inputs of a case, the same in every process: the seed is the name. Do not modify them."""
    return case.make(np.random.default_rng(list(case.name.encode())))


def fill_cache(inputs: Inputs) -> Cache:
    """A one-layer numpy cache with the given keys and values [B, Nmax, Hkv, D]; lengths cover what was written."""
    batch, capacity, num_kv_heads, head_dim = inputs["keys"].shape
    cache = Cache(1, batch, capacity, num_kv_heads, head_dim)
    cache.keys[0][:] = inputs["keys"]
    cache.values[0][:] = inputs.get("values", np.nan)
    cache.advance([n + t for n, t in zip(inputs["lengths"], inputs.get("num_tokens", [0] * batch), strict=True)])
    return cache


def specification(op: str, inputs: Inputs) -> dict[str, Any]:
    """What the numpy backend answers, in float64."""
    i = inputs
    if op in ("dense_verify", "sparse_verify"):
        chosen = TokenSet(i["indices"], i["counts"]) if op == "sparse_verify" else None
        q = i["q"].astype(np.float64)
        return {"out": ops.Attention()(q, fill_cache(i), 0, i["lengths"], i["num_tokens"], chosen)}
    if op == "score":
        scale, tap = i["q"].shape[-1] ** -0.5, Tap({0: i["heads"]})
        queries = {0: i["q"].astype(np.float64)}
        args = {"num_heads": i["num_heads"], "scale": scale, "softcap": None}
        return {"scores": ops.score(queries, tap, fill_cache(i), i["lengths"], **args)}
    if op == "score_within":
        scale, tap = i["q"].shape[-1] ** -0.5, Tap({0: i["heads"]})
        args = {"num_heads": i["num_heads"], "scale": scale, "softcap": None, "within": TokenSet(i["indices"], i["counts"])}
        return {"scores": ops.score({0: i["q"].astype(np.float64)}, tap, fill_cache(i), i["lengths"], **args)}
    if op == "page_scores":
        scale, tap = i["q"].shape[-1] ** -0.5, Tap({0: i["heads"]})
        args = {"num_heads": i["num_heads"], "scale": scale}
        queries = {0: i["q"].astype(np.float64)}
        return {"scores": set_ops.page_scores(queries, tap, fill_cache(i), i["lengths"], i["page_size"], **args)}
    if op == "accumulate":
        return {"scores": set_ops.accumulate(i["old"], i["new"], i["decay"])}
    if op == "smooth":
        return {"scores": set_ops.smooth(i["scores"], i["width"])}
    if op == "keep_mass":
        names = ("mass", "num_sink_tokens", "num_recent_tokens")
        chosen = TokenSet(i["indices"], i["counts"])
        chosen = set_ops.keep_mass(chosen, i["scores"], i["lengths"], **{name: i[name] for name in names})
        return {"indices": chosen.indices, "counts": chosen.counts}
    if op == "measures":
        rows = set_ops.compare_logits(i["reference"], i["logits"], i["tokens"])
        return vars(rows) | {"mass": set_ops.set_mass(TokenSet(i["indices"], i["counts"]), i["scores"])}
    if op == "select":
        quota = ("budget", "num_sink_tokens", "num_recent_tokens", "num_draft_selected")
        chosen = ops.select(i["target"], i["draft"], i["lengths"], **{name: i[name] for name in quota})
        return {"indices": chosen.indices, "counts": chosen.counts}
    if op == "probabilities":
        logits = i["logits"].astype(np.float64)
        return {"probabilities": sampling.probabilities(logits, i["warp"], i["context"], i["inflight"])}
    if op == "favour":
        rows = i["logits"].astype(np.float64)[:, :-1]
        sure = np.concatenate([sampling.confidence(rows[:, t : t + 1], None) for t in range(rows.shape[1])], 1)
        logits = sampling.favour(i["logits"].astype(np.float64), i["drafts"], i["num_drafts"], sure, i["threshold"])
        return {"logits": logits, "sure": sure}
    if op == "append_rollback":
        return _cache_script(i)
    if op == "accept_greedy":
        verdict = sampling.accept_greedy(i["drafts"], i["num_drafts"], i["logits"])
    elif op == "accept_sampled":
        uniforms = (i["accept_uniforms"], i["next_uniforms"])
        verdict = sampling.accept_sampled(i["drafts"], i["num_drafts"], i["q"], i["p"], i["logits"], *uniforms)
    else:
        raise ValueError(f"op is {op!r}, expected one of the table in this module's docstring")
    return {"num_accepted": verdict.num_accepted, "tokens": verdict.tokens, "finite": verdict.finite}


def _cache_script(i: Inputs) -> dict[str, Any]:
    cache = Cache(1, i["batch"], i["capacity"], i["num_kv_heads"], i["head_dim"])
    lengths, dropped = [], []
    for step in i["steps"]:
        if step[0] == "append":
            cache.write(0, step[1], step[2], step[3])
            cache.advance(step[1])
        else:
            dropped.append(cache.rollback(step[1]))
        lengths.append(cache.lengths)
    return {"lengths": lengths, "dropped": dropped, "keys": cache.keys[0], "values": cache.values[0]}


@functools.lru_cache(maxsize=512)
def reference_of(case: Case) -> dict[str, Any]:
    """The specification's outputs of a case."""
    return specification(case.op, inputs_of(case))


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    """RMS of the difference over RMS of the reference (over 1e-30 where that is all zero)."""
    difference = np.sqrt(np.mean((got.astype(np.float64) - want) ** 2))
    return float(difference / max(np.sqrt(np.mean(want.astype(np.float64) ** 2)), 1e-30))


def _require(ok: bool, case: Case, message: str) -> None:
    if not ok:
        raise ParityError(f"{case.name} ({case.dtype}): {message}")


def _same(case: Case, name: str, got: Any, want: Any) -> None:
    _require(np.array_equal(np.asarray(got), np.asarray(want)), case, f"{name} is {got}, expected {want}")


def _close(case: Case, name: str, got: np.ndarray, want: np.ndarray) -> None:
    _require(bool(np.isfinite(got).all()), case, f"{name} holds {int((~np.isfinite(got)).sum())} values that are not finite")
    error = relative_rms(got, want)
    _require(error <= case.tolerance, case, f"{name} differs by {error:.3g} relative RMS, expected at most {case.tolerance}")


def check(impl: Implementation, case: Case) -> None:
    """Run `impl` on the case. Raise ParityError that names the case, what was expected and what came."""
    inputs, want = inputs_of(case), reference_of(case)
    got = impl(inputs)
    if case.op in ("dense_verify", "sparse_verify"):
        _check_attention(case, inputs, np.asarray(got["out"]), want["out"])
    elif case.op in ("accumulate", "smooth"):
        scores = np.asarray(got["scores"])
        _same(case, "-inf entries", np.isneginf(scores), np.isneginf(want["scores"]))
        _close(case, "scores", np.where(np.isneginf(scores), 0, scores), np.where(np.isneginf(scores), 0, want["scores"]))
    elif case.op == "measures":
        _same(case, "same", got["same"], want["same"])
        for name in ("kl", "gap", "reference_logprob", "logprob", "mass"):
            _close(case, name, np.asarray(got[name]), want[name])
    elif case.op in ("score_within", "page_scores"):
        scores = np.asarray(got["scores"])
        for b, length in enumerate(inputs["lengths"]):
            row, exact = scores[b, :length], want["scores"][b, :length]
            _same(case, f"-inf of scores[{b}]", np.isneginf(row), np.isneginf(exact))
            _require(bool(np.isneginf(scores[b, length:]).all()), case, f"scores[{b}, {length}:] is not -inf")
            if np.isfinite(exact).any():
                _close(case, f"scores[{b}]", row[np.isfinite(exact)], exact[np.isfinite(exact)])
    elif case.op == "score":
        _check_scores(case, inputs, np.asarray(got["scores"]), want["scores"])
    elif case.op in ("select", "keep_mass"):
        _same(case, "counts", got["counts"], want["counts"])
        for b, count in enumerate(want["counts"]):
            _same(case, f"indices[{b}]", np.asarray(got["indices"])[b, :count], want["indices"][b, :count])
    elif case.op == "probabilities":
        p = np.asarray(got["probabilities"])
        _require(p.shape == want["probabilities"].shape, case, f"shape {p.shape}, expected {want['probabilities'].shape}")
        for b, t in np.ndindex(*p.shape[:2]):
            _close(case, f"probabilities[{b}, {t}]", p[b, t], want["probabilities"][b, t])
            exact = want["probabilities"][b, t]
            _same(case, f"tokens cut from probabilities[{b}, {t}]", p[b, t][exact == 0], exact[exact == 0])
            # Below 1e-30 fp32 may underflow; above, a kept token must keep its mass.
            _require(bool((p[b, t][exact > 1e-30] > 0).all()), case, f"probabilities[{b}, {t}] cut a token that is kept")
    elif case.op == "favour":
        _close(case, "sure", np.asarray(got["sure"]), want["sure"])
        forced = want["logits"] > 1e29
        _same(case, "favoured drafts", np.asarray(got["logits"]) > 1e29, forced)
        _close(case, "logits", np.where(forced, 0, np.asarray(got["logits"])), np.where(forced, 0, want["logits"]))
    elif case.op == "append_rollback":
        _same(case, "lengths", got["lengths"], want["lengths"])
        _same(case, "dropped", got["dropped"], want["dropped"])
        for name in ("keys", "values"):
            for b, length in enumerate(want["lengths"][-1]):
                _same(case, f"{name}[{b}]", np.asarray(got[name])[b, :length], want[name][b, :length])
    else:
        _check_verdict(case, got, want)


def _check_attention(case: Case, inputs: Inputs, out: np.ndarray, want: np.ndarray) -> None:
    """Row by row, so that one bad row cannot hide among good ones. Rows beyond num_tokens must be 0."""
    _require(out.shape == want.shape, case, f"out has shape {out.shape}, expected {want.shape}")
    for b, count in enumerate(inputs["num_tokens"]):
        _require(bool((out[b, count:] == 0).all()), case, f"out[{b}, {count}:] is not 0: these rows take no part")
        for t in range(count):
            _close(case, f"out[{b}, {t}]", out[b, t], want[b, t])
            if case.coded:
                committed = int(inputs["counts"][b]) if case.op == "sparse_verify" else inputs["lengths"][b]
                visible = committed + t + 1
                off = np.abs(visible * out[b, t].astype(np.float64) - np.rint(visible * want[b, t])).max()
                _require(off < 0.25, case, f"{visible} * out[{b}, {t}] is {off:.3f} off its integer counts: a wrong set of tokens")


def _check_scores(case: Case, inputs: Inputs, scores: np.ndarray, want: np.ndarray) -> None:
    _require(scores.shape[1] >= want.shape[1], case, f"scores have {scores.shape[1]} columns, expected {want.shape[1]} or more")
    for b, length in enumerate(inputs["lengths"]):
        _require(bool(np.isneginf(scores[b, length:]).all()), case, f"scores[{b}, {length}:] is not -inf")
        if length:
            _close(case, f"scores[{b}]", scores[b, :length], want[b, :length])


def _check_verdict(case: Case, got: dict[str, Any], want: dict[str, Any]) -> None:
    """Tokens of a row with NaN logits are undefined; all else is exact."""
    _same(case, "finite", got["finite"], want["finite"])
    for b, (n, finite) in enumerate(zip(want["num_accepted"], want["finite"], strict=True)):
        if finite:
            _same(case, f"num_accepted[{b}]", np.asarray(got["num_accepted"])[b], n)
            _same(case, f"tokens[{b}]", np.asarray(got["tokens"])[b, : n + 1], want["tokens"][b, : n + 1])
