"""What the Metal tests need: mlx for the exact source, and g++ on Linux to run it, or a Mac with Metal.

On a Mac the parity tests run on the device; the tests of the emulator itself are skipped there. Every skip says why.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.metal.emulator.build import compiler

EMULATOR_ONLY = {"test_bench.py", "test_bytes.py", "test_emulator.py", "test_faults.py", "test_round.py"}


def _reason(file: str) -> str:
    if importlib.util.find_spec("mlx") is None:
        return 'mlx is missing: pip install "mlx[cpu]"'
    if compiler():
        return ""
    import mlx.core as mx

    if not mx.metal.is_available():
        return "neither g++ on Linux (for the emulator) nor Metal is here"
    return "this file tests the emulator, which runs on Linux with g++" if file in EMULATOR_ONLY else ""


@pytest.fixture(autouse=True)
def metal_device() -> None:
    """A backend on the CPU sets MLX's default device for the whole process; these tests want Metal where it is."""
    if importlib.util.find_spec("mlx") is not None:
        import mlx.core as mx

        if mx.metal.is_available():
            mx.set_default_device(mx.gpu)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            reason = _reason(Path(item.path).name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
