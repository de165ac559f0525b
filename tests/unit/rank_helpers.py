"""Ranks started by tests: all processes of a run as torchrun would start them, or the command that starts them itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(size: int, command: list[str], environment: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """All ranks of a run, as torchrun would start them."""
    port = free_port()
    shared = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(ROOT), "DUSTIN_TP_TIMEOUT": "60"} | (environment or {})
    return [
        subprocess.Popen(
            [sys.executable, *(part.format(rank=rank) for part in command)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )  # fmt: skip
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank."""
    deadline = time.monotonic() + timeout
    ends = []
    for process in processes:
        out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        ends.append((process.returncode, out, err))
    return ends


def run_dustin(*args: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m dustin ARGS`."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    whole = inherited | {"PYTHONPATH": str(ROOT)} | (environment or {})
    return subprocess.run(
        [sys.executable, "-m", "dustin", *args], env=whole, capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip


def mlx_launch(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`mlx.launch -n 2 -- python COMMAND` over the ring on loopback; skips where it is not installed."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not launcher.exists():
        pytest.skip("mlx.launch is not installed")
    run = [str(launcher), "-n", "2", "--backend", "ring", "--starting-port", free_port(), "--", sys.executable, *command]
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    return subprocess.run(run, env=whole, capture_output=True, text=True, timeout=240, cwd=ROOT)
