"""The blocks of a decoder at a few rows: five launches a block, for DeviceForward to use where they are faster.

Numerics are those of the plain path: fp32 sums, the residual stream in the dtype of the weights, rounded after each add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_cache import PagePool
from dustin.backends.torch_triton.weights import Layer, Weights
from dustin.triton_kernels.decode_linear import DTYPES, MAX_ROWS, LinearConfig, LinearScratch, Stream
from dustin.triton_kernels.linear_add import depth_of_split, linear_add
from dustin.triton_kernels.norm_linear import norm_gate_up, norm_qkv
from dustin.triton_kernels.runtime import power_of_two
from dustin.triton_kernels.stream_rows import embed_rows


def choose_config(product: str, rows: int, columns: int, depth: int, half_head: int) -> LinearConfig:
    """The configuration of a product for rows [M, depth] and weight [columns, depth] (of gate_up: each half)."""
    if product in ("qkv", "gate_up"):
        block_n = min(half_head, 16) if product == "qkv" else 32
        return LinearConfig(block_n, 128, num_warps=4, num_stages=4)
    splits = max(1, min(8, depth // 1024))
    return LinearConfig(16, 128, splits=splits, num_warps=4, num_stages=5)


def supports(config: ModelConfig, weights: Weights) -> bool:
    """Whether a model can run so: 16-bit weights, no QK-norm, no bias on the gated product, rows that 16-byte copies read."""
    layers = weights.layers
    if config.qk_norm:
        return False
    aligned = all(n % 8 == 0 for n in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim))
    return weights.embedding.dtype in DTYPES and aligned and all(layer.gate_up.bias is None for layer in layers)


class DecodeBlocks:
    """The blocks of one model over one page pool, at up to `max_rows` rows. Scratch is shared by all layers."""

    max_rows = 0

    def __init__(self, config: ModelConfig, weights: Weights, pool: PagePool, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.config, self.weights, self.pool = config, weights, pool
        self._cos, self._sin = cos, sin
        self._scratch: dict[int, LinearScratch] = {}
        # Configurations to use instead of the chosen ones (the benchmark tries some).
        self.overrides: dict[str, LinearConfig] = {}

    def configs(self, rows: int) -> dict[str, LinearConfig]:
        """The configuration of each product at `rows` rows."""
        c = self.config
        q_size = c.num_heads * c.head_dim
        shapes = {
            "qkv": (q_size + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
            "output": (c.hidden_size, q_size),
            "gate_up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
        chosen = {name: choose_config(name, rows, *shape, c.head_dim // 2) for name, shape in shapes.items()}
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
