"""Ranks over NCCL on GPUs: a group gives one process's tokens, with and without CUDA graphs, and ends in order."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.tiny_model import write
from tests.unit.rank_helpers import ROOT, finish, start

pytestmark = pytest.mark.gpu
CASES = ("ar", "sparse", "exact")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of three layers with heads of 64, and a draft."""
    folder, wide = tmp_path_factory.mktemp("ranks"), {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    return write(folder / "target", seed=3, num_hidden_layers=3, **wide), write(folder / "draft", seed=4, **wide)


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path]) -> dict:
    """Tokens of a single process without ranks."""
    (end,) = finish(start(1, ["tests/ranks_driver.py", *map(str, models), *CASES], {"DRIVER_DEVICE": "cuda", **carried()}))
    assert end[0] == 0, end
    return json.loads(end[1])


def carried() -> dict[str, str]:
    """The path on which packages of this machine may lie."""
    return {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("graphs", ["0", "1"], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_give_the_tokens_of_one_and_end(
    ranks: list,
    models: tuple[Path, Path],
    alone: dict,
    size: int,
    graphs: str,
) -> None:
    """Every collective in a graph and outside; the end must not wait for graphs that are still alive."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs are here")
    environment = {"DRIVER_DEVICE": "cuda", "DUSTIN_CUDA_GRAPHS": graphs, **carried()}
    if size == 1:
        environment["DRIVER_ALONE"] = "1"
    ranks += start(size, ["tests/ranks_driver.py", *map(str, models), *CASES], environment)
    out = ranks[0].stdout
    found = json.loads(out.readline() or "{}")
    began = time.monotonic()
    ends = finish(ranks)
    assert [code for code, _, _ in ends] == [0] * size, ends
    assert found == alone
    assert time.monotonic() - began < 9
