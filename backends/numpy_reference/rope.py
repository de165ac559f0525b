"""Rotary position embedding: inverse frequencies of each scaling kind, and the rotation of half pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dustin.backends.numpy_reference.cache import Floats
from dustin.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn")


def _llama3(base: Floats, scaling: Mapping[str, Any]) -> Floats:
    """Long wavelengths are stretched by `factor`, short ones kept, the band between interpolated."""
    old = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi / base
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    return np.where(wavelength > old / low, base / factor, np.where(wavelength < old / high, base, between))


def _yarn(base: Floats, theta: float, head_dim: int, scaling: Mapping[str, Any], context_length: int) -> tuple[Floats, float]:
    """Frequencies that turn often enough over the original context are kept, the rest divided by `factor`; a ramp between."""
    factor = float(scaling["factor"])
    old = scaling.get("original_max_position_embeddings") or context_length

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0, 1)

    def attention_scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given, mscale, all_dim = (scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    amplitude = attention_scale(mscale) / attention_scale(all_dim) if mscale and all_dim else attention_scale()
    return base * (1 - ramp) + base / factor * ramp, amplitude if given is None else given


def frequencies(theta: float, head_dim: int, scaling: Mapping[str, Any] | None, context_length: int) -> tuple[Floats, float]:
    """Inverse frequencies [D/2] (radians a position) and the factor on cos and sin. Raise ModelError on an unknown kind."""
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = "default" if not scaling else scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"RoPE scaling is {kind!r}, expected one of {', '.join(KINDS)}")
    try:
        if kind == "linear":
            return base / (scaling or {})["factor"], 1.0
        if kind == "llama3":
            return _llama3(base, scaling or {}), 1.0
        if kind == "yarn":
            return _yarn(base, theta, head_dim, scaling or {}, context_length)
    except KeyError as error:
        raise ModelError(f"RoPE scaling {kind!r} lacks {error}: its config.json is incomplete") from error
    return base, 1.0


def rotate(x: Floats, position: int, inverse: Floats, amplitude: float) -> Floats:
    """x [H, D] turned to `position`: pair (i, i + D/2) by the angle position * inverse[i]."""
    angle = position * np.concatenate([inverse, inverse])
    first, second = np.split(x, 2, axis=-1)
    return amplitude * (x * np.cos(angle) + np.concatenate([-second, first], axis=-1) * np.sin(angle))
