"""Kernel text from the .metal files beside this module, and kernel objects whose names carry the hash of their source.

MLX runs stale code when two sources share a name in one process, hence the hash. Values that change from call to call
(lengths, counts, scale) are inputs, never template arguments, so nothing is compiled again when a length changes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUTPUT_FORMS = {
    "direct": "#define OUTPUTS out, (device float*)nullptr, (device float*)nullptr\n",
    "split": "#define OUTPUTS (device T*)nullptr, partial, stats\n",
}


@functools.cache
def text(name: str) -> str:
    """Contents of `name`.metal. ValueError for a character MLX cannot compile (it wants ASCII)."""
    content = (HERE / f"{name}.metal").read_text(encoding="utf-8")
    if not content.isascii():
        raise ValueError(f"{name}.metal: expected ASCII, got other characters; remove them")
    return content


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    header: str | None = None,
    prefix: str = "",
    file: str | None = None,
) -> Any:
    """The MLX kernel object of `file`.metal (default `name`), with `header`.metal and `prefix` before it. Needs mlx.

    Inputs are never made contiguous by MLX (that would copy a sliced cache on every call): the texts use strides for caches,
    and launchers pass the small arrays through `contiguous`.
    """
    import mlx.core as mx

    # Keyed by the constructor too: a tool that replaces it gets its own objects.
    return _kernel(
        mx.fast.metal_kernel,
        name,
        tuple(inputs),
        tuple(outputs),
        prefix + (text(header) if header else ""),
        text(file or name),
    )


@functools.lru_cache(maxsize=256)
def _kernel(make: Any, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], header: str, body: str) -> Any:
    digest = hashlib.sha256("\0".join((header, body, *inputs, *outputs)).encode()).hexdigest()[:12]
    return make(
        name=f"dustin_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous=False,
    )


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> Any:
    import mlx.core as mx

    return mx.array(value, mx.float32)


def scalar(value: float) -> Any:
    """A 0-d float32 input (a reference in the kernel), made once a value."""
    return _scalar(float(value))


def contiguous(array: Any) -> Any:
    """Row-contiguous form of a small array; free when it is contiguous already. Never call it on a cache."""
    import mlx.core as mx

    return mx.contiguous(array)
