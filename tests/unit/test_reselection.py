"""Sets chosen in the middle of a forward: numpy's definition, torch and MLX choose and read the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dustin.backends.numpy_reference.backend import create as create_numpy  # noqa: E402
from dustin.backends.numpy_reference.compact_keys import CompactKeys as NumpyCompactKeys  # noqa: E402
from dustin.backends.numpy_reference.model import ModelConfig, NumpyModel, weight_shapes  # noqa: E402
from dustin.interfaces import Reselection, Tap, TokenSet  # noqa: E402

LENGTHS, ROWS = (70, 41, 12), (3, 1, 2)
BUDGET = 16
EVERY = Tap({layer: (0, 1, 2, 3) for layer in range(3)})


def torch_model(kind: type, dtype: object = None, device: str = "cpu"):
    """Three layers of random weights, 4 query and 2 kv heads, on torch's CPU model or the CUDA one."""
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights

    config = qwen2_config(128, 96, 3, 4, 2, 50, context_length=256)
    weights = random_weights(config, dtype or torch.float32, torch.device(device), seed=3)
    return kind(config, weights, "tiny")


def numpy_twin(model) -> NumpyModel:
    """The reference model with the same weights."""
    c, w = model.config, model.weights
    config = ModelConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_layers=c.num_layers,
        num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta, qkv_bias=True, tied_embeddings=c.tied_embeddings, context_length=256,
    )  # fmt: skip
    cuts = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    w = on_cpu(w)
    named = {"model.embed_tokens.weight": w.embedding, "model.norm.weight": w.norm, "lm_head.weight": w.head.weight}
    for i, layer in enumerate(w.layers):
        prefix = f"model.layers.{i}."
        named |= {f"{prefix}input_layernorm.weight": layer.input_norm, f"{prefix}post_attention_layernorm.weight": layer.mlp_norm}
        for name, weight, bias in zip("qkv", layer.qkv.weight.split(cuts), layer.qkv.bias.split(cuts), strict=True):
            named |= {f"{prefix}self_attn.{name}_proj.weight": weight, f"{prefix}self_attn.{name}_proj.bias": bias}
        named[f"{prefix}self_attn.o_proj.weight"] = layer.output.weight
        gate, up = layer.gate_up.weight.chunk(2)
        named |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
        named[f"{prefix}mlp.down_proj.weight"] = layer.down.weight
    return NumpyModel(config, {key: named[key].double().numpy() for key in weight_shapes(config)}, "twin")


def on_cpu(part):
    """Weights, with every tensor on the CPU."""
    if isinstance(part, torch.Tensor):
        return part.cpu()
    if dataclasses.is_dataclass(part):
        return dataclasses.replace(part, **{f.name: on_cpu(getattr(part, f.name)) for f in dataclasses.fields(part)})
    return tuple(map(on_cpu, part)) if isinstance(part, tuple) else part


def filled(backend, model):
    """A cache of LENGTHS committed rows of the same random tokens everywhere."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, n).tolist() for n in LENGTHS]
    cache = model.new_cache(len(rows), 100)
    model.forward(backend.tokens(rows), LENGTHS, cache, logits="none")
    return cache


def fed(backend):
    """The rows in flight."""
    return backend.tokens([[5, 9, 11], [7, 0, 0], [3, 2, 0]])


def first_set(backend) -> TokenSet:
    """Sinks and the newest tokens."""
    return backend.select(
        None, None, LENGTHS, budget=BUDGET, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0
    )  # fmt: skip


def chosen_by_hand(backend, model, cache, layer, heads, queries, rows):
    """The set that a reselection at `layer` must be: Backend.score on each sequence's valid rows, then Backend.select."""
    taken = {layer: queries[layer][:, :rows]}
    scores = backend.score(backend.narrow_queries(taken, EVERY, Tap({layer: heads})), Tap({layer: heads}), model, cache, LENGTHS)
    return backend.select(
        scores, None, LENGTHS, budget=BUDGET, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (2,), (1, 3)])
def test_numpy_reads_what_score_and_select_would_choose(heads):
    """A forward that chooses at layer 1 equals one whose sets were made by hand from its queries (all rows valid)."""
    from dustin.backends.torch_triton.model import TorchModel

    backend, model = create_numpy(), numpy_twin(torch_model(TorchModel))
    tokens, counts = backend.tokens([[5, 9], [7, 1], [3, 2]]), (2, 2, 2)
    again = Reselection({1: heads}, BUDGET, 2, 4)
    cache = filled(backend, model)
    start = dataclasses.replace(first_set(backend), reselection=again)
    got = model.forward(tokens, counts, cache, token_set=start, tap=EVERY)
    cache.rollback(LENGTHS)
    made = chosen_by_hand(backend, model, cache, 1, heads, got.queries, 2)
    assert not np.array_equal(np.asarray(made.indices), np.asarray(start.indices))
    by_layer = {1: made}
    want = model.forward(tokens, counts, cache, token_set=dataclasses.replace(first_set(backend), by_layer=by_layer), tap=EVERY)
    np.testing.assert_array_equal(got.logits, want.logits)
    cache.rollback(LENGTHS)
    without = model.forward(tokens, counts, cache, token_set=first_set(backend))
    assert np.abs(without.logits - got.logits)[0].max() > 1e-3
    # A sequence that fits the budget is dense whatever chooses.
    np.testing.assert_array_equal(without.logits[2], got.logits[2])


def test_numpy_reuses_what_the_last_layer_chose():
    """Layers after the one that chooses read its set: as if it were given to each; those before it read the shared one."""
    from dustin.backends.torch_triton.model import TorchModel

    backend, model = create_numpy(), numpy_twin(torch_model(TorchModel))
    tokens, counts = backend.tokens([[5, 9], [7, 1], [3, 2]]), (2, 2, 2)
    cache, logits = filled(backend, model), {}
    for reuse in (True, False):
        again = Reselection({1: (0, 1, 2, 3)}, BUDGET, 2, 4, reuse=reuse)
        start = dataclasses.replace(first_set(backend), reselection=again)
        got = model.forward(tokens, counts, cache, token_set=start, tap=EVERY)
        cache.rollback(LENGTHS)
        made = chosen_by_hand(backend, model, cache, 1, (0, 1, 2, 3), got.queries, 2)
        by_layer = dict.fromkeys((1, 2) if reuse else (1,), made)
        want = model.forward(tokens, counts, cache, token_set=dataclasses.replace(first_set(backend), by_layer=by_layer))
        np.testing.assert_array_equal(got.logits, want.logits)
        cache.rollback(LENGTHS)
        logits[reuse] = got.logits
    assert np.abs(logits[True] - logits[False]).max() > 1e-4


CASES = {
    "one layer": Reselection({1: (0, 1, 2, 3)}, BUDGET, 2, 4),
    "some heads": Reselection({0: (2, 3), 2: (0, 3)}, BUDGET, 2, 4),
    "every layer": Reselection({layer: (0, 1, 2, 3) for layer in range(3)}, 20, 0, 1),
    "first row": Reselection({1: (1,)}, BUDGET, 2, 4, max_rows=1),
    "all fit": Reselection({1: (1,)}, 200, 2, 4),
    "kv heads": Reselection({0: (0, 1, 2, 3), 2: (1, 2, 3)}, BUDGET, 2, 4, by_kv_head=True),
    "kv heads, compact": Reselection({1: (0, 1, 2, 3)}, BUDGET, 2, 4, rank=32, by_kv_head=True),
    "compact": Reselection({0: (0, 1, 2, 3), 2: (1,)}, BUDGET, 2, 4, rank=32),
    "reused": Reselection({0: (0, 1, 2, 3)}, BUDGET, 2, 4, reuse=True),
    "reused after the first layer": Reselection({1: (2,)}, BUDGET, 2, 4, reuse=True),
    "reused around a dense layer": Reselection({0: (0, 3)}, BUDGET, 2, 4, reuse=True),
    "kv heads, compact, reused": Reselection({0: (0, 1, 2, 3)}, BUDGET, 2, 4, rank=32, by_kv_head=True, reuse=True),
}
TEXT = [(7 * i * i + i) % 50 for i in range(48)]


def logits_of(backend, model, again: Reselection, dense_layers: tuple[int, ...] = (), cache=None) -> np.ndarray:
    """Logits [B, T, V] of the rows in flight, on a cache of LENGTHS rows; rows that are not valid hold anything."""
    cache = cache or filled(backend, model)
    if again.rank and hasattr(model, "fit_compact_keys"):
        model.fit_compact_keys(TEXT, again.rank)
    start = dataclasses.replace(first_set(backend), reselection=again, dense_layers=dense_layers)
    out = model.forward(fed(backend), ROWS, cache, token_set=start)
    cache.rollback(LENGTHS)
    return np.asarray(out.logits.float().cpu() if isinstance(out.logits, torch.Tensor) else out.logits)


def check(backend, model, tolerance: float) -> None:
    """The model against numpy's reference in all cases, batched and alone."""
    model.fit_compact_keys(TEXT, 32)
    reference = create_numpy(), numpy_twin(model)
    # The reference judges with the same directions: where two are alike, a fit may choose either.
    mine = model.compact
    parts = [{layer: x.double().cpu().numpy() for layer, x in part.items()} for part in (mine.mean, mine.encode, mine.decode)]
    reference[1].compact = NumpyCompactKeys(32, *parts)
    caches = filled(*reference), filled(backend, model)
    for name, again in CASES.items():
        dense = (1,) if name in ("some heads", "reused around a dense layer") else ()
        want, got = logits_of(*reference, again, dense, caches[0]), logits_of(backend, model, again, dense, caches[1])
        for b, rows in enumerate(ROWS):
            np.testing.assert_allclose(got[b, :rows], want[b, :rows], atol=tolerance, err_msg=f"{name} row {b}")


def test_torch_equals_numpy():
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    check(create("cpu"), torch_model(TorchModel), 2e-4)


def test_heads_that_a_layer_lacks_are_named():
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    model = torch_model(TorchModel)
    for backend, any_model in ((create("cpu"), model), (create_numpy(), numpy_twin(model))):
        with pytest.raises(ValueError, match="names heads .4. of layer 1, expected some of 0 to 3"):
            logits_of(backend, any_model, Reselection({1: (4,)}, BUDGET, 2, 4))


def test_the_fit_is_the_same_in_numpy_and_torch():
    """Products of queries and codes, not directions: those have no sign."""
    from dustin.backends.torch_triton.model import TorchModel

    model = torch_model(TorchModel)
    twin = numpy_twin(model)
    cache = twin.new_cache(1, len(TEXT))
    queries = twin.forward(np.array([TEXT]), [len(TEXT)], cache, tap=EVERY, logits="none").queries
    for rank in (4, 32):
        model.fit_compact_keys(TEXT, rank)
        twin.fit_compact_keys(TEXT, rank)
        for layer in range(3):
            np.testing.assert_allclose(model.compact.mean[layer], twin.compact.mean[layer], atol=1e-4)
            q, k = queries[layer][:, -5:], cache.keys[layer][0, : len(TEXT)]
            whole = np.einsum("bthd,nhd->bthn", q, np.repeat(k - twin.compact.mean[layer], 2, 1))
            mine, its = model.compact, twin.compact
            codes = (mine.numbers_of(mine.codes_of(layer, torch.tensor(k))).double().numpy(), its.codes_of(layer, k))
            asked = (mine.queries(layer, torch.tensor(q)).numpy(), its.queries(layer, q))
            got, want = (np.einsum("bthr,nhr->bthn", a, np.repeat(c, 2, 1)) for a, c in zip(asked, codes, strict=True))
            scale = np.abs(whole).max()
            assert np.abs(got - want).max() < 0.1 * scale
            if rank == 32:
                assert np.sqrt(((want - whole) ** 2).mean()) < 0.2 * np.sqrt((whole**2).mean())


def test_memory_that_lacks_for_compact_keys_is_named(monkeypatch):
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel
    from dustin.errors import MemoryLimitError

    backend, model = create("cpu"), torch_model(TorchModel)
    cache = filled(backend, model)
    model.fit_compact_keys(TEXT, 32)

    def full(*shape, **how):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(MemoryLimitError, match="compact keys beside the KV cache: 2.00 GiB asked for .* leave --fidelity out"):
        model.compact.store(cache, 0)


def test_compact_keys_must_be_fitted():
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    model = torch_model(TorchModel)
    for backend, any_model in ((create("cpu"), model), (create_numpy(), numpy_twin(model))):
        cache = filled(backend, any_model)
        start = dataclasses.replace(first_set(backend), reselection=Reselection({1: (0,)}, BUDGET, 2, 4, rank=32))
        with pytest.raises(ValueError, match="compact keys of rank 32.*call fit_compact_keys first"):
            any_model.forward(fed(backend), ROWS, cache, token_set=start)


def codes_follow_the_keys(backend, model) -> None:
    """Rows dropped and written anew, copied, or read in long steps: the set is that of a fresh cache."""
    model.fit_compact_keys(TEXT, 32)
    again = Reselection({0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, BUDGET, 2, 4, rank=32)
    start = dataclasses.replace(first_set(backend), reselection=again)
    cache = filled(backend, model)
    model.forward(fed(backend), ROWS, cache, token_set=start)
    # Other rows in the same places.
    cache.rollback([5, 5, 5])
    rows = [[(3 * i + b) % 50 for i in range(n - 5)] for b, n in enumerate(LENGTHS)]
    model.forward(backend.tokens(rows), [len(row) for row in rows], cache, logits="none")
    got = model.forward(fed(backend), ROWS, cache, token_set=start).logits
    first = filled(backend, model)
    first.rollback([5, 5, 5])
    model.forward(backend.tokens(rows), [len(row) for row in rows], first, logits="none")
    fresh = first.take([0, 1, 2])
    want = model.forward(fed(backend), ROWS, fresh, token_set=start).logits
    for b, count in enumerate(ROWS):
        torch.testing.assert_close(got[b, :count], want[b, :count], atol=1e-5, rtol=1e-5)
    # A copy of one sequence over another.
    cache.rollback([40, 40, 10])
    fresh.rollback([40, 40, 10])
    for one in (cache, fresh):
        one.copy_row(0, 1, 40)
    other = fresh.take([0, 1, 2])
    lengths = (40, 40, 10)
    sized = backend.select(None, None, lengths, budget=BUDGET, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0)
    sized = dataclasses.replace(sized, reselection=again)
    outs = [model.forward(fed(backend), ROWS, one, token_set=sized).logits for one in (cache, other)]
    for b, count in enumerate(ROWS):
        torch.testing.assert_close(outs[0][b, :count], outs[1][b, :count], atol=1e-5, rtol=1e-5)


def test_codes_follow_the_keys():
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    codes_follow_the_keys(create("cpu"), torch_model(TorchModel))


def test_mlx_equals_numpy(tmp_path):
    pytest.importorskip("mlx_lm")
    from dustin.backends.mlx_metal.backend import create
    from dustin.errors import UsageError
    from tests import tiny_model

    backend, reference = create("cpu"), create_numpy()
    folder = tiny_model.write(tmp_path / "model", num_hidden_layers=3)
    model, twin = backend.load(folder, dtype="float32"), reference.load(folder)
    caches = filled(reference, twin), filled(backend, model)
    for name, again in CASES.items():
        if again.rank or again.by_kv_head:
            with pytest.raises(UsageError, match="keeps no compact keys|chooses by layer"):
                logits_of(backend, model, again, (), caches[1])
            caches[1].rollback(LENGTHS)
            continue
        want = logits_of(reference, twin, again, (), caches[0])
        got = logits_of(backend, model, again, (), caches[1])
        for b, rows in enumerate(ROWS):
            np.testing.assert_allclose(got[b, :rows], want[b, :rows], atol=2e-4, err_msg=f"{name} row {b}")
