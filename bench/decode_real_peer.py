"""What people use instead, on the same real weights and the same keys and values: transformers' generate (sdpa)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bench.decode_real import Cell
    from dustin.backends.torch_triton.weights import Weights

# Generated for the measurement, beyond as many in a run that is subtracted.
FEW, MORE = 3, 19


def transformers_model(model: Any) -> Any:
    """A Qwen2 model of transformers over the weights of `model` (ours), which it shares."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    c = model.config
    config = Qwen2Config(
        vocab_size=model.spec.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.context_length, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    if c.architecture != "Qwen2ForCausalLM" or (c.rope_scaling or {}).get("rope_type", "default") != "default":
        raise ValueError(f"{model.spec.name} is {c.architecture} (rope scaling {c.rope_scaling}), expected Qwen2 without scaling")
    with torch.device(model.device):
        made = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa").eval()
    made.load_state_dict(state_dict(model.weights, c.num_heads * c.head_dim, model.spec.vocab_size), assign=True)
    return made


def state_dict(weights: Weights, q_size: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Our fused weights under transformers' names, as views."""
    state = {
        "model.embed_tokens.weight": weights.embedding[:vocabulary], "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head.weight[:vocabulary],
    }  # fmt: skip
    for i, layer in enumerate(weights.layers):
        name = f"model.layers.{i}."
        kv_size = (len(layer.qkv.weight) - q_size) // 2
        for part, weight, bias in zip(
            "qkv", layer.qkv.weight.split([q_size, kv_size, kv_size]), layer.qkv.bias.split([q_size, kv_size, kv_size]), strict=True
        ):
            state |= {f"{name}self_attn.{part}_proj.weight": weight, f"{name}self_attn.{part}_proj.bias": bias}
        gate, up = layer.gate_up.weight.chunk(2)
        state |= {
            f"{name}self_attn.o_proj.weight": layer.output.weight, f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up, f"{name}mlp.down_proj.weight": layer.down.weight,
            f"{name}input_layernorm.weight": layer.input_norm, f"{name}post_attention_layernorm.weight": layer.mlp_norm,
        }  # fmt: skip
    return state


def transformers_run(model: Any, ours: Any, cell: Cell) -> tuple[float, list[list[int]]]:
    """Tokens a second of all rows, and the first tokens of each. Prompts are cut to the shortest: transformers pads them anyway."""
    from transformers import DynamicCache

    source = cell.caches["target"]
    shortest = min(source.lengths)
    cache = DynamicCache()
    for layer in range(ours.config.num_layers):
        rows = [source._where(b, shortest) for b in range(cell.batch)]
        stores = source.pool.keys[layer], source.pool.values[layer]
        cache.update(*(torch.stack([store[where] for where in rows]).transpose(1, 2) for store in stores), layer)
    tokens = torch.tensor([prompt[: shortest + 1] for prompt in cell.prompts], device=ours.device)
    seconds, made = {}, tokens
    for new in (FEW, FEW, MORE):
        cache.crop(shortest)
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        seconds[new] = time.perf_counter() - began
    rate = (MORE - FEW) * cell.batch / (seconds[MORE] - seconds[FEW])
    return rate, made[:, tokens.shape[1] :].tolist()
