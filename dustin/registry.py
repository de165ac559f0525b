"""Backends by name, imported when asked for."""

from __future__ import annotations

import importlib
from typing import cast

from dustin.errors import UsageError
from dustin.interfaces import Backend
from dustin.launch import world_size

BACKENDS = {
    "numpy": "dustin.backends.numpy_reference.backend",
    "torch": "dustin.backends.torch_triton.backend",
}

# What `create` gives where several ranks run: rank 0's backend.
PARALLEL = "dustin.backends.torch_triton.parallel_run"
_RANKS = "dustin.backends.torch_triton.ranks"


def create(name: str = "auto", device: str = "auto") -> Backend:
    """The backend `name` on `device`; `auto` is torch. Raise UsageError with the reason."""
    if name == "mlx":
        raise UsageError("backend 'mlx' is not in this version (its Metal kernels are, see metal_kernels): use --backend torch")
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise UsageError(f"backend is {name!r}, expected auto, {' or '.join(BACKENDS)}")
    path = BACKENDS[name]
    if world_size() > 1:
        if name != "torch":
            raise UsageError(f"backend is {name!r}, expected torch: tensor parallelism runs on the torch backend")
        path = PARALLEL
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise UsageError(
            f"backend {name!r} cannot be used here: {error}. Run `dustin doctor` to see what is missing"
        ) from error
    return cast(Backend, module.create(device))


def join_ranks() -> None:
    """Wait for the other ranks of this run. Raise RankError when they do not come."""
    importlib.import_module(_RANKS).join()


def leave_ranks() -> None:
    """On rank 0: let the other ranks go."""
    importlib.import_module(_RANKS).leave()


def follow() -> None:
    """On another rank: mirror rank 0 until it lets go. Raise RankError naming the rank that failed first."""
    importlib.import_module(PARALLEL).follow()
