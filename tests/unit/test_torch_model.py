"""The torch backend's model against transformers, and its cache, chunks, batches and sets against themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dustin.backends.torch_triton import attention  # noqa: E402
from dustin.backends.torch_triton.backend import create  # noqa: E402
from dustin.errors import MemoryLimitError, ModelError, UsageError  # noqa: E402
from dustin.interfaces import Tap, TokenSet  # noqa: E402

SHAPE = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=2048, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
}


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected.double()).pow(2).mean() / expected.double().pow(2).mean()).sqrt())


def reference(family: str):
    """A tiny transformers model whose biases and norms are not trivial."""
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(8)
    return model


def save(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def backend():
    return create("cpu")


@pytest.fixture(scope="module")
def llama(backend, tmp_path_factory):
    return backend.load(save(reference("llama"), tmp_path_factory.mktemp("llama")), dtype="float32")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(backend, model, rows: list[list[int]], chunks: list[int] | None = None, capacity: int = 2048):
    """Logits of each row, fed in chunks of the given sizes (the last takes the rest)."""
    cache = model.new_cache(len(rows), capacity)
    out: list[list[torch.Tensor]] = [[] for _ in rows]
    start = 0
    for size in [*(chunks or []), max(map(len, rows))]:
        parts = [row[start : start + size] for row in rows]
        logits = model.forward(backend.tokens(parts), [len(p) for p in parts], cache).logits
        for b, part in enumerate(parts):
            out[b].append(logits[b, : len(part)])
        start += size
    return [torch.cat(parts) for parts in out], cache


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(backend, tmp_path, family):
    theirs = reference(family)
    ours = backend.load(save(theirs, tmp_path), dtype="float32")
    ids = some_tokens(300)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    (got,), _ = run(backend, ours, [ids])
    assert relative_rms(got, expected) < 1e-5
    (got,), _ = run(backend, ours, [ids], [100, 70, 5, 1, 1, 6])
    assert relative_rms(got, expected) < 1e-5


def test_parts_of_a_long_past_equal_one_shot(backend, llama):
    ids = some_tokens(1500)
    (one,), _ = run(backend, llama, [ids])
    (chunked,), _ = run(backend, llama, [ids], [512, 512, 300, 1, 5, 33, 1])
    assert attention.num_parts(1300, 2) >= 4
    assert relative_rms(chunked, one) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_ragged_batch_equals_its_singles(backend, tmp_path, family):
    model = backend.load(save(reference(family), tmp_path), dtype="float32")
    rows = [some_tokens(n, n) for n in (700, 33, 1, 400)]
    together, cache = run(backend, model, rows, [300, 32, 1, 1])
    assert cache.lengths == (700, 33, 1, 400)
    for row, got in zip(rows, together, strict=True):
        (alone,), _ = run(backend, model, [row], [300, 32, 1, 1])
        assert relative_rms(got, alone) < 5e-6


def test_rollback_equals_a_fresh_run(backend, llama):
    rows = [some_tokens(90, 1), some_tokens(60, 2)]
    _, cache = run(backend, llama, rows)
    assert cache.rollback([50, 60]) == (40, 0)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 51"):
        cache.rollback([51, 60])
    after = llama.forward(backend.tokens([[5, 6], [7]]), [2, 1], cache).logits
    fresh, _ = run(backend, llama, [rows[0][:50] + [5, 6], rows[1] + [7]])
    assert relative_rms(after[0], fresh[0][50:52]) < 5e-6
    assert relative_rms(after[1, :1], fresh[1][60:61]) < 5e-6


def test_garbage_beyond_the_lengths_is_never_read(backend, llama):
    row = some_tokens(80)
    (clean,), _ = run(backend, llama, [row], [70, 5])
    cache = llama.new_cache(1, 128)
    for store in (*cache.keys, *cache.values):
        store.fill_(float("nan"))
    llama.forward(backend.tokens([row[:75]]), [75], cache)
    cache.rollback([70])
    for store in (*cache.keys, *cache.values):
        store[:, 70:] = float("nan")
    picked = TokenSet(torch.arange(70, dtype=torch.int32)[None], torch.tensor([70], dtype=torch.int32))
    for token_set in (None, picked):
        got = llama.forward(backend.tokens([row[70:75]]), [5], cache, token_set=token_set).logits[0]
        assert relative_rms(got, clean[70:75]) < 5e-6
        cache.rollback([70])


def sets_of(indices: list[list[int]]) -> TokenSet:
    width = max(map(len, indices))
    padded = torch.tensor([row + [-7] * (width - len(row)) for row in indices], dtype=torch.int32)
    return TokenSet(padded, torch.tensor([len(row) for row in indices], dtype=torch.int32))


def test_the_full_set_is_dense_bit_for_bit(backend, llama):
    rows = [some_tokens(600, 1), some_tokens(350, 2)]
    _, cache = run(backend, llama, rows)
    fed = backend.tokens([[1, 2, 3], [4, 5, 6]])
    dense = llama.forward(fed, [3, 3], cache).logits
    cache.rollback([600, 350])
    full = sets_of([list(range(600)), list(range(350))])
    assert torch.equal(llama.forward(fed, [3, 3], cache, token_set=full).logits, dense)
    cache.rollback([600, 350])
    half = sets_of([list(range(0, 600, 2)), list(range(350))])
    mixed = llama.forward(fed, [3, 3], cache, token_set=half).logits
    assert torch.equal(mixed[1], dense[1])
    assert relative_rms(mixed[0], dense[0]) > 1e-3


def test_a_set_reads_exactly_its_rows(backend, llama):
    """Keys of 0 make attention a plain mean of the values seen; values that code their position name every row read."""
    cache = llama.new_cache(2, 2048)
    cache.advance([1400, 700])
    position = torch.arange(2048.0)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys.zero_()
        values.zero_()
        for bit in range(8):
            values[:, :, :, bit] = (position[None, :, None].long() >> bit) & 1
    chosen = [sorted(set(some_seen(1400, 1100, 3))), sorted(set(some_seen(700, 500, 4)))]
    q = torch.randn(4, 6, 8)
    rows = [2, 2]
    attend = attention.Attention(cache.lengths, rows, 8**-0.5)
    got = attend(q, cache, 0, sets_of(chosen), None)
    for b, length in enumerate((1400, 700)):
        for t in range(2):
            seen = torch.tensor([*chosen[b], *range(length, length + t + 1)])
            sums = torch.stack([((seen >> bit) & 1).sum() for bit in range(8)])
            counted = got[2 * b + t, :, :8] * len(seen)
            assert torch.allclose(counted, sums.float().expand(6, 8), atol=0.05), (b, t)


def some_seen(length: int, count: int, seed: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def test_sparse_batch_equals_singles(backend, llama):
    rows = [some_tokens(n, n) for n in (900, 700, 800)]
    chosen = [sorted(some_seen(len(row), count, 9)) for row, count in zip(rows, (600, 600, 40), strict=True)]
    _, cache = run(backend, llama, rows)
    fed, counts = [[1, 2, 3], [4, 5], [6, 7, 8]], [3, 2, 3]
    together = llama.forward(backend.tokens(fed), counts, cache, token_set=sets_of(chosen)).logits
    for b, row in enumerate(rows):
        _, alone = run(backend, llama, [row])
        single = llama.forward(backend.tokens([fed[b]]), [counts[b]], alone, token_set=sets_of([chosen[b]])).logits
        assert relative_rms(together[b, : counts[b]], single[0]) < 5e-6


def test_dense_layers_and_layer_sets(backend, llama):
    row = some_tokens(300)
    _, cache = run(backend, llama, [row])
    fed, few, full = backend.tokens([[1]]), sets_of([[0, 5, 299]]), sets_of([list(range(300))])
    dense = llama.forward(fed, [1], cache).logits
    for token_set, same in (
        (TokenSet(few.indices, few.counts, dense_layers=(0, 1, 2)), True),
        (TokenSet(few.indices, few.counts, by_layer={0: full, 1: full, 2: full}), True),
        (TokenSet(few.indices, few.counts, dense_layers=(0, 1)), False),
    ):
        cache.rollback([300])
        assert torch.equal(llama.forward(fed, [1], cache, token_set=token_set).logits, dense) is same


@pytest.mark.parametrize("indices", [[3, 2], [1, 1], [0, 300], [-1, 4]])
def test_a_bad_set_is_refused(backend, llama, indices):
    _, cache = run(backend, llama, [some_tokens(300)])
    with pytest.raises(ValueError, match="ascending"):
        llama.forward(backend.tokens([[1]]), [1], cache, token_set=sets_of([indices]))


def test_idle_rows_last_logits_and_captured_queries(backend, llama):
    rows = [some_tokens(20, 1), some_tokens(12, 2)]
    tap = Tap({1: (0, 4), 2: (5,)})
    cache = llama.new_cache(2, 64)
    out = llama.forward(backend.tokens(rows), [20, 12], cache, tap=tap)
    assert {layer: tuple(q.shape) for layer, q in out.queries.items()} == {1: (2, 20, 2, 8), 2: (2, 20, 1, 8)}
    again = llama.new_cache(2, 64)
    last = llama.forward(backend.tokens(rows), [20, 12], again, tap=Tap(tap.heads, last_row_only=True), logits="last")
    assert relative_rms(last.logits[:, 0], torch.stack([out.logits[0, 19], out.logits[1, 11]])) < 5e-6
    assert torch.equal(last.queries[1][:, 0], torch.stack([out.queries[1][0, 19], out.queries[1][1, 11]]))
    idle = llama.forward(backend.tokens([[], [3]]), [0, 1], cache, tap=tap, logits="last")
    assert cache.lengths == (20, 13) and idle.logits.shape == (2, 1, 97)
    assert not idle.logits[0].any() and not idle.queries[1][0].any()
    nothing = llama.forward(backend.tokens([[], []]), [0, 0], cache, tap=tap, logits="last")
    assert cache.lengths == (20, 13) and torch.isfinite(nothing.logits).all()


def test_take_is_independent(backend, llama):
    rows = [some_tokens(20, 1), some_tokens(12, 2)]
    _, cache = run(backend, llama, rows)
    copy = cache.take([1, 1, 0], capacity=40)
    assert copy.lengths == (12, 12, 20) and copy.capacity == 40
    before = llama.forward(backend.tokens([[1], [2], [3]]), [1, 1, 1], copy).logits
    copy.rollback([12, 12, 20])
    cache.keys[0].fill_(9)
    assert torch.equal(llama.forward(backend.tokens([[1], [2], [3]]), [1, 1, 1], copy).logits, before)
    with pytest.raises(ValueError, match="20"):
        cache.take([0], capacity=19)


def test_limit_vocabulary(backend, tmp_path):
    model = backend.load(save(reference("qwen2"), tmp_path), dtype="float32")
    (full,), _ = run(backend, model, [[1, 2, 3]])
    model.limit_vocabulary(90)
    (cut,), _ = run(backend, model, [[1, 2, 3]])
    assert model.spec.vocab_size == 90 and relative_rms(cut, full[:, :90]) < 5e-6


def test_sharded_safetensors(backend, tmp_path):
    theirs = reference("qwen3")
    whole = backend.load(save(theirs, tmp_path / "whole"), dtype="float32")
    folder = save(theirs, tmp_path / "shards", max_shard_size="40KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    split = backend.load(folder, dtype="float32")
    assert split.spec.fingerprint == whole.spec.fingerprint
    (a,), _ = run(backend, whole, [[1, 2, 3]])
    (b,), _ = run(backend, split, [[1, 2, 3]])
    assert torch.equal(a, b)
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=shards[1].name):
        backend.load(folder)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"{shards[1].name} is missing"):
        backend.load(folder)


def test_missing_tensor_and_wrong_shape(backend, tmp_path):
    from safetensors.torch import load_file, save_file

    path = save(reference("llama"), tmp_path) / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"{name} is missing"):
        backend.load(tmp_path)
    save_file(weights | {name: torch.zeros(3, 3)}, path)
    with pytest.raises(ModelError, match=f"{name} has shape"):
        backend.load(tmp_path)


def test_unsupported_models_are_named(backend, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        backend.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="config.json"):
        backend.load(tmp_path)
    save(reference("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            backend.load(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        backend.load(tmp_path / "bad.gguf")


def test_bad_devices_and_dtypes(backend, llama, tmp_path):
    with pytest.raises(UsageError, match="tpu"):
        create("tpu")
    with pytest.raises(UsageError, match="int3"):
        backend.load(tmp_path, dtype="int3")
    with pytest.raises(MemoryLimitError, match=r"asks for \d+ bytes.*are available.*--max-kv-size.*fewer sequences.*--slots"):
        llama.new_cache(1000, 10**9)


def test_bad_input_is_refused(backend, llama):
    cache = llama.new_cache(1, 8)
    for tokens, counts, message in (
        ([[97]], [1], "97"),
        ([[1] * 9], [9], r"num_tokens\[0\] is 9"),
        ([[1]], [2], r"num_tokens\[0\] is 2"),
        ([[1], [1]], [1, 1], "2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            llama.forward(backend.tokens(tokens), counts, cache)
    assert cache.lengths == (0,)


def test_bfloat16_is_near_float32(backend, tmp_path):
    folder = save(reference("llama"), tmp_path)
    ids = some_tokens(700)
    (wide,), _ = run(backend, backend.load(folder, dtype="float32"), [ids], [600, 1, 5])
    model = backend.load(folder, dtype="bfloat16")
    (narrow,), cache = run(backend, model, [ids], [600, 1, 5])
    assert cache.keys[0].dtype == torch.bfloat16 and narrow.dtype == torch.float32
    assert model.spec.bytes_per_kv_token == 2 * 3 * 2 * 8 * 2
    assert relative_rms(narrow, wide) < 0.05


@pytest.fixture(scope="module")
def smollm() -> Path:
    root = Path(os.environ.get("DUSTIN_CACHE", Path.home() / ".cache" / "dustin"))
    found = sorted(root.rglob("SmolLM2-135M-Instruct.Q4_1.gguf")) if root.is_dir() else []
    if not found:
        pytest.skip("SmolLM2 is not in the cache: run `dustin models fetch` first")
    return found[0]


@pytest.mark.real
def test_smollm_equals_transformers(backend, smollm):
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(smollm.parent, gguf_file=smollm.name, dtype=torch.float32)
    ours = backend.load(smollm, dtype="float32")
    ids = torch.randint(0, 49152, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits[0]
    (got,), _ = run(backend, ours, ids.tolist(), [512, 100, 1, 5])
    assert relative_rms(got, expected) < 1e-5
