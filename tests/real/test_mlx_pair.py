"""A real target and draft (Qwen2.5-Coder 1.5B and 0.5B, 1.6 GB fetched on first use, 8 GB of memory) on MLX's CPU against torch."""

from __future__ import annotations

import importlib.util

import pytest

import dustin
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm", "torch")):
    pytest.skip('needs mlx, mlx-lm and torch: pip install "dustin-llm[test]"', allow_module_level=True)

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAIR = ("Qwen2.5-Coder-1.5B-Instruct-eval", "Qwen2.5-Coder-0.5B-Instruct-eval")
QUESTION = "def area(radius): returns the area of a circle. " * 12 + "Write it in one line of Python."
RUNS = (("ar", "none"), ("dense", "draft"), ("sparse", "draft"), ("exact", "draft"))


def answers(backend: str) -> dict[str, list[int]]:
    """Tokens by mode; the models are gone afterwards."""
    loaded = dustin.load(*PAIR, backend=backend, device="cpu", dtype="float32", options=EngineOptions(mode="ar"))
    prompt = loaded.encode([{"role": "user", "content": QUESTION}])
    found = {}
    for mode, drafter in RUNS:
        options = EngineOptions(mode=mode, drafter=drafter, budget=80)
        session = Session(loaded.backend, loaded.target, loaded.tokenizer, options, loaded.draft)
        found[mode] = session.generate(prompt, RequestOptions(max_tokens=14)).tokens
    return found


def test_the_pair_gives_the_same_tokens(request: pytest.FixtureRequest) -> None:
    """Minutes; run it by `-m "real and slow"`."""
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip('several minutes and 1.6 GB: ask for it with -m "real and slow"')
    mine = answers("mlx")
    assert mine["ar"] == mine["dense"] == mine["exact"]
    assert mine == answers("torch")
