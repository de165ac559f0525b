"""`dustin doctor` as a user runs it: its report, its exit code, and what it says of frameworks that are wrong, dead or hung."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dustin import doctor
from dustin.doctor_advice import advice, verdict

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *args: str, site: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where `site` runs at the start of every Python (a wrong or missing library)."""
    (tmp_path / "sitecustomize.py").write_text(site)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DUSTIN_", "LD_PRELOAD"))}
    environment = kept | {"DUSTIN_CACHE": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "DUSTIN_API_KEY": "secret"}
    command = [sys.executable, "-m", "dustin", "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)


def wrong(module: str, name: str, body: str) -> str:
    """A sitecustomize that replaces a function of ours when `module` is imported."""
    return (
        "import importlib, sys\nif 'dustin.self_test' in ' '.join(sys.orig_argv):\n"
        f"    module = importlib.import_module({module!r})\n    original = module.{name}\n"
        f"    def replaced(*args, **options):\n        {body}\n    module.{name} = replaced\n"
    )


def test_report_and_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    start = time.monotonic()
    done = run(tmp_path, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:]
    assert report["ok"] and report["backends"]["torch"]["available"] and report["backends"]["numpy"]["devices"] == ["cpu"]
    groups = {result["group"] for result in report["self_test"]}
    assert {"numpy", "torch on cpu", "triton"} <= groups
    assert all(result["state"] in ("passed", "skipped") for result in report["self_test"])
    assert all(result["detail"] for result in report["self_test"])
    assert report["packages"]["torch"] and "secret" not in done.stdout
    assert all(state["available"] or state["reason"] for state in report["backends"].values())
    # 15 s on two free cores; a busy machine gets more.
    assert time.monotonic() - start < 60
    text = doctor.lines(report)
    assert "backends:" in text and "  numpy: available (cpu)" in text and text[-1] == "ok"
    assert any(line.startswith("  torch on cpu: 9 passed: select, probabilities") for line in text)
    assert any(line.startswith(("  triton: skipped: all kernels: ", "  triton: 18 passed")) for line in text)


def test_a_wrong_kernel_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    done = run(tmp_path, site=wrong("dustin.metal_kernels.fallback", "dense_verify", "return original(*args, **options) * 1.01"))
    assert done.returncode == 1
    assert "mlx array path: FAILED: dense_verify: out is off by 0.01 relative RMS, allowed 1e-05" in done.stdout
    assert "checks of mlx array path" in done.stdout and "failed: do not trust its answers" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ok")


def test_a_kernel_that_kills_the_process_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    done = run(tmp_path, "--json", site=wrong("dustin.metal_kernels.fallback", "sparse_verify", "import os; os.abort()"))
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not report["ok"]
    (dead,) = [result for result in report["self_test"] if result["state"] == "failed"]
    assert dead["group"] == "mlx" and dead["name"] == "the remaining checks" and "signal 6" in dead["detail"]
    passed = {result["name"] for result in report["self_test"] if result["group"] == "mlx array path"}
    assert "dense_verify" in passed, "what passed before the crash stays in the report"


def test_without_frameworks(tmp_path: Path) -> None:
    """Neither torch nor MLX: nothing can run a model, the report still stands and says what to install."""
    block = (
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'mlx', 'triton'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib.metadata as m\noriginal = m.version\n"
        "def version(name):\n    if name in ('torch', 'mlx', 'triton'):\n        raise m.PackageNotFoundError(name)\n"
        "    return original(name)\nm.version = version\n"
    )
    done = run(tmp_path, "--json", site=block)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not report["ok"]
    assert report["backends"]["numpy"]["available"]
    assert "No module named 'torch'" in report["backends"]["torch"]["reason"]
    assert "torch is not installed: pip install -c constraints.txt torch" in report["advice"]


def test_a_group_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    entry, results = doctor.run_group("numpy", seconds=1)
    assert entry == {"available": False, "reason": "no answer within 1 s"} and results == []


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--fast")
    assert done.returncode == 2 and "error: No such option" in done.stderr and done.stdout == ""
    done = run(tmp_path, "extra")
    assert done.returncode == 2 and done.stdout == ""


# Advice, as a function of the report.


def found(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2.13.0", "triton": "3.6.0", "mlx": None, "mlx-cpu": None, "mlx-lm": None}
    backends = {
        "numpy": {"available": True, "devices": ["cpu"]},
        "torch": {"available": True, "devices": ["cpu"], "cuda_build": None},
        "mlx": {"available": False, "reason": "no"},
    }
    cache = {"path": "/cache", "writable": True, "free_gib": 1.0, "models": []}
    report: dict[str, Any] = {"system": ["Linux", "x86_64"], "gpus": [], "self_test": []}
    report |= {"packages": packages, "backends": backends, "cache": cache}
    for name, value in changes.items():
        target, key = (report["backends"], name) if name in backends else (report, name)
        target[key] = target[key] | value if isinstance(target.get(key), dict) else value
    return report


SLOW_BLAS = {"library": "x", "mlx_gflops": 5.0, "numpy_gflops": 100.0}


def test_what_the_server_needs_is_told() -> None:
    report = found() | dict.fromkeys(("dustin", "python", "platform", "cpus", "memory_gib", "environment", "config"), "")
    report |= {"packages": {"starlette": None, "mlx": None}, "advice": [], "ok": True}
    text = "\n".join(doctor.lines(report))
    assert 'starlette: not installed (`dustin serve` needs it: the extra "serve")' in text and "mlx: not installed\n" in text


def test_nothing_to_do() -> None:
    assert advice(found()) == [] and verdict(found())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": {"available": False, "reason": "libx"}}, "torch 2.13.0 cannot be used (libx): install it again"),
        ({"torch": {"available": False, "reason": "x"}, "packages": {"torch": None}}, "torch is not installed"),
        ({"gpus": ["GPU 0: A100"]}, "torch 2.13.0 is a CPU build, the driver lists GPU 0: A100: install torch's CUDA build"),
        ({"gpus": ["GPU 0: A100"], "torch": {"cuda_build": "13.0"}}, "torch is built for CUDA 13.0 but finds no GPU"),
        ({"torch": {"devices": ["cpu", "A100"]}, "packages": {"triton": None}}, "the GPU needs triton"),
        ({"system": ["Darwin", "arm64"]}, "MLX is not installed; on Apple silicon it drives the GPU: pip install mlx mlx-lm"),
        ({"packages": {"mlx": "0.32"}}, 'mlx 0.32 cannot be imported here without its CPU part: pip install "mlx[cpu]"'),
        ({"packages": {"mlx": "0.32", "mlx-cpu": "0.32"}, "mlx": {"devices": ["cpu"]}}, "pip install mlx-lm"),
        (
            {"system": ["Darwin", "arm64"], "packages": {"mlx": "1", "mlx-lm": "1"}, "mlx": {"devices": ["cpu"], "metal": False}},
            "MLX finds no Metal device",
        ),
        ({"mlx": {"blas": SLOW_BLAS}}, "MLX's BLAS is slow on this CPU (5 GFLOP/s, numpy's 100)"),
        ({"cache": {"writable": False}}, "set DUSTIN_CACHE"),
    ],
)
def test_advice(changes: dict[str, Any], words: str) -> None:
    (line,) = advice(found(**changes))
    assert words in line


@pytest.mark.parametrize(
    ("library", "speeds", "slow"),
    [
        ("libopenblas.so.0, libblas-1.so.3", (90.0, 100.0), False),
        ("libopenblas.so.0", (5.0, 100.0), True),
        # A busy machine slows numpy's many threads more than MLX's one: the reference library is known by its name.
        ("libblas-1.so.3.10.0", (5.0, 4.0), True),
    ],
)
def test_a_fast_blas_needs_no_word(library: str, speeds: tuple[float, float], slow: bool) -> None:
    blas = {"library": library, "mlx_gflops": speeds[0], "numpy_gflops": speeds[1]}
    assert bool(advice(found(mlx={"blas": blas}))) == slow


def test_verdict() -> None:
    assert not verdict(found(torch={"available": False, "reason": "x"}))
    assert verdict(found(torch={"available": False, "reason": "x"}, mlx={"available": True, "devices": ["M4"]}))
    failed = [{"group": "triton", "name": "select_tokens", "state": "failed", "detail": "x"}]
    assert not verdict(found(self_test=failed))
    assert "checks of triton failed" in advice(found(self_test=failed))[0]
