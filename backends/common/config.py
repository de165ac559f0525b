"""Shape of a decoder and how it is read from a Hugging Face config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dustin.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of a decoder. `windows[i]` is the sliding width of layer i in tokens (None = full attention)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads is {self.num_heads}, expected a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, expected an even number: RoPE turns pairs")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"windows has {len(self.windows)} entries, expected one for each of {self.num_layers} layers")


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a field of a config.json that is missing or no number of its kind."""
    for name in (*_COUNTS, "rms_norm_eps", "rope_theta"):
        value, whole = config.get(name), name in _COUNTS
        if value is None and name not in _OPTIONAL:
            raise ModelError(f"config.json lacks {name!r}: the model folder is incomplete")
        kinds = (int,) if whole else (int, float)
        if value is not None and (type(value) not in kinds or not value >= (1 if whole else 1e-30)):
            expected = "a whole number from 1 on" if whole else "a number above 0"
            raise ModelError(f"config.json has {value!r} as {name}, expected {expected}")


def check_layers(names: Iterable[str], num_layers: int) -> None:
    """Raise ModelError where weights of these names have a layer that their configuration knows nothing of."""
    found = (re.match(r"model\.layers\.(\d+)\.", name) for name in names)
    last = max((int(match[1]) for match in found if match), default=-1)
    if last >= num_layers:
        raise ModelError(f"config.json has {num_layers} layers, but the weights have a layer {last}: they are of different models")


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding width of each layer. Mistral slides everywhere, Qwen where it is switched on, and then from a layer on."""
    window = config.get("sliding_window")
    if not window or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if i >= config.get("max_window_layers", 0) else None for i in range(num_layers))


def shape_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a parsed config.json that every backend's ModelConfig has. Raise ModelError on an unsupported architecture or
    activation, and as `check_numbers` does."""
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture is {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {config['hidden_act']!r}, expected silu")
    check_numbers(config)
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    num_heads = config["num_attention_heads"]
    return {
        "architecture": architecture,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "context_length": config["max_position_embeddings"],
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "rope_theta": float(config.get("rope_theta") or (scaling or {}).get("rope_theta") or 10000.0),
        "rope_scaling": scaling,
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "windows": _windows(config, architecture, config["num_hidden_layers"]),
    }


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed config.json. Raise ModelError on an unsupported architecture, switch or missing field."""
    shape = shape_fields(config)
    if config.get("attn_logit_softcapping"):
        raise ModelError("attn_logit_softcapping is set, expected none: this backend has no softcap in attention")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor is {config['partial_rotary_factor']}, expected 1: RoPE turns whole heads")
    if "quantization_config" in config:
        raise ModelError("quantization_config is set, expected plain fp32, fp16 or bf16 weights (or a .gguf file)")
    return ModelConfig(**shape)
