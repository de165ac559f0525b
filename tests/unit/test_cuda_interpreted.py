"""The CUDA model on the CPU under Triton's interpreter: the same logits, queries and cache as the torch CPU model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.interpreted import interpreted, run_interpreted

pytest.importorskip("triton")


def test_under_the_interpreter():
    run_interpreted(__file__)


def converted(item, dtype: torch.dtype):
    """Weights with every tensor in another dtype."""
    if isinstance(item, torch.Tensor):
        return item.to(dtype)
    if isinstance(item, tuple):
        return tuple(converted(part, dtype) for part in item)
    if dataclasses.is_dataclass(item):
        return dataclasses.replace(item, **{f.name: converted(getattr(item, f.name), dtype) for f in dataclasses.fields(item)})
    return item


def make_models(dtype: torch.dtype = torch.float32, **changes):
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.backends.torch_triton.model import TorchModel

    config = qwen2_config(64, 96, 2, 4, 2, 50, context_length=256)
    config = dataclasses.replace(config, **changes)
    weights = converted(random_weights(config, torch.float32, torch.device("cpu"), seed=1), dtype)
    return TorchModel(config, converted(weights, torch.float32), "cpu"), CudaModel(config, weights, "paged")


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b).norm() <= (1e-4 if a.dtype == torch.float32 else 5e-3) * b.norm())


QWEN3 = {"qk_norm": True, "architecture": "Qwen3ForCausalLM"}


@interpreted
@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("changes", [{}, QWEN3, {"windows": (4, None)}, {"hidden_size": 72}])
def test_forward_equals_the_cpu_model(changes, dtype, few_rows, monkeypatch):
    from dustin.backends.torch_triton import cuda_decode
    from dustin.interfaces import Tap, TokenSet

    monkeypatch.setattr(cuda_decode, "MAX_HIDDEN", 2048 if few_rows else 0)
    expected_model, model = make_models(dtype, **changes)
    engine = model.device_forward(model.new_cache(1, 1))
    fused = dtype == torch.float16 and "qk_norm" not in changes
    assert (engine.blocks is not None) == fused
    caches = [m.new_cache(2, 100) for m in (expected_model, model)]
    generator = torch.Generator().manual_seed(0)
    sets = TokenSet(torch.tensor([[0, 3, 7], [1, 2, 0]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32))
    tap = Tap({1: (0, 3)})
    calls = [
        (9, (9, 5), None, "last"),
        (3, (3, 1), None, "all"),
        (3, (0, 3), sets, "all"),
        (2, (2, 2), dataclasses.replace(sets, dense_layers=(0,)), "last"),
        (2, (1, 2), TokenSet(sets.indices[:, :1], sets.counts.clamp(max=1), by_layer={1: sets}), "all"),
    ]
    for rows, counts, token_set, logits in calls:
        tokens = torch.randint(0, 50, (2, rows), generator=generator)
        outs = [
            m.forward(tokens, counts, cache, token_set=token_set, tap=tap, logits=logits)
            for m, cache in zip((expected_model, model), caches, strict=True)
        ]
        assert caches[0].lengths == caches[1].lengths
        for b, count in enumerate(counts):
            if not count:
                continue
            last = slice(0, 1) if logits == "last" else slice(0, count)
            assert near(outs[1].logits[b, last], outs[0].logits[b, last])
            assert near(outs[1].queries[1][b, :count], outs[0].queries[1][b, :count])
        for cache in caches:
            cache.rollback([max(0, n - 1) for n in cache.lengths])


@interpreted
def test_random_weights_have_the_spec_of_the_config_and_vocabulary_is_cut():
    _, model = make_models()
    model.limit_vocabulary(40)
    cache = model.new_cache(1, 8)
    out = model.forward(torch.tensor([[1, 2]]), [2], cache, logits="all")
    assert out.logits.shape == (1, 2, 40)
    assert model.spec.vocab_size == 40


@interpreted
def test_extend_set_keeps_a_prefix_and_adds_a_span():
    from dustin.backends.torch_triton.cuda_fused import extend_set

    indices = torch.tensor([[0, 2, 5, 9], [1, 3, 4, 0]], dtype=torch.int32)
    counts = torch.tensor([4, 3], dtype=torch.int32)
    starts, stops = torch.tensor([10, 8], dtype=torch.int32), torch.tensor([12, 4], dtype=torch.int32)
    out, sizes = extend_set(indices, counts, starts, stops, 7)
    assert sizes.tolist() == [6, 2]
    assert out[0, :6].tolist() == [0, 2, 5, 9, 10, 11]
    assert out[1, :2].tolist() == [1, 3]


@interpreted
def test_backend_equals_the_cpu_backend():
    from dustin.backends.torch_triton.backend import TorchBackend
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.interfaces import Tap, TokenSet

    cpu, cuda = TorchBackend(torch.device("cpu")), CudaBackend(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    models = make_models()
    caches = [model.new_cache(2, 100) for model in models]
    tokens = torch.randint(0, 50, (2, 70), generator=generator)
    tap = Tap({0: (1,), 1: (0, 3)})
    scores = []
    for backend, model, cache in zip((cpu, cuda), models, caches, strict=True):
        queries = model.forward(tokens, [70, 40], cache, tap=Tap(tap.heads, last_row_only=True), logits="none").queries
        scores.append(backend.score(queries, tap, model, cache, [70, 40]))
    for b, length in enumerate((70, 40)):
        assert near(scores[1][b, :length], scores[0][b, :length])
        assert bool((scores[1][b, length:] == float("-inf")).all())
    options = {"budget": 16, "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 5}
    for target, draft in ((0, 0), (0, None), (None, 0), (None, None)):
        pick = [(None if target is None else s, None if draft is None else s.flip(0)) for s in (scores[1], scores[1])]
        sets = [b.select(*p, [70, 40], **options) for b, p in zip((cpu, cuda), pick, strict=True)]
        assert torch.equal(sets[0].indices, sets[1].indices)
        assert torch.equal(sets[0].counts, sets[1].counts)
    grown = [backend.extend(TokenSet(sets[0].indices, sets[0].counts), [70, 40], [73, 38]) for backend in (cpu, cuda)]
    assert torch.equal(grown[0].counts, grown[1].counts)
    for b, count in enumerate(grown[0].counts.tolist()):
        assert torch.equal(grown[0].indices[b, :count], grown[1].indices[b, :count])

    logits = torch.randn(2, 4, 50, generator=generator)
    logits[1, 3, 5] = float("nan")
    drafts = logits[:, :3].argmax(-1)
    drafts[0, 1] = 7
    p, q = (torch.softmax(torch.randn(2, n, 50, generator=generator), -1) for n in (4, 3))
    uniforms = [[0.2, 0.9, 0.4], [0.1, 0.3, 0.99]]
    for numbers in ([3, 2], [0, 3]):
        pairs = [backend.accept_greedy(drafts, numbers, logits) for backend in (cpu, cuda)]
        for given in (q, None):
            pairs += [backend.accept_sampled(drafts, numbers, given, p, logits, uniforms, [0.5, 0.7]) for backend in (cpu, cuda)]
        for one, other in zip(pairs[::2], pairs[1::2], strict=True):
            mine, its = cpu.read(one), cuda.read(other)
            assert mine.num_accepted == its.num_accepted
            assert mine.finite == its.finite
            # What is chosen from a row with a NaN means nothing.
            assert all(x == y for x, y, fine in zip(mine.tokens, its.tokens, its.finite, strict=True) if fine)
    assert torch.equal(cpu.argmax(logits[:1]), cuda.argmax(logits[:1]))
    assert cuda.accept_greedy(cuda.tokens([[], []]), [0, 0], logits[:, :1]).num_accepted.tolist() == [0, 0]


@interpreted
@pytest.mark.parametrize("sparse, dtype", [(True, torch.float32), (False, torch.float32), (True, torch.float16)])
def test_a_chain_of_draft_steps_equals_the_steps_one_by_one(sparse, dtype, monkeypatch):
    from dustin.backends.torch_triton import cuda_forward
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.interfaces import GreedyChain, Tap, TokenSet

    # In fp16 also the argmax inside the head's product.
    monkeypatch.setattr(cuda_forward, "FUSED_HEAD_ROWS", range(65))
    _, model = make_models(dtype)
    assert isinstance(model, GreedyChain)
    backend = CudaBackend(torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(0, 50, (3, 40), generator=generator)
    fed, counts = torch.randint(0, 50, (3, 2), generator=generator), [2, 0, 1]
    chosen, starts = None, [35, 90, 31]
    if sparse:
        indices = torch.tensor([[0, 3, 7, 30, 34], [0, 1, 2, 3, 4], [5, 9, 29, 30, 0]], dtype=torch.int32)
        chosen = TokenSet(indices, torch.tensor([5, 5, 4], dtype=torch.int32))
    tap = Tap({0: (0, 3), 1: (2,)}, last_row_only=True)
    caches = [model.new_cache(3, 60) for _ in range(2)]
    for cache in caches:
        model.forward(prompt, [38, 20, 33], cache, logits="none")
    steps, tokens, now, queries = 4, fed, counts, []
    expected = []
    for _ in range(steps):
        token_set = backend.extend(chosen, starts, caches[0].lengths) if chosen is not None else None
        out = model.forward(tokens, now, caches[0], token_set=token_set, tap=tap, logits="last")
        tokens, now = backend.argmax(out.logits), [int(n > 0) for n in counts]
        expected.append(tokens)
        queries.append(out.queries)
    made = model.draft_greedy(fed, counts, caches[1], steps, token_set=chosen, set_lengths=starts, tap=tap)
    assert made is not None
    assert caches[0].lengths == caches[1].lengths == (43, 20, 37)
    for b in (0, 2):
        assert torch.equal(made[0][b], torch.cat(expected, 1)[b])
        for layer in tap.heads:
            assert near(made[1][layer][b], torch.cat([q[layer] for q in queries], 1)[b])
    assert model.draft_greedy(fed, counts, caches[1], 2, token_set=TokenSet(prompt, prompt, dense_layers=(0,)), tap=tap) is None
    with pytest.raises(ValueError, match="num_tokens"):
        model.draft_greedy(fed, counts, caches[1], 30, tap=tap)


@interpreted
def test_what_was_recorded_keeps_no_cache_alive():
    """Calls are kept by their shape for as long as the model lives; the pages of their first cache must not be."""
    import gc

    from dustin.interfaces import TokenSet

    _, model = make_models()
    cache = model.new_cache(2, 64)
    pool = cache.pool
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    model.forward(tokens, [12, 12], cache, logits="last")
    chosen = TokenSet(torch.arange(8, dtype=torch.int32).repeat(2, 1), torch.full((2,), 8, dtype=torch.int32))
    model.forward(tokens[:, :3], [3, 3], cache, token_set=chosen, logits="all")
    model.draft_greedy(tokens[:, :1], [1, 1], cache, 2, token_set=chosen, set_lengths=[12, 12])
    assert pool.allocator.num_free < pool.allocator.num_pages
    del cache
    gc.collect()
    assert pool.allocator.num_free == pool.allocator.num_pages


@interpreted
def test_a_prompt_beside_sequences_that_feed_nothing(monkeypatch):
    """Their rows are left out of the work, and nothing is kept of a prompt's shape."""
    from dustin.backends.torch_triton import cuda_call, cuda_forward, cuda_model
    from dustin.interfaces import Tap

    for module in (cuda_call, cuda_model):
        monkeypatch.setattr(module, "MAX_GRAPH_ROWS", 2)
    monkeypatch.setattr(cuda_forward, "KEPT_ROWS", 2)
    expected_model, model = make_models()
    caches = [m.new_cache(4, 40) for m in (expected_model, model)]
    generator, tap = torch.Generator().manual_seed(0), Tap({1: (0, 3)})
    worked, run = [], cuda_forward.DeviceForward.run
    monkeypatch.setattr(
        cuda_forward.DeviceForward, "run", lambda self, inputs, *rest: worked.append(len(inputs.tokens)) or run(self, inputs, *rest)
    )
    for counts, logits in (((0, 7, 0, 5), "last"), ((6, 0, 0, 0), "all"), ((0, 3, 9, 0), "none"), ((3, 2, 1, 4), "last")):
        tokens = torch.randint(0, 50, (4, max(counts)), generator=generator)
        asked = {"tap": Tap(tap.heads, last_row_only=logits == "last"), "logits": logits}
        outs = [m.forward(tokens, counts, cache, **asked) for m, cache in zip((expected_model, model), caches, strict=True)]
        assert caches[0].lengths == caches[1].lengths
        for b, count in enumerate(counts):
            rows = slice(0, 1 if logits == "last" else count)
            if count and logits != "none":
                assert near(outs[1].logits[b, rows], outs[0].logits[b, rows])
            if count:
                assert near(outs[1].queries[1][b, rows], outs[0].queries[1][b, rows])
        assert outs[1].queries[1].shape == outs[0].queries[1].shape
        assert logits == "none" or outs[1].logits.shape == outs[0].logits.shape
    assert worked == [2, 1, 2, 4]
    engine = model._engine(caches[1].pool)
    assert not engine.graphs and not engine.forward._workspaces


@interpreted
@pytest.mark.parametrize("logits, last_row_only", [("all", False), ("last", False), ("none", True)])
def test_packed_rows_give_what_all_rows_give(logits, last_row_only, monkeypatch):
    from dustin.backends.torch_triton import cuda_decode
    from dustin.backends.torch_triton.cuda_forward import Inputs, pack

    monkeypatch.setattr(cuda_decode, "MAX_HIDDEN", 0)
    _, model = make_models(torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 50, (4, 20), generator=generator)
    tokens, counts = torch.randint(0, 50, (4, 5), generator=generator), [2, 0, 5, 1]
    found = []
    for size in (0, 8, 11):
        cache = model.new_cache(4, 40)
        model.forward(prompt, [20, 3, 9, 17], cache, logits="none")
        fed, lengths = (torch.tensor(n, dtype=torch.int32) for n in (counts, cache.lengths))
        packed = pack(fed, 5, size) if size else None
        inputs = Inputs(tokens, lengths, fed, cache.page_table, packed=packed)
        worked = []
        with monkeypatch.context() as patch, torch.inference_mode():
            product = torch.nn.functional.linear
            patch.setattr(torch.nn.functional, "linear", lambda x, *rest, p=product, w=worked: w.append(len(x)) or p(x, *rest))
            out, queries = model.device_forward(cache).run(inputs, {1: (0, 3)}, last_row_only, logits)
        assert worked[0] == (size or 20)
        if packed is not None and logits == "all":
            out = out[0][packed.places].view(4, 5, -1)
        found.append((out, queries[1]))
    for out, queries in found[1:]:
        for b, count in enumerate(counts):
            if count and out is not None:
                kept = count if logits == "all" else 1
                assert near(out[b, :kept], found[0][0][b, :kept])
            if count:
                kept = 1 if last_row_only else count
                assert near(queries[b, :kept], found[0][1][b, :kept])


@interpreted
def test_a_draft_that_lags_reads_first_what_it_missed():
    """As after rounds that drafted nothing: the chain itself begins with one token."""
    _, model = make_models()
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(0, 50, (3, 30), generator=generator)
    fed, counts = torch.randint(0, 50, (3, 6), generator=generator), [6, 0, 3]
    caches = [model.new_cache(3, 60) for _ in range(2)]
    for cache in caches:
        model.forward(prompt, [28, 20, 23], cache, logits="none")
    expected, now, tokens = [], counts, fed
    for _ in range(3):
        tokens = model.forward(tokens, now, caches[0], logits="last").logits.argmax(2)
        now = [int(n > 0) for n in counts]
        expected.append(tokens)
    made = model.draft_greedy(fed, counts, caches[1], 3)
    assert caches[0].lengths == caches[1].lengths == (36, 20, 28)
    assert torch.equal(made[0][[0, 2]], torch.cat(expected, 1)[[0, 2]])
    assert [key[1] for key in model._engine(caches[1].pool).chain.graphs] == [2]


@interpreted
@pytest.mark.parametrize("rows, named", [(6, {"qkv", "output", "gate_up", "down"}), (24, {"output", "gate_up"}), (66, set())])
def test_products_of_few_rows_are_the_librarys(rows, named, monkeypatch):
    from dustin.backends.torch_triton import cuda_decode, cuda_wide

    monkeypatch.setattr(cuda_decode, "MAX_HIDDEN", 0)
    # Six programs on the interpreter's four processors.
    expected_model, model = make_models(torch.float16, intermediate_size=384)
    shapes = {(128, 64): "qkv", (64, 64): "output", (768, 64): "gate_up", (64, 384): "down"}
    made, wide = set(), cuda_wide.wide_linear
    monkeypatch.setattr(cuda_wide, "wide_linear", lambda x, w, *r, **o: made.add(shapes[tuple(w.shape)]) or wide(x, w, *r, **o))
    tokens = torch.randint(0, 50, (2, rows // 2), generator=torch.Generator().manual_seed(0))
    out, expected = (m.forward(tokens, [rows // 2] * 2, m.new_cache(2, 40)).logits for m in (model, expected_model))
    assert made == named
    assert near(out, expected)


@interpreted
@pytest.mark.parametrize("counts, packed", [((70, 9), True), ((70, 64), False)])
def test_prompts_of_different_lengths_cost_their_own_rows(counts, packed, monkeypatch):
    from dustin.backends.torch_triton import cuda_decode
    from dustin.interfaces import Tap

    monkeypatch.setattr(cuda_decode, "MAX_HIDDEN", 0)
    expected_model, model = make_models(torch.float32)
    tokens = torch.randint(0, 50, (2, 70), generator=torch.Generator().manual_seed(0))
    caches, tap, worked = [m.new_cache(2, 80) for m in (expected_model, model)], Tap({1: (0, 3)}, last_row_only=True), []
    expected = expected_model.forward(tokens, counts, caches[0], tap=tap, logits="last")
    with monkeypatch.context() as patch:
        product = torch.nn.functional.linear
        patch.setattr(torch.nn.functional, "linear", lambda x, *rest: worked.append(len(x)) or product(x, *rest))
        out = model.forward(tokens, counts, caches[1], tap=tap, logits="last")
    assert worked[0] == (sum(counts) if packed else 140)
    assert near(out.logits, expected.logits) and near(out.queries[1], expected.queries[1])
    # What was appended is what the next rows see.
    following = torch.randint(0, 50, (2, 3), generator=torch.Generator().manual_seed(1))
    outs = [m.forward(following, (3, 3), cache).logits for m, cache in zip((expected_model, model), caches, strict=True)]
    assert near(outs[1], outs[0])


@interpreted
def test_sparse_launches_of_one_wave_are_kept_apart():
    """Four processors under the interpreter: four programs are one each, eight are not."""
    from dustin.backends.torch_triton.cuda_forward import DeviceForward

    configs = [DeviceForward._sparse_config(None, torch.empty(batch, 6, 28, 128, dtype=torch.bfloat16), 4) for batch in (1, 2)]
    assert [config.num_stages for config in configs] == [4, 3]
