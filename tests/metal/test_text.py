"""The exact text MLX generates: golden files, address spaces (clang), names, and what must not be in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.metal.emulator import TracedKernel
from tests.metal.emulator.dropin import installed
from tests.metal.emulator.lint import clang, lint

GOLDEN = Path(__file__).parent / "golden"


def traced(batch: int = 2, dtype: str = "float16") -> dict[str, TracedKernel]:
    """Every kernel at one small shape, by its short name."""
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv
    from dustin.metal_kernels.dense_verify import dense_verify
    from dustin.metal_kernels.score_heads import score_heads
    from dustin.metal_kernels.select_tokens import select_tokens
    from dustin.metal_kernels.sparse_verify import sparse_verify, sparse_verify_blocks

    kind = getattr(mx, dtype)
    q, k, n = mx.zeros((batch, 3, 8, 64), kind), mx.zeros((batch, 90, 2, 64), kind), mx.zeros((batch,), mx.int32)
    chosen, new, scores = mx.zeros((batch, 20), mx.int32), mx.zeros((batch, 3, 2, 64), kind), mx.zeros((batch, 90))
    quota = {"budget": 20, "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 5}
    with installed(execute=False) as log:
        for splits in (1, 4):
            dense_verify(q, k, k, n, n, 0.125, splits=splits)
            sparse_verify(q, k, k, chosen, n, n, n, 0.125, splits=splits)
            sparse_verify_blocks(q, k, k, chosen, n, n, n, 0.125, splits=splits)
        score_heads(q[:, :, :3], k, (0, 5, 7), 8, n, 0.125, splits=2)
        select_tokens(scores, scores, n, **quota)
        append_kv(k, k, new, new, n, n)
    return {
        re.sub(r"custom_kernel_dustin_(\w+?)_[0-9a-f]{12}_.*|.*dustin_(\w+?)_[0-9a-f]{12}$", r"\1\2", x.name): x
        for x in log.kernels
    }


def test_golden() -> None:
    """The recorded text; DUSTIN_UPDATE_GOLDEN=1 writes it anew after a deliberate change or a new MLX."""
    import mlx.core as mx

    kernels = traced()
    assert len(kernels) == 11
    for name, made in kernels.items():
        path = GOLDEN / f"{name}.metal"
        text = f"// grid {made.grid} threadgroup {made.group}\n{made.source}"
        if os.environ.get("DUSTIN_UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, f"{name}: MLX {mx.__version__} generates another text than the recorded one"


@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_address_spaces(batch: int, dtype: str) -> None:
    """B = 2 puts the lengths into constant memory, B = 9 into device memory."""
    if clang() is None:
        pytest.skip("clang++ is missing: only the lint knows address spaces")
    kernels = traced(batch, dtype)
    for name, made in kernels.items():
        assert lint(made) == [], name
    assert ("const constant int32_t* lengths" in kernels["dense_verify"].source) == (batch < 8)


def test_small_sets_in_constant_memory() -> None:
    """Fewer than 8 indices or blocks are a constant array: the gather must take that address space too."""
    import mlx.core as mx

    from dustin.metal_kernels.sparse_verify import sparse_verify, sparse_verify_blocks

    if clang() is None:
        pytest.skip("clang++ is missing: only the lint knows address spaces")
    q, k, n = mx.zeros((1, 2, 4, 64)), mx.zeros((1, 90, 2, 64)), mx.array(40, mx.int32)
    with installed(execute=False) as log:
        sparse_verify(q, k, k, mx.zeros((1, 5), mx.int32), n, n, n, 0.125)
        sparse_verify_blocks(q, k, k, mx.zeros((1, 3), mx.int32), n, n, n, 0.125)
    assert "const constant int32_t* indices" in log.kernels[0].source
    assert "const constant int32_t& lengths" in log.kernels[0].source
    assert [lint(kernel) for kernel in log.kernels] == [[], []]


def test_text_rules() -> None:
    """ASCII, hashed names, no MLX copy of any input, no infinite mask, no template argument that a length could change."""
    for name, made in traced().items():
        assert made.source.isascii() and not made.row_contiguous
        assert re.search(r"dustin_\w+_[0-9a-f]{12}", made.name), name
        body = re.sub(r"//[^\n]*", "", made.source)
        assert "-INFINITY" not in body.replace("float score = -INFINITY", ""), name


def test_names_follow_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from dustin.metal_kernels import source

    before = traced()["select_tokens"].name
    real = source.text
    monkeypatch.setattr(source, "text", lambda name: real(name) + "// changed\n")
    assert traced()["select_tokens"].name != before
