"""The CUDA model on a GPU: equal to the CPU model, and the same with graphs as without."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


def make_models(dtype: torch.dtype, **changes):
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.backends.torch_triton.model import TorchModel

    config = dataclasses.replace(qwen2_config(512, 1024, 3, 8, 2, 1000, context_length=2048), **changes)
    weights = random_weights(config, dtype, torch.device("cuda"), seed=1)

    def moved(item, dtype):
        if isinstance(item, torch.Tensor):
            return item.to("cpu", dtype)
        if isinstance(item, tuple):
            return tuple(moved(part, dtype) for part in item)
        if dataclasses.is_dataclass(item):
            return dataclasses.replace(item, **{f.name: moved(getattr(item, f.name), dtype) for f in dataclasses.fields(item)})
        return item

    return TorchModel(config, moved(weights, torch.float32), "cpu"), CudaModel(config, weights, "cuda")


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "architecture": "Qwen3ForCausalLM"}, {"windows": (40, None, 40)}])
def test_forward_equals_the_cpu_model(dtype, limit, changes):
    from dustin.interfaces import Tap, TokenSet

    torch.backends.cuda.matmul.allow_tf32 = False
    expected_model, model = make_models(dtype, **changes)
    caches = [m.new_cache(2, 1000) for m in (expected_model, model)]
    generator = torch.Generator().manual_seed(0)
    indices = torch.arange(0, 256, 4, dtype=torch.int32).repeat(2, 1)
    counts = torch.tensor([64, 40], dtype=torch.int32)
    tap = Tap({2: (0, 3)})
    calls = [(300, (300, 201), False, "last"), (6, (6, 1), False, "all"), (6, (0, 6), True, "all"), (6, (6, 2), True, "all")]
    for rows, fed, sparse, logits in calls:
        tokens = torch.randint(0, 1000, (2, rows), generator=generator)
        outs = []
        for m, cache, device in zip((expected_model, model), caches, ("cpu", "cuda"), strict=True):
            sets = TokenSet(indices.to(device), counts.to(device)) if sparse else None
            outs.append(m.forward(tokens.to(device), fed, cache, token_set=sets, tap=tap, logits=logits))
        for b, count in enumerate(fed):
            if count:
                last = slice(0, 1) if logits == "last" else slice(0, count)
                assert relative_rms(outs[1].logits[b, last], outs[0].logits[b, last]) < limit
                assert relative_rms(outs[1].queries[2][b, :count], outs[0].queries[2][b, :count]) < limit


def test_graphs_change_nothing_and_outputs_survive_the_next_call():
    from dustin.interfaces import Tap, TokenSet

    _, model = make_models(torch.bfloat16)
    sets = TokenSet(torch.arange(32, dtype=torch.int32, device="cuda").repeat(2, 1), torch.full((2,), 32, device="cuda").int())
    results = []
    for graphs in (False, True):
        model.use_graphs = graphs
        cache = model.new_cache(2, 500)
        generator = torch.Generator("cuda").manual_seed(3)
        outs = []
        for rows, token_set in ((200, None), (1, None), (1, None), (6, sets), (6, sets), (33, None)):
            tokens = torch.randint(0, 1000, (2, rows), device="cuda", generator=generator)
            outs.append(model.forward(tokens, [rows, rows], cache, token_set=token_set, tap=Tap({1: (0,)})))
        results.append(outs)
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager.logits, graph.logits)
        assert torch.equal(eager.queries[1], graph.queries[1])
    assert model.capture_seconds > 0


def test_too_large_a_cache_names_the_option():
    from dustin.errors import MemoryLimitError

    _, model = make_models(torch.bfloat16)
    with pytest.raises(MemoryLimitError, match="bytes.*are free.*--max-kv-size"):
        model.new_cache(10**6, 2048)


@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "rectified", "exact"])
@pytest.mark.parametrize("graphs", [True, False])
def test_generated_tokens_equal_the_cpu_backends(mode, graphs):
    from dustin.backends.torch_triton.backend import TorchBackend, create
    from dustin.config import EngineOptions, RequestOptions
    from dustin.generation import Session

    torch.backends.cuda.matmul.allow_tf32 = False
    targets = make_models(torch.float32)
    drafts = make_models(torch.float32, num_layers=2, windows=(None,) * 2)
    options = EngineOptions(mode=mode, budget=128, rectify_interval=20, exact_block=8, num_draft_tokens=3, prefill_chunk=100)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (300, 211)]
    answers = []
    for i, backend in enumerate((TorchBackend(torch.device("cpu")), create("cuda"))):
        if i:
            targets[i].use_graphs = drafts[i].use_graphs = graphs
        session = Session(backend, targets[i], None, options, drafts[i])
        answers.append([r.tokens for r in session.batch_generate(prompts, RequestOptions(max_tokens=40))])
    assert answers[0] == answers[1]


def test_scores_and_sets_replayed_equal_those_launched():
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.interfaces import Tap

    _, model = make_models(torch.bfloat16)
    graphs = CudaBackend(torch.device("cuda"))
    generator = torch.Generator().manual_seed(2)
    # Two heads in one layer, one in the other: two launches, the second of which adds.
    tap = Tap({0: (1,), 2: (0, 5)}, last_row_only=True)
    quota = {"budget": 64, "num_sink_tokens": 4, "num_recent_tokens": 16, "num_draft_selected": 20}
    cache = model.new_cache(3, 1500)
    model.forward(torch.randint(0, 1000, (3, 700), generator=generator).cuda(), [700, 300, 512], cache, logits="none")
    kept = []
    for _ in range(6):
        plain = CudaBackend(torch.device("cuda"))  # launches: a first call is never captured
        tokens = torch.randint(0, 1000, (3, 5), generator=generator).cuda()
        queries = model.forward(tokens, [5, 1, 3], cache, tap=tap, logits="none").queries
        scores = [b.score(queries, tap, model, cache, cache.lengths) for b in (graphs, plain)]
        for b, length in enumerate(cache.lengths):
            assert torch.equal(scores[0][b, :length], scores[1][b, :length])
            assert bool((scores[0][b, length:] == float("-inf")).all())
        sets = [b.select(s, s.flip(0), cache.lengths, **quota) for b, s in zip((graphs, plain), scores, strict=True)]
        assert torch.equal(sets[0].counts, sets[1].counts) and torch.equal(sets[0].indices, sets[1].indices)
        kept.append((scores, sets))
    assert sum(map(len, graphs._replays._graphs.values())) == 2 and graphs._replays.seconds > 0
    # What was returned is the caller's own.
    assert all(torch.equal(a.indices, b.indices) for _, (a, b) in kept)
    assert all(torch.equal(a[0, :700], b[0, :700]) for (a, b), _ in kept)


def test_a_single_prompts_pieces_are_recorded_when_they_come_again():
    from dustin.interfaces import Tap

    _, model = make_models(torch.bfloat16)
    tap = Tap({1: (0,)}, last_row_only=True)
    outs, recorded = [], []
    for graphs in (False, True):
        model.use_graphs = graphs
        generator = torch.Generator("cuda").manual_seed(3)
        results = []
        for _ in range(3):
            cache = model.new_cache(4, 1600)
            for rows, logits in ((300, "none"), (90, "none"), (1000, "none"), (70, "last"), (27, "last")):
                tokens = torch.randint(0, 1000, (4, rows), device="cuda", generator=generator)
                results.append(model.forward(tokens, [0, rows, 0, 0], cache, tap=tap if logits == "last" else None, logits=logits))
            assert cache.lengths == (0, 300 + 90 + 1000 + 70 + 27, 0, 0)
            recorded.append(len(model._engine(cache.pool).graphs))
            del cache
        outs.append(results)
    # The shortest is recorded at once, and without graphs its inputs are kept as if it were.
    assert recorded == [1, 1, 1, 2, 6, 6]
    for eager, graph in zip(*outs, strict=True):
        if eager.logits is not None:
            # A padded product may be another kernel.
            assert relative_rms(graph.logits[1], eager.logits[1]) < 2e-2
            assert relative_rms(graph.queries[1][1], eager.queries[1][1]) < 2e-2
            assert not graph.logits[0].any() and graph.logits.shape == eager.logits.shape


@pytest.mark.parametrize("width", [0, 3])
def test_verdicts_are_those_of_launches_when_they_are_recorded(width: int):
    from dustin.backends.torch_triton.cuda_backend import CudaBackend

    graphs, generator, found = CudaBackend(torch.device("cuda")), torch.Generator().manual_seed(5), []
    for i in range(6):
        logits = torch.randn(4, width + 1, 5000, generator=generator).to(torch.bfloat16).cuda()
        drafts = logits.argmax(-1)[:, :width].clone()
        counts = [width, width, max(0, width - 1), 0]
        if width:
            drafts[1, i % width] += 1
        if i == 4:
            logits[3, 0, 7] = float("nan")
        # A first call is never captured.
        expected = CudaBackend(torch.device("cuda")).accept_greedy(drafts, counts, logits)
        found.append((graphs.accept_greedy(drafts, counts, logits), CudaBackend.read(graphs, expected)))
    # What was recorded wrote over none of them.
    assert [graphs.read(verdict) for verdict, _ in found] == [host for _, host in found]
    assert not found[4][1].finite[3] and all(found[5][1].finite)
    assert sum(map(len, graphs._replays._graphs.values())) == 1
