"""The self-test of `dustin doctor`: one small parity case for each operation and kernel, against the float64 reference.

    python -m dustin.self_test torch      # JSON lines: what the framework is, then one line a check

It runs in a process of its own, so that a kernel that crashes or hangs leaves the report standing. A check is passed, failed
(with what differed) or skipped (with the reason); the inputs are ragged, with NaN where nothing may be read.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Relative RMS against float64, as in tests/parity.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One check. `group` is where it ran, `state` passed, failed or skipped, `detail` the difference or the reason."""

    group: str
    name: str
    state: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """`run` gives host arrays by name; each must equal `want` (integers) or be within `tolerance` (floats)."""

    group: str
    name: str
    run: Callable[[], Outputs]
    want: Outputs
    tolerance: float = TOLERANCE["float32"]


def judge(check: Check, clock: Callable[[], float] = time.perf_counter) -> Result:
    """Run a check; whatever it raises is its result."""
    start = clock()
    try:
        problem, detail = _difference(check.run(), check.want, check.tolerance)
    except Exception as error:  # a broken kernel may raise anything
        problem, detail = True, f"{type(error).__name__}: {last_line(error)}"
    return Result(check.group, check.name, "failed" if problem else "passed", detail[:300], round(clock() - start, 3))


def last_line(error: BaseException) -> str:
    """The last line of a message; the kind of error when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _difference(got: Outputs, want: Outputs, tolerance: float) -> tuple[bool, str]:
    """(whether something is wrong, what), over all outputs."""
    worst = 0.0
    for name, expected in want.items():
        expected, actual = np.asarray(expected), np.asarray(got[name])
        if actual.shape != expected.shape:
            return True, f"{name} has shape {actual.shape}, expected {expected.shape}"
        if expected.dtype.kind in "iub":
            wrong = int((actual != expected).sum())
            if wrong:
                return True, f"{wrong} of {expected.size} values of {name} are wrong"
            continue
        hidden = np.isneginf(expected)
        if not np.array_equal(hidden, np.isneginf(actual)) or not np.isfinite(actual[~hidden]).all():
            return True, f"{name} holds NaN or infinity where a number is expected, or a number where none is"
        reference = expected[~hidden].astype(np.float64)
        error = math.sqrt(float(np.mean((actual[~hidden].astype(np.float64) - reference) ** 2))) if reference.size else 0.0
        scale = math.sqrt(float(np.mean(reference**2))) if reference.size else 1.0
        error /= max(scale, 1e-30)
        if not error <= tolerance:
            return True, f"{name} is off by {error:.3g} relative RMS, allowed {tolerance:g}"
        worst = max(worst, error)
    return False, f"relative RMS {worst:.1e}, allowed {tolerance:g}" if worst else "exact"


@dataclass
class Case:
    """A ragged verification: a long, a short and a finished sequence, and the reference's answers (float64, computed once).

    q [B, T, Hq, D]; keys, values [B, Nmax, Hkv, D] with `tail` beyond the in-flight rows; scores [B, Nmax] with ties.
    """

    head_dim: int = 64
    num_heads: int = 6
    num_kv_heads: int = 2
    lengths: tuple[int, ...] = (70, 5, 30)
    num_tokens: tuple[int, ...] = (3, 4, 0)
    rows: int = 4
    capacity: int = 90
    budget: int = 20
    tail: float = math.nan
    precision: type = np.float16
    quota: dict[str, int] = field(
        default_factory=lambda: {"budget": 20, "num_sink_tokens": 2, "num_recent_tokens": 6, "num_draft_selected": 5}
    )

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        batch, kv = len(self.lengths), (len(self.lengths), self.capacity, self.num_kv_heads, self.head_dim)
        self.q = self._round(rng.standard_normal((batch, self.rows, self.num_heads, self.head_dim)))
        self.keys, self.values = (self._round(rng.standard_normal(kv)) for _ in "kv")
        self.new_keys, self.new_values = (self._round(rng.standard_normal((batch, self.rows, *kv[2:]))) for _ in "kv")
        self.indices = np.zeros((batch, self.budget), np.int32)
        self.counts = np.array([min(self.budget, n) for n in self.lengths], np.int32)
        self.scores = np.full((2, batch, self.capacity), -np.inf, np.float32)
        for b, (length, fed) in enumerate(zip(self.lengths, self.num_tokens, strict=True)):
            self.keys[b, length + fed :] = self.values[b, length + fed :] = self.tail
            self.indices[b, : self.counts[b]] = np.sort(rng.choice(length, self.counts[b], replace=False))
            self.scores[:, b, :length] = np.floor(rng.random((2, length)) * 12) / 8

    def _round(self, x: np.ndarray) -> np.ndarray:
        """float32 values that the tested precision holds exactly."""
        return x.astype(self.precision).astype(np.float32)

    def cache(self) -> Any:
        """The reference's cache with everything in it."""
        from dustin.backends.numpy_reference.cache import Cache

        cache = Cache(1, len(self.lengths), self.capacity, self.num_kv_heads, self.head_dim)
        cache.keys[0][:], cache.values[0][:] = self.keys, self.values
        cache.advance([n + t for n, t in zip(self.lengths, self.num_tokens, strict=True)])
        return cache

    def attention(self, sparse: bool) -> np.ndarray:
        """[B, T, Hq, D] float64."""
        from dustin.backends.numpy_reference.ops import Attention
        from dustin.interfaces import TokenSet

        chosen = TokenSet(self.indices, self.counts) if sparse else None
        return Attention()(self.q.astype(np.float64), self.cache(), 0, self.lengths, self.num_tokens, chosen)

    @property
    def scoring(self) -> tuple[int, int]:
        """Query heads that score: one of the first kv head and one of the last."""
        return 0, self.num_heads - 1

    def scored(self, layers: int = 1) -> np.ndarray:
        """[B, Nmax] float32: the scores of the first query row of the scoring heads; -inf beyond the lengths.

        With two layers their mean; the second layer's keys are this one's values.
        """
        from dustin.backends.numpy_reference import ops
        from dustin.interfaces import Tap

        cache = self.cache()
        cache.keys.append(cache.values[0])
        queries = {layer: self.q[:, :1, list(self.scoring)].astype(np.float64) for layer in range(layers)}
        options: dict[str, Any] = {"num_heads": self.num_heads, "scale": self.head_dim**-0.5, "softcap": None}
        found = ops.score(queries, Tap(dict.fromkeys(range(layers), self.scoring)), cache, self.lengths, **options)
        return np.pad(found, [(0, 0), (0, self.capacity - found.shape[1])], constant_values=-np.inf)

    def selected(self) -> Outputs:
        """Indices [B, budget] (0 beyond the counts) and counts of the quota rule over `scores`."""
        from dustin.backends.numpy_reference import ops

        chosen = ops.select(self.scores[0], self.scores[1], self.lengths, **self.quota)
        return {"indices": np.maximum(chosen.indices, 0), "counts": chosen.counts}

    def appended(self) -> Outputs:
        """Keys and values after the new rows were written (the valid ones)."""
        keys, values = self.keys.copy(), self.values.copy()
        for b, (length, fed) in enumerate(zip(self.lengths, self.num_tokens, strict=True)):
            keys[b, length : length + fed], values[b, length : length + fed] = self.new_keys[b, :fed], self.new_values[b, :fed]
        return {"keys": self.valid(keys), "values": self.valid(values)}

    def valid(self, rows: np.ndarray) -> np.ndarray:
        """[B, Nmax, Hkv, D] with 0 where nothing lies."""
        ends = np.array(self.lengths) + np.array(self.num_tokens)
        return np.where(np.arange(self.capacity)[None, :, None, None] < ends[:, None, None, None], rows, 0)


def acceptance_inputs(vocab: int = 60) -> Outputs:
    """Drafts [B, G], q [B, G, V], p [B, G+1, V], logits and uniforms, far from every threshold."""
    rng = np.random.default_rng(5)
    p, q = (rng.random((3, rows, vocab)) + 0.05 for rows in (4, 3))
    p, q = ((x / x.sum(-1, keepdims=True)).astype(np.float32) for x in (p, q))
    logits = np.log(p)
    drafts = logits[:, :3].argmax(-1).astype(np.int64)
    drafts[1, 1] = (drafts[1, 1] + 1) % vocab
    drafts[2] = (drafts[2] + 7) % vocab
    uniforms = {"accept": [[0.3] * 3] * 3, "next": [0.51] * 3}
    return {"drafts": drafts, "num_drafts": [3, 3, 2], "q": q, "p": p, "logits": logits} | uniforms


GROUPS: dict[str, str] = {
    "numpy": "dustin.self_test_backends:numpy_checks",
    "torch": "dustin.self_test_backends:torch_checks",
    "mlx": "dustin.self_test_backends:mlx_checks",
}


def run(group: str) -> Iterator[dict[str, Any]]:
    """What the framework is ({"devices": ...}), then the results, each as it comes."""
    import importlib

    module, function = GROUPS[group].split(":")
    try:
        for found in getattr(importlib.import_module(module), function)():
            if isinstance(found, Check):
                yield asdict(judge(found))
            else:
                yield asdict(found) if isinstance(found, Result) else found
    except Exception as error:  # preparing a check failed: the checks after it did not run
        yield asdict(Result(group, "the remaining checks", "failed", f"{type(error).__name__}: {last_line(error)}"[:300]))


def main(words: list[str]) -> int:
    """Print the lines of one group. 0, or 2 when there is no such group."""
    if len(words) != 1 or words[0] not in GROUPS:
        print(f"error: expected one of {', '.join(GROUPS)}, got {' '.join(words) or 'nothing'}", file=sys.stderr)
        return 2
    for line in run(words[0]):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    # Under its own name: the checks import this module, and its classes must be the same ones.
    from dustin.self_test import main as entry

    sys.exit(entry(sys.argv[1:]))
