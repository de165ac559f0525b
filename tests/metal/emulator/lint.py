"""Type-checks Metal text with clang and real address spaces (device, constant, threadgroup), plus the size rules of a launch."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

from .launch import Finding
from .signature import strip_comments, template_arguments, to_cpp
from .tracing import TracedKernel

SHIM = Path(__file__).resolve().parent / "shim_lint"
FLAGS = [
    "-x",
    "c++",
    "-std=c++14",
    "-fsyntax-only",
    "-target",
    "aarch64-linux-gnu",
    "-ffreestanding",
    "-nostdinc",
    "-Wno-everything",
]


@functools.cache
def clang() -> str | None:
    """clang++ on this machine, or None."""
    return shutil.which("clang++")


def lint(kernel: TracedKernel) -> list[Finding]:
    """What Metal's compiler would refuse, as far as clang can tell. RuntimeError without clang."""
    if clang() is None:
        raise RuntimeError("lint: expected clang++ on PATH, got none; install clang or skip the lint")
    found = []
    if not kernel.source.isascii():
        found.append(Finding("lint", "the source has characters beyond ASCII, which MLX cannot compile"))
    if re.search(r"\bdouble\b", strip_comments(kernel.source)):
        found.append(Finding("lint", "double: Metal has none"))
    instance = kernel.name + template_arguments(kernel.source, kernel.name)
    use = f'#line 1 "kernel.metal"\nauto* lint_use = &{instance};'
    text = f'#include "metal_stdlib"\nnamespace metal {{\n#line 1 "kernel.metal"\n{to_cpp(kernel.source, "extern")}\n{use}\n}}\n'
    done = subprocess.run([clang(), *FLAGS, f"-I{SHIM}", "-"], input=text, capture_output=True, text=True)
    errors = re.findall(r"kernel\.metal:(\d+):\d+: error: ([^\n]*)", done.stderr)
    found += [Finding("lint", f"line {line}: {message}") for line, message in errors]
    if done.returncode and not errors:
        found.append(Finding("lint", done.stderr[:400]))
    return found
