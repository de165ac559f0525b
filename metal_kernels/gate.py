"""Chooses kernel or array path per chip and shape: measured once, checked numerically, kept on disk, overridable.

A token gather that loses at 8k may win at 64k, so no fixed rule is shipped. Apple speed is unmeasured: on a Mac the first call
of a shape measures (a few milliseconds to a second), later runs read the file. `DUSTIN_METAL_GATE` = kernel, array or auto.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .source import HERE

TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}  # two paths against each other: twice one path's own
VERSION = 1


@dataclass(frozen=True)
class Decision:
    """`path` is "kernel" or "array"; `reason` says why in words; times in milliseconds (0 when not measured)."""

    path: str
    reason: str
    kernel_ms: float = 0.0
    array_ms: float = 0.0


def bucket(n: int) -> int:
    """The power of two at or above n: shapes within a bucket share a decision."""
    return 1 << max(0, n - 1).bit_length()


def chip_name() -> str | None:
    """Metal device name, or None where Metal is absent."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    return str(info.get("device_name", "unknown"))


@functools.cache
def source_hash() -> str:
    """Hash of every .metal text: a changed kernel is measured again."""
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.metal")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def default_path() -> Path:
    """$DUSTIN_CACHE/metal_gate.json, or ~/.cache/dustin/metal_gate.json."""
    root = os.environ.get("DUSTIN_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "dustin") / "metal_gate.json"


class Gate:
    """Decisions by (chip, mlx version, kernel texts, operation, shape). `mode` None reads DUSTIN_METAL_GATE (default auto)."""

    def __init__(
        self,
        mode: str | None = None,
        path: Path | None = None,
        chip: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        mode = mode or os.environ.get("DUSTIN_METAL_GATE") or "auto"
        if mode not in ("kernel", "array", "auto"):
            raise ValueError(f"DUSTIN_METAL_GATE: expected kernel, array or auto, got {mode!r}")
        self.mode, self.path, self.clock = mode, path or default_path(), clock
        self.chip = chip if chip is not None else chip_name()
        self._known: dict[str, Decision] | None = None

    def decide(
        self, operation: str, shape: dict[str, int | str], kernel: Callable[[], Any], array: Callable[[], Any]
    ) -> Decision:
        """The path for `operation` at `shape` (its "dtype" picks the tolerance). Runs both callables only when undecided."""
        if self.mode != "auto":
            return Decision(self.mode, "set by DUSTIN_METAL_GATE or the caller")
        if self.chip is None:
            return Decision("array", "Metal is not available here")
        key = self._key(operation, shape)
        known = self._load()
        if key not in known:
            known[key] = self._measure(str(shape["dtype"]), kernel, array)
            self._save()
        return known[key]

    def _key(self, operation: str, shape: dict[str, int | str]) -> str:
        import mlx.core as mx

        parts = [self.chip, mx.__version__, source_hash(), operation, *(f"{k}={shape[k]}" for k in sorted(shape))]
        return "|".join(str(p) for p in parts)

    def _measure(self, dtype: str, kernel: Callable[[], Any], array: Callable[[], Any]) -> Decision:
        import mlx.core as mx

        try:
            got = kernel().astype(mx.float32)
            mx.eval(got)
        except (RuntimeError, ValueError) as error:  # a pipeline this chip cannot build: say so and go on
            return Decision("array", f"the kernel failed: {str(error)[:200]}")
        want = array().astype(mx.float32)
        error = mx.sqrt(mx.mean(mx.square(got - want))) / mx.maximum(mx.sqrt(mx.mean(mx.square(want))), 1e-30)
        if not error.item() <= TOLERANCE[dtype]:  # NaN fails too
            return Decision(
                "array", f"the kernel's numbers differ: relative RMS {error.item():.3g} above {TOLERANCE[dtype]}"
            )
        times = [self._time(f) for f in (kernel, array)]
        faster = "kernel" if times[0] <= times[1] else "array"
        return Decision(faster, "measured", *times)

    def _time(self, function: Callable[[], Any], runs: int = 5) -> float:
        import mlx.core as mx

        best = float("inf")
        for _ in range(runs):
            start = self.clock()
            mx.eval(function())
            best = min(best, self.clock() - start)
        return best * 1e3

    def _load(self) -> dict[str, Decision]:
        if self._known is None:
            self._known = {}
            try:
                stored = json.loads(self.path.read_text())
                if stored.get("version") == VERSION:
                    self._known = {k: Decision(**d) for k, d in stored["decisions"].items()}
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                self._known = {}  # absent or damaged: measure again
        return self._known

    def _save(self) -> None:
        content = {"version": VERSION, "decisions": {k: asdict(d) for k, d in (self._known or {}).items()}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(content, indent=1))
            part.replace(self.path)
        except OSError:
            pass  # a read-only home costs a measurement per run, nothing else
