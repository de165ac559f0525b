"""Checks of whole backends: their operations and a tiny model of random weights, against the numpy backend.

Everything goes through the protocol of dustin.interfaces, so one function serves every backend. Frameworks are imported here only
when a function runs.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dustin import registry
from dustin.errors import DustinError
from dustin.interfaces import Backend, Tap, WarpBatch
from dustin.self_test import Case, Check, Outputs, Result, acceptance_inputs, last_line

About = dict[str, Any]
# Rounding adds up over the layers; in bfloat16 the weights are rounded too, so that only gross errors show.
_MODEL_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
_VOCABULARY = 67
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # One that the Metal kernels serve: on a Mac the model runs through them.
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def about(available: bool, **entries: Any) -> About:
    """The first line of a group: whether the backend can be used, its devices or the reason, and notes."""
    return {"about": {"available": available} | entries}


def numpy_checks() -> Iterator[About | Check]:
    """The reference against closed forms: uniform attention is a mean, the quota rule is a sort."""
    registry.create("numpy", "cpu")
    yield about(True, devices=["cpu"])
    case = Case(precision=np.float32)
    case.q[:] = 0
    mean = np.zeros(case.q.shape)
    for b, fed in enumerate(case.num_tokens):
        for t in range(fed):
            seen = case.values[b, : case.lengths[b] + t + 1].astype(np.float64).mean(0)
            mean[b, t] = np.repeat(seen, case.num_heads // case.num_kv_heads, 0)
    yield Check("numpy", "attention", lambda: {"out": case.attention(False)}, {"out": mean})
    target, length = case.scores[0, 0], case.lengths[0]
    protected = [*range(2), *range(length - 6, length)]
    order = sorted((j for j in range(length) if j not in protected), key=lambda j: (-target[j], j))
    want = np.array(sorted([*protected, *order[:12]]), np.int32)

    def select() -> Outputs:
        from dustin.backends.numpy_reference import ops

        quota = case.quota | {"num_draft_selected": 0}
        return {"indices": ops.select(case.scores[0], None, case.lengths, **quota).indices[0]}

    yield Check("numpy", "select", select, {"indices": want})


def write_model(folder: Path) -> Path:
    """A random Llama of two layers in `folder` (config.json, model.safetensors)."""
    from safetensors.numpy import save_file

    from dustin.backends.numpy_reference.loading import config_from_hf
    from dustin.backends.numpy_reference.model import random_model

    weights = random_model(config_from_hf(_CONFIG), 0).weights
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class _Pair:
    """The same schedule on a backend and on the reference: each step is run once, when first asked for."""

    def __init__(self, backend: Backend, to_numpy: Callable[[Any], np.ndarray], folder: Path, dtype: str) -> None:
        reference = registry.create("numpy", "cpu")
        self.to_numpy = to_numpy
        self.sides = [(backend, backend.load(folder, dtype=dtype)), (reference, reference.load(folder))]
        self.caches = [model.new_cache(3, 48) for _, model in self.sides]
        self.tap = Tap({0: (0, 3), 1: (1,)}, last_row_only=True)
        self.queries: list[Any] = [None, None]
        self.rng = np.random.default_rng(3)

    def forward(self, counts: list[int], sparse: bool = False) -> tuple[Outputs, Outputs]:
        """Logits of the valid rows, 0 elsewhere: (the backend's, the reference's)."""
        rows = [self.rng.integers(0, _VOCABULARY, max(counts)).tolist() for _ in counts]
        out: list[Outputs] = []
        for side, ((backend, model), cache) in enumerate(zip(self.sides, self.caches, strict=True)):
            quota = {"budget": 9, "num_sink_tokens": 2, "num_recent_tokens": 3, "num_draft_selected": 4}
            chosen = backend.select(None, None, cache.lengths, **quota) if sparse else None
            result = model.forward(backend.tokens(rows), counts, cache, token_set=chosen, tap=self.tap)
            self.queries[side] = result.queries
            logits = self._host(side, result.logits)
            valid = np.arange(logits.shape[1])[None, :, None] < np.array(counts)[:, None, None]
            out.append({"logits": np.where(valid, logits, 0)})
        return out[0], out[1]

    def score(self) -> tuple[Outputs, Outputs]:
        """Scores of the captured queries."""
        out = []
        for side, ((backend, model), cache) in enumerate(zip(self.sides, self.caches, strict=True)):
            lengths = cache.lengths
            scores = self._host(side, backend.score(self.queries[side], self.tap, model, cache, lengths))
            out.append({"scores": scores[:, : max(lengths)]})
        return out[0], out[1]

    def rollback(self, lengths: list[int]) -> tuple[Outputs, Outputs]:
        """Rows dropped and what is left."""
        out = []
        for cache in self.caches:
            dropped = cache.rollback(lengths)
            out.append({"dropped": np.array(dropped), "lengths": np.array(cache.lengths)})
        return out[0], out[1]

    def _host(self, side: int, array: Any) -> np.ndarray:
        return np.asarray(array) if side else self.to_numpy(array)


def model_checks(
    backend: Backend, group: str, to_numpy: Callable[[Any], np.ndarray], folder: Path, dtype: str = "float32"
) -> Iterator[Check]:
    """Prefill, sparse verification, scores, rollback, dense verification on a tiny model; both sides run in step."""
    pair = _Pair(backend, to_numpy, folder, dtype)

    def step(name: str, act: Callable[[], tuple[Outputs, Outputs]]) -> Check:
        want: Outputs = {}

        def run() -> Outputs:
            got, expected = act()
            want.update(expected)
            return got

        return Check(group, name, run, want, _MODEL_TOLERANCE[dtype])

    yield step("prefill", lambda: pair.forward([17, 5, 12]))
    yield step("scores", pair.score)
    yield step("sparse verification", lambda: pair.forward([4, 2, 0], sparse=True))
    yield step("rollback", lambda: pair.rollback([18, 6, 12]))
    yield step("dense verification", lambda: pair.forward([1, 4, 3]))


def operation_checks(
    backend: Backend, group: str, to_array: Callable[[np.ndarray], Any], to_numpy: Callable[[Any], np.ndarray]
) -> Iterator[Check]:
    """Selection, warped distributions and both acceptance rules."""
    reference = registry.create("numpy", "cpu")
    case, inputs = Case(), acceptance_inputs()
    draws = (inputs["accept"], inputs["next"])

    def verdict(side: Backend, give: Callable[[np.ndarray], Any], take: Callable[[Any], np.ndarray], greedy: bool) -> Outputs:
        drafts, limits = side.tokens(inputs["drafts"].tolist()), inputs["num_drafts"]
        logits = give(inputs["logits"])
        if greedy:
            found = side.accept_greedy(drafts, limits, logits)
        else:
            found = side.accept_sampled(drafts, limits, give(inputs["q"]), give(inputs["p"]), logits, *draws)
        kept, tokens = take(found.num_accepted).astype(np.int64), take(found.tokens).astype(np.int64)
        used = np.arange(tokens.shape[1])[None] <= kept[:, None]
        return {"num_accepted": kept, "tokens": np.where(used, tokens, 0), "finite": take(found.finite).astype(bool)}

    def select() -> Outputs:
        found = backend.select(to_array(case.scores[0]), to_array(case.scores[1]), case.lengths, **case.quota)
        indices, counts = to_numpy(found.indices).astype(np.int64), to_numpy(found.counts).astype(np.int64)
        return {"indices": np.where(np.arange(indices.shape[1])[None] < counts[:, None], indices, 0), "counts": counts}

    warp = WarpBatch((0.0, 0.7, 1.3), (5, 0, 0), (1.0, 0.8, 1.0), (0.0, 0.0, 0.1), (1.0,) * 3, (0.0,) * 3, (0.0,) * 3)
    exact = {"p": np.asarray(reference.probabilities(inputs["logits"].astype(np.float64), warp, None, None))}

    def warped() -> Outputs:
        return {"p": to_numpy(backend.probabilities(to_array(inputs["logits"]), warp, None, None))}

    yield Check(group, "select", select, case.selected())
    yield Check(group, "probabilities", warped, exact)
    for name, greedy in (("accept_greedy", True), ("accept_sampled", False)):
        want = verdict(reference, np.asarray, np.asarray, greedy)
        yield Check(group, name, partial(verdict, backend, to_array, to_numpy, greedy), want)


def backend_checks(backend: Backend, group: str, to_array: Any, to_numpy: Any, *, half: bool = False) -> Iterator[Check]:
    """All checks of one backend on its device; with `half` the model runs in bfloat16 too, where fused kernels serve."""
    yield from operation_checks(backend, group, to_array, to_numpy)
    with tempfile.TemporaryDirectory(prefix="dustin-self-test-") as name:
        folder = write_model(Path(name))
        yield from model_checks(backend, group, to_numpy, folder)
        if half:
            yield from model_checks(backend, f"{group}, bfloat16", to_numpy, folder, "bfloat16")


def torch_checks() -> Iterator[About | Check | Result]:
    """The torch backend on the CPU and on a GPU where there is one, then the Triton kernels."""
    try:
        import torch

        backend = registry.create("torch", "cpu")
    except (ImportError, OSError, DustinError) as error:
        yield about(False, reason=last_line(error))
        yield Result("triton", "all kernels", "skipped", "torch cannot be used")
        return
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    yield about(True, devices=["cpu", *gpus], cuda_build=torch.version.cuda)
    yield from backend_checks(backend, "torch on cpu", torch.from_numpy, _torch_to_numpy)
    from dustin.self_test_kernels import triton_checks

    yield from triton_checks()
    if gpus:
        on_gpu = registry.create("torch", "cuda")
        yield from backend_checks(on_gpu, "torch on cuda", lambda x: torch.from_numpy(x).cuda(), _torch_to_numpy, half=True)


def _torch_to_numpy(x: Any) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() else x).numpy()


def mlx_checks() -> Iterator[About | Check | Result]:
    """The MLX backend, MLX's BLAS, and the Metal kernels (or the array path where Metal is absent)."""
    # On CUDA MLX multiplies float32 in TF32 unless told otherwise: a thousandth off, which would hide what is wrong here.
    os.environ["MLX_ENABLE_TF32"] = "0"
    try:
        # First: it puts a fast BLAS before MLX's own where the system has one.
        importlib.import_module("dustin.backends.mlx_metal")
        import mlx.core as mx
    except (ImportError, OSError) as error:
        yield about(False, reason=last_line(error))
        yield Result("metal", "all kernels", "skipped", "mlx cannot be imported")
        return
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    facts: dict[str, Any] = {"devices": [f"{info.get('device_name', 'unknown')} ({mx.default_device()})"]}
    facts["metal"] = mx.metal.is_available()
    facts["cuda"] = bool(hasattr(mx, "cuda") and mx.cuda.is_available())
    if facts["metal"]:
        # The kernels are what is checked, whatever the gate would choose; and nothing is measured or kept on disk.
        os.environ.setdefault("DUSTIN_METAL_GATE", "kernel")
    try:
        backend = registry.create("mlx")
    except (ImportError, OSError, DustinError) as error:
        backend = None
        yield about(False, reason=last_line(error), **facts, blas=_blas())
    else:
        yield about(True, **facts, blas=_blas())
    from dustin.self_test_kernels import metal_checks

    yield from metal_checks(mx.metal.is_available())
    if backend is not None:
        yield from backend_checks(backend, "mlx", mx.array, _mlx_to_numpy)


def _mlx_to_numpy(x: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)


def _blas() -> dict[str, Any] | None:
    """MLX's BLAS library, GFLOP/s of a 256^3 float32 product by MLX's CPU device and by numpy: far behind means the slow one.

    None where MLX computes on a GPU, and off Linux: there MLX brings Apple's BLAS or does not need one.
    """
    import mlx.core as mx

    if platform.system() != "Linux" or mx.default_device() != mx.Device(mx.cpu):
        return None
    mine = mx.random.normal((256, 256))
    theirs = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)

    def gflops(product: Callable[[], Any]) -> float:
        product()
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - start)
        return round(2 * 256**3 / best / 1e9, 1)

    speeds = {"mlx_gflops": gflops(lambda: mx.eval(mine @ mine)), "numpy_gflops": gflops(lambda: theirs @ theirs)}
    return {"library": blas_libraries(Path("/proc/self/maps").read_text())} | speeds


def blas_libraries(maps: str) -> str:
    """File names of the BLAS libraries in a process's memory map, numpy's own left out."""
    paths = [line.split()[-1] for line in maps.splitlines() if len(line.split()) > 5]
    names = {path.rsplit("/", 1)[1] for path in paths if "blas" in path.rsplit("/", 1)[-1] and "/numpy" not in path}
    return ", ".join(sorted(names)) or "unknown"

