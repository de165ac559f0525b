"""After a warm-up no plan of mode auto compiles a kernel or records a round: each is played on the shapes of the real pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["1x4096", "3x9000"])
def test_no_plan_of_auto_meets_anything_new_after_a_warm_up(sizes: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.met_shapes", sizes]
    done = subprocess.run(
        command, cwd=Path(__file__).resolve().parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert "warm-up: " in done.stderr, done.stderr[-3000:]
    assert done.returncode == 0 and not done.stdout, done.stdout[-3000:]
