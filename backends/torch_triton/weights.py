"""Weights of a decoder with q, k, v and gate, up fused: one matrix product each instead of three and two."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dustin.backends.torch_triton.config import ModelConfig
from dustin.errors import ModelError
from dustin.interfaces import ModelSpec

Fetch = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    """One block: qkv [(Hq + 2 Hkv) D, H], output [H, Hq D], gate_up [2 I, H], down [H, I], norms [H], q_norm and k_norm [D]."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """embedding [V, H], layers, norm [H], head [V, H] (the embedding itself where they are tied)."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, a tied head counted once."""
        tensors = {id(t): t for t in _tensors(self)}
        return sum(t.numel() * t.itemsize for t in tensors.values())


def _tensors(item: object) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, tuple):
        return [t for part in item for t in _tensors(part)]
    if dataclasses.is_dataclass(item):
        return [t for f in dataclasses.fields(item) for t in _tensors(getattr(item, f.name))]
    return []


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """sha256 of the configuration, the dtype and some numbers of every tensor: stable over runs, cheap for any size."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode())
    for tensor in _tensors(weights):
        flat = tensor.flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def spec_of(config: ModelConfig, weights: Weights, name: str) -> ModelSpec:
    """What the engine needs to know of a model with these weights."""
    dtype = weights.embedding.dtype
    return ModelSpec(
        name=name,
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        dtype=str(dtype).removeprefix("torch."),
        fingerprint=fingerprint(config, weights),
        sliding_layers=tuple(i for i, window in enumerate(config.windows) if window),
        bytes_per_kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize,
        weight_bytes=weights.num_bytes,
    )


class _Reader:
    def __init__(self, fetch: Fetch, dtype: torch.dtype, device: torch.device) -> None:
        self._fetch, self._dtype, self._device = fetch, dtype, device

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._fetch(name)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing, expected shape {shape}: the model is incomplete")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} has dtype {tensor.dtype}, expected fp32, fp16 or bf16")
        return tensor.to(self._device, self._dtype).contiguous()

    def linear(self, prefix: str, parts: list[tuple[str, int]], columns: int) -> Linear:
        """The named matrices [rows, columns] stacked; biases where the model has them."""
        weight = torch.cat([self(f"{prefix}{name}.weight", rows, columns) for name, rows in parts])
        found = [self._fetch(f"{prefix}{name}.bias") is not None for name, _ in parts]
        if not any(found):
            return Linear(weight, None)
        return Linear(weight, torch.cat([self(f"{prefix}{name}.bias", rows) for name, rows in parts]))


def build(config: ModelConfig, fetch: Fetch, dtype: torch.dtype, device: torch.device) -> Weights:
    """All weights in `dtype` on `device`, read one after the other. Raise ModelError on a missing tensor or a wrong shape."""
    c, read = config, _Reader(fetch, dtype, device)
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    embedding = read("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    layers = []
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        layers.append(
            Layer(
                input_norm=read(f"{prefix}input_layernorm.weight", c.hidden_size),
                qkv=read.linear(attention, [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)], c.hidden_size),
                q_norm=read(f"{attention}q_norm.weight", c.head_dim) if c.qk_norm else None,
                k_norm=read(f"{attention}k_norm.weight", c.head_dim) if c.qk_norm else None,
                output=read.linear(attention, [("o_proj", c.hidden_size)], q_size),
                mlp_norm=read(f"{prefix}post_attention_layernorm.weight", c.hidden_size),
                gate_up=read.linear(mlp, [("gate_proj", c.intermediate_size), ("up_proj", c.intermediate_size)], c.hidden_size),
                down=read.linear(mlp, [("down_proj", c.hidden_size)], c.intermediate_size),
            )
        )
    head = embedding if c.tied_embeddings else read("lm_head.weight", c.vocab_size, c.hidden_size)
    return Weights(embedding, tuple(layers), read("model.norm.weight", c.hidden_size), Linear(head, None))
