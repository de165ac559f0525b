"""Runs a traced kernel on the CPU and reports what the checker saw."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .build import build
from .signature import kernel_parameters
from .tracing import TracedKernel

MAX_THREADS, MAX_THREADGROUP_BYTES = 1024, 32768
ORDERS = {"forward": 0, "reverse": 1, "shuffled": 2}
STORAGE = {"bfloat16": np.dtype(np.uint16), "bool": np.dtype(np.bool_)}


class _Buffer(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_uint64)]
    _fields_ += [(n, ctypes.c_int32) for n in ("itemsize", "writable", "initialised")]
    _fields_ += [(n, ctypes.c_uint64) for n in ("loaded", "touched", "stored")]


class _Error(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char * 24), ("text", ctypes.c_char * 232), ("pc", ctypes.c_size_t)]


class _Launch(ctypes.Structure):
    _fields_ = [("buffers", ctypes.POINTER(_Buffer)), ("num_buffers", ctypes.c_int32)]
    _fields_ += [
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
    ]
    _fields_ += [("check", ctypes.c_int32), ("byte_granules", ctypes.c_int32)]
    _fields_ += [(n, ctypes.c_uint64) for n in ("threadgroup_limit", "step_limit", "threadgroup_used", "groups")]
    _fields_ += [("errors", ctypes.POINTER(_Error)), ("num_errors", ctypes.c_int32)]


@dataclass(frozen=True)
class Finding:
    """One thing the checker saw: `kind` is race, bounds, uninitialised, unwritten, input, divergence, alignment, size, ..."""

    kind: str
    text: str


class EmulationError(RuntimeError):
    """A kernel that breaks the rules; `report.findings` lists how."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(f"{report.name}: " + "; ".join(f"[{f.kind}] {f.text}" for f in report.findings))


@dataclass
class Report:
    """What one dispatch did.

    Bytes are counted per access: a row that two threads load counts twice in `loaded`, once in `touched`.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    threadgroup_bytes: int = 0
    groups: int = 0
    threads: int = 0
    outputs: list[np.ndarray] = field(default_factory=list)
    mutated: dict[str, np.ndarray] = field(default_factory=dict)


def storage(dtype: str) -> np.dtype:
    """The numpy dtype that holds an MLX dtype; bfloat16 is held as its uint16 bits."""
    return STORAGE.get(dtype) or np.dtype(dtype)


def declared_writes(source: str) -> tuple[str, ...]:
    """Inputs that a kernel's text declares it writes in place: a line `// writes: k_cache v_cache`."""
    match = re.search(r"//\s*writes:([^\n]*)", source)
    return tuple(match[1].split()) if match else ()


def declared_unwritten(source: str) -> tuple[str, ...]:
    """Outputs (scratch between kernels) that a text declares partly unwritten: a line `// may stay unwritten: partial`."""
    match = re.search(r"//\s*may stay unwritten:([^\n]*)", source)
    return tuple(match[1].split()) if match else ()


def run(
    kernel: TracedKernel,
    inputs: Sequence[np.ndarray],
    *,
    order: str = "forward",
    check: bool = True,
    strict: bool = True,
    init_value: float | None = None,
    seed: int = 0,
    threadgroup_limit: int = MAX_THREADGROUP_BYTES,
    includes: tuple[str, ...] = (),
    step_limit: int = 1 << 33,
) -> Report:
    """Execute `kernel` on host arrays (bfloat16 as uint16 bits; strided views stay strided).

    order: forward, reverse or shuffled threads and groups. check: instrument memory. Raises EmulationError on a finding
    when strict, BuildError when the text does not compile.
    """
    report = Report(kernel.name, threads=int(np.prod(kernel.group)))
    sizes = _illegal_sizes(kernel)
    if sizes:
        report.findings = sizes
        if strict:
            raise EmulationError(report)
        return report
    library = build(kernel.source, kernel.name, check, includes)
    held = bind(kernel, inputs, init_value)
    outputs = [h.array for h in held[len(held) - len(kernel.outputs) :]]
    _launch(library, kernel, held, report, order, seed, check, threadgroup_limit, step_limit)
    scratch = declared_unwritten(kernel.source)
    report.findings = [
        f for f in report.findings if f.kind != "unwritten" or f.text.split()[1].rstrip(":") not in scratch
    ]
    report.outputs = outputs
    report.mutated = {h.name: h.array for h in held[: len(held) - len(outputs)] if h.writable}
    if report.findings and strict:
        raise EmulationError(report)
    return report


@dataclass(frozen=True)
class Bound:
    """One buffer of a launch, in binding order: inputs (each followed by its shape and strides where wanted), then outputs."""

    name: str
    array: np.ndarray
    writable: bool
    initialised: bool


def bind(kernel: TracedKernel, inputs: Sequence[np.ndarray], init_value: float | None = None) -> list[Bound]:
    """Buffers as MLX would bind them. Outputs are fresh, filled with 0xFF bytes or `init_value`."""
    names = [p.name for p in kernel_parameters(kernel.source, kernel.name) if p.buffer is not None]
    writes = declared_writes(kernel.source)
    held: list[Bound] = []
    for array, (has_shape, has_strides, has_ndim) in zip(inputs, kernel.needs, strict=True):
        if kernel.row_contiguous and not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)  # what MLX would do on every call
        name = names[len(held)]
        held.append(Bound(name, _memory(array), name in writes, True))
        extra = [
            (has_shape, np.array(array.shape, np.int32)),
            (has_strides, np.array(array.strides, np.int64) // max(array.itemsize, 1)),
            (has_ndim, np.array([array.ndim], np.int32)),
        ]
        for wanted, value in extra:
            if wanted and array.ndim:
                held.append(Bound(names[len(held)], value, False, True))
    for shape, dtype in kernel.outputs:
        out = np.full(int(np.prod(shape)) * storage(dtype).itemsize, 0xFF, np.uint8).view(storage(dtype)).reshape(shape)
        if init_value is not None:
            out[...] = _encode(init_value, dtype)
        held.append(Bound(names[len(held)], out, True, init_value is not None))
    return held


def _encode(value: float, dtype: str):
    return int(np.float32(value).view(np.uint32) >> 16) if dtype == "bfloat16" else value


def _memory(array: np.ndarray) -> np.ndarray:
    """The bytes between the first and the last element, as the kernel would see them (a strided view keeps its gaps)."""
    if array.flags.c_contiguous or array.size == 0:
        return np.ascontiguousarray(array)
    if min(array.strides) < 0:
        raise ValueError(f"strides: expected no negative stride, got {array.strides}; copy the array first")
    count = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) // array.itemsize + 1
    return np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,))


def _illegal_sizes(kernel: TracedKernel) -> list[Finding]:
    found = []
    threads = int(np.prod(kernel.group))
    if not 1 <= threads <= MAX_THREADS:
        found.append(
            Finding("size", f"threadgroup {kernel.group} has {threads} threads, 1 to {MAX_THREADS} are allowed")
        )
    if min(kernel.grid) < 1:
        found.append(Finding("size", f"grid {kernel.grid} has an empty axis"))
    if not kernel.source.isascii():
        found.append(Finding("size", "the source has characters beyond ASCII, which MLX cannot compile"))
    return found


def _launch(library, kernel, held, report, order, seed, check, threadgroup_limit, step_limit) -> None:
    buffers = (_Buffer * len(held))()
    for b, h in zip(buffers, held, strict=True):
        b.name, b.data, b.size = h.name.encode(), h.array.ctypes.data, h.array.nbytes
        b.itemsize, b.writable, b.initialised = h.array.itemsize, h.writable, h.initialised
    errors = (_Error * 32)()
    launch = _Launch(
        buffers,
        len(held),
        (ctypes.c_uint32 * 3)(*kernel.grid),
        (ctypes.c_uint32 * 3)(*kernel.group),
        ORDERS[order],
        seed,
        check,
    )
    launch.byte_granules = bool(re.search(r"threadgroup\s+(u?char|bool|u?int8_t)", kernel.source))
    launch.threadgroup_limit, launch.step_limit, launch.errors = threadgroup_limit, step_limit, errors
    library.emu_launch(ctypes.byref(launch))
    report.threadgroup_bytes, report.groups = launch.threadgroup_used, launch.groups
    for b in buffers:
        name = b.name.decode()
        report.loaded[name], report.touched[name], report.stored[name] = b.loaded, b.touched, b.stored
    for e in errors[: launch.num_errors]:
        report.findings.append(Finding(e.kind.decode(), e.text.decode() + _line(library, e.pc)))


def _line(library, pc: int) -> str:
    tool = shutil.which("addr2line")
    if not pc or not tool:
        return ""
    done = subprocess.run([tool, "-i", "-e", library._name, hex(pc - 1)], capture_output=True, text=True)
    lines = re.findall(r"kernel\.metal:(\d+)", done.stdout)
    return f" (line {lines[0]})" if lines else ""
