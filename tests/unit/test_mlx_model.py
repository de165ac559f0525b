"""The MLX backend's models against transformers and mlx-lm itself, its cache, sets and refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if any(importlib.util.find_spec(module) is None for module in ("mlx", "mlx_lm", "torch", "transformers")):
    pytest.skip('needs mlx, mlx-lm, torch and transformers: pip install "dustin-llm[test]"', allow_module_level=True)

import mlx.core as mx

from dustin import interfaces, registry
from dustin.backends.mlx_metal import cache as cache_module
from dustin.backends.mlx_metal import loading, sets
from dustin.backends.mlx_metal.backend import MlxBackend, create
from dustin.backends.mlx_metal.cache import MlxCache
from dustin.backends.mlx_metal.model import MlxModel
from dustin.backends.mlx_metal.sets import facts_of
from dustin.errors import MemoryLimitError
from dustin.interfaces import Tap, TokenSet
from dustin.metal_kernels.gate import Gate
from tests import tiny_model
from tests.parity.adapters import CONFIGS, write_model

FAMILIES = ("llama-tied", "llama3-rope", "llama-bias", "linear-rope", "qwen2", "qwen2-yarn", "qwen3", "mistral-full")
LLAMA = CONFIGS["llama"]


@pytest.fixture(scope="module")
def backend() -> MlxBackend:
    return create("cpu")


@pytest.fixture(scope="module")
def llama(backend: MlxBackend, tmp_path_factory: pytest.TempPathFactory):
    return backend.load(write_model(tmp_path_factory.mktemp("llama"), LLAMA), dtype="float32")


def relative_rms(got: Any, want: Any) -> float:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def ids_of(count: int, seed: int = 0, vocab: int = 67) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def run(backend: MlxBackend, model: Any, row: list[int], chunks: list[int]) -> np.ndarray:
    """Logits [len(row), V], fed in chunks of the given sizes (the last takes the rest)."""
    cache, out, start = model.new_cache(1, len(row) + 3), [], 0
    for size in [*chunks, len(row)]:
        part = row[start : start + size]
        if part:
            out.append(np.array(model.forward(backend.tokens([part]), [len(part)], cache).logits[0]))
        start += size
    return np.concatenate(out)


# Models.


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(backend, tmp_path, family):
    """mlx-lm's definitions, filled from a folder as transformers writes it (RoPE settings nested, biases where there are some)."""
    import torch

    from tests.unit.test_torch_model import reference

    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    ids = ids_of(90, vocab=97)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    model = backend.load(tmp_path, dtype="float32")
    assert relative_rms(run(backend, model, ids, []), want) < 1e-5
    assert relative_rms(run(backend, model, ids, [40, 20, 5, 1, 1, 6]), want) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_folder_of_mlx_lm(backend, tmp_path, bits):
    """Made by mlx-lm's own convert; logits equal mlx-lm's model with mlx-lm's cache, whose attention stays its own."""
    import mlx_lm
    from mlx_lm.convert import convert

    source = tiny_model.write(tmp_path / "plain", hidden_size=64, intermediate_size=128, head_dim=16)
    convert(str(source), mlx_path=str(tmp_path / "quantised"), quantize=True, q_bits=bits, q_group_size=32)
    model = backend.load(tmp_path / "quantised")
    plain = backend.load(source)
    assert model.dtype == mx.float32 and model.spec.weight_bytes < (0.4 if bits == 4 else 0.6) * plain.spec.weight_bytes
    ids = ids_of(40)
    theirs, _ = mlx_lm.load(str(tmp_path / "quantised"))
    want = theirs(mx.array([ids]), cache=mlx_lm.models.cache.make_prompt_cache(theirs))[0].astype(mx.float32)
    assert relative_rms(run(backend, model, ids, [20, 3, 1]), want) < 1e-5
    assert relative_rms(run(backend, plain, ids, []), want) > 1e-3  # quantised weights were used, not the plain ones


def write_gguf(path: Path, kind: str, factors: np.ndarray | None = None) -> Path:
    """A random fp32 model of 2 layers as a GGUF file; llama's q and k are stored in pairs, as that format does."""
    import gguf

    heads, kv_heads, dim, hidden, inner, vocab = 4, 2, 16, 64, 96, 67
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_vocab_size(vocab)
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    for i in range(2):
        parts = {"attn_q": (heads * dim, hidden), "attn_k": (kv_heads * dim, hidden), "attn_v": (kv_heads * dim, hidden)}
        parts |= {"attn_output": (hidden, heads * dim), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
        parts |= {"ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in parts.items()}
        if kind == "qwen2":
            shapes |= {f"blk.{i}.{name}.bias": parts[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    for name, shape in shapes.items():
        writer.add_tensor(name, (0.2 * rng.standard_normal(shape) + (1 if "norm" in name else 0)).astype(np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "llama-factors", "qwen2"])
def test_a_gguf_file_equals_the_torch_backend(backend, tmp_path, kind):
    factors = np.linspace(1, 8, 8) if kind == "llama-factors" else None
    path = write_gguf(tmp_path / "model.gguf", kind.split("-")[0], factors)
    other = registry.create("torch", "cpu")
    theirs = other.load(path, dtype="float32")
    ids = ids_of(60)
    want = theirs.forward(other.tokens([ids]), [60], theirs.new_cache(1, 64)).logits[0].numpy()
    assert relative_rms(run(backend, backend.load(path), ids, [30, 4, 1]), want) < 1e-5


def test_spec_and_fingerprint(backend, llama, tmp_path):
    again = backend.load(write_model(tmp_path / "again", LLAMA), dtype="float32")
    other = backend.load(write_model(tmp_path / "other", LLAMA, seed=1), dtype="float32")
    half = backend.load(tmp_path / "again", dtype="bfloat16")
    assert again.spec.fingerprint == llama.spec.fingerprint
    assert len({model.spec.fingerprint for model in (again, other, half)}) == 3
    assert half.spec.bytes_per_kv_token == again.spec.bytes_per_kv_token / 2 == 2 * 3 * 2 * 16 * 2
    assert half.forward(backend.tokens([[1]]), [1], half.new_cache(1, 4)).logits.dtype == mx.float32


def test_norms_in_fp32_beside_half_precision_weights(backend, tmp_path):
    """Some folders keep them so; q and k then come out in fp32, and the cache stays in half precision."""
    from safetensors.numpy import load_file, save_file

    folder = write_model(tmp_path / "mixed", CONFIGS["qwen3"])
    for path in folder.glob("*.safetensors"):
        save_file({k: w if "norm" in k else w.astype(np.float16) for k, w in load_file(path).items()}, path)
    inner, config, name = loading.load(folder, None)
    model = MlxModel(inner, config, name, Gate("array"))
    exact = backend.load(folder, dtype="float32")
    assert model.dtype == model.new_cache(1, 4).keys[0].dtype == mx.float16
    assert inner.model.norm.weight.dtype == mx.float32
    ids = ids_of(30)
    assert relative_rms(run(backend, model, ids, [20, 4, 1]), run(backend, exact, ids, [])) < 2e-2


def test_limited_vocabulary(backend, tmp_path):
    model = backend.load(write_model(tmp_path, LLAMA), dtype="float32")
    whole = model.forward(backend.tokens([[3, 4]]), [2], model.new_cache(1, 8)).logits
    model.limit_vocabulary(50)
    cut = model.forward(backend.tokens([[3, 4]]), [2], model.new_cache(1, 8)).logits
    assert model.spec.vocab_size == 50 and mx.array_equal(cut, whole[..., :50])
    with pytest.raises(ValueError, match="size is 68"):
        model.limit_vocabulary(68)


def test_rows_that_take_no_part(backend, llama):
    """Nothing of them changes; their results are finite zeros, in short and in long forwards."""
    cache = llama.new_cache(3, 64)
    tap = Tap({1: (0, 5)})
    for rows in (4, 30):
        out = llama.forward(backend.tokens([ids_of(rows)] * 3), [rows, 0, rows - 1], cache, tap=tap)
        assert out.logits.shape == (3, rows, 67) and out.queries[1].shape == (3, rows, 2, 16)
        assert not bool(mx.isnan(out.logits).any()) and not bool(mx.isnan(out.queries[1]).any())
    assert cache.lengths == (34, 0, 32)
    nothing = llama.forward(backend.tokens([[], [], []]), [0, 0, 0], cache, tap=tap, logits="last")
    assert nothing.logits.shape == (3, 1, 67) and nothing.queries[1].shape == (3, 0, 2, 16)
    assert llama.forward(backend.tokens([[1]] * 3), [1] * 3, cache, logits="none").logits is None


MADE = {"Backend": MlxBackend, "Measures": MlxBackend, "Model": MlxModel, "KVCache": MlxCache}


@pytest.mark.parametrize(("protocol", "made"), [(getattr(interfaces, name), made) for name, made in MADE.items()])
def test_every_method_of_the_protocols_is_there(protocol, made):
    """With the same parameters: the engine calls them by name."""
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        want = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(made, name)).parameters)[: len(want)] == want, name


# Sets.


def test_a_set_that_is_everything_equals_dense_bit_for_bit(backend, llama):
    """Alone, beside a sparse row, through extend, and in single layers."""
    rows = [ids_of(12, 1), ids_of(40, 2)]
    fed = backend.tokens([ids_of(3, 3), ids_of(3, 4)])
    quota = {"budget": 20, "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 0}

    def logits(token_set: TokenSet | None) -> mx.array:
        cache = llama.new_cache(2, 64)
        llama.forward(backend.tokens(rows), [12, 40], cache)
        return llama.forward(fed, [3, 3], cache, token_set=token_set).logits

    dense = logits(None)
    chosen = backend.select(None, None, [12, 40], **quota)
    mixed = logits(chosen)
    assert mx.array_equal(mixed[0], dense[0]) and relative_rms(mixed[1], dense[1]) > 1e-2
    everything = backend.select(None, None, [12, 40], **quota | {"budget": 40})
    assert mx.array_equal(logits(everything), dense)
    shorter = backend.select(None, None, [8, 36], **quota | {"budget": 40})
    assert mx.array_equal(logits(backend.extend(shorter, [8, 36], [12, 40])), dense)
    by_layer = dataclasses.replace(chosen, by_layer={0: everything}, dense_layers=(1, 2))
    assert mx.array_equal(logits(by_layer), dense)
    plain = TokenSet(chosen.indices, chosen.counts)
    assert mx.array_equal(logits(plain), mixed)


@pytest.mark.parametrize(
    ("indices", "counts", "message"),
    [
        ([[0, 5, 3]], [3], "not ascending"),
        ([[0, 1, 30]], [3], "within 0..29"),
        ([[0, 1, 2]], [4], "counts"),
        ([[0]] * 2, [1, 1], "rows"),
    ],
)
def test_a_set_that_does_not_fit_is_refused(backend, llama, indices, counts, message):
    cache = llama.new_cache(1, 64)
    llama.forward(backend.tokens([ids_of(30)]), [30], cache)
    with pytest.raises(ValueError, match=message):
        llama.forward(backend.tokens([[1]]), [1], cache, token_set=TokenSet(mx.array(indices), mx.array(counts)))


def test_facts_of_sets_go_with_their_arrays(backend):
    """A set that was wrapped anew is not read again; arrays of another set are; nothing outlives its arrays."""
    chosen = backend.select(None, None, [30], budget=20, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0)
    facts = facts_of(TokenSet(chosen.indices, chosen.counts, (1,)))
    assert facts is not None and facts.counts == (20,)
    assert facts_of(TokenSet(chosen.indices + 0, chosen.counts)) is None
    before = len(sets._KNOWN)
    del chosen
    assert len(sets._KNOWN) == before - 1


def test_host_counts_follow_a_set(backend):
    """What the host claims of a set is what the device has, whatever extend and replace_set_rows did to it."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = rng.integers(1, 60, 3).tolist()
        quota = {"budget": int(rng.integers(8, 40)), "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 0}
        scores = mx.array(rng.random((3, 60)).astype(np.float32))
        made_sets = [backend.select(scores, None, lengths, **quota)]
        starts = [max(0, n - int(rng.integers(0, 6))) for n in lengths]
        made_sets.append(backend.extend(made_sets[0], starts, [n + int(rng.integers(0, 5)) for n in starts]))
        made_sets.append(backend.replace_set_rows(made_sets[0], made_sets[1], [True, False, True]))
        made_sets.append(backend.keep_mass(made_sets[0], scores, lengths, mass=0.5, num_sink_tokens=2, num_recent_tokens=4))
        for made in made_sets:
            counts, rows = made.counts.tolist(), made.indices.tolist()
            facts = facts_of(TokenSet(made.indices, made.counts))
            for b, known in enumerate(facts.counts):
                assert known is None or known == counts[b]
                assert all(x < facts.bounds[b] for x in rows[b][: counts[b]])
                assert rows[b][: counts[b]] == sorted(set(rows[b][: counts[b]]))


# Cache.


def addresses(cache: Any) -> list[int]:
    return [np.array(rows, copy=False).ctypes.data for rows in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_is_written_in_place(backend, llama, batch):
    """Chunks, single tokens, verification, scores and rollback: no layer is ever copied or moved."""
    cache = llama.new_cache(batch, 200)
    before = addresses(cache)
    tap = Tap({1: (0, 1)}, last_row_only=True)
    quota = {"budget": 16, "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 0}
    llama.forward(backend.tokens([ids_of(40, b) for b in range(batch)]), [40 - b for b in range(batch)], cache, logits="last")
    for step in range(4):
        out = llama.forward(backend.tokens([[3]] * batch), [1] * batch, cache, tap=tap)
        scores = backend.score(out.queries, tap, llama, cache, cache.lengths)
        chosen = backend.select(scores, None, cache.lengths, **quota)
        base = cache.lengths
        llama.forward(backend.tokens([ids_of(5, step)] * batch), [5] * batch, cache, token_set=chosen)
        cache.rollback(base)
        assert addresses(cache) == before
    cache.copy_row(0, batch - 1, 30)
    assert addresses(cache) == before


def test_cache_limits(backend, llama):
    cache = llama.new_cache(2, 10)
    with pytest.raises(ValueError, match="expected 0 to 10"):
        llama.forward(backend.tokens([[1] * 11] * 2), [11, 1], cache)
    assert cache.lengths == (0, 0)
    with pytest.raises(ValueError, match="lengths"):
        cache.rollback([1, 0])
    with pytest.raises(ValueError, match="capacity is 0"):
        llama.new_cache(1, 0)
    with pytest.raises(MemoryLimitError, match="asks for .* bytes"):
        llama.new_cache(64, 2**40)
    with pytest.raises(ValueError, match="tokens range over 0..67"):
        llama.forward(backend.tokens([[1, 67], [2]]), [2, 1], cache)


@pytest.mark.parametrize(
    ("info", "fits"),
    [({"max_recommended_working_set_size": 2**40}, True), ({"max_recommended_working_set_size": 1000}, False), ({}, True)],
)
def test_a_gpu_says_how_much_it_takes(llama, monkeypatch, info, fits):
    """The recommended working set less what MLX holds; where nothing is told, nothing is refused."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(cache_module, "device_info", lambda: info)
    if fits:
        assert llama.new_cache(1, 8).capacity == 8
        return
    with pytest.raises(MemoryLimitError, match="asks for 6144 bytes .1 sequences of 8 tokens., 0 are available"):
        llama.new_cache(1, 8)


def test_an_allocation_that_mlx_refuses(llama, monkeypatch):
    """A GPU limits single buffers too, whatever is free."""

    def refuse(*_):
        raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum")

    monkeypatch.setattr(mx, "eval", refuse)
    with pytest.raises(MemoryLimitError, match="6144 bytes .* greater than the maximum.*--max-kv-size"):
        llama.new_cache(1, 8)


def test_taken_rows_are_independent(backend, llama):
    cache = llama.new_cache(2, 32)
    llama.forward(backend.tokens([ids_of(9), ids_of(20, 1)]), [9, 20], cache)
    wide = cache.take([1, 1, 0], 48)
    assert wide.lengths == (20, 20, 9) and wide.capacity == 48
    llama.forward(backend.tokens([[1], [2], [3]]), [1, 1, 1], wide)
    a, b = (cache.keys[0][1, :20], wide.keys[0][0, :20])
    assert mx.array_equal(a, b) and cache.lengths == (9, 20)
    with pytest.raises(ValueError, match="expected 0 to 12"):
        cache.take([1], 12)


def test_another_thread_can_run_the_model(backend, llama):
    ids, found = ids_of(25), []
    want = run(backend, llama, ids, [20])

    def work() -> None:
        try:
            found.append(run(backend, llama, ids, [20]))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], np.ndarray), found[0]
    assert np.array_equal(found[0], want)


def test_the_limit_of_open_files_stays(monkeypatch):
    """mlx-lm sets 2048 when it is imported, and fails where that is more than it may."""
    have, theirs, called = resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit, []

    def imported(name: str) -> None:
        called.append(name)
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    monkeypatch.delitem(sys.modules, "mlx_lm")
    monkeypatch.setattr(loading.importlib, "import_module", imported)
    loading.import_mlx_lm()
    assert called == ["mlx_lm.utils"] and resource.getrlimit(resource.RLIMIT_NOFILE) == have and resource.setrlimit is theirs
