"""`python -m bench apple` and `mlx_cuda` without their hardware: numbers, labels, refusals. Metal kernels run in the emulator."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from bench import apple, mlx_attention, mlx_cuda
from bench.mlx_attention import Problem, array_operations, interleaved, kernel_operations, measure
from tests import tiny_model
from tests.metal.emulator.dropin import installed
from tests.metal.faults import FAULTS

TINY = Problem(8, 2, 64, context=96, batch=2, rows=3, budgets=(48,), held=2, layers=3, dtype="float16")
NO_MLX_LM = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")


def run(command: Any, *args: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, [*args])


def fault(name: str) -> Any:
    """A transform for the emulator that makes one kernel wrong."""
    seeded = next(each for each in FAULTS if each.name == name)
    return lambda kernel: replace(kernel, source=kernel.source.replace(seeded.old, seeded.new))


# Measuring.


def test_kernels_are_measured_against_stock_attention() -> None:
    with installed() as log:
        row = measure(TINY, kernel_operations(), repeats=1)
    assert not log.findings
    assert set(row["ms_per_layer"]) == {"stock", "stock packed", "our dense", "sparse 48", "blocks 48"}
    assert row["our_path"] == "Metal kernels" and row["layers"] == 3 and row["shape"] == "8/2/64"
    assert all(0 < error < 1e-3 for error in row["relative_rms"].values())
    assert row["dense_bytes_per_layer"] == 2 * (96 + 3) * 2 * 64 * 2 * 2
    assert row["sparse_bytes_per_layer"] == {"48": 2 * (48 + 3) * 2 * 64 * 2 * 2}
    dense = min(row["ms_per_layer"][name] for name in ("stock", "stock packed", "our dense"))
    assert row["ms_per_layer"][row["baseline"]] == dense
    whole = row["ms_per_layer"]["sparse 48"] * 3 + row["selection_ms_per_round"]["48"]
    assert row["ratio"]["48"] == pytest.approx(dense * 3 / whole, rel=0.02, abs=0.01)


@pytest.mark.parametrize("name", ["index one too high", "future token visible", "scale forgotten"])
def test_a_wrong_kernel_prints_no_speed(name: str) -> None:
    with installed(transform=fault(name), check=False), pytest.raises(ValueError, match="no speed is printed"):
        measure(TINY, kernel_operations(), repeats=1)


def test_the_packed_mask_hides_the_future() -> None:
    mask = np.array(mlx_attention.packed_mask(replace(TINY, context=48)))
    assert mask.shape == (4 * 3, 51)
    for row in range(12):
        assert mask[row].tolist() == [True] * (48 + row % 3 + 1) + [False] * (2 - row % 3)


def test_calls_take_turns() -> None:
    order: list[str] = []
    clock = iter(range(100))

    def call(name: str) -> Any:
        order.append(name)
        return []

    calls = {name: lambda name=name: call(name) for name in "ab"}
    times = interleaved(calls, 3, lambda: float(next(clock)))
    assert order == ["a", "b", "a", "b"] + ["a", "b"] * 3
    assert times == {"a": [1000.0] * 3, "b": [1000.0] * 3}


@pytest.mark.parametrize(
    ("change", "words"), [({"heads": 7}, "multiple of the 2 kv heads"), ({"budgets": (8,)}, "got 8"), ({"context": 40}, "got 48")]
)
def test_impossible_cases_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TINY, **change)


# The Apple command.


def test_without_metal_it_says_so() -> None:
    if apple.metal_here():
        pytest.skip("Metal is here")
    done = run(apple.main)
    assert done.exit_code == 1 and done.stdout == ""
    assert "Metal is not available here" in done.stderr and "--array-path" in done.stderr


def test_array_path_is_labelled_as_such(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = run(apple.main, "--array-path", "--repeats", "1", "--only", "1024 1 6", "--output", str(file))
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["what"] == apple.ARRAYS and "not a measurement of Apple hardware" in row["what"]
    assert [case["our_path"] for case in row["cases"]] == ["array path"] and row["cases"][0]["query_rows"] == 6
    assert {"chip", "gpu", "macos", "mlx", "commit", "command", "memory_gib"} <= set(row)
    assert json.loads(file.read_text()) == row


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac: Metal is there (the emulator), no model in the cache, a table of one tiny case and one too large."""
    monkeypatch.setattr(apple, "at_hand", lambda limit: None)
    huge = replace(TINY, context=1 << 24, batch=64)
    monkeypatch.setattr(apple, "metal_here", lambda: True)
    monkeypatch.setattr(apple, "table", lambda: [TINY, huge])


def test_a_mac_gets_a_line_to_send_back(pretended: None) -> None:
    with installed():
        done = run(apple.main, "--repeats", "1")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["what"] == apple.METAL
    assert [case["our_path"] for case in row["cases"]] == ["Metal kernels", "array path"]
    assert "left out, it takes" in done.stderr and "please send the line above back" in done.stderr


def test_red_cases_are_in_the_line_and_fail_the_command(pretended: None) -> None:
    with installed(transform=fault("scale forgotten"), check=False):
        done = run(apple.main, "--repeats", "1")
    cases = json.loads(done.stdout)["cases"]
    assert "our dense" in cases[0]["error"] and "ms_per_layer" in cases[1]
    with pytest.MonkeyPatch.context() as patch, installed(transform=fault("scale forgotten"), check=False):
        patch.setattr(apple, "array_operations", kernel_operations)
        done = run(apple.main, "--repeats", "1")
    assert done.exit_code == 1 and "no case could be measured" in done.stderr


def test_bad_options_are_refused() -> None:
    assert run(apple.main, "--array-path", "--repeats", "0").exit_code == 2
    done = run(apple.main, "--array-path", "--only", "nothing")
    assert done.exit_code == 1 and "leaves no case" in done.stderr and done.stdout == ""


def test_machine_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"sysctl": "Apple M4 Pro", "pmset": "System-wide power settings:\n lowpowermode         1"}
    monkeypatch.setattr(apple, "_line", lambda *command: said[command[0]])
    monkeypatch.setattr(apple.platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    facts = apple.machine()
    assert (facts["chip"], facts["macos"], facts["low_power_mode"]) == ("Apple M4 Pro", "15.5", True)


def test_the_table_holds_the_promised_shapes() -> None:
    """KERNELS section 2: 32/8/128 at 32k with T = 1, 4, 8; 72B, 14B, 8B at batch 1 and 8 with k = 2048."""
    cases = {(p.name, p.batch, p.rows) for p in apple.table() if p.context == 32768 and 2048 in p.budgets}
    assert {("32/8/128", 1, rows) for rows in (1, 4, 6, 8)} <= cases
    assert {("64/8/128", 1, 6), ("64/8/128", 8, 6), ("40/8/128", 1, 6), ("32/8/128", 8, 6), ("28/4/128", 1, 6)} <= cases


@NO_MLX_LM
def test_a_model_at_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert apple.at_hand(1e9) is None
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    sizes = {"mlx-community--small": 1_000, "mlx-community--large": 9_000, "mlx-community--huge": 90_000, "other--one": 5_000}
    for name, size in sizes.items():
        snapshot = tmp_path / f"models--{name}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (tmp_path / f"models--{name}" / "refs").mkdir()
        (tmp_path / f"models--{name}" / "refs" / "main").write_text("1")
        (snapshot / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
        (snapshot / "model.safetensors").write_bytes(b"0" * size)
    assert apple.at_hand(50_000) == "mlx-community/large"
    strange = tmp_path / "models--mlx-community--large" / "snapshots" / "1" / "config.json"
    strange.write_text('{"architectures": ["Whisper"]}')
    assert apple.at_hand(50_000) == "mlx-community/small"
    assert apple.at_hand(500) is None


@NO_MLX_LM
def test_generation_beside_mlx_lm(tmp_path: Path) -> None:
    from bench.mlx_generation import generation

    folder = tiny_model.write(tmp_path / "tiny", head_dim=64, max_position_embeddings=2048)
    found = list(generation(str(folder), 300, 10, print, modes=("ar", "exact"), repeats=1))
    assert [row["engine"] for row in found] == ["mlx_lm", "dustin ar", "dustin exact"]
    assert all(row["tokens_per_s"] > 0 and row["prompt_tokens"] == 300 for row in found)
    assert [row["leading_tokens_as_mlx_lm"] for row in found[1:]] == [10, 10], "greedy float32 tokens equal mlx_lm's"


@NO_MLX_LM
def test_a_model_that_cannot_be_loaded_is_a_row(tmp_path: Path) -> None:
    said: list[str] = []
    (row,) = apple.generated(str(tmp_path / "none"), 300, 10, said.append)
    assert "no model at" in row["error"] and said


# The CUDA command.


def test_cuda_bench_needs_cuda() -> None:
    done = run(mlx_cuda.main)
    assert done.exit_code == 1 and "this MLX has no CUDA device" in done.stderr


@NO_MLX_LM
def test_cuda_bench_checks_itself_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = run(mlx_cuda.main, "--cpu-check", "--repeats", "1", "--output", str(file))
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["kind"] for row in found] == ["attention", "model round", "attention"]
    assert all(row["what"] == mlx_cuda.WHAT and row["card"] == "none (--cpu-check)" for row in found)
    assert set(found[1]["ms_per_round"]) == {"dense", "plain decoding", "sparse 64"}


def test_array_operations_share_their_plans() -> None:
    """The masks and positions of a pass are made once, not once a layer."""
    made = []
    operations = array_operations()
    counted = replace(operations, sparse_plan=lambda *args: made.append(1) or operations.sparse_plan(*args))
    measure(replace(TINY, dtype="float32"), counted, repeats=1)
    # One for the check of the numbers, two warm-up passes, one timed.
    assert len(made) == 4


@pytest.mark.parametrize("command", [apple.main, mlx_cuda.main])
def test_without_mlx_it_says_what_to_install(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    done = run(command)
    assert done.exit_code == 1 and done.stdout == ""
    assert "MLX cannot be imported" in done.stderr and "pip install" in done.stderr
