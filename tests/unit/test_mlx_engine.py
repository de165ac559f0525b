"""The engine on MLX: the same tokens as on numpy and torch in every mode and with every drafter, for batches and single runs."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.generation import Session
from dustin.interfaces import Backend, Model, TokenSet
from dustin.registry import create
from tests.parity.adapters import CONFIGS, write_model

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm", "torch")):
    pytest.skip('needs mlx, mlx-lm and torch: pip install "dustin-llm[test]"', allow_module_level=True)

PROMPTS = [[(7 * i + i * i) % 67 for i in range(60)], [5, 9, 11, 5, 9, 11, 5, 9], [(3 * i) % 67 for i in range(33)]]
OPTIONS = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "num_draft_tokens": 3, "prefill_chunk": 20}
OPTIONS |= {"rectify_interval": 8, "exact_block": 7}
RUNS = [
    ("ar", "none"),
    ("dense", "draft"),
    ("dense", "self"),
    ("dense", "lookup"),
    ("sparse", "draft"),
    ("sparse", "lookup"),
    ("sparse", "none"),
    ("rectified", "draft"),
    ("rectified", "lookup"),
    ("exact", "draft"),
    ("exact", "none"),
    ("exact", "lookup"),
]
SAMPLED = SamplingOptions(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.1, seed=5)


@cache
def folders() -> tuple[Path, Path]:
    """A target of 3 layers with QK-norm and a draft of 2 without; fp32."""
    root = Path(mkdtemp())
    target = CONFIGS["qwen3"] | {"num_key_value_heads": 2}
    draft = CONFIGS["llama"] | {"num_hidden_layers": 2}
    return write_model(root / "target", target, seed=1), write_model(root / "draft", draft, seed=2)


@cache
def loaded(name: str) -> tuple[Backend, Model, Model]:
    backend = create(name, "auto" if name == "numpy" else "cpu")
    target, draft = folders()
    dtype = "auto" if name == "numpy" else "float32"
    return backend, backend.load(target, dtype=dtype), backend.load(draft, dtype=dtype)


@cache
def tokens(name: str, mode: str, drafter: str, rows: tuple[int, ...], sampled: bool = False) -> list[list[int]]:
    backend, target, draft = loaded(name)
    lag = 1 if mode == "exact" and sampled else None
    options = EngineOptions(mode=mode, drafter=drafter, lookahead_lag=lag, **OPTIONS)  # type: ignore[arg-type]
    session = Session(backend, target, None, options, draft if drafter == "draft" else None)
    request = RequestOptions(max_tokens=18, sampling=SAMPLED if sampled else SamplingOptions())
    results = session.batch_generate([PROMPTS[row] for row in rows], request)
    assert not any(result.error for result in results)
    return [result.tokens for result in results]


@pytest.mark.parametrize(("mode", "drafter"), RUNS)
def test_greedy_tokens_equal_numpy_and_torch(mode: str, drafter: str) -> None:
    mine = tokens("mlx", mode, drafter, (0, 1, 2))
    assert mine == tokens("torch", mode, drafter, (0, 1, 2))
    assert mine == tokens("numpy", mode, drafter, (0, 1, 2))
    if mode in ("dense", "exact"):
        assert mine == tokens("mlx", "ar", "none", (0, 1, 2))


@pytest.mark.parametrize(("mode", "drafter"), [("ar", "none"), ("dense", "self"), ("sparse", "draft"), ("exact", "lookup")])
def test_a_batch_equals_single_runs(mode: str, drafter: str) -> None:
    assert tokens("mlx", mode, drafter, (0, 1, 2)) == [tokens("mlx", mode, drafter, (row,))[0] for row in range(3)]


@pytest.mark.parametrize(("mode", "drafter"), [("ar", "none"), ("dense", "draft"), ("sparse", "draft"), ("exact", "draft")])
def test_sampled_tokens_equal_numpy(mode: str, drafter: str) -> None:
    mine = tokens("mlx", mode, drafter, (0, 2), sampled=True)
    assert mine == tokens("numpy", mode, drafter, (0, 2), sampled=True)
    assert mine != tokens("mlx", mode, drafter, (0, 2))


@pytest.mark.parametrize("selector", ["streaming", "history", "lookahead", "specattn", "h2o", "snapkv", "quest", "oracle"])
def test_every_selector_equals_numpy(selector: str) -> None:
    """Page bounds, accumulated and smoothed scores, sets cut by mass: the operations that the other selectors ask for."""
    found = []
    for name in ("mlx", "numpy"):
        backend, target, draft = loaded(name)
        options = EngineOptions(mode="sparse", drafter="draft", selector=selector, **OPTIONS)  # type: ignore[arg-type]
        results = Session(backend, target, None, options, draft).batch_generate(PROMPTS, RequestOptions(max_tokens=12))
        found.append([result.tokens for result in results])
    assert found[0] == found[1]


def test_logprobs_equal_numpy() -> None:
    found = []
    for name in ("mlx", "numpy"):
        backend, target, draft = loaded(name)
        session = Session(backend, target, None, EngineOptions(mode="dense", drafter="draft", **OPTIONS), draft)  # type: ignore[arg-type]
        found.append(session.generate(PROMPTS[0], RequestOptions(max_tokens=8, top_logprobs=3)).logprobs)
    for mine, its in zip(*found, strict=True):
        assert (mine.token, mine.top_tokens) == (its.token, its.top_tokens)
        assert [mine.logprob, *mine.top_logprobs] == pytest.approx([its.logprob, *its.top_logprobs], abs=1e-4)


@pytest.mark.parametrize("selector", ["dustin", "specattn", "quest"])
def test_no_set_is_read_back(monkeypatch: pytest.MonkeyPatch, selector: str) -> None:
    """`read` is the one way out of a round: what the engine does with sets never makes a forward read them."""
    from dustin.backends.mlx_metal import attention, sets

    seen = []

    def checked(token_set: TokenSet | None, lengths: object) -> TokenSet | None:
        parts = [] if token_set is None else [token_set, *token_set.by_layer.values()]
        seen.extend(sets.facts_of(part) is not None for part in parts)
        return sets.checked(token_set, lengths)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "checked", checked)
    backend, target, draft = loaded("mlx")
    options = EngineOptions(mode="sparse", drafter="draft", selector=selector, **OPTIONS)  # type: ignore[arg-type]
    Session(backend, target, None, options, draft).batch_generate(PROMPTS, RequestOptions(max_tokens=12))
    assert len(seen) > 10 and all(seen)
