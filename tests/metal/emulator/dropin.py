"""A stand-in for mx.fast.metal_kernel: calls run in the emulator at once and return ordinary arrays.

    with installed() as log:      # log.reports: one Report a dispatch
        model(tokens)

The source, grid and threadgroup are those MLX itself generates (export tracing), inputs keep their strides, and kernels that
declare `// writes:` change the buffers of the arrays they were given, as on Metal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .build import compiler
from .launch import Report, run
from .tracing import TracedKernel, dtype_name, trace


@dataclass
class Log:
    """Everything that ran, with the settings used. `transform` may rewrite a traced kernel first (seeded faults do).

    `execute` False only records the kernels; outputs are zeros.
    """

    execute: bool = True
    observe: Callable[[TracedKernel, list[np.ndarray], Report], None] | None = (
        None  # kernel, inputs before it ran, report
    )
    check: bool = True
    strict: bool = True
    order: str = "forward"
    transform: Callable[[TracedKernel], TracedKernel] | None = None
    on_device: bool = False  # True where kernels ran on Metal itself: then nothing is recorded
    reports: list[Report] = field(default_factory=list)
    kernels: list[TracedKernel] = field(default_factory=list)

    @property
    def findings(self) -> list:
        """All findings of all dispatches."""
        return [f for r in self.reports for f in r.findings]

    def report(self, name: str) -> Report:
        """The last report of a kernel whose name contains `name`."""
        return next(r for r in reversed(self.reports) if name in r.name)


def to_numpy(array: Any) -> np.ndarray:
    """A view of an evaluated CPU array with its strides; bfloat16 as uint16 bits."""
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    return np.array(array, copy=False)


def from_numpy(array: np.ndarray, dtype: str) -> Any:
    """An mlx array of `dtype` from host values (bfloat16 from uint16 bits)."""
    import mlx.core as mx

    made = mx.array(array)
    return made.view(mx.bfloat16) if dtype == "bfloat16" else made


class EmulatedKernel:
    """What the replaced mx.fast.metal_kernel returns: called like the real object."""

    def __init__(self, real: Any, log: Log) -> None:
        self._real, self._log, self._traces = real, log, {}

    def __call__(
        self,
        *,
        inputs: list[Any],
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        **kw: Any,
    ):
        import mlx.core as mx

        inputs = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        key = str(([(a.shape, a.dtype) for a in inputs], sorted(kw.items())))
        if key not in self._traces:
            blank = [mx.zeros(a.shape, a.dtype) for a in inputs]
            (self._traces[key],) = trace(lambda *a: self._real(inputs=list(a), **kw), *blank)
        kernel = self._traces[key]
        log = self._log
        if log.transform:
            kernel = log.transform(kernel)
        log.kernels.append(kernel)
        report = Report(kernel.name)
        if log.execute:
            views = [to_numpy(a) for a in inputs]
            before = [v.copy() for v in views] if log.observe else []
            report = run(kernel, views, order=log.order, check=log.check, strict=log.strict, init_value=init_value)
            log.reports.append(report)
            if log.observe:
                log.observe(kernel, before, report)
        outputs = report.outputs or [np.zeros(s, np.uint16 if d == "bfloat16" else d) for s, d in kernel.outputs]
        return [from_numpy(o, d) for o, (_, d) in zip(outputs, kernel.outputs, strict=True)]


@contextlib.contextmanager
def installed(**settings: Any) -> Iterator[Log]:
    """Within the block mx.fast.metal_kernel makes EmulatedKernel objects. Settings are the fields of Log.

    Where there is Metal and no emulator (a Mac) kernels run on the device and the log stays empty.
    """
    import mlx.core as mx

    log = Log(**settings)
    if log.execute and compiler() is None and mx.metal.is_available():
        log.on_device = True
        yield log
        return
    real = mx.fast.metal_kernel

    def make(*args: Any, **kw: Any) -> EmulatedKernel:
        return EmulatedKernel(real(*args, **kw), log)

    mx.fast.metal_kernel = make
    try:
        yield log
    finally:
        mx.fast.metal_kernel = real


__all__ = ["EmulatedKernel", "Log", "dtype_name", "from_numpy", "installed", "to_numpy"]
