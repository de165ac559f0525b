"""Rotary position embedding: inverse frequencies of each scaling kind, tables of cos and sin, and the rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dustin.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn")


def _llama3(base: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, the band between interpolated."""
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / base
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    kept = torch.where(wavelength < old / high, base, between)
    return torch.where(wavelength > old / low, base / factor, kept)


def _yarn(
    base: torch.Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any], context_length: int
) -> tuple[torch.Tensor, float]:
    """Frequencies that turn often enough over the original context are kept, the rest divided by `factor`; a ramp between."""
    factor = float(scaling["factor"])
    old = scaling.get("original_max_position_embeddings") or context_length

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float64)
    ramp = ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)

    def attention_scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given, mscale, all_dim = (scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    amplitude = attention_scale(mscale) / attention_scale(all_dim) if mscale and all_dim else attention_scale()
    return base * (1 - ramp) + base / factor * ramp, amplitude if given is None else float(given)


def frequencies(theta: float, head_dim: int, scaling: Mapping[str, Any] | None, context_length: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [D/2] fp64 (radians a position) and the factor on cos and sin. Raise ModelError on an unknown kind.

    `scaling["frequency_factors"]` [D/2] (GGUF files carry them) divide the frequencies.
    """
    base = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    settings: Mapping[str, Any] = scaling or {}
    if settings.get("frequency_factors") is not None:
        base = base / torch.as_tensor(settings["frequency_factors"], dtype=torch.float64)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"RoPE scaling is {kind!r}, expected one of {', '.join(KINDS)}")
    try:
        if kind == "linear":
            return base / settings["factor"], 1.0
        if kind == "llama3":
            return _llama3(base, settings), 1.0
        if kind == "yarn":
            return _yarn(base, theta, head_dim, settings, context_length)
    except KeyError as error:
        raise ModelError(f"RoPE scaling {kind!r} lacks {error}: the model's configuration is incomplete") from error
    return base, 1.0


def table(positions: torch.Tensor, inverse: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [R, 1, D] fp32 of positions [R]; the first half of sin is negated, as `rotate` wants it."""
    angle = positions[:, None].double() * inverse
    cos, sin = (angle.cos() * amplitude).float(), (angle.sin() * amplitude).float()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [R, H, D] with each pair (i, i + D/2) turned; computed in fp32, returned in x's dtype."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
