"""What several files of tests need around a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that must be gone after the test."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()
