"""Mode `own` of bench decode: verification whose layers choose sets of their own in the forward, by compact keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import torch

from dustin.backends.torch_triton.compact_keys import CompactKeys, fit
from dustin.backends.torch_triton.cuda_model import CudaModel
from dustin.backends.torch_triton.reselection import Rechoice

if TYPE_CHECKING:
    from bench.decode import DecodeBench

RANK = 64
# Rows of random queries and keys that the compact keys are fitted to, and rows encoded at once.
FITTED = 1024
CHUNK = 65536


def encoded(model: CudaModel, pool: Any) -> CompactKeys:
    """Compact keys for random ones, fitted and filled in for the whole pool: what is read has real scores."""
    config, device = model.config, model.device
    gen = torch.Generator(device).manual_seed(0)
    q = torch.randn(FITTED, config.num_heads, config.head_dim, device=device, generator=gen)
    k = torch.randn(FITTED, config.num_kv_heads, config.head_dim, device=device, generator=gen)
    layers = range(config.num_layers)
    one = fit({0: q}, {0: k}, RANK, model._inverse, config.context_length)
    # Each layer its own copies, as in use: they share no cache lines.
    made = CompactKeys(RANK, *({i: part[0].clone() for i in layers} for part in (one.mean, one.encode, one.decode)))
    stores = pool.compact.setdefault(made, {})
    for layer in layers:
        keys = pool.keys[layer].flatten(0, 1)
        codes = stores[layer] = torch.zeros(*keys.shape[:2], RANK // 2, dtype=torch.int8, device=device)
        for first in range(0, len(keys), CHUNK):
            codes[first : first + CHUNK] = made.codes_of(layer, keys[first : first + CHUNK])
    return made


def layers_of(text: str, count: int) -> tuple[int, ...]:
    """`7,12` as layers of a model of `count`. Raise click.BadParameter on anything else."""
    try:
        layers = tuple(sorted({int(part) for part in text.split(",") if part}))
    except ValueError:
        layers = (-1,)
    if any(not 0 <= layer < count for layer in layers):
        raise click.BadParameter(f"--own-layers is {text!r}, expected layers of 0 to {count - 1} as 7,12")
    return layers


def choice(bench: DecodeBench, budget: int) -> Rechoice:
    """The kv heads of every layer of the target, of `bench.choosing` layers for those after them too, or of `bench.own_layers`
    alone, choose `budget` tokens; the compact keys are made at first use."""
    model = bench.target
    if bench.compact is None:
        bench.compact = encoded(model, model.new_cache(1, 64).pool)
    heads, count = tuple(range(model.config.num_heads)), model.config.num_layers
    if bench.own_layers:
        return Rechoice(tuple((i, heads) for i in bench.own_layers), budget, 4, 32, 16, bench.compact, True)
    chosen = bench.choosing or count
    layers = tuple((i * count // chosen, heads) for i in range(chosen))
    return Rechoice(layers, budget, 4, 32, 16, bench.compact, True, chosen < count)
