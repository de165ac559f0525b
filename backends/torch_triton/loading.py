"""A TorchModel from a Hugging Face folder (config.json, safetensors read shard by shard) or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dustin.backends.common.config import check_layers
from dustin.backends.common.folders import read_json, weight_files
from dustin.backends.torch_triton.config import ModelConfig, config_from_hf
from dustin.backends.torch_triton.sharding import Part
from dustin.backends.torch_triton.weights import Fetch, Weights, build
from dustin.errors import ModelError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache. `auto` is bf16 where the device multiplies it natively, else fp32.

    Measured on a CPU with avx512_bf16, bf16 linear layers are 2 to 5 times faster than fp32 at 1, 5, 48 and 512 rows alike;
    a CPU without such instructions emulates bf16 and is slower. Raise UsageError on an unknown name or fp16 on the CPU.
    """
    if name == "auto":
        native = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}, expected auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise UsageError("dtype is float16, expected float32 or bfloat16 on the CPU: it has no fast fp16 arithmetic")
    return DTYPES[name]


def load(source: Path, dtype: torch.dtype, device: torch.device) -> tuple[ModelConfig, Weights, str]:
    """Configuration, weights and name of the model at `source`. Raise ModelError that names what is missing or damaged."""
    config, fetch, name = open_source(source)
    return config, build(config, fetch, dtype, device), name


def open_source(source: Path) -> tuple[ModelConfig, Fetch, str]:
    """Configuration, a reader of tensors, and the name of the model at `source`. Raise ModelError as `load` does."""
    if source.suffix == ".gguf":
        from dustin.backends.torch_triton.gguf_loading import open_gguf

        return *open_gguf(source), source.stem
    if not source.is_dir():
        raise ModelError(f"{source} is neither a folder of safetensors nor a .gguf file")
    return *open_folder(source), source.resolve().name


def open_folder(source: Path) -> tuple[ModelConfig, Fetch]:
    """The configuration and a reader of single tensors; no tensor is in memory before it is asked for."""
    config = config_from_hf(read_json(source / "config.json"))
    files = weight_files(source)
    where = {name: path for path in files for name in _open(path).keys()}
    check_layers(where, config.num_layers)

    def fetch(name: str, part: Part | None = None) -> torch.Tensor | None:
        if name not in where:
            return None
        if part is None:
            return _open(where[name]).get_tensor(name)
        # Only the part's bytes are read: a rank never holds the whole tensor.
        rows = _open(where[name]).get_slice(name)
        part.check(tuple(rows.get_shape()))
        return rows[part.start : part.stop] if part.dim == 0 else rows[:, part.start : part.stop]

    return config, _with_errors(fetch)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it again") from error


def _with_errors(fetch: Fetch) -> Fetch:
    from safetensors import SafetensorError

    def guarded(name: str, part: Part | None = None) -> torch.Tensor | None:
        try:
            return fetch(name, part)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"tensor {name} cannot be read: {error}. Fetch the model again") from error

    return guarded
