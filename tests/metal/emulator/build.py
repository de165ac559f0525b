"""Compiles a kernel with the shim and the runtime into a shared object, cached by the hash of all that went in."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .signature import kernel_parameters, template_arguments, to_cpp

HERE = Path(__file__).resolve().parent
FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-g1",
]
CHECK_FLAGS = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]


class BuildError(RuntimeError):
    """The C++ compiler refused the kernel; the message is its own."""


@functools.cache
def compiler() -> str | None:
    """g++ on this machine, or None: the runtime knows Linux on x86-64 and arm64, and clang's hooks differ."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return None
    return shutil.which("g++")


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    try:
        has_f16c = " f16c " in Path("/proc/cpuinfo").read_text()
    except OSError:
        has_f16c = False
    return ("-mf16c",) if has_f16c else ()


def cache_folder() -> Path:
    """Folder of compiled kernels: $DUSTIN_EMULATOR_CACHE or one below the temporary folder."""
    folder = Path(
        os.environ.get("DUSTIN_EMULATOR_CACHE") or Path(tempfile.gettempdir()) / f"dustin-emulator-{os.getuid()}"
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@functools.cache
def _fixed_hash() -> str:
    h = hashlib.sha256(" ".join([*FLAGS, *_machine_flags(), str(compiler())]).encode())
    h.update(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp"), *(HERE / "shim").iterdir()]):
        h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()


def _run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr[:6000])


@functools.cache
def _runtime() -> Path:
    target = cache_folder() / f"runtime-{_fixed_hash()[:24]}.o"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.tmp.o")
        _run([compiler(), *FLAGS, "-O2", "-c", str(HERE / "runtime.cpp"), "-o", str(part)])
        part.replace(target)
    return target


def kernel_cpp(source: str, function: str) -> str:
    """The translation unit: Metal text in namespace metal, then the entry that passes buffers and positions."""
    arguments = ", ".join(p.argument() for p in kernel_parameters(source, function))
    instance = "emu_user" + template_arguments(source, function)
    # One text whatever the name and the address spaces of small inputs (they are the lint's business): fewer builds.
    source = re.sub(r"\b(device|constant)\b ?", "", source.replace(function, "emu_user"))
    return (
        f'#include <metal_stdlib>\nnamespace metal {{\n#line 1 "kernel.metal"\n{to_cpp(source)}\n}}\n#line 1 "entry"\n'
        f'extern "C" EMU_PLAIN void emu_kernel(void** b, EmuThread* t) {{\n'
        f"  using namespace metal;\n  metal::{instance}({arguments});\n}}\n"
    )


@functools.cache
def build(source: str, function: str, check: bool = True, includes: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the compiled kernel; RuntimeError without a compiler, BuildError when the text does not compile."""
    if compiler() is None:
        raise RuntimeError("emulator: expected g++ on PATH, got none; install g++ or skip these tests")
    text = kernel_cpp(source, function)
    key = hashlib.sha256(f"{_fixed_hash()}{check}{includes}{text}".encode()).hexdigest()[:24]
    target = cache_folder() / f"kernel-{key}.so"
    if not target.exists():
        part = cache_folder() / f"kernel-{key}.{os.getpid()}"
        cpp, obj, shared = (part.with_suffix(f".{os.getpid()}{s}") for s in (".cpp", ".o", ".so"))
        cpp.write_text(text)
        flags = [*FLAGS, *_machine_flags(), *(CHECK_FLAGS if check else [])]
        paths = [f"-I{HERE / 'shim'}", f"-I{HERE}", *(f"-I{i}" for i in includes)]
        _run([compiler(), *flags, *paths, "-c", str(cpp), "-o", str(obj)])
        _run([compiler(), "-shared", "-Wl,-Bsymbolic", str(obj), str(_runtime()), "-o", str(shared)])
        shared.replace(target)
        cpp.unlink()
        obj.unlink()
    return ctypes.CDLL(str(target), mode=os.RTLD_LOCAL if hasattr(os, "RTLD_LOCAL") else 0)
