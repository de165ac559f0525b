"""The numpy model against transformers; a batch equals its singles, rollback a fresh run, a full token set dense attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin.backends.numpy_reference.backend import create
from dustin.backends.numpy_reference.loading import load
from dustin.backends.numpy_reference.model import ModelConfig, NumpyModel, random_model
from dustin.errors import MemoryLimitError, ModelError, UsageError
from dustin.interfaces import KVCache, Tap, TokenSet
from tests.parity.adapters import CONFIGS, ModelCheck, write_model

backend = create("cpu")
BASE = ModelConfig(53, 32, 48, 3, 6, 2, 8, context_length=128)
VARIANTS = {
    "plain": BASE,
    "qwen3": dataclasses.replace(BASE, qk_norm=True, num_kv_heads=1),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True, tied_embeddings=True),
    "sliding": dataclasses.replace(BASE, windows=(None, 4, None)),
    "softcap": dataclasses.replace(BASE, attention_softcap=2.0),
}
ROWS = [[5, 9, 2, 7, 7, 1, 30], [8], [], [52, 0, 3, 3]]
COUNTS = [7, 1, 0, 4]


def whole(indices, counts):
    return TokenSet(np.asarray(indices, dtype=np.int32), np.asarray(counts, dtype=np.int32))


def filled(model, capacity=30):
    cache = model.new_cache(4, capacity)
    return cache, model.forward(backend.tokens(ROWS), COUNTS, cache).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = write_model(tmp_path, CONFIGS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(0, 67, (1, 90))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    model = load(folder)
    got = model.forward(tokens, [90], model.new_cache(1, 90)).logits
    # transformers keeps RoPE tables in fp32 even in a float64 model.
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_schedule_other_backends_run_passes_on_a_folder(name, tmp_path):
    ModelCheck(backend, np.asarray, write_model(tmp_path, CONFIGS[name]), "float64", 1e-12).run()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_batch_equals_its_singles_bit_for_bit(config):
    model = random_model(config, 3)
    _, together = filled(model)
    for b, row in enumerate(ROWS):
        if row:
            alone = model.forward(backend.tokens([row]), [len(row)], model.new_cache(1, 9)).logits
            assert np.array_equal(alone[0], together[b, : len(row)])
    assert np.isfinite(together).all()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_many_rows_equal_single_steps_bit_for_bit(config):
    model = random_model(config, 3)
    cache = model.new_cache(1, 7)
    steps = [model.forward(backend.tokens([[token]]), [1], cache).logits[0, 0] for token in ROWS[0]]
    assert np.array_equal(np.stack(steps), filled(model)[1][0])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_rollback_equals_a_fresh_run_bit_for_bit(config):
    model = random_model(config, 3)
    cache, logits = filled(model)
    assert cache.rollback([2, 0, 0, 4]) == (5, 1, 0, 0)
    again = model.forward(backend.tokens([row[n:] for row, n in zip(ROWS, [2, 0, 0, 4], strict=True)]), [5, 1, 0, 0], cache)
    assert np.array_equal(again.logits[0, :5], logits[0, 2:7])
    assert np.array_equal(again.logits[1, 0], logits[1, 0])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_full_set_equals_dense_and_a_smaller_one_does_not(config):
    model = random_model(config, 3)
    cache, _ = filled(model)
    step = backend.tokens([[3, 4], [5, 6], [7, 8], [9, 9]])
    indices = np.tile(np.arange(9), (4, 1))
    dense = model.forward(step, [2, 2, 1, 2], cache.take(range(4))).logits
    full = model.forward(step, [2, 2, 1, 2], cache.take(range(4)), token_set=whole(indices, COUNTS)).logits
    assert np.array_equal(dense, full)
    fewer = model.forward(step, [2, 2, 1, 2], cache.take(range(4)), token_set=whole(indices, [6, 1, 0, 4])).logits
    assert not np.allclose(fewer[0], dense[0])
    assert np.array_equal(fewer[1:], dense[1:])
    everywhere = TokenSet(indices, np.array([3, 0, 0, 0]), dense_layers=(0, 1, 2))
    assert np.array_equal(model.forward(step, [2, 2, 1, 2], cache.take(range(4)), token_set=everywhere).logits, dense)
    by_layer = TokenSet(indices, np.array([3, 0, 0, 0]), by_layer={i: whole(indices, COUNTS) for i in range(3)})
    assert np.array_equal(model.forward(step, [2, 2, 1, 2], cache.take(range(4)), token_set=by_layer).logits, dense)


def test_sparse_equals_a_dense_run_that_never_saw_the_others_in_one_layer():
    """With one layer, leaving tokens out of the set is leaving their rows out of the cache (positions kept)."""
    model = random_model(dataclasses.replace(BASE, num_layers=1), 3)
    cache, _ = filled(model)
    chosen = whole([[0, 2, 6]] * 4, [3, 0, 0, 0])
    sparse = model.forward(backend.tokens([[3], [], [], []]), [1, 0, 0, 0], cache.take(range(4)), token_set=chosen)
    cut = cache.take(range(4))
    for store in (*cut.keys, *cut.values):
        store[0, [1, 3, 4, 5]] = np.nan
    blind = model.forward(backend.tokens([[3], [], [], []]), [1, 0, 0, 0], cut, token_set=chosen)
    assert np.array_equal(sparse.logits, blind.logits)
    assert np.isnan(model.forward(backend.tokens([[3], [], [], []]), [1, 0, 0, 0], cut).logits[0]).any()


@pytest.mark.parametrize(
    ("indices", "count"), [([0, 2, 2], 3), ([2, 0, 1], 3), ([0, 1, 7], 3), ([-1, 1, 2], 3), ([0, 1, 2], 4), ([0, 1, 2], -1)]
)
def test_a_set_that_is_no_ascending_part_of_the_prefix_is_refused(indices, count):
    model = random_model(BASE, 3)
    cache, _ = filled(model)
    with pytest.raises(ValueError, match="token_set"):
        model.forward(backend.tokens([[3], [], [], []]), [1, 0, 0, 0], cache, token_set=whole([indices] * 4, [count, 0, 0, 0]))


def test_taps_keep_the_queries_attention_used():
    model = random_model(VARIANTS["qwen3"], 3)
    tokens = backend.tokens(ROWS)
    every = model.forward(tokens, COUNTS, model.new_cache(4, 9), tap=Tap({0: (1, 4), 2: (5,)})).queries
    last = model.forward(tokens, COUNTS, model.new_cache(4, 9), tap=Tap({0: (1, 4), 2: (5,)}, last_row_only=True), logits="none")
    assert last.logits is None
    assert {layer: q.shape for layer, q in every.items()} == {0: (4, 7, 2, 8), 2: (4, 7, 1, 8)}
    for b, count in enumerate(COUNTS):
        if count:
            assert np.array_equal(last.queries[0][b, 0], every[0][b, count - 1])
    gathered = backend.gather_rows(every, np.array([6, 0, 0, 3]))
    assert all(np.array_equal(gathered[layer][[0, 1, 3]], last.queries[layer][[0, 1, 3]]) for layer in every)


def test_score_is_the_attention_that_the_model_itself_pays():
    """One layer, softcap on: with V replaced by one-hot rows the attention output IS the mass of each token."""
    model = random_model(dataclasses.replace(VARIANTS["softcap"], num_layers=1, head_dim=16), 3)
    cache = model.new_cache(1, 16)
    row = list(range(10, 22))
    queries = model.forward(backend.tokens([row]), [12], cache, tap=Tap({0: (0, 1, 2, 3, 4, 5)}, last_row_only=True)).queries
    from dustin.backends.numpy_reference.ops import Attention

    cache.values[0][0, :12] = np.eye(16)[:12, None]
    mass = Attention(softcap=2.0)(queries[0], cache, 0, [11], [1], None)[0, 0].mean(axis=0)
    got = backend.score(queries, Tap({0: (0, 1, 2, 3, 4, 5)}), model, cache, [12])
    assert np.allclose(got[0], mass[:12], atol=1e-7)


def test_cache_lengths_room_take_and_poison():
    model = random_model(BASE, 3)
    cache, _ = filled(model, capacity=8)
    assert isinstance(cache, KVCache)
    assert cache.lengths == (7, 1, 0, 4)
    assert cache.num_bytes == 4 * 8 * model.spec.bytes_per_kv_token
    with pytest.raises(ValueError, match=r"lengths\[1\] is 2"):
        cache.rollback([7, 2, 0, 4])
    with pytest.raises(ValueError, match=r"num_tokens\[0\] is 2"):
        model.forward(backend.tokens([[1, 2], [], [], []]), [2, 0, 0, 0], cache)
    assert cache.lengths == (7, 1, 0, 4)
    copy = cache.take([3, 3])
    copy.rollback([1, 4])
    assert cache.lengths == (7, 1, 0, 4) and copy.lengths == (1, 4)
    assert np.isfinite(cache.keys[0][3, :4]).all()
    assert np.isnan(copy.keys[0][0, 1:]).all() and np.isfinite(copy.values[2][1, :4]).all()


def test_too_large_a_cache_names_asked_and_available_bytes():
    with pytest.raises(MemoryLimitError, match=r"asks for \d+ bytes .* \d+ are available"):
        random_model(BASE, 3).new_cache(1000, 10**9)


@pytest.mark.parametrize("tokens", [[[53]], [[-1]]])
def test_a_token_outside_the_vocabulary_is_refused(tokens):
    model = random_model(BASE, 3)
    with pytest.raises(ValueError, match="tokens"):
        model.forward(np.array(tokens), [1], model.new_cache(1, 4))


def test_damaged_folders_name_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        load(tmp_path / "absent")
    folder = write_model(tmp_path / "model", CONFIGS["llama"])
    shard = folder / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(ModelError, match="cannot be read"):
        load(folder)
    shard.unlink()
    with pytest.raises(ModelError, match="is missing"):
        load(folder)
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        load(write_config(folder, CONFIGS["llama"] | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UsageError, match="float16"):
        backend.load(folder, dtype="float16")
    with pytest.raises(UsageError, match="cuda"):
        create("cuda")


def write_config(folder, config):
    import json

    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_unknown_rope_scaling_is_refused_by_name():
    with pytest.raises(ModelError, match="longrope"):
        random_model(dataclasses.replace(BASE, rope_scaling={"rope_type": "longrope", "factor": 2.0}))


def test_bf16_weights_are_read_exactly(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from dustin.backends.numpy_reference.loading import read_tensors

    x = torch.tensor([1.0, -2.5, 3.140625, 1e-30, 65280.0]).to(torch.bfloat16)
    save_file({"a": x, "b": x.half().reshape(5, 1)}, tmp_path / "x.safetensors")
    read = read_tensors(tmp_path / "x.safetensors")
    assert np.array_equal(read["a"], x.double().numpy())
    assert np.array_equal(read["b"], x.half().double().numpy().reshape(5, 1))


def test_fingerprints_follow_weights_and_config():
    first, same, other = random_model(BASE, 1), random_model(BASE, 1), random_model(BASE, 2)
    assert first.spec.fingerprint == same.spec.fingerprint != other.spec.fingerprint
    capped = NumpyModel(dataclasses.replace(BASE, attention_softcap=9.0), first.weights)
    assert capped.spec.fingerprint != first.spec.fingerprint


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_schedule_of_forwards_and_rollbacks_equals_a_fresh_run(data):
    """Two ragged sequences; after each random step the cache holds exactly what one dense forward of the tokens would."""
    model = random_model(dataclasses.replace(BASE, num_layers=2, windows=(None, 3)), 4)
    cache, held = model.new_cache(2, 12), [[], []]
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            lengths = [data.draw(st.integers(0, len(row))) for row in held]
            assert cache.rollback(lengths) == tuple(len(row) - n for row, n in zip(held, lengths, strict=True))
            held = [row[:n] for row, n in zip(held, lengths, strict=True)]
        else:
            new = [data.draw(st.lists(st.integers(0, 52), max_size=min(4, 12 - len(row)))) for row in held]
            model.forward(backend.tokens(new), [len(row) for row in new], cache, logits="none")
            held = [row + more for row, more in zip(held, new, strict=True)]
        assert cache.lengths == tuple(len(row) for row in held)
    fresh = model.new_cache(2, 12)
    model.forward(backend.tokens(held), [len(row) for row in held], fresh, logits="none")
    for mine, its in zip((*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True):
        assert np.array_equal(mine, its, equal_nan=True)


def test_a_limited_vocabulary_cuts_the_logits():
    model = random_model(BASE, 3)
    full = filled(model)[1]
    model.limit_vocabulary(50)
    assert np.allclose(filled(model)[1], full[:, :, :50], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="size is 54"):
        model.limit_vocabulary(54)
