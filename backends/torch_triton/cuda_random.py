"""Models of given shapes with random weights: speed does not depend on the numbers, only on the shapes."""

from __future__ import annotations

import torch

from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.weights import Layer, Linear, Weights


def qwen2_config(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    *,
    context_length: int = 133120,
    tied_embeddings: bool = False,
) -> ModelConfig:
    """A Qwen2 decoder (biases on q, k, v; no QK-norm, no windows) of the given shape."""
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        context_length=context_length,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qk_norm=False,
        tied_embeddings=tied_embeddings,
        windows=(None,) * num_layers,
    )


QWEN2_7B = qwen2_config(3584, 18944, 28, 28, 4, 152064)
QWEN2_1_5B = qwen2_config(1536, 8960, 28, 12, 2, 151936, tied_embeddings=True)
QWEN2_0_5B = qwen2_config(896, 4864, 24, 14, 2, 151936, tied_embeddings=True)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Normal weights of standard deviation 1/sqrt(in) (norms 1, small biases on q, k, v), made on the device itself."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)

    def linear(rows: int, columns: int, bias: bool = False) -> Linear:
        weight = matrix(rows, columns, columns**-0.5)
        return Linear(weight, matrix(1, rows, 0.1)[0] if bias else None)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers = tuple(
        Layer(
            input_norm=ones(c.hidden_size),
            qkv=linear(q_size + 2 * kv_size, c.hidden_size, bias=c.architecture == "Qwen2ForCausalLM"),
            q_norm=ones(c.head_dim) if c.qk_norm else None,
            k_norm=ones(c.head_dim) if c.qk_norm else None,
            output=linear(c.hidden_size, q_size),
            mlp_norm=ones(c.hidden_size),
            gate_up=linear(2 * c.intermediate_size, c.hidden_size),
            down=linear(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.num_layers)
    )
    embedding = matrix(c.vocab_size, c.hidden_size, 1.0)
    head = Linear(embedding, None) if c.tied_embeddings else linear(c.vocab_size, c.hidden_size)
    return Weights(embedding, layers, ones(c.hidden_size), head)
