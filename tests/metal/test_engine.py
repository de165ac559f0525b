"""A whole tiny model generates with the Metal kernels in it, executed by the emulator: the same tokens as by the array path."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session
from tests.metal.emulator.dropin import Log, installed
from tests.parity.adapters import CONFIGS, ModelCheck, write_model

if TYPE_CHECKING:
    from dustin.metal_kernels.gate import Gate

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("mlx-lm is missing: pip install mlx-lm", allow_module_level=True)

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
PROMPTS = [[(5 * i + i * i) % 67 for i in range(50)], [(3 * i) % 67 for i in range(21)]]
OPTIONS = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "num_draft_tokens": 2, "prefill_chunk": 20}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    target = write_model(root / "target", CONFIGS["qwen3"] | HEADS, seed=1)
    return target, write_model(root / "draft", CONFIGS["llama"] | HEADS | {"num_hidden_layers": 1}, seed=2)


def make_backend(gate: str | Gate):
    """On Metal where it is, else on the CPU (where only the emulator can run kernels)."""
    import mlx.core as mx

    from dustin.backends.mlx_metal.backend import MlxBackend
    from dustin.metal_kernels.gate import Gate

    made = Gate(gate) if isinstance(gate, str) else gate
    chip = made.chip
    backend = MlxBackend("metal" if mx.metal.is_available() else "cpu", made)
    made.chip = chip  # on the CPU a backend takes it away
    return backend


def run(folders: tuple[Path, Path], gate: str | Gate, mode: str, drafter: str) -> list[list[int]]:
    backend = make_backend(gate)
    target, draft = (backend.load(folder, dtype="float32") for folder in folders)
    options = EngineOptions(mode=mode, drafter=drafter, **OPTIONS)  # type: ignore[arg-type]
    session = Session(backend, target, None, options, draft if drafter == "draft" else None)
    return [result.tokens for result in session.batch_generate(PROMPTS, RequestOptions(max_tokens=6))]


def launches(log: Log) -> Counter[str]:
    """How often each kernel ran, without the hash in its name."""
    return Counter(re.search(r"dustin_(\w+?)_[0-9a-f]{12}", report.name)[1] for report in log.reports)  # type: ignore[index]


SELECTION = {"score_heads", "score_mean", "select_tokens"}


@pytest.mark.parametrize(("mode", "drafter"), [("sparse", "draft"), ("dense", "self"), ("rectified", "lookup")])
def test_generation_with_the_kernels(folders: tuple[Path, Path], mode: str, drafter: str) -> None:
    """Prompts are read in chunks of 20 rows, which no kernel takes; all that follows is kernels."""
    want = run(folders, "array", mode, drafter)
    with installed() as log:
        got = run(folders, "kernel", mode, drafter)
    assert got == want and all(len(row) == 6 for row in got)
    assert not log.findings
    if not log.on_device:
        counts = launches(log)
        assert set(counts) == {"append_kv", "sparse_verify", "dense_verify"} | SELECTION
        # One row fits the budget for a while: it is verified densely beside the sparse one, over the same appended rows.
        assert counts["sparse_verify"] + counts["dense_verify"] >= counts["append_kv"] > counts["score_heads"] > 0


@pytest.mark.parametrize("winner", ["kernel", "array"])
def test_generation_with_a_gate_that_measures(folders: tuple[Path, Path], winner: str, tmp_path: Path) -> None:
    """As on a Mac: rows are appended in place by the kernel, and each shape takes the path that the gate's clock found faster."""
    from dustin.metal_kernels.gate import Gate

    want = run(folders, "array", "sparse", "draft")
    ticks = itertools.count()
    # The kernel is timed first: on a clock whose steps shrink it is the slower one, on one that stands still no slower.
    clock = {"kernel": lambda: 0.0, "array": lambda: math.sqrt(next(ticks))}[winner]
    with installed() as log:
        got = run(folders, Gate("auto", tmp_path / "gate.json", chip="emulator", clock=clock), "sparse", "draft")
    assert got == want and not log.findings
    decided = json.loads((tmp_path / "gate.json").read_text())["decisions"]
    assert {key.split("|")[3] for key in decided} == {"dense_verify", "sparse_verify", "score_heads", "select_tokens"}
    assert {decision["path"] for decision in decided.values()} == {winner}
    assert all(decision["reason"] == "measured" for decision in decided.values())


# Half precision rounds the weights too, so it only bounds gross errors.
DTYPES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 4e-2}


CHECKS = [("llama", "float32"), ("qwen3", "float32"), ("llama", "float16"), ("qwen3", "bfloat16")]


@pytest.mark.parametrize(("family", "dtype"), CHECKS)
def test_a_model_with_the_kernels_equals_the_specification(family: str, dtype: str, tmp_path: Path) -> None:
    """Ragged rows, taps, scores, sets, rollback, copies of rows; unused rows of the cache are NaN, which kernels never read."""
    import mlx.core as mx

    from dustin.backends.mlx_metal.model import MlxModel

    def poisoned(self: MlxModel, batch: int, capacity: int):
        cache = fresh(self, batch, capacity)
        for store in (cache.keys, cache.values):
            store[:] = [mx.full(rows.shape, float("nan"), rows.dtype) for rows in store]
        return cache

    def to_numpy(x):
        return np.array(x.astype(mx.float32))

    fresh = MlxModel.new_cache
    folder = write_model(tmp_path / family, CONFIGS[family] | HEADS)
    with installed(order="shuffled") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlxModel, "new_cache", poisoned)
        ModelCheck(make_backend("kernel"), to_numpy, folder, dtype, DTYPES[dtype]).run()
    assert not log.findings


@pytest.mark.parametrize("batch", [1, 9])
def test_kernels_and_slices_write_the_same_cache_in_place(batch: int, tmp_path: Path) -> None:
    """Long chunks are written by slices, short ones by the kernel; neither moves a layer, and logits equal the array path's."""
    import mlx.core as mx

    folder = write_model(tmp_path / "llama", CONFIGS["llama"] | HEADS)
    found = []
    for gate in ("array", "kernel"):
        with installed() as log:
            backend = make_backend(gate)
            model = backend.load(folder, dtype="float32")
            cache = model.new_cache(batch, 160)
            addresses = [np.array(rows, copy=False).ctypes.data for rows in (*cache.keys, *cache.values)]
            for rows in (30, 3, 20, 1, 25):
                fed = backend.tokens([[(b + t * t) % 67 for t in range(rows)] for b in range(batch)])
                out = model.forward(fed, [max(1, rows - b % 2) for b in range(batch)], cache, logits="last")
                found.append(np.array(out.logits))
                log.reports.clear()  # they hold the buffers that kernels wrote
                assert [np.array(x, copy=False).ctypes.data for x in (*cache.keys, *cache.values)] == addresses
            mx.eval(cache.keys)
    for array, kernel in zip(found[:5], found[5:], strict=True):
        assert np.abs(array - kernel).max() < 1e-4 * np.abs(array).max()
