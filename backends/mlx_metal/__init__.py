"""The MLX backend. Importing it loads a fast BLAS before MLX where the system has one."""

from __future__ import annotations

import ctypes
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
