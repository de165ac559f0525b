"""Backends by name, imported when asked for."""

from __future__ import annotations

import importlib
from typing import cast

from dustin.errors import UsageError
from dustin.interfaces import Backend

BACKENDS = {
    "numpy": "dustin.backends.numpy_reference.backend",
    "torch": "dustin.backends.torch_triton.backend",
}


def create(name: str = "auto", device: str = "auto") -> Backend:
    """The backend `name` on `device`; `auto` is torch. Raise UsageError with the reason."""
    if name == "mlx":
        raise UsageError("backend 'mlx' is not in this version (its Metal kernels are, see metal_kernels): use --backend torch")
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise UsageError(f"backend is {name!r}, expected auto, {' or '.join(BACKENDS)}")
    try:
        module = importlib.import_module(BACKENDS[name])
    except ImportError as error:
        raise UsageError(
            f"backend {name!r} cannot be used here: {error}. Run `dustin doctor` to see what is missing"
        ) from error
    return cast(Backend, module.create(device))
