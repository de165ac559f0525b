"""The same Metal text as CUDA (SIMD-group = warp): built with nvcc for sm_90, run through the driver API, compared elsewhere."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .build import HERE, BuildError
from .signature import kernel_parameters, template_arguments, to_cpp
from .tracing import TracedKernel

FLAGS = ["-arch=sm_90", "-std=c++17", "--expt-relaxed-constexpr", "-fmad=false", "-w", "-O3"]
_THREAD = """  EmuThread self, *t = &self;
  const uint32_t p[3] = {threadIdx.x, threadIdx.y, threadIdx.z}, g[3] = {blockIdx.x, blockIdx.y, blockIdx.z};
  const uint32_t s[3] = {blockDim.x, blockDim.y, blockDim.z}, n[3] = {gridDim.x, gridDim.y, gridDim.z};
  for (int i = 0; i < 3; ++i) {
    t->position_in_grid[i] = g[i] * s[i] + p[i]; t->position_in_group[i] = p[i]; t->group_position[i] = g[i];
    t->threads_per_grid[i] = s[i] * n[i]; t->groups_per_grid[i] = n[i];
    t->threads_per_group[i] = t->dispatch_threads_per_group[i] = s[i];
  }
  t->index = p[0] + s[0] * (p[1] + s[1] * p[2]);
  t->lane = t->index % 32; t->simdgroup = t->index / 32; t->simdgroups = (s[0] * s[1] * s[2] + 31) / 32; t->lanes = 32;
"""


@functools.cache
def nvcc() -> str | None:
    """nvcc on PATH or in /usr/local/cuda, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def kernel_cuda(kernel: TracedKernel) -> str:
    """CUDA translation unit with `extern "C" __global__ emu_entry(Buffers)`."""
    source, name = kernel.source, kernel.name
    arguments = ", ".join(p.argument() for p in kernel_parameters(source, name)).replace("b[", "b.p[")
    text = re.sub(rf"\[\[\s*kernel\s*\]\]\s*void\s+{re.escape(name)}\s*\(", f"__device__ void {name}(", source)
    # As text, not macros: __device__ itself expands to a word that a macro named `device` would erase.
    text = re.sub(r"\b(device|constant|thread|threadgroup)\b ", "", to_cpp(text, "shared"))
    text = re.sub(r"\binline\b", "__device__ inline", text)
    text = re.sub(r"^(\s+)([\w<>:]+ \w+\([^;{}()]*\) const \{)", r"\1__device__ \2", text, flags=re.M)
    return (
        f'#include "metal_stdlib"\nstruct Buffers {{ void* p[40]; }};\nnamespace metal {{\n#line 1 "kernel.metal"\n{text}\n'
        f'extern "C" __global__ void __launch_bounds__(512) emu_entry(Buffers b) {{\n{_THREAD}'
        f"  {name}{template_arguments(source, name)}({arguments});\n}}\n}}\n"
    )


def build_cuda(kernel: TracedKernel, target: Path) -> Path:
    """Write `target` (.cubin). RuntimeError without nvcc, BuildError with the compiler's words."""
    if nvcc() is None:
        raise RuntimeError("cuda: expected nvcc on PATH, got none; build where the CUDA toolkit is")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "kernel.cu"
        unit.write_text(kernel_cuda(kernel))
        done = subprocess.run(
            [nvcc(), *FLAGS, f"-I{HERE / 'shim_cuda'}", "-cubin", str(unit), "-o", str(target)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise BuildError(done.stderr[:6000])
    return target
