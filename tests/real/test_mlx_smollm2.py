"""SmolLM2's real weights on MLX's CPU: the same greedy tokens as the torch backend, the first divergence only at a near tie."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

import dustin
from bench.rows import ROOT
from dustin import models
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm", "torch")):
    pytest.skip('needs mlx, mlx-lm and torch: pip install "dustin-llm[test]"', allow_module_level=True)

pytestmark = pytest.mark.real

QUESTIONS = ["What is the capital of France?", "Explain photosynthesis to a child.", "List three prime numbers above 20."]
# Two forwards of this model differ by less than this in logits; bf16 has steps of 0.125 where the best logits lie.
NEAR_TIE = {"float32": 1e-2, "bfloat16": 0.25}


@cache
def load(dtype: str) -> dict[str, Session]:
    options = EngineOptions(mode="ar")
    return {name: dustin.load(backend=name, device="cpu", dtype=dtype, options=options) for name in ("mlx", "torch")}


def gap(session: Session, tokens: list[int]) -> float:
    """Logits of the best token minus the second best after `tokens`."""
    out = session.target.forward(
        session.backend.tokens([tokens]), [len(tokens)], session.target.new_cache(1, len(tokens)), logits="last"
    )
    first, second = sorted(out.logits[0, 0].tolist())[-1:-3:-1]
    return first - second


def same_or_tied(mine: list[int], its: list[int], prompt: list[int], torch: Session) -> None:
    """Equal, or the first difference is a near tie of the torch backend; says so."""
    at = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), None)
    if at is None:
        assert len(mine) == len(its)
        return
    found = gap(torch, prompt + its[:at])
    print(f"first divergence at token {at}: {mine[at]} and {its[at]}, top-2 gap {found:.5f}")
    assert found < NEAR_TIE[torch.target.spec.dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_equal_torch(question: str, dtype: str) -> None:
    sessions = load(dtype)
    prompt = sessions["torch"].encode([{"role": "user", "content": question}])
    assert sessions["mlx"].encode([{"role": "user", "content": question}]) == prompt
    mine, its = (sessions[name].generate(prompt, RequestOptions(max_tokens=32)).tokens for name in ("mlx", "torch"))
    same_or_tied(mine, its, prompt, sessions["torch"])


@pytest.mark.parametrize(
    ("mode", "drafter"), [("dense", "self"), ("dense", "lookup"), ("exact", "none"), ("sparse", "lookup"), ("rectified", "lookup")]
)
def test_modes_equal_torch_over_a_document(mode: str, drafter: str) -> None:
    """In fp32. The sparse modes choose by scores, where a near tie may choose another token."""
    sessions = load("float32")
    options = EngineOptions(mode=mode, drafter=drafter, budget=96, rectify_interval=16)
    prompt = sessions["torch"].encode(" ".join(f"Item {i} costs {i * 7 % 31} pounds." for i in range(24)) + " Item 3 costs")
    request = RequestOptions(max_tokens=24, ignore_eos=True)
    found = [
        Session(s.backend, s.target, s.tokenizer, options).generate(prompt, request).tokens
        for s in (sessions["mlx"], sessions["torch"])
    ]
    same_or_tied(*found, prompt, sessions["torch"])


def test_four_bit_weights_read_a_text_almost_as_well(tmp_path: Path) -> None:
    """A folder as mlx-lm's convert -q writes it, from the real weights: the mean negative log-likelihood rises a few per cent."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model, save_config, save_model

    from dustin.backends.mlx_metal import loading

    session = load("float32")["mlx"]
    inner, config, _ = loading.load(models.resolve(models.DEFAULT), mx.float32)
    fields = loading.arguments(config, {"architectures": [config.architecture]})
    quantised, fields = quantize_model(inner, fields, group_size=64, bits=4)
    save_model(tmp_path, quantised)
    save_config(fields, tmp_path / "config.json")
    small = session.backend.load(tmp_path)
    assert small.spec.weight_bytes < 0.2 * session.target.spec.weight_bytes
    text = (ROOT / "bench" / "data" / "northanger_abbey_chapter_1.txt").read_text(encoding="utf-8")
    ids = session.encode(text)[:129]
    losses = []
    for model in (session.target, small):
        logits = model.forward(session.backend.tokens([ids[:-1]]), [128], model.new_cache(1, 128)).logits[0]
        chosen = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
        losses.append(float((mx.logsumexp(logits, axis=-1) - chosen).mean()))
    print(f"mean negative log-likelihood: fp32 {losses[0]:.3f}, 4-bit {losses[1]:.3f}")
    assert 2 < losses[0] < losses[1] < 1.2 * losses[0]
