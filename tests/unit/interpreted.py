"""Tests of Triton code on the CPU: Triton reads TRITON_INTERPRET when it is imported, so they need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, under TRITON_INTERPRET=1")


def run_interpreted(path: str, only: str = "") -> None:
    """Run the tests of a file, or those that `only` selects as -k does, under the interpreter; skip where this is that run."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("already interpreted")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", only, path],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
