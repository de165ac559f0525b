"""A NumpyModel from a Hugging Face folder: config.json and *.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dustin.backends.common.config import check_layers, shape_fields
from dustin.backends.common.folders import read_json, weight_files
from dustin.backends.numpy_reference.cache import Floats
from dustin.backends.numpy_reference.model import ModelConfig, NumpyModel
from dustin.errors import ModelError

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed config.json. Raise ModelError on an unsupported architecture or a missing field."""
    shape, biased = shape_fields(config), bool(config.get("attention_bias", False))
    qwen2 = shape["architecture"] == "Qwen2ForCausalLM"
    return ModelConfig(
        **shape,
        qkv_bias=qwen2 or biased,
        output_bias=not qwen2 and biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_softcap=config.get("attn_logit_softcapping"),
    )


def to_float64(data: bytes, dtype: str, shape: tuple[int, ...], name: str) -> Floats:
    """A float64 array from little-endian bytes. bf16 is the upper half of fp32. Raise ModelError on any other dtype."""
    if dtype == "BF16":
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64).reshape(shape)
    if dtype not in _DTYPES:
        raise ModelError(f"tensor {name} has dtype {dtype}, expected BF16, {', '.join(_DTYPES)}")
    return np.frombuffer(data, dtype=_DTYPES[dtype]).astype(np.float64).reshape(shape)


def read_tensors(path: Path) -> dict[str, Floats]:
    """Every tensor of one safetensors file. Raise ModelError when it is truncated or no safetensors file."""
    from safetensors import SafetensorError, deserialize

    try:
        entries = deserialize(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Fetch it again") from error
    return {name: to_float64(bytes(e["data"]), e["dtype"], tuple(e["shape"]), name) for name, e in entries}


def load(source: Path) -> NumpyModel:
    """The model in folder `source`. Raise ModelError that says what is missing or damaged."""
    if not source.is_dir():
        raise ModelError(f"{source} is no folder; the numpy backend reads folders of safetensors (for .gguf use the torch backend)")
    config = config_from_hf(read_json(source / "config.json"))
    weights: dict[str, Floats] = {}
    for path in weight_files(source):
        weights.update(read_tensors(path))
    check_layers(weights, config.num_layers)
    return NumpyModel(config, weights, name=source.name)
