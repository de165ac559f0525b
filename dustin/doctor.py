"""`dustin doctor`: what works here, and why the rest does not. It always prints: frameworks are tried in a process apart."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from dustin import __version__
from dustin.cli_options import CONTEXT, debug_option
from dustin.config_file import config_path
from dustin.models import KNOWN, cache_dir

_PACKAGES = (
    "numpy",
    "click",
    "torch",
    "triton",
    "mlx",
    "mlx-lm",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "jinja2",
    "rich",
    "gguf",
)
_PROBES = {
    "numpy": "import numpy; import dustin.backends.numpy_reference.backend; print('cpu')",
    "torch": "import torch; import dustin.backends.torch_triton.backend; "
    "print(', '.join(['cpu'] + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))",
    "mlx": "raise ImportError('not in this version of Dustin')",
}
_VARIABLES = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_PROBE_SECONDS = 120


def _safely(check: Callable[[], Any]) -> Any:
    """A check that fails is a line of the report, not its end."""
    try:
        return check()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str) -> dict[str, Any]:
    """Import a backend in its own process: a library that crashes or hangs must not take the report with it."""
    try:
        command = [sys.executable, "-c", _PROBES[name]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"available": False, "reason": f"its import took more than {_PROBE_SECONDS} s"}
    if done.returncode == 0:
        return {"available": True, "devices": done.stdout.strip()}
    lines = done.stderr.strip().splitlines() or [f"its import ended with status {done.returncode}"]
    return {"available": False, "reason": lines[-1]}


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().splitlines()


def _cache() -> dict[str, Any]:
    folder = cache_dir()
    cached = [name for name, model in KNOWN.items() if (folder / "models" / name / model.file).exists()]
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = round(shutil.disk_usage(existing).free / 2**30, 1)
    return {"path": str(folder), "writable": os.access(existing, os.W_OK), "free_gib": free, "models": cached}


def _shown(variable: str) -> bool:
    """Our variables and the ones that change what we do; never a key or a token."""
    return variable in _VARIABLES or (variable.startswith("DUSTIN_") and "KEY" not in variable)


def report() -> dict[str, Any]:
    """Everything the command prints."""
    return {
        "dustin": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": _safely(platform.platform),
        "cpus": _safely(lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory_gib": _safely(_memory_gib),
        "gpus": _safely(_gpus),
        "backends": {name: _safely(partial(_backend, name)) for name in _PROBES},
        "packages": {package: _safely(partial(_version, package)) for package in _PACKAGES},
        "cache": _safely(_cache),
        "config": _safely(lambda: f"{config_path()} ({'present' if config_path().is_file() else 'absent'})"),
        "environment": {name: value for name, value in os.environ.items() if _shown(name)},
    }


@click.command(context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@debug_option
def doctor(as_json: bool) -> None:
    """Report platform, backends (and why one is unavailable), versions and cache."""
    found = report()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        if not isinstance(value, dict):
            click.echo(f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
            continue
        click.echo(f"{name}:")
        for key, entry in value.items():
            click.echo(f"  {key}: {_plain(entry)}")


def _plain(entry: Any) -> str:
    if isinstance(entry, dict):
        return f"available ({entry['devices']})" if entry.get("available") else f"unavailable: {entry.get('reason')}"
    if isinstance(entry, list):
        return ", ".join(entry) or "none"
    return "not installed" if entry is None else str(entry)
