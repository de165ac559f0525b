"""`dustin doctor`: what works here, why the rest does not, and what to do. It always prints: frameworks run in processes apart."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from dustin import __version__
from dustin.cli_options import CONTEXT, debug_option
from dustin.config_file import config_path
from dustin.doctor_advice import advice, verdict
from dustin.models import KNOWN, cache_dir
from dustin.self_test import GROUPS, Result
from dustin.terminal import note

_PACKAGES = (
    "numpy",
    "click",
    "torch",
    "triton",
    "mlx",
    "mlx-cpu",
    "mlx-lm",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "jinja2",
    "rich",
    "gguf",
    "starlette",
    "uvicorn",
    "prometheus-client",
)
_OF_THE_SERVER = ("starlette", "uvicorn", "prometheus-client")
_VARIABLES = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
# A first run on a GPU compiles the kernels; elsewhere a group takes a few seconds.
_GROUP_SECONDS = 300


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


def run_group(group: str, seconds: float = _GROUP_SECONDS) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the backend's entry, results) of one self-test group, run apart: what crashes or hangs must not take the report with it."""
    command = [sys.executable, "-m", "dustin.self_test", group]
    # Of many ranks each would wait for the others.
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
        printed, ended = done.stdout, _ending(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ended = f"no answer within {seconds:g} s"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    entry = next((line["about"] for line in lines if "about" in line), None)
    results = [line for line in lines if "about" not in line]
    if entry is None:
        entry = {"available": False, "reason": ended or "it said nothing"}
    elif ended:
        results.append(asdict(Result(group, "the remaining checks", "failed", ended)))
    return entry, results


def _ending(status: int, errors: str) -> str:
    """Empty when a process ended well; else how it ended."""
    if status == 0:
        return ""
    lines = errors.strip().splitlines()
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{how}: {lines[-1]}" if lines else how


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


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
    """Everything the command prints, with `advice` (what to install or change) and `ok`."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(GROUPS)) as pool:
        groups = {name: pool.submit(run_group, name) for name in GROUPS}
        found: dict[str, Any] = {
            "dustin": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": _safely(platform.platform),
            "system": [platform.system(), platform.machine()],
            "cpus": _safely(lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
            "memory_gib": _safely(_memory_gib),
            "gpus": _safely(_gpus),
            "packages": {package: _safely(partial(_version, package)) for package in _PACKAGES},
            "cache": _safely(_cache),
            "config": _safely(lambda: f"{config_path()} ({'present' if config_path().is_file() else 'absent'})"),
            "environment": {name: value for name, value in os.environ.items() if _shown(name)},
        }
        ended = {name: future.result() for name, future in groups.items()}
    found["backends"] = {name: entry for name, (entry, _) in ended.items()}
    found["self_test"] = [result for _, results in ended.values() for result in results]
    found["advice"] = advice(found)
    found["ok"] = verdict(found)
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


@click.command(context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@debug_option
def doctor(as_json: bool) -> int:
    """Report platform, backends (and why one is unavailable), versions, a self-test of every kernel, and what to install.

    Exit code 0: a backend that runs models (torch or mlx) works here and no check failed. 1: none works, or a check failed.
    """
    if sys.stderr.isatty():
        note("checking backends and kernels (a first run on a GPU compiles them: about a minute) ...")
    found = report()
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in lines(found):
            click.echo(line)
    return 0 if found["ok"] else 1


def lines(found: dict[str, Any]) -> list[str]:
    """The report for people."""
    out = []
    for name in ("dustin", "python", "platform", "cpus", "memory_gib", "gpus"):
        value = found[name]
        out.append(f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    out += ["backends:", *(f"  {name}: {_backend(entry)}" for name, entry in found["backends"].items())]
    out += ["self-test (against the float64 reference):", *_self_test(found["self_test"])]
    for name in ("packages", "cache", "environment"):
        section = found[name] if isinstance(found[name], dict) else {"": found[name]}
        out += [f"{name}:", *(f"  {key}: {_plain(entry, key)}" for key, entry in section.items())]
    out.append(f"config: {found['config']}")
    out += ["what to do:", *(f"  - {line}" for line in found["advice"])] if found["advice"] else []
    out.append("ok" if found["ok"] else "not ok: see the lines marked FAILED or unavailable above")
    return out


def _backend(entry: dict[str, Any]) -> str:
    devices = ", ".join(entry.get("devices", ()))
    blas = entry.get("blas")
    speed = f"; BLAS {blas['library']}: {blas['mlx_gflops']:g} GFLOP/s, numpy's {blas['numpy_gflops']:g}" if blas else ""
    if entry.get("available"):
        return f"available ({devices}{speed})"
    return f"unavailable: {entry.get('reason')}" + (f" (mlx itself computes on {devices}{speed})" if devices else "")


def _self_test(results: list[dict[str, Any]]) -> list[str]:
    """One line a group that passed, one a skipped or failed check."""
    out = []
    for group in dict.fromkeys(result["group"] for result in results):
        mine = [result for result in results if result["group"] == group]
        passed = [result["name"] for result in mine if result["state"] == "passed"]
        if passed:
            out.append(f"  {group}: {len(passed)} passed: {', '.join(passed)}")
        for result in mine:
            if result["state"] != "passed":
                state = "FAILED" if result["state"] == "failed" else result["state"]
                out.append(f"  {group}: {state}: {result['name']}: {result['detail']}")
    return out


def _plain(entry: Any, key: str) -> str:
    if isinstance(entry, list):
        return ", ".join(entry) or "none"
    if entry is None:
        return "not installed" + (' (`dustin serve` needs it: the extra "serve")' if key in _OF_THE_SERVER else "")
    return str(entry)
