"""The array path against float64, and the dispatch gate: measured once, checked, kept, overridable, loud about why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.metal.emulator.dropin import installed
from tests.metal.helpers import to_host, to_mlx
from tests.metal.reference import TOLERANCE, Case, expected_scores, parity_case, relative_rms

SHAPE = {"dtype": "float32", "dim": 64}


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_array_path(form: str, dtype: str) -> None:
    """Rows past the end hold stale finite values; MLX's CPU attention rounds in the array's dtype."""
    import mlx.core as mx

    from dustin.metal_kernels import fallback

    case = parity_case(dtype)
    want = case.expected(form)
    k, v = (to_mlx(np.nan_to_num(x, nan=7.0), dtype) for x in (case.k, case.v))
    n, t = mx.array(case.lengths, mx.int32), mx.array(case.num_tokens, mx.int32)
    q = to_mlx(case.q, dtype)
    if form == "dense":
        got = fallback.dense_verify(q, k, v, n, t, case.scale)
    else:
        got = fallback.sparse_verify(q, k, v, mx.array(case.indices), mx.array(case.counts), n, t, case.scale)
    assert relative_rms(to_host(got), want) <= TOLERANCE[dtype]


def test_array_scores() -> None:
    import mlx.core as mx

    from dustin.metal_kernels import fallback

    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 4, 64)).astype(np.float32), rng.normal(size=(2, 50, 2, 64)).astype(np.float32)
    got = np.array(fallback.score_heads(mx.array(q), mx.array(k), (0, 4, 1, 2), 6, mx.array([50, 31], mx.int32), 0.125))
    want = expected_scores(q, k, (0, 4, 1, 2), 3, (50, 31), 0.125)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    assert relative_rms(got[np.isfinite(want)], want[np.isfinite(want)]) <= 1e-5


class Clock:
    """Each call of a timed function takes what the test says (seconds)."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs, self.now, self.calls = costs, 0.0, {"kernel": 0, "array": 0}

    def __call__(self) -> float:
        return self.now

    def function(self, name: str, value: float):
        import mlx.core as mx

        def run():
            self.now += self.costs[name]
            self.calls[name] += 1
            return mx.full((4,), value)

        return run


def gate(tmp_path: Path, clock: Clock, **options):
    from dustin.metal_kernels.gate import Gate

    return Gate(path=tmp_path / "gate.json", clock=clock, **({"chip": "Test M1"} | options))


@pytest.mark.parametrize(
    "costs,path", [({"kernel": 1e-3, "array": 2e-3}, "kernel"), ({"kernel": 3e-3, "array": 2e-3}, "array")]
)
def test_faster_path_wins_and_is_kept(tmp_path: Path, costs: dict, path: str) -> None:
    clock = Clock(costs)
    run = (clock.function("kernel", 1.0), clock.function("array", 1.0))
    first = gate(tmp_path, clock).decide("dense_verify", SHAPE, *run)
    assert first.path == path and first.reason == "measured"
    assert (first.kernel_ms, first.array_ms) == pytest.approx((costs["kernel"] * 1e3, costs["array"] * 1e3))
    calls = dict(clock.calls)
    assert gate(tmp_path, clock).decide("dense_verify", SHAPE, *run) == first and clock.calls == calls
    gate(tmp_path, clock, chip="Test M2").decide("dense_verify", SHAPE, *run)
    assert clock.calls != calls  # another chip is measured by itself
    assert len(json.loads((tmp_path / "gate.json").read_text())["decisions"]) == 2


@pytest.mark.parametrize("value", [1.01, float("nan")])
def test_wrong_numbers_never_win(tmp_path: Path, value: float) -> None:
    clock = Clock({"kernel": 1e-6, "array": 1.0})
    decision = gate(tmp_path, clock).decide(
        "dense_verify", SHAPE, clock.function("kernel", value), clock.function("array", 1.0)
    )
    assert decision.path == "array" and "differ" in decision.reason


def test_failing_kernel_and_damaged_file(tmp_path: Path) -> None:
    clock = Clock({"kernel": 1e-6, "array": 1.0})
    (tmp_path / "gate.json").write_text("{ not json")

    def fail():
        raise RuntimeError("pipeline too large")

    decision = gate(tmp_path, clock).decide("dense_verify", SHAPE, fail, clock.function("array", 1.0))
    assert decision.path == "array" and "pipeline too large" in decision.reason


def test_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"kernel": 1.0, "array": 1.0})
    run = (clock.function("kernel", 1.0), clock.function("array", 1.0))
    monkeypatch.setenv("DUSTIN_METAL_GATE", "kernel")
    assert gate(tmp_path, clock).decide("dense_verify", SHAPE, *run).path == "kernel"
    assert gate(tmp_path, clock, mode="array").decide("dense_verify", SHAPE, *run).path == "array"
    assert clock.calls == {"kernel": 0, "array": 0}
    monkeypatch.setenv("DUSTIN_METAL_GATE", "fast")
    with pytest.raises(ValueError, match="DUSTIN_METAL_GATE"):
        gate(tmp_path, clock)


def test_dispatch_end_to_end(tmp_path: Path) -> None:
    """On this machine: no Metal takes the array path; forced, the kernel runs in the emulator; odd shapes say why not."""
    import mlx.core as mx

    from dustin.metal_kernels.attention import verify_attention
    from dustin.metal_kernels.gate import Gate

    case = Case((70, 5), (3, 4), 4, 10, 2, 64, "float32", 90, 20)
    q, k, v = (to_mlx(np.nan_to_num(x), "float32") for x in (case.q, case.k, case.v))
    n, t = mx.array(case.lengths, mx.int32), mx.array(case.num_tokens, mx.int32)
    chosen = (mx.array(case.indices), mx.array(case.counts))
    path = tmp_path / "gate.json"
    if not mx.metal.is_available():
        out, decision = verify_attention(q, k, v, n, t, case.scale, *chosen, gate=Gate(path=path))
        assert decision.path == "array" and "not available" in decision.reason
        assert relative_rms(to_host(out), case.expected("sparse")) <= 1e-5
    with installed() as log:
        out, decision = verify_attention(q, k, v, n, t, case.scale, *chosen, gate=Gate("kernel", path))
        dense, _ = verify_attention(q, k, v, n, t, case.scale, gate=Gate("kernel", path))
        measured = verify_attention(q, k, v, n, t, case.scale, *chosen, gate=Gate(path=path, chip="emulator"))[1]
    assert (log.on_device or log.reports) and measured.reason == "measured"  # the emulator loses, but its numbers agree
    assert relative_rms(to_host(out), case.expected("sparse")) <= 1e-5
    assert relative_rms(to_host(dense), case.expected("dense")) <= 1e-5
    odd = verify_attention(q[..., :40], k[..., :40], v[..., :40], n, t, 1.0, gate=Gate("kernel", path))[1]
    assert odd.path == "array" and "head_dim 40" in odd.reason
