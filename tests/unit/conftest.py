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


@pytest.fixture(scope="module")
def short_documents() -> Iterator[None]:
    """Texts and answers of a few tokens: a whole fidelity bench in seconds."""
    from bench import fidelity_cells, fidelity_documents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity_cells, "ANSWER_TOKENS", 3)
        text = {kind: make()[:9000] for kind, make in fidelity_documents.SOURCES.items() if kind != "code"}
        patch.setattr(fidelity_documents, "SOURCES", {kind: (lambda kind=kind: text[kind]) for kind in text})
        yield
