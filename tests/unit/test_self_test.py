"""The self-test of `dustin doctor`: it passes here, covers every kernel, and finds each kernel that is made wrong on purpose."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dustin import self_test
from dustin.self_test import Check, Result, judge

ROOT = Path(__file__).resolve().parents[2]
# Modules of triton_kernels that hold no kernel of their own.
_SHARED = {"runtime", "attention_core", "score_plan", "decode_linear"}


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def run(group: str) -> dict[str, dict[str, Any]]:
    """Results by "group/name"."""
    return {f"{line['group']}/{line['name']}": line for line in self_test.run(group) if "about" not in line}


# What differs is found, whatever way it differs.


def verdict(got: Any, want: Any = None, tolerance: float = 1e-5) -> Result:
    want = np.arange(4.0) if want is None else want
    return judge(Check("group", "name", lambda: {"out": got}, {"out": want}, tolerance))


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (np.arange(4.0) * 1.001, "off by 0.001"),
        (np.zeros(4), "off by 1"),
        (np.arange(3.0), "shape (3,), expected (4,)"),
        (np.array([0, 1, 2, np.nan]), "NaN or infinity"),
        (np.array([0, 1, 2, -np.inf]), "NaN or infinity"),
    ],
)
def test_wrong_numbers_fail(got: np.ndarray, words: str) -> None:
    found = verdict(got)
    assert found.state == "failed" and words in found.detail


def test_right_numbers_pass() -> None:
    assert verdict(np.arange(4.0) * (1 + 1e-7)).state == "passed"
    assert verdict(np.array([1, 2]), np.array([1, 2])).detail == "exact"
    hidden = np.array([1.0, -np.inf])
    assert verdict(hidden, hidden).state == "passed" and verdict(np.array([1.0, 5.0]), hidden).state == "failed"


def test_one_wrong_integer_fails() -> None:
    found = verdict(np.array([1, 3]), np.array([1, 2]))
    assert found.state == "failed" and "1 of 2 values of out are wrong" in found.detail


def test_what_a_check_raises_is_its_result() -> None:
    def broken() -> Any:
        raise RuntimeError("first\nlast line")

    found = judge(Check("group", "name", broken, {"out": np.zeros(1)}))
    assert (found.state, found.detail) == ("failed", "RuntimeError: last line")
    assert judge(Check("group", "name", lambda: {}, {"out": np.zeros(1)})).state == "failed"


def test_a_group_that_cannot_prepare_its_checks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        yield {"about": {"available": True}}
        raise ZeroDivisionError("no")

    module = importlib.import_module("dustin.self_test_backends")
    monkeypatch.setattr(module, "numpy_checks", broken)
    assert [*self_test.run("numpy")][1]["detail"] == "ZeroDivisionError: no"


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert self_test.main(["tpu"]) == 2 == self_test.main([])
    assert "expected one of numpy, torch, mlx, got tpu" in capsys.readouterr().err


# Every backend and kernel.


@pytest.mark.parametrize("group", ["numpy", pytest.param("torch", marks=needs("torch")), pytest.param("mlx", marks=needs("mlx"))])
def test_everything_passes_here(group: str) -> None:
    found = run(group)
    assert [name for name, line in found.items() if line["state"] == "failed"] == []
    assert sum(line["state"] == "passed" for line in found.values()) >= 2


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Results of the Triton checks in Triton's interpreter, right kernels and then each kernel made wrong."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("torch or triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _TRITON_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {f"{line['fault']}/{line['name']}": line for line in map(json.loads, done.stdout.splitlines())}


# Every launcher's tensors come back a little off; the others stay as they are.
_TRITON_FAULTS = """
import dataclasses, importlib, json
from dustin.self_test import Check, judge
from dustin.self_test_kernels import triton_checks

PLACES = {"accept_greedy": "accept", "accept_sampled": "accept", "norm_qkv": "norm_linear", "norm_gate_up": "norm_linear"}
PLACES |= {"score_layers": "score_heads", "packed_keys": "packed_rows"}
PLACES |= {"embed_rows": "stream_rows", "last_norm": "stream_rows", "capture_heads": "stream_rows"}
# What a launcher writes in place, or hides in what it returns.
WRITTEN = {"append_kv": lambda args, out: args[2], "linear_add": lambda args, out: args[3].residual}
WRITTEN |= {"embed_rows": lambda args, out: out.residual, "packed_keys": lambda args, out: args[1]}
checks = [c for c in triton_checks() if isinstance(c, Check)]

def worse(original, written):
    def wrong(*args, **options):
        out = original(*args, **options)
        x = written(args, out) if written else out[0] if isinstance(out, tuple) else out
        x.mul_(1.05) if x.is_floating_point() else x.add_(1)
        return out
    return wrong

for fault in [None, *(c.name for c in checks)]:
    if fault:
        module = importlib.import_module("dustin.triton_kernels." + PLACES.get(fault, fault))
        original = getattr(module, fault)
        setattr(module, fault, worse(original, WRITTEN.get(fault)))
    for check in checks:
        if fault in (None, check.name):
            print(json.dumps({"fault": fault} | dataclasses.asdict(judge(check))), flush=True)
    if fault:
        setattr(module, fault, original)
"""


def test_triton_kernels_pass_and_wrong_ones_are_found(interpreted: dict[str, dict[str, Any]]) -> None:
    right = {name: line for name, line in interpreted.items() if line["fault"] is None}
    wrong = {name: line for name, line in interpreted.items() if line["fault"] is not None}
    assert len(right) == len(wrong) > 16
    assert [name for name, line in right.items() if line["state"] != "passed"] == []
    assert [name for name, line in wrong.items() if line["state"] != "failed"] == []


def launchers(text: str) -> set[str]:
    """Public functions of a kernel module that launch a kernel, themselves or through a private function."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    direct, calls = set(), {}
    for function in functions:
        nodes = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        calls[function.name] = {node.id for node in nodes if isinstance(node, ast.Name)}
        if any(isinstance(node, ast.Subscript) for node in nodes):
            direct.add(function.name)
    return {name for name, called in calls.items() if not name.startswith("_") and (name in direct or called & direct)}


def test_every_triton_kernel_has_a_check(interpreted: dict[str, dict[str, Any]]) -> None:
    """A new module with a @triton.jit kernel and a launcher of its name needs a check in self_test_kernels.py."""
    named = {line["name"] for line in interpreted.values()}
    for path in sorted((ROOT / "triton_kernels").glob("*.py")):
        text = path.read_text()
        if path.stem in _SHARED or "@triton.jit" not in text:
            continue
        missing = launchers(text) - named
        assert not missing, f"{path.name} launches kernels in {sorted(missing)}, which no check of self_test_kernels.py runs"


def test_every_metal_launcher_has_a_check() -> None:
    from dustin.self_test_kernels import metal_functions

    named = set(metal_functions(True))
    for path in sorted((ROOT / "metal_kernels").glob("*.py")):
        launchers = re.findall(r"^def (\w+)\(", path.read_text(), re.M)
        if path.with_suffix(".metal").exists() and path.stem in launchers:
            assert path.stem in named, path.name


@needs("mlx")
@pytest.mark.parametrize("name", ["dense_verify", "sparse_verify", "score_heads", "select_tokens", "append_kv"])
def test_a_wrong_array_path_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    from dustin.metal_kernels import fallback

    original = getattr(fallback, name)

    def wrong(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        return (out[0] + 1, *out[1:]) if isinstance(out, tuple) else mx.roll(out, 1, axis=1)

    monkeypatch.setattr(fallback, name, wrong)
    found = run("mlx")
    failed = {line["name"] for line in found.values() if line["group"] == "mlx array path" and line["state"] == "failed"}
    assert failed == {name}


# What is changed on the torch backend -> the check that must see it first.
_TORCH_FAULTS = {
    "select": "select",
    "probabilities": "probabilities",
    "accept_greedy": "accept_greedy",
    "accept_sampled": "accept_sampled",
    "score": "scores",
}


@needs("torch")
@pytest.mark.parametrize("method", _TORCH_FAULTS)
def test_a_wrong_torch_operation_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dustin.backends.torch_triton.backend import TorchBackend

    original = getattr(TorchBackend, method)

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        out = original(self, *args, **options)
        if method == "select":
            out.indices[:, 1] += 1
        elif method.startswith("accept"):
            out.tokens[:, 0] += 1
        else:
            out = out.roll(1, -1)
        return out

    monkeypatch.setattr(TorchBackend, method, wrong)
    assert run("torch")[f"torch on cpu/{_TORCH_FAULTS[method]}"]["state"] == "failed"


@needs("torch")
def test_wrong_torch_attention_and_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dustin.backends.torch_triton.attention import Attention
    from dustin.backends.torch_triton.cache import TorchCache

    original, rollback = Attention.__call__, TorchCache.rollback
    monkeypatch.setattr(Attention, "__call__", lambda *args, **options: original(*args, **options) * 1.01)
    found = run("torch")
    for name in ("prefill", "dense verification", "sparse verification"):
        assert found[f"torch on cpu/{name}"]["state"] == "failed"
    monkeypatch.undo()

    def keeps_a_row(self: Any, lengths: Any) -> Any:
        return rollback(self, [min(n + 1, have) for n, have in zip(lengths, self.lengths, strict=True)])

    monkeypatch.setattr(TorchCache, "rollback", keeps_a_row)
    assert run("torch")["torch on cpu/rollback"]["state"] == "failed"


def metal_results(**settings: Any) -> dict[str, str]:
    """name -> state of the Metal checks under the emulator."""
    from dustin.self_test_kernels import metal_checks
    from tests.metal.emulator.build import compiler
    from tests.metal.emulator.dropin import installed

    if compiler() is None:
        pytest.skip("the emulator needs g++ on Linux")
    with installed(**settings):
        results = [judge(check) for check in metal_checks(True) if isinstance(check, Check)]
    return {result.name: result.state for result in results}


@needs("mlx")
def test_metal_kernels_pass() -> None:
    found = metal_results()
    assert len(found) == 6 and set(found.values()) == {"passed"}


@needs("mlx_lm")
def test_the_model_runs_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLX backend's checks with the kernels forced, as on a Mac, and the emulator in Metal's place."""
    from tests.metal.emulator.build import compiler
    from tests.metal.emulator.dropin import installed

    if compiler() is None:
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setenv("DUSTIN_METAL_GATE", "kernel")
    with installed() as log:
        found = run("mlx")
    assert [name for name, line in found.items() if line["state"] == "failed"] == []
    assert {"mlx/prefill", "mlx/scores", "mlx/sparse verification"} <= set(found)
    names = " ".join(kernel.name for kernel in log.kernels)
    for name in ("append_kv", "dense_verify", "sparse_verify", "score_heads", "select_tokens"):
        assert f"dustin_{name}_" in names
    assert not log.findings


# A seeded fault of tests/metal/faults.py -> the check that must see it.
_METAL_FAULTS = {
    "future token visible": "dense_verify",
    "scale forgotten": "dense_verify",
    "index one too high": "sparse_verify",
    "own token hidden": "sparse_verify",
    "block of 15 tokens": "sparse_verify_blocks",
    "score of one key too many": "score_heads",
    "ties to the higher index": "select_tokens",
    "append one row late": "append_kv",
}


@needs("mlx")
@pytest.mark.parametrize("fault", _METAL_FAULTS)
def test_a_wrong_metal_text_is_found(fault: str) -> None:
    from tests.metal.faults import FAULTS

    seeded = next(each for each in FAULTS if each.name == fault)
    changed = []

    def transform(kernel: Any) -> Any:
        # score_heads launches score_mean too.
        stem = "score" if _METAL_FAULTS[fault] == "score_heads" else _METAL_FAULTS[fault]
        if f"dustin_{stem}_" not in kernel.name.replace("_split", "") or seeded.old not in kernel.source:
            return kernel
        changed.append(kernel.name)
        return replace(kernel, source=kernel.source.replace(seeded.old, seeded.new))

    found = metal_results(transform=transform, check=False)
    assert changed and found[_METAL_FAULTS[fault]] == "failed"
