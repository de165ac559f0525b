"""Every kernel's text compiles for sm_90 (no GPU needed). Running it there is tests/metal/cuda_check.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.metal.cuda_check import difference
from tests.metal.emulator.cuda import build_cuda, nvcc
from tests.metal.test_text import traced

needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="nvcc is missing: the CUDA form cannot be compiled")


@needs_nvcc
def test_compiles(tmp_path: Path) -> None:
    """The text that uses most of the shim: simdgroup_load and store, fragments, barriers."""
    assert build_cuda(traced(2, "bfloat16")["sparse_verify_blocks"], tmp_path / "k.cubin").stat().st_size > 0


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_compile(tmp_path: Path, dtype: str) -> None:
    for name, kernel in traced(9, dtype).items():
        assert build_cuda(kernel, tmp_path / f"{name}.cubin").stat().st_size > 0


def test_comparison_can_fail() -> None:
    x = np.ones(8, np.float32)
    assert difference(x, x, "float32", False) == 0
    assert difference(x * 1.1, x, "float32", False) > 0.05
    assert difference(np.full(8, np.nan, np.float32), x, "float32", False) == float("inf")
    assert difference(np.array([1, 2]), np.array([1, 3]), "int32", False) == 1
    assert difference(np.full(8, -np.inf, np.float32), x, "float32", False) == float("inf")
