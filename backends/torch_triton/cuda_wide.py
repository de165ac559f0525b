"""The products of a model too wide for DecodeBlocks at few rows, by the kernel or the library, whichever was measured faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dustin.backends.torch_triton.cuda_fused import silu_gate
from dustin.backends.torch_triton.weights import Linear, Weights
from dustin.triton_kernels.decode_linear import MAX_ROWS
from dustin.triton_kernels.runtime import power_of_two
from dustin.triton_kernels.wide_linear import WideConfig, WideScratch, few_programs, scratch_sizes, wide_linear

# By the rows that a tile is made for. All products of a pass of 7B on one H200, library -> these: 4.49 -> 4.06 ms at one row,
# 4.71 -> 4.22 at 16, 4.71 -> 4.48 at 32, 4.77 -> 4.58 at 40. From 128 rows on the library is faster throughout.
CONFIGS: dict[int, dict[str, WideConfig]] = {
    16: {
        "qkv": WideConfig(64, 128, splits=3, num_stages=4),
        "output": WideConfig(64, 128, splits=4, num_stages=4),
        "gate_up": WideConfig(64, 64),
        "down": WideConfig(64, 128, splits=2, num_stages=6),
    },
    32: {"gate_up": WideConfig(64, 64), "output": WideConfig(64, 128, splits=2, num_stages=6)},
    64: {"gate_up": WideConfig(64, 64)},
}


class WideProducts:
    """Products of one model's layers; scratch is shared by all of them and made at the first use of a number of rows."""

    def __init__(self, weights: Weights, whole: bool) -> None:
        """`whole`: the weights are no rank's share."""
        first = weights.layers[0]
        sixteen = all(linear.weight.shape[1] % 8 == 0 for linear in (first.qkv, first.output, first.down))
        self.max_rows = MAX_ROWS if whole and sixteen and few_programs(first.gate_up.weight) else 0
        self._scratch: dict[tuple[int, ...], WideScratch] = {}

    def linear(self, product: str, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """x [R, in] times the layer's weight [out, in], plus its bias."""
        config = self._config(product, x)
        if config is None:
            return F.linear(x, layer.weight, layer.bias)
        return wide_linear(x, layer.weight, layer.bias, config=config, scratch=self._scratch_for(x, layer, config))

    def gated(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """silu(x gate) * (x up) [R, I] of a weight that holds both."""
        config = self._config("gate_up", x)
        if config is None or layer.bias is not None:
            return silu_gate(F.linear(x, layer.weight, layer.bias))
        return wide_linear(x, layer.weight, gate=True, config=config)

    def _config(self, product: str, x: torch.Tensor) -> WideConfig | None:
        return CONFIGS[power_of_two(len(x), 16)].get(product) if len(x) <= self.max_rows else None

    def _scratch_for(self, x: torch.Tensor, layer: Linear, config: WideConfig) -> WideScratch:
        sizes = scratch_sizes(len(x), *layer.weight.shape, config)
        if sizes not in self._scratch:
            self._scratch[sizes] = WideScratch(*sizes, x.device)
        return self._scratch[sizes]
