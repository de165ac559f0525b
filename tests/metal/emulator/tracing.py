"""The exact kernel that MLX generates, read from an export trace: no Metal device is needed.

`mx.export_function(callback, f, *arrays)` records `mx.fast.metal_kernel` calls with name, full source, grid and threadgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TracedKernel:
    """One dispatch as MLX would make it. `grid` and `group` count threads; `inputs`/`outputs` are (shape, dtype name)."""

    name: str
    source: str
    grid: tuple[int, int, int]
    group: tuple[int, int, int]
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    needs: tuple[tuple[bool, bool, bool], ...]  # per input: passes shape, strides, ndim
    row_contiguous: bool


def dtype_name(dtype: Any) -> str:
    """'float16' of mlx.core.float16."""
    return str(dtype).rsplit(".", 1)[-1]


def trace(function: Callable[..., Any], *arrays: Any) -> list[TracedKernel]:
    """Every custom kernel that `function(*arrays)` would dispatch, in order. Needs mlx; runs nothing."""
    import mlx.core as mx

    found: list[TracedKernel] = []

    def callback(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event.get("name") == "CustomKernel":
            found.append(_kernel(event))

    mx.export_function(callback, function, *arrays)
    return found


def _kernel(event: dict[str, Any]) -> TracedKernel:
    a: Sequence[Any] = event["arguments"]
    return TracedKernel(
        name=a[0],
        source=a[1],
        grid=tuple(a[2:5]),
        group=tuple(a[5:8]),
        inputs=tuple((tuple(s), dtype_name(d)) for _, s, d in event["inputs"]),
        outputs=tuple((tuple(s), dtype_name(d)) for _, s, d in event["outputs"]),
        needs=tuple(tuple(i) for i in a[8]),
        row_contiguous=bool(a[9]),
    )
