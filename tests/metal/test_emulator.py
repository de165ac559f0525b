"""The emulator itself: arithmetic, SIMD functions, fragments, and MLX's own attention kernel through the same shim."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal.emulator import EmulationError, TracedKernel, run, trace
from tests.metal.emulator.dropin import from_numpy, installed
from tests.metal.reference import relative_rms, round_to
from tests.metal.stock import stock_attention

ORDERS = ("forward", "reverse", "shuffled")


def kernel(
    body: str, inputs: dict[str, tuple], out: tuple, threads: int = 32, group: int = 32, header: str = ""
) -> TracedKernel:
    """Trace one kernel: inputs name -> (shape, dtype name), out (shape, dtype name)."""
    import mlx.core as mx

    made = mx.fast.metal_kernel(
        name="probe", input_names=list(inputs), output_names=["out"], source=body, header=header
    )
    launch = {"grid": (threads, 1, 1), "threadgroup": (group, 1, 1)}

    def call(*arrays):
        return made(inputs=list(arrays), output_shapes=[out[0]], output_dtypes=[getattr(mx, out[1])], **launch)

    return trace(call, *(mx.zeros(s, getattr(mx, d)) for s, d in inputs.values()))[0]


def probe(body: str, threads: int = 32, group: int = 32, order: str = "forward", **inputs: np.ndarray) -> np.ndarray:
    """Output float32 [threads] of a body that writes `out[i]` and reads float32 or int32 inputs."""
    kinds = {n: (a.shape, str(a.dtype)) for n, a in inputs.items()}
    made = kernel("uint i = thread_position_in_grid.x;\n" + body, kinds, ((threads,), "float32"), threads, group)
    return run(made, list(inputs.values()), order=order).outputs[0]


def test_every_half_and_bfloat_code() -> None:
    """All 65,536 codes to float and back, and rounding to nearest even against numpy."""
    codes = np.arange(65536, dtype=np.uint16)
    body = "uint i = thread_position_in_grid.x;\nout[i] = float(x[i]);"
    for dtype, want in (
        ("float16", codes.view(np.float16).astype(np.float32)),
        ("bfloat16", (codes.astype(np.uint32) << 16).view(np.float32)),
    ):
        got = run(
            kernel(body, {"x": ((65536,), dtype)}, ((65536,), "float32"), 65536, 256),
            [codes if dtype == "bfloat16" else codes.view(np.float16)],
        )
        assert np.array_equal(got.outputs[0], want, equal_nan=True)
    values = (np.random.default_rng(0).normal(size=4096) * np.logspace(-8, 6, 4096)).astype(np.float32)
    for dtype, kind in (("float16", "half"), ("bfloat16", "bfloat")):
        body = f"uint i = thread_position_in_grid.x;\nout[i] = {kind}(x[i]);"
        got = run(kernel(body, {"x": ((4096,), "float32")}, ((4096,), dtype), 4096, 256), [values]).outputs[0]
        got = got.astype(np.float32) if dtype == "float16" else (got.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            assert np.array_equal(got, round_to(values, dtype))


def test_half_arithmetic_rounds_every_step() -> None:
    a, b = (np.random.default_rng(s).normal(size=64).astype(np.float16) for s in (0, 1))
    body = "uint i = thread_position_in_grid.x;\nout[i] = float(x[i] * y[i] + x[i] / y[i] - y[i]);"
    got = run(kernel(body, {"x": ((64,), "float16"), "y": ((64,), "float16")}, ((64,), "float32"), 64), [a, b]).outputs[
        0
    ]
    assert np.array_equal(got, (a * b + a / b - b).astype(np.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_simd_functions(order: str) -> None:
    x = np.arange(64, dtype=np.int32) * 3 % 17
    rows = x.reshape(2, 32)

    def lanes(expression: str) -> np.ndarray:
        return probe(f"out[i] = float({expression});", 64, 64, order, x=x).reshape(2, 32)

    assert np.array_equal(lanes("simd_sum(x[i])"), np.repeat(rows.sum(1, keepdims=True), 32, 1))
    assert np.array_equal(lanes("simd_max(x[i])"), np.repeat(rows.max(1, keepdims=True), 32, 1))
    assert np.array_equal(lanes("simd_prefix_exclusive_sum(x[i])"), rows.cumsum(1) - rows)
    assert np.array_equal(lanes("simd_shuffle_xor(x[i], ushort(8))"), rows[:, np.arange(32) ^ 8])
    assert np.array_equal(lanes("simd_broadcast(x[i], ushort(5))"), np.repeat(rows[:, 5:6], 32, 1))
    want = [sum(1 << j for j in range(8) if r[j] > 8) for r in rows]
    assert lanes("uint(simd_vote::vote_t(simd_ballot(x[i] > 8)) & 255)")[:, 0].tolist() == want


def test_shuffle_from_outside_is_poison() -> None:
    assert np.isnan(probe("out[i] = simd_shuffle_down(x[i], ushort(4));", x=np.ones(32, np.float32))[28:]).all()


@pytest.mark.parametrize("transpose", [False, True])
def test_fragments(transpose: bool) -> None:
    """load, multiply, store of 8x8 fragments with an origin and a stride."""
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(16, 24)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    body = f"""simdgroup_matrix<float, 8, 8> m, n, c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), d(2.0f);
simdgroup_load(m, a, 24, ulong2(8, 3), {str(transpose).lower()});
simdgroup_load(n, b, 8);
simdgroup_multiply_accumulate(c, m, n, c);
simdgroup_multiply_accumulate(c, d, n, c);
simdgroup_store(c, out, 8);"""
    made = kernel(body, {"a": (a.shape, "float32"), "b": (b.shape, "float32")}, ((8, 8), "float32"))
    tile = a[3:11, 8:16].T if transpose else a[3:11, 8:16]
    assert np.allclose(run(made, [a, b]).outputs[0], tile @ b + 1 + 2 * b, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_atomics_and_partial_threadgroups(order: str) -> None:
    """100 threads in groups of 64: the last group has 36, and its second SIMD-group four lanes."""
    body = """uint i = thread_position_in_grid.x;
threadgroup atomic_uint n;
if (thread_position_in_threadgroup.x == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_add_explicit(&n, x[i], memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = float(atomic_load_explicit(&n, memory_order_relaxed)) + 1000.0f * float(simd_sum(1));"""
    x = np.arange(100, dtype=np.uint32)
    got = run(kernel(body, {"x": ((100,), "uint32")}, ((100,), "float32"), 100, 64), [x], order=order).outputs[0]
    want = np.r_[
        np.full(64, x[:64].sum() + 32000.0), np.full(32, x[64:].sum() + 32000.0), np.full(4, x[64:].sum() + 4000.0)
    ]
    assert np.array_equal(got, want)


def test_race_between_threadgroups() -> None:
    made = kernel("out[thread_position_in_threadgroup.x] = x[0];", {"x": ((9,), "float32")}, ((32,), "float32"), 64, 32)
    with pytest.raises(EmulationError, match="race"):
        run(made, [np.ones(9, np.float32)])


def test_init_value_counts_as_written() -> None:
    made = kernel(
        "if (thread_position_in_grid.x < 3) out[thread_position_in_grid.x] = x[0];",
        {"x": ((9,), "float32")},
        ((32,), "float32"),
    )
    assert run(made, [np.ones(9, np.float32)], init_value=0).outputs[0].sum() == 3
    with pytest.raises(EmulationError, match="unwritten"):
        run(made, [np.ones(9, np.float32)])


def test_endless_loop_stops() -> None:
    made = kernel("while (x[0] > 0.0f) out[0] = x[0];", {"x": ((9,), "float32")}, ((1,), "float32"), 1, 1)
    with pytest.raises(EmulationError, match="endless"):
        run(made, [np.ones(9, np.float32)], step_limit=10000)


def test_bytes_are_counted_by_access_and_by_address() -> None:
    made = kernel(
        "out[thread_position_in_grid.x] = x[0] + x[thread_position_in_grid.x];",
        {"x": ((32,), "float32")},
        ((32,), "float32"),
    )
    report = run(made, [np.ones(32, np.float32)])
    assert (report.loaded["x"], report.touched["x"], report.stored["out"]) == (256, 128, 128)


def test_dropin_restores_and_keeps_dtype() -> None:
    import mlx.core as mx

    real = mx.fast.metal_kernel
    with installed() as log:
        double = mx.fast.metal_kernel(
            name="double",
            input_names=["x"],
            output_names=["y"],
            source="uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];",
        )
        x = from_numpy(np.array([0x3F80] * 9, np.uint16), "bfloat16")
        (y,) = double(
            inputs=[x], grid=(9, 1, 1), threadgroup=(9, 1, 1), output_shapes=[(9,)], output_dtypes=[mx.bfloat16]
        )
    assert mx.fast.metal_kernel is real
    assert y.dtype == mx.bfloat16 and y.tolist() == [2.0] * 9 and log.report("double").groups == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mlx_own_attention_kernel(dtype: str, causal: bool, order: str) -> None:
    """sdpa_vector.h as MLX ships it (1,024 threads, GQA 2, 3 query rows) agrees with float64."""
    heads, rows, keys, dim = 2, 3, 37, 64
    rng = np.random.default_rng(4)
    q, k, v = (round_to(rng.normal(size=s), dtype) for s in ((heads, rows, dim), (1, keys, dim), (1, keys, dim)))
    got, _ = stock_attention(q, k, v, dtype, causal, order)
    scores = np.einsum("hrd,kd->hrk", q.astype(np.float64), k[0].astype(np.float64)) * dim**-0.5
    if causal:
        scores[:, np.arange(keys)[None] > keys - rows + np.arange(rows)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = (weights / weights.sum(-1, keepdims=True)) @ v[0].astype(np.float64)
    assert relative_rms(got, want) <= {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
