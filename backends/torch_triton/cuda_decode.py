"""The blocks of a decoder at a few rows: five launches a block, for DeviceForward to use where they are faster.

Numerics are those of the plain path: fp32 sums, the residual stream in the dtype of the weights, rounded after each add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_cache import PagePool
from dustin.backends.torch_triton.weights import Layer, Weights
from dustin.triton_kernels.attention_core import AttentionConfig
from dustin.triton_kernels.decode_linear import DTYPES, MAX_ROWS, LinearConfig, LinearScratch, Stream
from dustin.triton_kernels.linear_add import depth_of_split, linear_add
from dustin.triton_kernels.norm_linear import norm_gate_up, norm_qkv
from dustin.triton_kernels.runtime import power_of_two
from dustin.triton_kernels.stream_rows import embed_rows

# Wider models are bound by the bytes of their weights, which the library reads faster (7B, 32 rows, gate and up: 78 against
# 109 us on an H200); narrower ones by launches (0.5B, 32 rows: 0.96 against 1.13 ms a step).
MAX_HIDDEN = 2048


def choose_config(product: str, rows: int, depth: int, half_head: int) -> LinearConfig:
    """The measured configuration of a product at M = `rows` rows of `depth` elements (an H200, the shapes of a 0.5B model)."""
    few, some = rows <= 16, rows <= 32
    if product == "qkv":
        # Halves of a head are turned against each other in one tile: it must divide them.
        return LinearConfig(16 if few and half_head % 16 == 0 else 8, 128, num_warps=2 if some else 4, num_stages=7)
    if product == "gate_up":
        # Asking for all of these weights early only crowds out what the kernel before reads.
        if rows <= 8:
            return LinearConfig(32, 128, num_stages=4, prefetch_bytes=0)
        if some and not few:
            return LinearConfig(64, 64, num_warps=8, num_stages=6, swap=True, prefetch_bytes=0)
        return LinearConfig(32, 64, num_stages=6, swap=True, prefetch_bytes=0)
    if product == "output":
        return LinearConfig(8 if few else 16, 128, num_warps=2 if some else 4, num_stages=7)
    if few:
        return LinearConfig(32, 128, splits=max(1, round(depth / 608)), num_stages=5)
    if some:
        return LinearConfig(64, 128, splits=max(1, round(depth / 972)), num_stages=6, swap=True, prefetch_bytes=0)
    return LinearConfig(64, 64, splits=max(1, round(depth / 695)), num_stages=8, swap=True, prefetch_bytes=0)


def attention_config(base: AttentionConfig, batch: int, num_kv_heads: int, packed_rows: int, head_dim: int) -> AttentionConfig:
    """Sparse attention of a draft step: one tile of rows and short splits, merged by the last program, measured fastest."""
    if packed_rows > 16 or head_dim > 64 or not base.ahead:
        return base
    if batch * num_kv_heads <= 16:
        # Two splits, merged by the last: at few sequences each further arrival costs more than it reads.
        return replace(base, block_n=128, num_warps=4, num_stages=3, fused_splits=8, max_splits=2)
    if batch * num_kv_heads >= 64:
        return replace(base, block_n=64, num_warps=2, num_stages=3)
    return replace(base, block_n=128, num_warps=4, num_stages=3, fused_splits=8)


def supports(config: ModelConfig, weights: Weights) -> bool:
    """Whether a model can run so: 16-bit weights, no QK-norm, no bias on the gated product, rows that 16-byte copies read."""
    layers = weights.layers
    if config.qk_norm or config.head_dim % 16:
        return False
    aligned = all(n % 8 == 0 for n in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim))
    return weights.embedding.dtype in DTYPES and aligned and all(layer.gate_up.bias is None for layer in layers)


class DecodeBlocks:
    """The blocks of one model over one page pool, at up to `max_rows` rows. Scratch is shared by all layers."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: PagePool, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.config, self.weights, self.pool = config, weights, pool
        self._cos, self._sin = cos, sin
        self.max_rows = MAX_ROWS if config.hidden_size <= MAX_HIDDEN else 0
        self._scratch: dict[int, LinearScratch] = {}
        # Configurations to use instead of the chosen ones (the benchmark tries some).
        self.overrides: dict[str, LinearConfig] = {}

    def configs(self, rows: int) -> dict[str, LinearConfig]:
        """The configuration of each product at `rows` rows."""
        c = self.config
        q_size = c.num_heads * c.head_dim
        depths = {"qkv": c.hidden_size, "output": q_size, "gate_up": c.hidden_size, "down": c.intermediate_size}
        chosen = {name: choose_config(name, rows, depth, c.head_dim // 2) for name, depth in depths.items()}
        return {**chosen, **self.overrides}

    def scratch(self, rows: int) -> LinearScratch:
        """Scratch for `rows` rows, made once (before a capture)."""
        if rows not in self._scratch:
            c, configs = self.config, self.configs(rows)
            tiles = partials = 1
            for name, depth in (("output", c.num_heads * c.head_dim), ("down", c.intermediate_size)):
                config = configs[name]
                count = triton.cdiv(c.hidden_size, config.block_n)
                splits = triton.cdiv(depth, depth_of_split(depth, config))
                tiles = max(tiles, count)
                partials = max(partials, count * splits * power_of_two(rows, 16) * config.block_n)
            self._scratch[rows] = LinearScratch(tiles * rows, partials, tiles, self.weights.embedding.device)
        return self._scratch[rows]

    def run(
        self,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        attend: Callable[[torch.Tensor, int], torch.Tensor],
        keep: Callable[[int, torch.Tensor], None],
    ) -> Stream:
        """All blocks on tokens [B, T]; the stream after them is ready for the last norm.

        `attend(q, layer)` gives attention [B, T, Hq, D] of the queries; `keep(layer, q)` sees the queries of every layer.
        """
        layers, eps = self.weights.layers, self.config.rms_norm_eps
        rows = tokens.numel()
        configs = self.configs(rows)
        stream = embed_rows(tokens, self.weights.embedding, layers[0].input_norm, self.scratch(rows))
        paging = (page_table, lengths, num_tokens, self._cos, self._sin)
        for i, layer in enumerate(layers):
            q = norm_qkv(
                stream, layer.qkv.weight, layer.qkv.bias, self.pool.keys[i], self.pool.values[i], *paging,
                eps=eps, config=configs["qkv"],
            )  # fmt: skip
            keep(i, q)
            following = layers[i + 1].input_norm if i + 1 < len(layers) else self.weights.norm
            self._finish(layer, attend(q, i).view(rows, -1), stream, following, configs)
        return stream

    def _finish(
        self, layer: Layer, attended: torch.Tensor, stream: Stream, following: torch.Tensor, configs: dict[str, LinearConfig]
    ) -> None:
        """Output projection and MLP of a block."""
        linear_add(attended, layer.output.weight, layer.output.bias, stream, layer.mlp_norm, config=configs["output"])
        gated = norm_gate_up(stream, layer.gate_up.weight, eps=self.config.rms_norm_eps, config=configs["gate_up"])
        linear_add(gated, layer.down.weight, layer.down.bias, stream, following, config=configs["down"])
