"""Every shipped configuration compiles for sm_90 without a GPU, fits in shared memory, and does not spill."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = 227 * 1024


@pytest.mark.slow
def test_shipped_configurations_do_not_spill() -> None:
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_report"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 40
    spilled = [row for row in rows if row["stack"] > 0 or row["local"] > 0]
    assert not spilled, "\n".join(map(str, spilled))
    one_by_one = [row for row in rows if row["serialized"]]
    assert not one_by_one, "\n".join(map(str, one_by_one))
    assert all(row["shared"] <= SHARED_LIMIT for row in rows)
    # Plain decoding plans two programs a processor: where three fit, some get three and the step waits for those.
    plain = [row for row in rows if "dense_verify bfloat16 B=8 T=1 " in row["case"] and row["kernel"] == "dense_verify_kernel"]
    assert plain
    assert all(3 * (row["shared"] + 1024) > SHARED_LIMIT + 1024 for row in plain)
