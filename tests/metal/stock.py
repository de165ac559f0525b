"""MLX's own attention kernel (sdpa_vector.h of the installed wheel), run through the shim: a test of the shim, and a measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.metal.emulator import Report, TracedKernel, run

# What sdpa_vector.h takes from MLX's utils.h.
PREAMBLE = """template <typename U> struct Limits {
  static constexpr float finite_min = -3.4028234e38f;
  static constexpr float min = -INFINITY;
};
"""
CPP = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


def stock_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str, causal: bool, order: str = "forward"
) -> tuple[np.ndarray, Report]:
    """(output [Hq, T, D] float32, report) for q [Hq, T, D], k, v [Hkv, N, D], one threadgroup of 1,024 a query row and head."""
    import mlx

    folder = Path(list(mlx.__path__)[0]) / "include" / "mlx" / "backend" / "metal" / "kernels"
    if not (folder / "sdpa_vector.h").is_file():
        pytest.skip("this mlx wheel ships no Metal headers")
    (heads, rows, dim), (kv_heads, keys, _) = q.shape, k.shape
    text = PREAMBLE + (folder / "sdpa_vector.h").read_text().encode("ascii", "ignore").decode()
    text = text.replace("do_causal [[function_constant(22)]];", f"do_causal = {str(causal).lower()};")
    instance = f"sdpa_vector<{CPP[dtype]}, {dim}>"
    text += f"\n// writes: out\n// decltype({instance}) {instance}\n"
    raw = [(x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype) for x in (q, k, v)]
    out = np.zeros_like(raw[0])
    unused = raw[0][:1, 0, :1]
    inputs = [*raw, out, np.array(heads // kv_heads, np.int32), np.array(keys, np.int32)]
    inputs += [np.array(n, np.uint64) for n in (keys * dim, dim) * 2]
    inputs += [np.array(dim**-0.5, np.float32), np.zeros(1, np.bool_), unused, *(np.array(0, np.int32),) * 3]
    inputs += [unused, np.array(heads, np.int32)]
    needs = ((False, False, False),) * len(inputs)
    made = TracedKernel("sdpa_vector", text, (1024 * heads, rows, 1), (1024, 1, 1), (), (), needs, False)
    report = run(made, inputs, order=order)
    got = (out.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else out.astype(np.float32)
    return got, report
