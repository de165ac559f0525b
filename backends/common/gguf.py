"""GGUF files: metadata to ModelConfig, tensors dequantised one at a time (or in parts) under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dustin.backends.common.config import ModelConfig
from dustin.backends.common.gguf_tensors import Floats, TensorFile
from dustin.errors import ModelError
from dustin.gguf_metadata import read_tables

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MOST_LAYERS = 10_000
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF name of a tensor: model.layers.3.mlp.up_proj.weight is blk.3.ffn_up.weight."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def unpermute(tensor: Floats, num_heads: int) -> Floats:
    """Rows [H * D, ...] of a llama q or k from GGUF's order (pairs side by side) to ours (halves)."""
    rest = tensor.shape[1:]
    return np.ascontiguousarray(tensor.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(tensor.shape))


class Fetch(Protocol):
    """Reads one tensor, or entries start..stop-1 of its axis `dim`, by its Hugging Face name; None where there is no such tensor.

    Parts of q and k must be whole heads.
    """

    def __call__(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Floats | None: ...


def open_gguf(path: Path) -> tuple[ModelConfig, Fetch, Callable[[str], tuple[int, ...] | None]]:
    """The configuration, a reader of tensors and parts, and their shapes by name (None where there is no such tensor).

    Raise ModelError on a damaged file or an unsupported architecture.
    """
    if not path.is_file():
        raise ModelError(f"{path} is no file: give the path of a .gguf file or a model folder")
    fields, places = read_tables(path)
    file = TensorFile(path, places)
    factors = None
    if "rope_freqs.weight" in file:
        factors = tuple(float(x) for x in file.read("rope_freqs.weight"))
    tokens = fields.get("tokenizer.ggml.tokens")
    config = config_from_gguf(fields, path, "output.weight" not in file, factors, len(tokens) if tokens else None)

    def shape(name: str) -> tuple[int, ...] | None:
        return file.shape(gguf_name(name)) if gguf_name(name) in file else None

    def fetch(name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Floats | None:
        if gguf_name(name) not in file:
            return None
        out = file.read(gguf_name(name), dim, start, stop)
        turned = config.architecture == "LlamaForCausalLM" and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj")
        # Of another size than heads have the caller refuses it.
        if turned and not (config.head_dim % 2 or len(out) % config.head_dim):
            out = unpermute(out, len(out) // config.head_dim)
        return out

    return config, fetch, shape


def config_from_gguf(
    fields: dict[str, Any],
    path: Path,
    tied: bool,
    factors: tuple[float, ...] | None,
    num_tokens: int | None,
) -> ModelConfig:
    """ModelConfig of GGUF metadata. Raise ModelError naming the architecture or the missing key."""
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(f"architecture of {path} is {kind!r}, expected one of {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{key}", default)
        if value is None:
            raise ModelError(f"{path} lacks the key {kind}.{key}: the file is damaged or incomplete")
        return value

    def size(key: str, default: Any = None, most: int = 1 << 31) -> int:
        value = get(key, default)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(f"{kind}.{key} of {path} is {value!r}, expected a number from 1 to {most}: the file is damaged")
        return value

    heads, layers, hidden = size("attention.head_count"), size("block_count", most=_MOST_LAYERS), size("embedding_length")
    if fields.get(f"{kind}.expert_count"):
        raise ModelError(f"{path} is a mixture of experts, expected a dense {kind} model")
    vocab = fields.get(f"{kind}.vocab_size", num_tokens)
    if vocab is None:
        raise ModelError(f"{path} has neither {kind}.vocab_size nor a token list")
    head_dim = size("attention.key_length", hidden // heads)
    if fields.get(f"{kind}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path} turns part of a head (rope.dimension_count), expected all {head_dim} dimensions")
    scaling: dict[str, Any] = {"rope_type": "default", "frequency_factors": factors}
    scaling_type = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling_type != "none":
        scaling |= {"rope_type": scaling_type, "factor": get("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = fields.get(f"{kind}.rope.scaling.original_context_length")
    window = fields.get(f"{kind}.attention.sliding_window") or None
    return ModelConfig(
        architecture=ARCHITECTURES[kind],
        vocab_size=int(vocab),
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=size("context_length"),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        tied_embeddings=tied,
        windows=(window,) * layers,
    )
