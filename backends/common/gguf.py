"""GGUF files: metadata to ModelConfig, tensors dequantised one at a time to float32 numpy under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dustin.backends.common.config import ModelConfig
from dustin.errors import ModelError

Floats = npt.NDArray[np.float32]
Fetch = Callable[[str], Floats | None]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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


def open_gguf(path: Path) -> tuple[ModelConfig, Fetch]:
    """The configuration and a reader of single tensors. Raise ModelError on a damaged file or an unsupported architecture."""
    import gguf

    if not path.is_file():
        raise ModelError(f"{path} is no file: give the path of a .gguf file or a model folder")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is no readable GGUF file (truncated?): {error}. Fetch it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = None
    if "rope_freqs.weight" in tensors:
        factors = tuple(float(x) for x in tensors["rope_freqs.weight"].data)
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    config = config_from_gguf(fields, path, "output.weight" not in tensors, factors, len(tokens.data) if tokens else None)

    def fetch(name: str) -> Floats | None:
        tensor = tensors.get(gguf_name(name))
        if tensor is None:
            return None
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, NotImplementedError) as error:
            raise ModelError(f"tensor {tensor.name} of {path} cannot be dequantised: {error}") from error
        out = np.array(values, dtype=np.float32)
        if config.architecture == "LlamaForCausalLM" and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj"):
            out = unpermute(out, config.num_heads if "q_proj" in name else config.num_kv_heads)
        return out

    return config, fetch


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

    heads, layers, hidden = get("attention.head_count"), get("block_count"), get("embedding_length")
    if fields.get(f"{kind}.expert_count"):
        raise ModelError(f"{path} is a mixture of experts, expected a dense {kind} model")
    vocab = fields.get(f"{kind}.vocab_size", num_tokens)
    if vocab is None:
        raise ModelError(f"{path} has neither {kind}.vocab_size nor a token list")
    head_dim = get("attention.key_length", hidden // heads)
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
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=get("context_length"),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        tied_embeddings=tied,
        windows=(window,) * layers,
    )
