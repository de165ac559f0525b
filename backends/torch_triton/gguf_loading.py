"""GGUF files as torch tensors: backends.common.gguf reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from dustin.backends.common import gguf
from dustin.backends.common.config import ModelConfig
from dustin.backends.torch_triton.sharding import Part
from dustin.backends.torch_triton.weights import Fetch


def open_gguf(path: Path) -> tuple[ModelConfig, Fetch]:
    """The configuration and a reader of single tensors. Raise ModelError on a damaged file or an unsupported architecture."""
    config, read, shape = gguf.open_gguf(path)

    def fetch(name: str, part: Part | None = None) -> torch.Tensor | None:
        whole = shape(name)
        if whole is None:
            return None
        if part is None:
            values = read(name)
        else:
            part.check(whole)
            values = read(name, part.dim, part.start, part.stop)
        return None if values is None else torch.from_numpy(values)

    return config, fetch
