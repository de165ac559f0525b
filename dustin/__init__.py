"""Dustin: long-context generation with draft-augmented sparse verification (arXiv 2606.24957).

Nothing here imports torch, mlx or triton: a backend is imported when a model is loaded.
"""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout the sibling folders backends/, triton_kernels/ and metal_kernels/ are dustin.backends and so on.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "triton_kernels").is_dir():
    __path__.append(str(_root))

_EXPORTS = {
    "load": "dustin.generation",
    "generate": "dustin.generation",
    "Session": "dustin.generation",
    "GenerationResponse": "dustin.generation",
    "GenerationResult": "dustin.generation",
    "EngineOptions": "dustin.config",
    "RequestOptions": "dustin.config",
    "SamplingOptions": "dustin.config",
    "DustinError": "dustin.errors",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    import importlib

    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dustin' has no attribute {name!r}")
