"""A tiny random Llama on disk: config.json, model.safetensors, a byte-level tokenizer.json and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """One token a byte, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return core


def write(
    folder: Path, *, special: tuple[str, ...] = SPECIAL, seed: int = 0, template: str | None = TEMPLATE, **changes: Any
) -> Path:
    """Write the model into `folder`; `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    core = byte_tokenizer(special)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": core.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    names = {"bos_token": special[1], "eos_token": special[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | ({"chat_template": template} if template else {})))
    core.save(str(folder / "tokenizer.json"))
    save_file(_weights(config, np.random.default_rng(seed)), str(folder / "model.safetensors"))
    return folder


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, value = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def random(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    weights = {"model.embed_tokens.weight": random(config["vocab_size"], hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": np.ones(hidden, np.float32),
            at + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            at + "self_attn.q_proj.weight": random(query, hidden),
            at + "self_attn.k_proj.weight": random(value, hidden),
            at + "self_attn.v_proj.weight": random(value, hidden),
            at + "self_attn.o_proj.weight": random(hidden, query),
            at + "mlp.gate_proj.weight": random(inner, hidden),
            at + "mlp.up_proj.weight": random(inner, hidden),
            at + "mlp.down_proj.weight": random(hidden, inner),
        }
    return weights
