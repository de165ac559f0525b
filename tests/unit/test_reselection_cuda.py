"""Sets chosen in the middle of a forward: the CUDA model, under Triton's interpreter and on a GPU, against numpy's definition."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.interpreted import interpreted, run_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dustin.interfaces import Reselection  # noqa: E402
from tests.unit.test_reselection import (  # noqa: E402
    BUDGET,
    LENGTHS,
    ROWS,
    TEXT,
    check,
    codes_follow_the_keys,
    fed,
    filled,
    first_set,
    torch_model,
)


def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
def test_cuda_equals_numpy():
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    check(CudaBackend(torch.device("cpu")), torch_model(CudaModel), 2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpu_equals_numpy(graphs):
    """Every case on the device itself, twice where graphs replay it."""
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    model = torch_model(CudaModel, device="cuda")
    model.use_graphs = graphs
    for _ in range(1 + graphs):
        check(CudaBackend(torch.device("cuda")), model, 2e-3)


@interpreted
@pytest.mark.parametrize("rank", [0, 32])
def test_cuda_serves_one_sequence_alone(rank):
    """As the same sequence in torch's CPU model: the lengths of its kv heads' sets are one number, several times."""
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.model import TorchModel

    again = Reselection({0: (0, 1, 2, 3), 2: (0, 1, 2, 3)}, BUDGET, 2, 4, rank=rank, by_kv_head=True)
    made = []
    for backend, kind in ((create("cpu"), TorchModel), (CudaBackend(torch.device("cpu")), CudaModel)):
        model = torch_model(kind)
        model.fit_compact_keys(TEXT, 32)
        cache = model.new_cache(1, 100)
        model.forward(backend.tokens([[(7 * i) % 50 for i in range(70)]]), [70], cache, logits="none")
        start = backend.select(
            None, None, (70,), budget=BUDGET, num_sink_tokens=2, num_recent_tokens=4, num_draft_selected=0
        )  # fmt: skip
        out = model.forward(backend.tokens([[5, 9]]), [2], cache, token_set=dataclasses.replace(start, reselection=again))
        made.append(out.logits)
    torch.testing.assert_close(made[1], made[0], atol=2e-4, rtol=1e-4)


@interpreted
def test_cuda_codes_follow_the_keys():
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    codes_follow_the_keys(CudaBackend(torch.device("cpu")), torch_model(CudaModel))


@interpreted
def test_cuda_encodes_the_layers_that_choose():
    """And the others once they do: a set of mode `exact` encodes what a check wrote after every block."""
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    backend, made = CudaBackend(torch.device("cpu")), []
    for layers in ((0, 1), (1,), (0, 1)):
        model = torch_model(CudaModel)
        model.fit_compact_keys(TEXT, 32)
        cache, every = filled(backend, model), (0, 1, 2, 3)
        again = [Reselection({layer: every for layer in part}, BUDGET, 2, 4, rank=32) for part in (layers, (0, 1))]
        sets = [dataclasses.replace(first_set(backend), reselection=each) for each in again]
        model.forward(fed(backend), ROWS, cache, token_set=sets[0])
        assert set(cache.pool.compact[model.compact]) == set(layers)
        cache.rollback(LENGTHS)
        made.append(model.forward(fed(backend), ROWS, cache, token_set=sets[1]).logits)
    for out in made[1:]:
        for b, count in enumerate(ROWS):
            torch.testing.assert_close(out[b, :count], made[0][b, :count], atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("by_kv_head", [False, True])
def test_cuda_chooses_nothing_for_a_sequence_that_feeds_nothing(by_kv_head, monkeypatch):
    """Its scores are all alike, the slowest to choose among; the others' logits are as if it were not there."""
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.reselection import Rechoice

    backend, model = CudaBackend(torch.device("cpu")), torch_model(CudaModel)
    again = Reselection({1: (0, 1, 2, 3)}, BUDGET, 2, 4, by_kv_head=by_kv_head)
    sets, counts, plain = 2 if by_kv_head else 1, [], Rechoice.choose

    def noted(self, *given, **more):
        made = plain(self, *given, **more)
        counts.append(made[1].view(-1, sets)[:, 0].tolist())
        return made

    monkeypatch.setattr(Rechoice, "choose", noted)
    outs = []
    for rows in (ROWS, (ROWS[0], 0, ROWS[2])):
        start = dataclasses.replace(first_set(backend), reselection=again)
        outs.append(model.forward(fed(backend), rows, filled(backend, model), token_set=start).logits)
    assert counts == [[BUDGET, BUDGET, LENGTHS[2]], [BUDGET, 0, LENGTHS[2]]]
    for b in (0, 2):
        torch.testing.assert_close(outs[1][b, : ROWS[b]], outs[0][b, : ROWS[b]], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(outs[1]).all()


@interpreted
def test_large_budgets_are_chosen_by_torch(monkeypatch):
    from dustin.backends.torch_triton import reselection
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    monkeypatch.setattr(reselection, "MAX_SELECTED", 8)
    check(CudaBackend(torch.device("cpu")), torch_model(CudaModel), 2e-4)
