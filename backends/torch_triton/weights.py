"""Weights of a decoder with q, k, v and gate, up fused: one matrix product each instead of three and two."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Protocol

import torch

from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.sharding import Part, Shard
from dustin.errors import ModelError
from dustin.interfaces import ModelSpec


class Fetch(Protocol):
    """Reads one tensor, or one part of it, by its Hugging Face name; None where the model has no such tensor."""

    def __call__(self, name: str, part: Part | None = None) -> torch.Tensor | None: ...


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

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """The tensor `name`, whose shape in all is `shape`, or the part of it."""
        tensor = self._fetch(name, part)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing, expected shape {shape}: the model is incomplete")
        wanted = tuple(part.stop - part.start if part and i == part.dim else n for i, n in enumerate(shape))
        if tuple(tensor.shape) != wanted:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {wanted}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} has dtype {tensor.dtype}, expected fp32, fp16 or bf16")
        return tensor.to(self._device, self._dtype).contiguous()

    def linear(self, prefix: str, parts: list[tuple[str, int, Part | None]], columns: int) -> Linear:
        """The named matrices [rows, columns] stacked, of each the given rows; biases where the model has them."""
        weight = torch.cat([self(f"{prefix}{name}.weight", rows, columns, part=part) for name, rows, part in parts])
        found = [self._fetch(f"{prefix}{name}.bias") is not None for name, _, _ in parts]
        if not any(found):
            return Linear(weight, None)
        return Linear(weight, torch.cat([self(f"{prefix}{name}.bias", rows, part=part) for name, rows, part in parts]))

    def columns(self, name: str, rows: int, columns: int, part: Part | None) -> Linear:
        """A matrix [rows, columns] of which this rank multiplies some columns; one rank alone adds the bias."""
        weight = self(f"{name}.weight", rows, columns, part=part)
        biased = self._fetch(f"{name}.bias") is not None and (part is None or part.start == 0)
        return Linear(weight, self(f"{name}.bias", rows) if biased else None)

    def vocabulary(self, name: str, size: int, columns: int, shard: Shard) -> torch.Tensor:
        """Rows of this rank's tokens, padded with zeros to the same number on every rank."""
        if shard.size == 1:
            return self(name, size, columns)
        start, share = shard.vocabulary(size)
        held = self(name, size, columns, part=Part(0, min(start, size), min(start + share, size), size))
        return torch.cat([held, held.new_zeros(share - len(held), columns)])


def build(config: ModelConfig, fetch: Fetch, dtype: torch.dtype, device: torch.device, shard: Shard | None = None) -> Weights:
    """The weights of one rank (all of them without `shard`) in `dtype` on `device`, read one after the other.

    `config` is the whole model's. Raise ModelError on a missing tensor or a wrong shape.
    """
    c, read, shard = config, _Reader(fetch, dtype, device), shard or Shard()
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q_part, kv_part = shard.part(c.num_heads, c.head_dim), shard.kv_part(c.num_kv_heads, c.head_dim)
    mlp_part = shard.part(c.intermediate_size)
    embedding = read.vocabulary("model.embed_tokens.weight", c.vocab_size, c.hidden_size, shard)
    layers = []
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        projections = [("q_proj", q_size, q_part), ("k_proj", kv_size, kv_part), ("v_proj", kv_size, kv_part)]
        gates = [(name, c.intermediate_size, mlp_part) for name in ("gate_proj", "up_proj")]
        layers.append(
            Layer(
                input_norm=read(f"{prefix}input_layernorm.weight", c.hidden_size),
                qkv=read.linear(attention, projections, c.hidden_size),
                q_norm=read(f"{attention}q_norm.weight", c.head_dim) if c.qk_norm else None,
                k_norm=read(f"{attention}k_norm.weight", c.head_dim) if c.qk_norm else None,
                output=read.columns(f"{attention}o_proj", c.hidden_size, q_size, shard.part(c.num_heads, c.head_dim, dim=1)),
                mlp_norm=read(f"{prefix}post_attention_layernorm.weight", c.hidden_size),
                gate_up=read.linear(mlp, gates, c.hidden_size),
                down=read.columns(f"{mlp}down_proj", c.hidden_size, c.intermediate_size, shard.part(c.intermediate_size, dim=1)),
            )
        )
    head = embedding if c.tied_embeddings else read.vocabulary("lm_head.weight", c.vocab_size, c.hidden_size, shard)
    return Weights(embedding, tuple(layers), read("model.norm.weight", c.hidden_size), Linear(head, None))
