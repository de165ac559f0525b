"""Kernels run in two places: in Triton's interpreter (a subprocess, see test_interpreter.py) and on a GPU (-m gpu)."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a kernel test."""
    if request.param == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available() or INTERPRETED:
            pytest.skip("needs an NVIDIA GPU and a process without TRITON_INTERPRET")
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the interpreter cases out of processes that compile; test_interpreter.py starts one that interprets."""
    here = os.path.dirname(__file__)

    def belongs(item: pytest.Item) -> bool:
        if not str(item.path).startswith(here):
            return True
        if "device" in getattr(item, "fixturenames", ()):
            return INTERPRETED or item.callspec.params.get("device") != "cpu"
        return not INTERPRETED

    dropped = [item for item in items if not belongs(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if belongs(item)]
