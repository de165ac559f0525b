"""What the MLX backend cannot run is refused by name: models, folders, devices, libraries that are not there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm", "torch", "transformers")):
    pytest.skip('needs mlx, mlx-lm, torch and transformers: pip install "dustin-llm[test]"', allow_module_level=True)

import mlx.core as mx

from dustin import registry
from dustin.backends.mlx_metal.backend import MlxBackend, create
from dustin.errors import ModelError, UsageError
from dustin.metal_kernels.gate import Gate
from tests.parity.adapters import CONFIGS, write_model


@pytest.fixture(scope="module")
def backend() -> MlxBackend:
    return create("cpu")


def changed(tmp_path: Path, **config: Any) -> Path:
    """A folder whose config.json has the given entries (None takes one out)."""
    folder = write_model(tmp_path / "changed", CONFIGS["llama"])
    parsed = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in parsed.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}, "slides .* 3 of 3 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "head_dim is 16, expected .* 8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 64}, "cannot be loaded"),
        ({"num_hidden_layers": 4}, "cannot be loaded: Missing"),
    ],
)
def test_what_mlx_cannot_run_is_refused_by_name(backend, tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        backend.load(changed(tmp_path, **config))


def test_damaged_folders(backend, tmp_path):
    folder = changed(tmp_path)
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        backend.load(folder, dtype="int8")
    shards = sorted(folder.glob("*.safetensors"))
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot be (loaded|read)"):
        backend.load(folder)
    shards[0].unlink()
    with pytest.raises(ModelError, match="00001-of-00002.safetensors is missing"):
        backend.load(folder)
    with pytest.raises(ModelError, match="neither a folder"):
        backend.load(tmp_path / "absent")


def test_kernels_by_force_need_a_head_dim_they_serve(tmp_path):
    with pytest.raises(ModelError, match="head_dim .* is 16, .* 64, 96, 128, 256"):
        MlxBackend("cpu", Gate("kernel")).load(changed(tmp_path))


@pytest.mark.parametrize(
    ("device", "message"), [("metal", "no Metal GPU"), ("cuda", "no CUDA GPU"), ("gpu", "neither"), ("tpu", "'tpu'")]
)
def test_devices_that_are_not_here(device, message):
    if device != "tpu" and (mx.metal.is_available() or mx.is_available(mx.gpu)):
        pytest.skip("MLX has a GPU here")
    with pytest.raises(UsageError, match=message):
        create(device)


def test_a_bad_gate_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("DUSTIN_METAL_GATE", "fast")
    with pytest.raises(UsageError, match="DUSTIN_METAL_GATE"):
        create("cpu")


@pytest.mark.parametrize(("missing", "message"), [("mlx.core", "mlx"), ("mlx_lm", "mlx-lm")])
def test_absent_libraries_are_named_with_what_to_do(monkeypatch, missing, message):
    if missing == "mlx.core":
        for name in [name for name in sys.modules if name.startswith("dustin.backends.mlx_metal")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "mlx.core", None)
    else:
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest))
    with pytest.raises(UsageError, match=f"(?s)backend 'mlx'.*{message}.*install") as caught:
        registry.create("mlx", "cpu")
    assert caught.value.exit_code == 2


def test_auto_takes_mlx_on_apple_silicon(monkeypatch):
    assert registry.choose() == ("mlx" if sys.platform == "darwin" else "torch")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(registry.platform, "machine", lambda: "arm64")
    assert registry.choose() == "mlx"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert registry.choose() == "torch"
