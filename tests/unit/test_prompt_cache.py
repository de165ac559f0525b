"""KV kept in files: rows come back bit for bit in every backend, and a session goes on as if it had never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dustin.config import EngineOptions, RequestOptions
from dustin.errors import UsageError
from dustin.generation import Session, load
from dustin.interfaces import PortableCache
from tests import tiny_model

REQUEST = RequestOptions(max_tokens=8)
OPTIONS = EngineOptions(mode="sparse", budget=48)
SHAPE = (2, 2, 8)  # layers, Hkv, D


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_model.write(folder / "target"), tiny_model.write(folder / "draft", seed=3, num_hidden_layers=1)


def session(models: tuple[Path, Path], backend: str = "numpy", dtype: str = "auto", with_draft: bool = True) -> Session:
    made = load(str(models[0]), str(models[1]) if with_draft else None, backend=backend, dtype=dtype, options=OPTIONS)
    made.prefix_cache = True
    return made


def numpy_cache(dtype: str) -> Any:
    from dustin.backends.numpy_reference.cache import Cache

    return Cache(SHAPE[0], 2, 40, *SHAPE[1:])


def torch_cache(dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    from dustin.backends.torch_triton.cache import TorchCache

    return TorchCache(SHAPE[0], 2, 40, *SHAPE[1:], dtype=getattr(torch, dtype))


def paged_cache(dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    from dustin.backends.torch_triton.cuda_cache import PagedCache, PagePool

    pool = PagePool(SHAPE[0], 20, *SHAPE[1:], dtype=getattr(torch, dtype), device=torch.device("cpu"), page_size=8)
    other = PagedCache(pool, 1, 8)  # so that pages do not begin at 0
    made = PagedCache(pool, 2, 40)
    made.neighbour = other  # type: ignore[attr-defined]
    return made


def mlx_cache(dtype: str) -> Any:
    mx = pytest.importorskip("mlx.core")
    from dustin.backends.mlx_metal.cache import MlxCache

    return MlxCache(SHAPE[0], 2, 40, *SHAPE[1:], dtype=getattr(mx, dtype))


KINDS = [
    (numpy_cache, "float64"),
    *((make, dtype) for make in (torch_cache, paged_cache, mlx_cache) for dtype in ("float32", "bfloat16", "float16")),
]


@pytest.mark.parametrize(("make", "dtype"), KINDS)
def test_rows_come_back_bit_for_bit(make: Any, dtype: str) -> None:
    cache = make(dtype)
    assert isinstance(cache, PortableCache)
    rng = np.random.default_rng(0)
    kind = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    layers = [rng.standard_normal((2, 21, *SHAPE[1:])).astype(np.float32) for _ in range(SHAPE[0])]
    # Numbers that bfloat16 holds: the upper half of a float32.
    stored = [(x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(kind) for x in layers]
    cache.restore(1, stored)
    assert cache.lengths == (0, 21)
    back = cache.dump(1)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(back, stored, strict=True))
    assert [x.shape for x in cache.dump(0)] == [(2, 0, *SHAPE[1:])] * SHAPE[0]
    # A copy, and a shorter one, hold the same rows.
    cache.rollback([0, 13])
    assert all(np.array_equal(a, b[:, :13]) for a, b in zip(cache.take([1], 64).dump(0), stored, strict=True))
    with pytest.raises(ValueError, match="has 13 rows, expected an empty one"):
        cache.restore(1, stored)
    for wrong, message in (
        (stored[:1], "1 layers"),
        ([x[:, :, :1] for x in stored], "expected"),
        ([x.astype(np.int8) for x in stored], "int8"),
        ([np.repeat(x, 3, axis=1) for x in stored], "at most the capacity of 40"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.restore(0, wrong)
    assert cache.lengths == (0, 13)


@pytest.mark.parametrize(("backend", "dtype"), [("numpy", "auto"), ("torch", "float32"), ("torch", "bfloat16"), ("mlx", "float32")])
def test_a_session_goes_on_as_if_it_had_never_ended(models: tuple[Path, Path], backend: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip({"numpy": "numpy", "torch": "torch", "mlx": "mlx_lm"}[backend])
    one = session(models, backend, dtype)
    document = "a document that is read once. " * 5
    first = one.generate(document, REQUEST)
    assert one.save_kept(tmp_path / "kv") == (tmp_path / "kv").stat().st_size
    follow = [*one.encode(document), *first.tokens, 70, 71, 72]
    expected = one.generate(follow, REQUEST)
    other = session(models, backend, dtype)
    assert other.load_kept(tmp_path / "kv") >= len(document)
    result = other.generate(follow, REQUEST)
    assert result.tokens == expected.tokens
    assert result.stats.reused_prompt_tokens == expected.stats.reused_prompt_tokens > 100
    assert not list(tmp_path.glob("*.part"))


def test_what_does_not_fit_together_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    one = session(models)
    one.generate("a document", REQUEST)
    one.save_kept(tmp_path / "kv")
    # Without the draft the target's rows serve alone.
    assert session(models, with_draft=False).load_kept(tmp_path / "kv") > 0
    changed = tiny_model.write(tmp_path / "other", seed=9)
    with pytest.raises(UsageError, match=r"holds the KV of target as target, in other weights, dtype or tokenizer than other here"):
        session((changed, models[1])).load_kept(tmp_path / "kv")
    if pytest.importorskip("torch"):
        with pytest.raises(UsageError, match="other weights, dtype"):
            session(models, "torch", "float32").load_kept(tmp_path / "kv")
    words = tiny_model.write(tmp_path / "words", special=("<|endoftext|>", "<|im_start|>", "<|end|>"))
    with pytest.raises(UsageError, match="tokenizer"):
        session((words, models[1]), with_draft=False).load_kept(tmp_path / "kv")


@pytest.mark.parametrize("content", [None, b"", b"notes", b"\x08\0\0\0\0\0\0\0{}      "])
def test_files_that_are_no_prompt_cache(models: tuple[Path, Path], tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "kv").write_bytes(content)
    with pytest.raises(UsageError, match=str(tmp_path / "kv")):
        session(models).load_kept(tmp_path / "kv")
    with pytest.raises(UsageError, match="cannot write"):
        session(models).save_kept(tmp_path / "nowhere" / "kv")


def test_a_file_that_was_cut_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    one = session(models)
    one.generate("a document", REQUEST)
    one.save_kept(tmp_path / "kv")
    (tmp_path / "kv").write_bytes((tmp_path / "kv").read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot read the prompt cache"):
        session(models).load_kept(tmp_path / "kv")
