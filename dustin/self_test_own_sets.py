"""Checks of the Triton kernels of layers that choose their own sets: compact keys and scores by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dustin.self_test import Check, Outputs

_TOKENS, _HEADS, _KV_HEADS, _DIM, _PAGE, _FRESH = 2, 4, 2, 32, 16, 16
_LENGTHS, _FED, _BEGINS = (37, 0, 5), (2, 0, 1), (3, 0, 4)
_TABLE = ((4, 0, 6), (1, 2, 3), (5, 8, 7))
_PAGES, _COLUMNS, _SCALE = 9, 40, 0.2
# Queries are rounded to float16 before and after their product.
_TOLERANCE = 3e-3


def own_set_checks(device: str) -> Iterator[Check]:
    """One check a launcher, with float16 queries on `device`."""
    layer = _Layer(device)
    for name, run, want in (
        ("packed_keys", layer.encode_prompts, lambda: {"codes": layer.coded(_BEGINS)}),
        ("packed_rows", layer.pack, layer.packed),
        ("packed_scores", layer.score, layer.scores),
    ):
        yield Check("triton", name, run, want(), _TOLERANCE)


class _Layer:
    """A layer of two kv heads over three sequences in pages; each kernel beside its formula in float64."""

    def __init__(self, device: str) -> None:
        import torch

        rng = np.random.default_rng(12)
        self.torch, self.device = torch, device
        self.q = rng.standard_normal((3, _TOKENS, _HEADS, _DIM)).astype(np.float16).astype(np.float32)
        # Whole numbers in a basis that only reorders them: codes have one right value each.
        self.keys = rng.integers(-9, 10, (_PAGES, _PAGE, _KV_HEADS, _DIM)).astype(np.float32)
        self.mean = rng.integers(-1, 2, (_KV_HEADS, _DIM)).astype(np.float32)
        self.encode = np.stack([np.eye(_DIM, dtype=np.float32)[rng.permutation(_DIM)] for _ in range(_KV_HEADS)])
        self.decode = rng.standard_normal((_KV_HEADS, _DIM, _DIM)).astype(np.float32)
        self.codes = rng.integers(-128, 128, (_PAGES, _PAGE, _KV_HEADS, _DIM // 2)).astype(np.int8)

    def put(self, values: Any, kind: str = "float32") -> Any:
        """A copy: codes are written in place."""
        return self.torch.tensor(values, device=self.device, dtype=getattr(self.torch, kind))

    @property
    def place(self) -> tuple[Any, Any]:
        return self.put(np.array(_TABLE), "int32"), self.put(np.array(_LENGTHS), "int32")

    def pack(self) -> Outputs:
        from dustin.triton_kernels.packed_rows import packed_rows

        codes = self.put(self.codes, "int8").flatten(0, 1)
        bases = (self.put(x) for x in (self.mean, self.encode, self.decode))
        pool = self.put(self.keys, "float16")
        rows = packed_rows(self.put(self.q, "float16"), pool, codes, *self.place, *bases, num_rows=_TOKENS, fresh=_FRESH)
        return {"rows": rows.float().cpu().numpy(), "codes": codes.cpu().numpy()}

    def encode_prompts(self) -> Outputs:
        from dustin.triton_kernels.packed_rows import packed_keys

        codes, pool = self.put(self.codes, "int8").flatten(0, 1), self.put(self.keys, "float16")
        begins, bases = self.put(np.array(_BEGINS), "int32"), (self.put(self.mean), self.put(self.encode))
        packed_keys(pool, codes, self.place[0], begins, self.place[1], *bases, most=max(_LENGTHS))
        return {"codes": codes.cpu().numpy()}

    def coded(self, begins: Sequence[int]) -> np.ndarray:
        """Codes of each sequence's keys from begins[b] on; the others stay."""
        codes = self.codes.reshape(-1, _KV_HEADS, _DIM // 2).copy()
        flat = self.keys.reshape(-1, _KV_HEADS, _DIM)
        for b, (begin, length) in enumerate(zip(begins, _LENGTHS, strict=True)):
            for position in range(begin, length):
                place = _TABLE[b][position // _PAGE] * _PAGE + position % _PAGE
                moved = np.einsum("hd,hdr->hr", flat[place] - self.mean, self.encode)
                low, high = np.split(np.clip(moved, -7, 7).astype(np.int32), 2, -1)
                codes[place] = ((low & 15) | (high << 4)).astype(np.int8)
        return codes

    def packed(self) -> Outputs:
        """Codes of the newest keys of each sequence, and the queries in the basis of the codes."""
        heads = self.decode[np.arange(_HEADS) // (_HEADS // _KV_HEADS)]
        newest = self.coded([max(0, length - _FRESH) for length in _LENGTHS])
        return {"rows": np.einsum("bthd,hdr->bthr", self.q, heads, dtype=np.float64), "codes": newest}

    def score(self) -> Outputs:
        from dustin.triton_kernels.packed_scores import packed_scores

        scores = self.torch.full((3 * _KV_HEADS, _COLUMNS), float("nan"), device=self.device)
        codes, fed = self.put(self.codes, "int8"), self.put(np.array(_FED), "int32")
        packed_scores(self.put(self.q, "float16"), codes, *self.place, scores, num_rows=fed, scale=_SCALE)
        return {"scores": scores.cpu().numpy()}

    def scores(self) -> Outputs:
        """The mean softmax of a kv head's queries over the numbers in its codes; nothing beyond a sequence's end."""
        want = np.full((3, _KV_HEADS, _COLUMNS), -np.inf)
        group = _HEADS // _KV_HEADS
        for b, length in enumerate(_LENGTHS):
            want[b, :, :length] = 0
            if not length or not _FED[b]:
                continue
            codes = self.codes[list(_TABLE[b])].reshape(-1, _KV_HEADS, _DIM // 2)[:length].astype(np.int32)
            numbers = np.concatenate([((codes & 15) ^ 8) - 8, codes >> 4], -1)
            for h in range(_KV_HEADS):
                asked = self.q[b, : _FED[b], h * group : (h + 1) * group].reshape(-1, _DIM)
                logits = asked.astype(np.float64) @ numbers[:, h].T * _SCALE
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                want[b, h, :length] = (weights / weights.sum(-1, keepdims=True)).mean(0)
        return {"scores": want.reshape(-1, _COLUMNS)}
