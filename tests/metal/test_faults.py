"""Check the checkers: every seeded fault must be found by the means named beside it, and the sound kernels by none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.metal.emulator.dropin import Log, installed
from tests.metal.emulator.lint import clang, lint
from tests.metal.emulator.tracing import TracedKernel
from tests.metal.faults import FAULTS, Fault
from tests.metal.helpers import call, parity_problem, to_mlx
from tests.metal.reference import Case, expected_scores, expected_set, relative_rms, round_to

CHECKED = {"race", "uninitialised", "unwritten", "input"}  # kinds that only instrumented memory can show
# Five splits of (30 or 31) + 4 rows: some split sees in-flight rows that its first query row does not.
CASES = {
    "dense": ((70, 5, 30), (3, 4, 0), "float16", 1),
    "sparse": ((70, 5, 30), (3, 4, 0), "float16", 1),
    "split": ((62, 5, 30), (4, 4, 0), "float32", 5),
    "combine": ((70, 5, 30), (3, 4, 0), "float16", 5),
    "blocks": ((75, 5, 30), (3, 4, 0), "float16", 1),
}
FORM = {"split": "dense", "combine": "dense"}


def attention_problems(operation: str, coded: bool) -> str:
    lengths, tokens, dtype, splits = CASES[operation]
    case = Case(lengths, tokens, 4, 10, 2, 64, dtype, 90, 33, coded=coded)
    form = FORM.get(operation, operation)
    return parity_problem(case, form, call(case, form, splits))


def score_problems() -> str:
    import mlx.core as mx

    from dustin.metal_kernels.score_heads import score_heads

    rng = np.random.default_rng(0)
    q = round_to(rng.normal(size=(2, 3, 4, 64)), "float16")
    k = round_to(rng.normal(size=(2, 150, 2, 64)), "float16")
    lengths, heads = (131, 40), (0, 4, 1, 2)
    want = expected_scores(q, k, heads, 3, lengths, 0.125)
    n = mx.array(lengths, mx.int32)
    got = np.array(score_heads(to_mlx(q, "float16"), to_mlx(k, "float16"), heads, 6, n, 0.125, splits=4))
    if not np.array_equal(np.isneginf(got), np.isneginf(want)):
        return "other keys scored"
    error = relative_rms(got[np.isfinite(want)], want[np.isfinite(want)])
    return "" if error <= 1e-5 else f"relative RMS {error:.3g}"


def select_problems() -> str:
    import mlx.core as mx

    from dustin.metal_kernels.select_tokens import select_tokens

    rng = np.random.default_rng(0)
    scores = rng.integers(0, 9, size=(1, 700)).astype(np.float32)
    indices, counts = select_tokens(
        mx.array(scores),
        None,
        mx.array([700], mx.int32),
        budget=48,
        num_sink_tokens=4,
        num_recent_tokens=8,
        num_draft_selected=0,
    )
    want = expected_set(scores[0], scores[0], 700, 48, 4, 8, 0)
    return "" if np.array(indices)[0].tolist() == want and int(counts[0]) == 48 else "another set"


def append_problems() -> str:
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv

    cache = [mx.zeros((2, 20, 2, 64), mx.float16) for _ in "kv"]
    mx.eval(cache)
    new = mx.ones((2, 4, 2, 64), mx.float16)
    k, v, _, ends = append_kv(*cache, new, new, mx.array([3, 17], mx.int32), mx.array([2, 4], mx.int32))
    want = np.zeros((2, 20, 2, 64), np.float32)
    want[0, 3:5] = 1
    same = all(np.array_equal(np.array(x.astype(mx.float32)), want) for x in (k, v))
    return "" if same and np.array(ends).tolist() == [5, -1] else "another cache"


OTHERS = {"score": score_problems, "select": select_problems, "append": append_problems}


def problems(operation: str, transform=None, check: bool = True) -> set[str]:
    """Kinds of findings and failed comparisons of `operation`, with every kernel passed through `transform`."""
    kinds: set[str] = set()
    settings = {"strict": False, "transform": transform, "check": check}
    with installed(**settings) as log:
        wrong = OTHERS[operation]() if operation in OTHERS else attention_problems(operation, coded=False)
        kinds |= {"parity"} if wrong else set()
        if operation in CASES and attention_problems(operation, coded=True):
            kinds.add("coded")
    return kinds | {f.kind for f in log.findings} | lint_kinds(log)


def lint_kinds(log: Log) -> set[str]:
    if clang() is None:
        return set()
    return {f.kind for k in {k.name: k for k in log.kernels}.values() for f in lint(k)}


def seeded(fault: Fault):
    applied = []

    def transform(kernel: TracedKernel) -> TracedKernel:
        if fault.old in kernel.source:
            applied.append(kernel.name)
        return dataclasses.replace(kernel, source=kernel.source.replace(fault.old, fault.new, 1))

    return transform, applied


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "-"))
def test_fault_is_found(fault: Fault) -> None:
    if "lint" in fault.found_by:
        if clang() is None:
            pytest.skip("clang++ is missing: only the lint knows address spaces")
        assert {"lint"} <= _lint_only(fault)
        return
    transform, applied = seeded(fault)
    kinds = problems(fault.operation, transform)
    assert applied, "the text that the fault changes is gone: update the fault"
    assert set(fault.found_by) <= kinds, kinds
    if set(fault.found_by) <= CHECKED:
        assert not CHECKED & problems(fault.operation, transform, check=False)


def _lint_only(fault: Fault) -> set[str]:
    with installed() as log:
        attention_problems(fault.operation, coded=False)
    transform, _ = seeded(fault)
    return {f.kind for k in log.kernels for f in lint(transform(k))}


@pytest.mark.parametrize("operation", [*CASES, *OTHERS])
def test_sound_kernels_pass(operation: str) -> None:
    assert problems(operation) == set()


@pytest.mark.parametrize("group,kind", [((1056, 1, 1), "size"), ((0, 1, 1), "size")])
def test_illegal_launch(group: tuple[int, int, int], kind: str) -> None:
    assert kind in problems("select", lambda k: dataclasses.replace(k, group=group))


def test_text_beyond_ascii() -> None:
    assert "size" in problems("select", lambda k: dataclasses.replace(k, source=k.source + "// \u00b5"))


def test_parity_helper_refuses_zeros_and_nan() -> None:
    case = Case((20,), (2,), 2, 4, 2, 64, "float16", 30, 9)
    assert parity_problem(case, "dense", np.zeros(case.q.shape))
    assert parity_problem(case, "dense", np.full(case.q.shape, np.nan))
    assert not parity_problem(case, "dense", case.expected("dense"))
