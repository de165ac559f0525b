"""The torch backend on the CPU against the float64 specification: operations, and whole models of every family."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dustin.registry import create
from tests.parity.adapters import CONFIGS, ModelCheck, implementations, write_model
from tests.parity.cases import cases, check

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("dustin.backends.torch_triton.backend") is None:
    pytest.skip("the torch backend is not here", allow_module_level=True)

import torch


def to_numpy(x) -> np.ndarray:
    return x.detach().cpu().float().numpy() if x.is_floating_point() else x.detach().cpu().numpy()


@pytest.fixture(scope="module")
def backend():
    return create("torch", "cpu")


@pytest.mark.parametrize("case", cases("select", "accept_greedy", "accept_sampled", "probabilities"), ids=lambda case: case.name)
def test_operation(backend, case):
    check(implementations(backend, torch.from_numpy, to_numpy)[case.op], case)


@pytest.mark.parametrize("name", CONFIGS)
def test_model_in_fp32(backend, name, tmp_path):
    ModelCheck(backend, to_numpy, write_model(tmp_path / name, CONFIGS[name]), "float32", 1e-5).run()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_model_in_bf16(backend, name, tmp_path):
    """Weights are rounded too, so this only bounds gross errors; fp32 above is the exact test."""
    ModelCheck(backend, to_numpy, write_model(tmp_path / name, CONFIGS[name]), "bfloat16", 4e-2).run()
