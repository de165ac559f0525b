"""Checks of the Triton kernels of a fused decoding step: embedding, products with norm, RoPE, gate and residual inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dustin.self_test import Check, Outputs

_EPS, _HIDDEN, _WIDE, _PAGE = 1e-6, 96, 48, 4
_BATCH, _TOKENS, _HEADS, _KV_HEADS, _DIM = 3, 2, 3, 1, 32
_LENGTHS, _FED = (3, 0, 9), (2, 0, 1)
_TABLE = ((3, 8, 1), (0, 2, 4), (5, 6, 7))
# Rows and weights are rounded to float16, and so are a norm's and a product's results on their way.
_TOLERANCE = 6e-3


def step_checks(device: str) -> Iterator[Check]:
    """One check a launcher, in float16 on `device`."""
    step = _Step(device)
    for name, run, want in (
        ("embed_rows", step.embed, step.embedded),
        ("norm_qkv", step.qkv, step.projected),
        ("norm_gate_up", step.gate_up, step.gated),
        ("wide_linear", step.alone, step.products),
        ("linear_add", step.add, step.added),
        ("last_norm", step.last, step.last_rows),
        ("capture_heads", step.capture, step.captured),
        ("head_argmax", step.argmax, step.best),
    ):
        yield Check("triton", name, run, want(), _TOLERANCE)


class _Step:
    """Six rows (three sequences of two) and the weights around them; each kernel beside its formula in float64."""

    def __init__(self, device: str) -> None:
        import torch

        from dustin.triton_kernels.decode_linear import LinearConfig

        rng = np.random.default_rng(9)
        self.device, self.torch, self.config = device, torch, LinearConfig(16, 32)
        self.rows = _BATCH * _TOKENS
        projected = (_HEADS + 2 * _KV_HEADS) * _DIM
        shapes = {
            "x": (self.rows, _HIDDEN),
            "norm": (_HIDDEN,),
            "qkv": (projected, _HIDDEN),
            "gate_up": (2 * _WIDE, _HIDDEN),
            "down": (_HIDDEN, _WIDE),
            "inner": (self.rows, _WIDE),
            "embedding": (11, _HIDDEN),
            "q": (_BATCH, _TOKENS, _HEADS, _DIM),
        }
        # float32 arrays of values that float16 holds exactly.
        self.host = {name: rng.standard_normal(shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}
        self.tokens = np.array([[1, 10], [0, 4], [9, 9]])
        self.angles = np.arange(12)[:, None] * np.linspace(0.1, 1.0, _DIM // 2)[None]
        self.heads = np.array([2, 0])

    def on_device(self, values: Any, kind: type) -> Any:
        """An array as a tensor of numpy's `kind`."""
        return self.torch.from_numpy(np.ascontiguousarray(values, dtype=kind)).to(self.device)

    def half(self, name: str) -> Any:
        """A named array in float16."""
        return self.on_device(self.host[name], np.float16)

    def wide(self, name: str) -> np.ndarray:
        """A named array in float64."""
        return self.host[name].astype(np.float64)

    def stream(self) -> Any:
        """The residual stream x before the norm `norm`."""
        from dustin.triton_kernels.decode_linear import LinearScratch, Stream

        scratch = LinearScratch(64 * self.rows, 20000, 100, self.torch.device(self.device))
        scratch.squares[: self.rows] = self.on_device((self.wide("x") ** 2).sum(1), np.float32)
        x = self.half("x")
        return Stream(x, x * self.half("norm"), scratch, 1)

    def normed(self) -> np.ndarray:
        """RMS norm of x, float64."""
        x = self.wide("x")
        return x / np.sqrt((x**2).mean(1, keepdims=True) + _EPS) * self.wide("norm")

    def embed(self) -> Outputs:
        from dustin.triton_kernels.decode_linear import LinearScratch
        from dustin.triton_kernels.stream_rows import embed_rows

        scratch = LinearScratch(self.rows, 1, 1, self.torch.device(self.device))
        stream = embed_rows(self.on_device(self.tokens, np.int64), self.half("embedding"), self.half("norm"), scratch)
        return {"residual": _host(stream.residual), "scaled": _host(stream.scaled), "squares": _host(scratch.squares)}

    def embedded(self) -> Outputs:
        rows = self.wide("embedding")[self.tokens.ravel()]
        return {"residual": rows, "scaled": rows * self.wide("norm"), "squares": (rows**2).sum(1)}

    def qkv(self) -> Outputs:
        from dustin.triton_kernels.norm_linear import norm_qkv

        pools = [self.on_device(np.zeros((9, _PAGE, _KV_HEADS, _DIM)), np.float16) for _ in "kv"]
        table, lengths, fed = (self.on_device(x, np.int32) for x in (_TABLE, _LENGTHS, _FED))
        cos, sin = (self.on_device(f(self.angles), np.float32) for f in (np.cos, np.sin))
        place = (*pools, table, lengths, fed, cos, sin)
        q = norm_qkv(self.stream(), self.half("qkv"), None, *place, eps=_EPS, config=self.config)
        return {"q": _host(q), "keys": _host(pools[0]), "values": _host(pools[1])}

    def projected(self) -> Outputs:
        y = (self.normed() @ self.wide("qkv").T).reshape(_BATCH, _TOKENS, _HEADS + 2 * _KV_HEADS, _DIM)
        angles = self.angles[np.array(_LENGTHS)[:, None] + np.arange(_TOKENS)][:, :, None]
        first, second = np.split(y, 2, axis=-1)
        c, s = np.cos(angles), np.sin(angles)
        turned = np.concatenate([first * c - second * s, second * c + first * s], -1)
        keys, values = (np.zeros((9, _PAGE, _KV_HEADS, _DIM)) for _ in "kv")
        for b, (length, fed) in enumerate(zip(_LENGTHS, _FED, strict=True)):
            for t in range(fed):
                row = _TABLE[b][(length + t) // _PAGE], (length + t) % _PAGE
                keys[row], values[row] = turned[b, t, _HEADS : _HEADS + _KV_HEADS], y[b, t, _HEADS + _KV_HEADS :]
        return {"q": turned[:, :, :_HEADS], "keys": keys, "values": values}

    def gate_up(self) -> Outputs:
        from dustin.triton_kernels.norm_linear import norm_gate_up

        return {"out": _host(norm_gate_up(self.stream(), self.half("gate_up"), eps=_EPS, config=self.config))}

    def gated(self) -> Outputs:
        gate, up = np.split(self.normed() @ self.wide("gate_up").T, 2, axis=1)
        return {"out": gate / (1 + np.exp(-gate)) * up}

    def alone(self) -> Outputs:
        from dustin.triton_kernels.wide_linear import WideConfig, wide_linear

        x, w = self.half("x"), self.half("gate_up")
        split = wide_linear(x, w, config=WideConfig(16, 32, splits=2))
        return {"out": _host(wide_linear(x, w, gate=True, config=WideConfig(16, 32))), "split": _host(split)}

    def products(self) -> Outputs:
        product = self.wide("x") @ self.wide("gate_up").T
        gate, up = np.split(product, 2, axis=1)
        return {"out": gate / (1 + np.exp(-gate)) * up, "split": product}

    def add(self) -> Outputs:
        from dustin.triton_kernels.linear_add import linear_add

        stream = self.stream()
        linear_add(self.half("inner"), self.half("down"), None, stream, self.half("norm"), config=self.config)
        return {"residual": _host(stream.residual), "scaled": _host(stream.scaled)}

    def added(self) -> Outputs:
        residual = self.wide("x") + self.wide("inner") @ self.wide("down").T
        return {"residual": residual, "scaled": residual * self.wide("norm")}

    def last(self) -> Outputs:
        from dustin.triton_kernels.stream_rows import last_norm

        return {"out": _host(last_norm(self.half("x"), self.on_device(_FED, np.int32), self.half("norm"), _EPS))}

    def last_rows(self) -> Outputs:
        rows = np.arange(_BATCH) * _TOKENS + np.maximum(np.array(_FED) - 1, 0)
        return {"out": self.normed()[rows]}

    def capture(self) -> Outputs:
        from dustin.triton_kernels.stream_rows import capture_heads

        heads, fed = self.on_device(self.heads, np.int64), self.on_device(_FED, np.int32)
        calls: dict[str, Callable[[], Any]] = {
            "all": lambda: capture_heads(self.half("q"), heads, fed, False),
            "last": lambda: capture_heads(self.half("q"), heads, fed, True),
        }
        return {name: _host(call()) for name, call in calls.items()}

    def captured(self) -> Outputs:
        chosen = self.wide("q")[:, :, self.heads]
        rows = np.maximum(np.array(_FED) - 1, 0)
        return {"all": chosen, "last": chosen[np.arange(_BATCH), rows][:, None]}

    def argmax(self) -> Outputs:
        from dustin.triton_kernels.head_argmax import head_argmax

        x, head = self.on_device(self.wide("embedding")[:6], np.float16), self.half("embedding")
        tokens, finite = head_argmax(x, head, vocabulary=10, config=self.config)
        return {"tokens": _host(tokens).astype(np.int64), "finite": _host(finite).astype(bool)}

    def best(self) -> Outputs:
        # Each row is one of the head's: its own token is the likeliest, by far.
        return {"tokens": np.arange(6), "finite": np.ones(6, dtype=bool)}


def _host(x: Any) -> np.ndarray:
    return x.detach().cpu().float().numpy()
