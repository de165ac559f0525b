"""How the ranks of tensor parallelism share a model: whole heads, columns of the MLP, a span of the vocabulary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from dustin.backends.torch_triton.config import ModelConfig
from dustin.errors import ModelError, UsageError


@dataclass(frozen=True)
class Part:
    """Entries start..stop-1 of axis `dim`, which has `total` of them."""

    dim: int
    start: int
    stop: int
    total: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor. Raise ModelError when the axis has another size."""
        self.check(tuple(tensor.shape))
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ModelError when the axis is missing or has another size than `total`."""
        if self.dim >= len(shape) or shape[self.dim] != self.total:
            raise ModelError(f"a tensor has shape {shape}, expected {self.total} entries along axis {self.dim}")


@dataclass(frozen=True)
class Shard:
    """What one of `size` ranks holds of a model: whole heads, a share of the MLP and of the vocabulary (Megatron's split).

    Where there are more ranks than kv heads, several ranks hold the same kv head.
    """

    rank: int = 0
    size: int = 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """The shapes of this rank. Raise UsageError naming what the ranks cannot share evenly."""
        c, n = config, self.size
        for what, count in (("query heads", c.num_heads), ("MLP columns", c.intermediate_size)):
            if count % n:
                raise UsageError(f"{n} ranks cannot share {count} {what} evenly: use {_numbers_that_fit(c)} ranks")
        if not _kv_fits(c, n):
            raise UsageError(f"{n} ranks cannot share {c.num_kv_heads} kv heads evenly: use {_numbers_that_fit(c)} ranks")
        return dataclasses.replace(
            c,
            num_heads=c.num_heads // n,
            num_kv_heads=max(1, c.num_kv_heads // n),
            intermediate_size=c.intermediate_size // n,
        )

    def part(self, count: int, unit: int = 1, dim: int = 0) -> Part | None:
        """This rank's even share of `count` groups of `unit` entries; None (all of it) for a single rank."""
        if self.size == 1:
            return None
        share = count // self.size * unit
        return Part(dim, self.rank * share, (self.rank + 1) * share, count * unit)

    def kv_part(self, num_kv_heads: int, head_dim: int) -> Part | None:
        """Rows of this rank's kv heads; ranks beyond their number hold copies."""
        if self.size == 1:
            return None
        first = self.rank * num_kv_heads // self.size
        held = max(1, num_kv_heads // self.size)
        return Part(0, first * head_dim, (first + held) * head_dim, num_kv_heads * head_dim)

    def vocabulary(self, size: int) -> tuple[int, int]:
        """First token of this rank and tokens a rank (the last ranks may have fewer, padded with zeros)."""
        share = -(-size // self.size)
        return self.rank * share, share


def _kv_fits(config: ModelConfig, ranks: int) -> bool:
    return not (config.num_kv_heads % ranks and ranks % config.num_kv_heads)


def _numbers_that_fit(config: ModelConfig) -> str:
    c = config
    numbers = [n for n in range(1, c.num_heads + 1) if not (c.num_heads % n or c.intermediate_size % n) and _kv_fits(c, n)]
    return ", ".join(str(n) for n in numbers[:-1]) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])
