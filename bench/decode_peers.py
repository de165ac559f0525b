"""What people use instead, measured beside our own decoding."""

from __future__ import annotations

import time

import torch

from dustin.backends.torch_triton.cuda_random import QWEN2_7B


def transformers_rate(batch: int, context: int) -> float:
    """Tokens per second of transformers' generate (sdpa) with a cache of random rows; the model is built on the device."""
    from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

    c = QWEN2_7B
    config = Qwen2Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.context_length, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    cache = DynamicCache()
    for layer in range(c.num_layers):
        shape = (batch, c.num_kv_heads, context, c.head_dim)
        cache.update(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)), layer)
    tokens = torch.randint(0, 1000, (batch, context + 1), device="cuda")
    times = []
    for new in (3, 3, 11):
        cache.crop(context)
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(tokens, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 8 * batch / (times[2] - times[1])
