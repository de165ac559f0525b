"""A tiny model on disk, a clean environment, and processes that no test leaves behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_model
from tests.cli.running import ROOT


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A model with room for more tokens than anyone waits for."""
    return tiny_model.write(tmp_path / "slow", max_position_embeddings=50_000)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DUSTIN_", "HF_"))}
    own = {"DUSTIN_CACHE": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config"), "DUSTIN_BACKEND": "numpy"}
    own |= {"XDG_STATE_HOME": str(tmp_path / "state")}
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    return kept | own | hub | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the test started; none outlives it."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()
