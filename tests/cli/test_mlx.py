"""`--backend mlx` from the command line: the numpy backend's tokens, and refusals with their exit codes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests import tiny_model
from tests.cli.running import dustin, fails

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm")):
    pytest.skip('needs mlx and mlx-lm: pip install "dustin-llm[mlx]"', allow_module_level=True)

MLX = ("--backend", "mlx", "--device", "cpu")


@pytest.mark.parametrize("mode", ["ar", "sparse", "exact"])
def test_generate_equals_numpy(model: Path, environment: dict[str, str], mode: str) -> None:
    options = ["generate", "-m", model, "-n", 10, "--ignore-eos", "--json", "--mode", mode, "a story about the sea, and more of it"]
    options += [] if mode == "ar" else ["--budget", 40]
    mine, its = (json.loads(dustin(environment, *options, *extra).stdout) for extra in (MLX, ("--backend", "numpy")))
    assert mine["tokens"] == its["tokens"] and len(mine["tokens"]) == 10


def test_refusals(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    fails(dustin(environment, "generate", "-m", model, *MLX, "--dtype", "int8", "hi"), 2, "dtype is 'int8'")
    fails(dustin(environment, "generate", "-m", model, "--backend", "mlx", "--device", "tpu", "hi"), 2, "device is 'tpu'")
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    sliding = tiny_model.write(tmp_path / "sliding", **window)
    fails(dustin(environment, "generate", "-m", sliding, *MLX, "hi"), 1, "no rotating cache that can roll back")
    fails(dustin(environment | {"DUSTIN_METAL_GATE": "fast"}, "generate", "-m", model, *MLX, "hi"), 2, "DUSTIN_METAL_GATE")
