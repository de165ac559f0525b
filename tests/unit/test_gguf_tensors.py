"""Tensors of GGUF files: equal to the gguf package's own reader and dequantiser, whole and in parts; damage is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin.backends.common.gguf import unpermute
from dustin.backends.common.gguf_tensors import TensorFile, threads
from dustin.backends.torch_triton.gguf_loading import open_gguf
from dustin.backends.torch_triton.weights import build
from dustin.errors import ModelError
from dustin.gguf_metadata import read_metadata, read_tables

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ROWS, COLUMNS = 96, 160


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One matrix of every kind that can be written here, a vector, and K-quants of random blocks."""
    path = tmp_path_factory.mktemp("gguf") / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    random = np.random.default_rng(0)
    for name in KINDS:
        kind = gguf.GGMLQuantizationType[name]
        values = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        kind = gguf.GGMLQuantizationType[name]
        blocks = random.integers(0, 60, (ROWS, 2 * gguf.GGML_QUANT_SIZES[kind][1])).astype(np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.add_tensor("vector", random.standard_normal(37).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def expected(file: Path) -> dict[str, np.ndarray]:
    """Every tensor as the package reads it."""
    reader = gguf.GGUFReader(file)
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def test_every_kind_equals_the_package(file: Path, expected: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor takes many pieces."""
    monkeypatch.setattr("dustin.backends.common.gguf_tensors._PIECE", 1000)
    fields, places = read_tables(file)
    assert fields == read_metadata(file) and set(places) == set(expected) and len(places) == 14
    tensors = TensorFile(file, places)
    for name, values in expected.items():
        found = tensors.read(name)
        assert found.dtype == np.float32 and tensors.shape(name) == values.shape
        np.testing.assert_array_equal(found, values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_are_parts_of_the_whole(file: Path, expected: dict[str, np.ndarray], data: st.DataObject) -> None:
    """Any rows, and any columns, whether or not they begin with a block."""
    tensors = TensorFile(file, read_tables(file)[1])
    name = data.draw(st.sampled_from(sorted(expected)))
    values = expected[name]
    dim = data.draw(st.integers(0, values.ndim - 1))
    start = data.draw(st.integers(0, values.shape[dim]))
    stop = data.draw(st.integers(start, values.shape[dim]))
    found = tensors.read(name, dim, start, stop)
    np.testing.assert_array_equal(found, values[start:stop] if dim == 0 else values[:, start:stop])
    assert found.flags.c_contiguous


def test_heads_of_a_part_are_turned_as_in_the_whole() -> None:
    """A rank's whole heads."""
    whole = np.arange(4 * 6 * 3, dtype=np.float32).reshape(24, 3)
    np.testing.assert_array_equal(unpermute(whole, 4)[6:18], unpermute(whole[6:18], 2))


def test_a_truncated_file_is_named(file: Path, tmp_path: Path) -> None:
    """In the table, and in the data."""
    content = file.read_bytes()
    for size, text in ((300, "truncated"), (len(content) - 64, "tensor vector ends beyond")):
        cut = tmp_path / f"cut{size}.gguf"
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=text) as raised:
            TensorFile(cut, read_tables(cut)[1])
        assert str(cut) in str(raised.value)


def test_a_tensor_without_entries_is_named(file: Path) -> None:
    """A damaged table."""
    place = read_tables(file)[1]["Q4_0"]
    with pytest.raises(ModelError, match="tensor Q4_0 of .* has shape"):
        TensorFile(file, {"Q4_0": replace(place, shape=(0, 32))})


def test_an_unknown_kind_is_named(file: Path, tmp_path: Path) -> None:
    """A newer file than the package."""
    content = bytearray(file.read_bytes())
    at = content.index(b"Q4_0") + 4
    assert content[at : at + 4] == (2).to_bytes(4, "little")
    content[at + 20 : at + 24] = (999).to_bytes(4, "little")
    newer = tmp_path / "newer.gguf"
    newer.write_bytes(content)
    with pytest.raises(ModelError, match="tensor Q4_0 of .* is of GGML type 999"):
        TensorFile(newer, read_tables(newer)[1])


def test_threads_are_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad variable counts as one rank."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)), raising=False)
    found = {}
    for value in ("1", "2", "8", "100", "many", "0"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        found[value] = threads()
    assert found == {"1": 16, "2": 16, "8": 4, "100": 1, "many": 16, "0": 16}


def write_llama(path: Path) -> Path:
    """A model of one layer."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 1, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24, "attention.head_count": 4,
        "attention.head_count_kv": 2, "vocab_size": 19,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    shapes = {"token_embd": (19, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    shapes |= {"blk.0.attn_q": (16, 16), "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16), "blk.0.attn_output": (16, 16)}
    shapes |= {"blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_damaged_headers_end_in_one_error(tmp_path: Path) -> None:
    """Any bytes of the tables: the file is read as it says, or refused by name."""
    content = write_llama(tmp_path / "whole.gguf").read_bytes()
    head = content.index(b"blk.0.ffn_down.weight") + 60
    random, refused = np.random.default_rng(0), 0
    for _ in range(400):
        damaged = bytearray(content)
        for at in random.integers(4, head, random.integers(1, 4)):
            damaged[at] = random.choice([0, 1, 255, random.integers(256)])
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            config, fetch = open_gguf(tmp_path / "damaged.gguf")
            build(config, fetch, torch.float32, torch.device("cpu"))
        except ModelError as error:
            refused += 1
            assert "damaged.gguf" in str(error) or "tensor" in str(error)
    assert 100 < refused < 400
