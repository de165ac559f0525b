"""Tensors of a GGUF file as float32 numpy arrays, whole or in parts: only the part's blocks are read, on several threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dustin.errors import ModelError
from dustin.gguf_metadata import TensorPlace

Floats = npt.NDArray[np.float32]

# Values that one call of the library dequantises: large enough that numpy works and not Python, small enough for a cache.
_PIECE = 1 << 17
_MOST_THREADS = 16


def threads() -> int:
    """Threads that dequantise: this process's share of the cores, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST_THREADS, cores // max(1, int(here) if here.isdigit() else 1)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), thread_name_prefix="dequantise")


class TensorFile:
    """The tensors of one file, mapped; nothing is read before it is asked for."""

    def __init__(self, path: Path, places: Mapping[str, TensorPlace]) -> None:
        """Raise ModelError where a tensor has a kind that is not known, a broken row, or lies beyond the file's end."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._path, self._places = path, places
        self._kinds: dict[str, Any] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        size = path.stat().st_size
        for name, place in places.items():
            try:
                kind = GGMLQuantizationType(place.kind)
                values, width = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError) as error:
                raise ModelError(f"tensor {name} of {path} is of GGML type {place.kind}, which this gguf package lacks") from error
            if 0 in place.shape:
                raise ModelError(f"tensor {name} of {path} has shape {place.shape}: the file is damaged. Fetch it again")
            if place.shape[-1] % values:
                raise ModelError(f"tensor {name} of {path} has rows of {place.shape[-1]}, expected a multiple of {values}")
            count = int(np.prod(place.shape, dtype=object))
            if place.offset + count // values * width > size:
                raise ModelError(f"{path} is truncated: tensor {name} ends beyond its {size} bytes. Fetch it again")
            self._kinds[name], self._sizes[name] = kind, (values, width)
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r"))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._places[name].shape

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Floats:
        """Entries start..stop-1 of axis `dim` (0 or the last). Raise ModelError where it cannot be dequantised."""
        place, (values, width) = self._places[name], self._sizes[name]
        columns = place.shape[-1]
        count = int(np.prod(place.shape)) // columns
        raw = self._bytes[place.offset : place.offset + count * columns // values * width].reshape(count, -1)
        stop = place.shape[dim] if stop is None else stop
        if dim == len(place.shape) - 1:
            # Whole blocks, of which the ends may be cut off again.
            first, last = start // values, -(-stop // values)
            found = self._dequantised(name, raw[:, first * width : last * width], (last - first) * values)
            found = found[:, start - first * values : stop - first * values]
            return np.ascontiguousarray(found).reshape(*place.shape[:-1], stop - start)
        rows = count // place.shape[0]
        found = self._dequantised(name, raw[start * rows : stop * rows], columns)
        return found.reshape(stop - start, *place.shape[1:])

    def _dequantised(self, name: str, raw: npt.NDArray[np.uint8], columns: int) -> Floats:
        """[rows, columns] of raw blocks [rows, bytes]."""
        from gguf.quants import dequantize

        kind, out = self._kinds[name], np.empty((len(raw), columns), np.float32)

        def fill(first: int) -> None:
            part = np.ascontiguousarray(raw[first : first + step])
            # One row: the library goes over rows in small groups, which costs more than the arithmetic.
            out[first : first + step] = dequantize(part.reshape(1, -1), kind).reshape(len(part), columns)

        step = max(1, _PIECE // max(1, columns))
        try:
            if 0 < len(raw) <= step and columns:
                fill(0)
            elif out.size:
                list(_pool().map(fill, range(0, len(raw), step)))
        except (ValueError, NotImplementedError) as error:
            raise ModelError(f"tensor {name} of {self._path} cannot be dequantised: {error}") from error
        return out
