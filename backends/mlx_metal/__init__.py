"""The MLX backend. Importing it settles what MLX reads when it starts: its BLAS on Linux, and that fp32 products are fp32."""

from __future__ import annotations

import ctypes
import os
import sys

FAST_BLAS = "libopenblas.so.0"


def load_fast_blas() -> bool:
    """On Linux MLX's CPU wheel links the reference BLAS, ten times slower than OpenBLAS; one loaded earlier serves its calls.

    True if OpenBLAS is loaded. Without it, or with MLX imported already, nothing changes.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    try:
        ctypes.CDLL(FAST_BLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


load_fast_blas()
# MLX's default on a GPU is TF32, 11 bits of mantissa: a model asked for in float32 would differ from every other backend's.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
