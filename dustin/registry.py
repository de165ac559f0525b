"""Backends by name, imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from typing import cast

from dustin.errors import UsageError
from dustin.interfaces import Backend
from dustin.interrupts import held
from dustin.launch import kind

BACKENDS = {
    "numpy": "dustin.backends.numpy_reference.backend",
    "torch": "dustin.backends.torch_triton.backend",
    "mlx": "dustin.backends.mlx_metal.backend",
}
# What to do when a backend's libraries are not there.
_INSTALL = {
    "mlx": 'install "dustin-llm[mlx]" (on Linux mlx[cpu] or mlx[cuda13], never plain mlx, and mlx-lm), or use --backend torch',
}

# What `create` gives where several ranks run: rank 0's backend.
PARALLEL = {"torch": "dustin.backends.torch_triton.parallel_run", "mlx": "dustin.backends.mlx_metal.parallel"}
_RANKS = {"torch": "dustin.backends.torch_triton.ranks", "mlx": "dustin.backends.mlx_metal.ranks"}


def choose() -> str:
    """What `auto` means here: mlx on Apple silicon where mlx and mlx-lm are installed, else torch."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return "mlx" if apple and all(importlib.util.find_spec(module) for module in ("mlx", "mlx_lm")) else "torch"


def create(name: str = "auto", device: str = "auto") -> Backend:
    """The backend `name` on `device`; `auto` is the ranks' own, else what `choose` says. Raise UsageError with the reason."""
    if name == "auto":
        name = kind() or choose()
    if name not in BACKENDS:
        raise UsageError(f"backend is {name!r}, expected {', '.join(['auto', *BACKENDS])}")
    path = BACKENDS[name]
    if started := kind():
        if name != started:
            starter = "mlx.launch" if started == "mlx" else "torchrun and --tensor-parallel"
            raise UsageError(f"backend is {name!r}, expected {started}: {starter} split models over ranks of the {started} backend")
        path = PARALLEL[started]
    try:
        with held():
            module = importlib.import_module(path)
    except ImportError as error:
        hint = _INSTALL.get(name, "run `dustin doctor` to see what is missing")
        raise UsageError(f"backend {name!r} cannot be used here: {error}: {hint}") from error
    return cast(Backend, module.create(device))


def join_ranks() -> None:
    """Wait for the other ranks of this run. Raise RankError when they do not come."""
    importlib.import_module(_RANKS[kind() or "torch"]).join()


def leave_ranks() -> None:
    """On rank 0: let the other ranks go."""
    importlib.import_module(_RANKS[kind() or "torch"]).leave()


def follow() -> None:
    """On another rank: mirror rank 0 until it lets go. Raise RankError naming the rank that failed first."""
    importlib.import_module(PARALLEL[kind() or "torch"]).follow()
