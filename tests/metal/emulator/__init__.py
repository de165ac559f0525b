"""Runs Metal kernel text on the CPU, without a Mac, and checks it while it runs.

    kernels = trace(function, *mlx_arrays)          # the exact source MLX generates, nothing executed
    report = run(kernels[0], numpy_arrays)          # outputs, findings, bytes read, threadgroup memory
    with installed(): ...                           # mx.fast.metal_kernel calls run here instead of on Metal

What it cannot show: fast-math precision, register limits, forward progress, speed.
"""

from .build import BuildError, compiler
from .launch import EmulationError, Finding, Report, run
from .tracing import TracedKernel, trace

__all__ = ["BuildError", "EmulationError", "Finding", "Report", "TracedKernel", "compiler", "run", "trace"]
