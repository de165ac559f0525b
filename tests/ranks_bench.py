"""One rank of `bench tensor_parallel` on CPUs: interpreted kernels, gloo, tiny shapes, fake clocks. Not a test by itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from bench import decode, decode_exact, tensor_parallel
from dustin.backends.torch_triton.cuda_random import qwen2_config
from dustin.backends.torch_triton.ranks import Ranks

TINY = qwen2_config(256, 64, 3, 16, 8, 1040, context_length=512)
TINY_DRAFT = qwen2_config(448, 64, 3, 14, 2, 1032, context_length=512, tied_embeddings=True)


class Eager:
    """Stands for Captured."""

    def __init__(self, function: Any, *_: Any) -> None:
        self.seconds, self._function = 0.0, function
        self.outputs = function()

    def __call__(self) -> Any:
        return self._function()


def once(function: Any, *_: Any) -> float:
    """Stands for gpu_ms."""
    function()
    return 1.0


def main() -> None:
    """Arguments: those of the bench."""
    torch.set_num_threads(1)
    for name, value in {
        "device_count": 8, "get_device_name": "no card", "max_memory_allocated": 0, "synchronize": None,
        "get_device_properties": SimpleNamespace(total_memory=1 << 40),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, value=value: value)
    Ranks.open = lambda self, _: None  # type: ignore[method-assign, assignment]
    decode.Captured, decode.RECTIFY_CHUNK = Eager, 8  # type: ignore[misc, assignment]
    decode.SLACK = tensor_parallel.SLACK = 64  # type: ignore[attr-defined]
    decode.gpu_ms = tensor_parallel.gpu_ms = once  # type: ignore[assignment]
    tensor_parallel.SHAPES["72b"], tensor_parallel.DRAFT = ("tiny", TINY), TINY_DRAFT
    bench = tensor_parallel.SplitBench
    loop, rectified, exact = bench._loop, bench.rectified, decode_exact.measure
    bench._loop = lambda self, graph, state, count: loop(self, graph, state, 1)  # type: ignore[method-assign]
    bench.rectified = lambda self, batch: rectified(self, batch, 2)  # type: ignore[method-assign, assignment]
    decode_exact.measure = lambda self, batch, block, checks: exact(self, batch, block, 1)  # type: ignore[assignment]
    tensor_parallel.main(sys.argv[1:], standalone_mode=True)


if __name__ == "__main__":
    main()
