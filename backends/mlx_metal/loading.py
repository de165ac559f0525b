"""mlx-lm's own model classes, filled from a folder (mlx-community's quantised ones too) or from a GGUF file."""

from __future__ import annotations

import dataclasses
import importlib
import resource
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dustin.backends.common.config import ModelConfig, config_from_hf
from dustin.backends.common.folders import read_json, weight_files
from dustin.backends.common.gguf import Fetch, open_gguf
from dustin.errors import ModelError, UsageError

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# The architectures of config_from_hf, by the name of mlx-lm's definition.
DEFINITIONS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_KINDS = ("default", "linear", "llama3", "yarn")


def choose_dtype(name: str) -> mx.Dtype | None:
    """The dtype of weights, activations and KV cache; None means the model's own. Raise UsageError on an unknown name.

    `auto` on the CPU is fp32: measured there, 4-bit products are 7 times slower in bf16 and 36 times in fp16.
    """
    if name == "auto":
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}, expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def import_mlx_lm() -> None:
    """Import mlx-lm, whose first act is to lower this process's limit of open files to 2048; a server needs its own."""
    if "mlx_lm" in sys.modules:
        return
    theirs = resource.setrlimit
    resource.setrlimit = lambda *_: None  # type: ignore[assignment]
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = theirs


def load(source: Path, dtype: mx.Dtype | None) -> tuple[Any, ModelConfig, str]:
    """(mlx-lm model, its weights in memory; configuration; name). Raise ModelError that names what is missing or unsupported."""
    import_mlx_lm()
    if source.suffix == ".gguf":
        config, fetch, _ = open_gguf(source)
        check(config, source)
        model, name = _from_gguf(config, fetch, source, dtype or mx.bfloat16), source.stem
    elif source.is_dir():
        raw = read_json(source / "config.json")
        config = folder_config(raw)
        check(config, source)
        model, name = _from_folder(config, raw, source), source.resolve().name
    else:
        raise ModelError(f"{source} is neither a folder of safetensors nor a .gguf file")
    if dtype is not None:
        model.set_dtype(dtype)
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise ModelError(f"the weights of {source} cannot be read: {error}. Fetch the model again") from error
    return model.eval(), config, name


def folder_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json; the quantisation that mlx-lm writes is its business, any other is refused with ModelError."""
    kept = dict(raw)
    if "quantization" in kept:
        kept.pop("quantization_config", None)
    elif "quantization_config" in kept:
        method = (kept["quantization_config"] or {}).get("quant_method", "unknown")
        raise ModelError(
            f"the weights are quantised by {method!r}, expected plain ones or MLX's own: take an mlx-community folder, a .gguf "
            "file, or convert the original with `mlx_lm.convert -q`"
        )
    return config_from_hf(kept)


def check(config: ModelConfig, source: Path) -> None:
    """Raise ModelError naming what this backend cannot run, before any weight is read."""
    sliding = [i for i, window in enumerate(config.windows) if window is not None and window < config.context_length]
    if sliding:
        raise ModelError(
            f"{source} slides its attention in {len(sliding)} of {config.num_layers} layers (window {config.windows[sliding[0]]}): "
            "the mlx backend has no rotating cache that can roll back; use --backend torch"
        )
    if config.architecture == "Qwen2ForCausalLM" and config.head_dim * config.num_heads != config.hidden_size:
        raise ModelError(
            f"head_dim is {config.head_dim}, expected hidden_size / heads = {config.hidden_size // config.num_heads}: mlx-lm's "
            "qwen2 knows no other; use --backend torch"
        )
    _rope_scaling(config)


def arguments(config: ModelConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that mlx-lm's ModelArgs read, from a ModelConfig; `raw` adds what only some definitions know (biases)."""
    # Written out because mlx-lm's defaults differ by family, and newer files nest rope_theta where its llama does not look.
    return raw | {
        "model_type": DEFINITIONS[config.architecture],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "rope_parameters": None,
        "tie_word_embeddings": config.tied_embeddings,
        "layer_types": None,
        "sliding_window": None,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """mlx-lm's form of the RoPE scaling. Raise ModelError on a kind or setting that it has not."""
    settings = dict(config.rope_scaling or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _KINDS:
        raise ModelError(f"RoPE scaling is {kind!r}, expected one of {', '.join(_KINDS)}")
    if kind == "default":
        return None
    odd = [name for name in ("attention_factor", "frequency_factors") if settings.get(name) is not None]
    odd += ["truncate"] if not settings.get("truncate", True) else []
    if odd:
        raise ModelError(f"RoPE scaling {kind!r} sets {', '.join(odd)}, which mlx-lm ignores: use --backend torch")
    needed = {"linear": ("factor",), "yarn": ("factor",)}.get(
        kind, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    for name in needed:
        if name not in settings:
            raise ModelError(f"RoPE scaling {kind!r} lacks {name!r}: the model's configuration is incomplete")
    if kind == "yarn" and not settings.get("original_max_position_embeddings"):
        settings["original_max_position_embeddings"] = config.context_length
    return {k: v for k, v in settings.items() if v is not None} | {"type": kind, "rope_type": kind}


def _from_folder(config: ModelConfig, raw: dict[str, Any], source: Path) -> Any:
    from mlx_lm.utils import load_model
    from safetensors import SafetensorError, safe_open

    files = weight_files(source)
    if not any(path.name.startswith("model") for path in files):
        raise ModelError(f"{files[0]}: mlx-lm reads files named model*.safetensors alone; rename it")
    for path in files:
        try:
            safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            # MLX reads lazily, and older versions fill up a truncated file with whatever is in memory.
            raise ModelError(f"{path} cannot be read: {error}. Fetch it again") from error
    try:
        return load_model(source, lazy=True, model_config=arguments(config, raw))[0]
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"{source} cannot be loaded: {_short(error)}") from error


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:400] + " ..."


def _from_gguf(config: ModelConfig, fetch: Fetch, source: Path, dtype: mx.Dtype) -> Any:
    """The definition filled tensor by tensor, each dequantised and cast before the next is read."""
    definition = importlib.import_module(f"mlx_lm.models.{DEFINITIONS[config.architecture]}")
    plain = dataclasses.replace(config, rope_scaling={**(config.rope_scaling or {}), "frequency_factors": None})
    model = definition.Model(definition.ModelArgs.from_dict(arguments(plain, {})))
    weights = []
    for name, blank in tree_flatten(model.parameters()):
        values = fetch(name)
        if values is None:
            raise ModelError(f"tensor {name} is missing in {source}, expected shape {blank.shape}: the model is incomplete")
        if values.shape != blank.shape:
            raise ModelError(f"tensor {name} of {source} has shape {values.shape}, expected {blank.shape}")
        tensor = mx.array(values).astype(dtype)
        mx.eval(tensor)
        weights.append((name, tensor))
    model.load_weights(weights)
    factors = (config.rope_scaling or {}).get("frequency_factors")
    if factors is not None:
        turn = FactoredRope(config.head_dim, config.rope_theta, factors)
        for layer in model.layers:
            layer.self_attn.rope = turn
    return model


class FactoredRope:
    """RoPE whose frequencies a file divides by factors of its own [D/2] (Llama 3 as GGUF has its scaling in that form)."""

    def __init__(self, head_dim: int, theta: float, factors: tuple[float, ...]) -> None:
        self._dim = head_dim
        self._wavelengths = theta ** (mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim) * mx.array(factors)

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x [B, H, T, D] turned to the positions from `offset` (int or [B]) on."""
        return mx.fast.rope(x, self._dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._wavelengths)
