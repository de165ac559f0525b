"""The Metal tests need mlx (for the exact source) and g++ (to run it): without them they are skipped, with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.metal.emulator.build import compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if importlib.util.find_spec("mlx") is None:
        reason = 'mlx is missing: pip install "mlx[cpu]"'
    elif compiler() is None:
        reason = "g++ is missing: the emulator compiles kernels with it"
    here = Path(__file__).parent
    for item in items:
        if reason and here in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason=reason))
