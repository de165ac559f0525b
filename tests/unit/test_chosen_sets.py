"""Which sets layers choose: what a model says of them is what its forward reads, and traces record it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dustin.config import EngineOptions, RequestOptions  # noqa: E402
from dustin.generation import Session, load  # noqa: E402
from dustin.interfaces import ChoosingModel, Tap  # noqa: E402
from dustin.trace import Recorder, unpacked  # noqa: E402
from dustin.trace_page import render  # noqa: E402
from tests.tiny_model import write  # noqa: E402
from tests.unit.engine_helpers import VOCAB, backend, draft, target  # noqa: E402
from tests.unit.interpreted import interpreted, run_interpreted  # noqa: E402
from tests.unit.test_reselection import (  # noqa: E402
    CASES,
    EVERY,
    LENGTHS,
    ROWS,
    TEXT,
    fed,
    filled,
    first_set,
    numpy_twin,
    torch_model,
)

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 90)]
SMALL: dict[str, Any] = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "num_draft_tokens": 4}


def sets_are_those_of_the_forward(backend: Any, model: Any, tolerance: float = 1e-5) -> None:
    """In every case: the sets of layers that choose for all heads, given to a forward, leave its logits as they are; those of kv
    heads are what the kv head's own heads choose for a layer."""
    assert isinstance(model, ChoosingModel)
    model.fit_compact_keys(TEXT, 32)
    cache = filled(backend, model)
    for name, again in CASES.items():
        dense = (1,) if name == "some heads" else ()
        start = dataclasses.replace(first_set(backend), reselection=again, dense_layers=dense)
        out = model.forward(fed(backend), ROWS, cache, token_set=start, tap=EVERY)
        cache.rollback(LENGTHS)
        made = model.chosen_sets(out.queries, ROWS, cache, start)
        assert cache.lengths == LENGTHS and set(made) == set(again.heads) - set(dense), name
        if again.by_kv_head:
            assert all(len(sets) == 2 for sets in made.values())
            for layer, sets in made.items():
                for kv, one in enumerate(sets):
                    part = again.of_kv_heads(layer, 4, 2)[kv]
                    alone = model.chosen_sets(out.queries, ROWS, cache, dataclasses.replace(start, reselection=part))[layer]
                    assert rows_of(one) == rows_of(alone[0]), name
            continue
        given = {layer: sets[0] for layer, sets in made.items()}
        if again.reuse:
            given |= {layer: given[max(given)] for layer in range(max(given), 3)}
        plain = dataclasses.replace(first_set(backend), dense_layers=dense, by_layer=given)
        want = model.forward(fed(backend), ROWS, cache, token_set=plain)
        cache.rollback(LENGTHS)
        for b, rows in enumerate(ROWS):
            got, mine = (np.asarray(x.logits.cpu() if isinstance(x.logits, torch.Tensor) else x.logits) for x in (out, want))
            np.testing.assert_allclose(mine[b, :rows], got[b, :rows], atol=tolerance, err_msg=name)


def rows_of(token_set: Any) -> list[list[int]]:
    return [row[:n] for row, n in zip(token_set.indices.tolist(), token_set.counts.tolist(), strict=True)]


def test_numpy_says_what_its_layers_choose() -> None:
    from dustin.backends.numpy_reference.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    sets_are_those_of_the_forward(create(), numpy_twin(torch_model(TorchModel)))


def test_torch_says_what_its_layers_choose() -> None:
    from dustin.backends.torch_triton.backend import create
    from dustin.backends.torch_triton.model import TorchModel

    sets_are_those_of_the_forward(create("cpu"), torch_model(TorchModel))


@interpreted
def test_cuda_says_what_its_layers_choose() -> None:
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    sets_are_those_of_the_forward(CudaBackend(torch.device("cpu")), torch_model(CudaModel))


def test_under_the_interpreter() -> None:
    run_interpreted(__file__, "cuda")


@pytest.mark.gpu
def test_a_gpu_says_what_its_layers_choose() -> None:
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    sets_are_those_of_the_forward(CudaBackend(torch.device("cuda")), torch_model(CudaModel, device="cuda"), 2e-3)


def test_without_a_reselection_nothing_is_chosen() -> None:
    out = {1: np.zeros((3, 3, 4, 8))}
    cache = target().new_cache(3, 8)
    assert target().chosen_sets(out, (1, 1, 1), cache, first_set(backend)) == {}  # type: ignore[attr-defined]


# Traces.


def recorded(**more: Any) -> tuple[Any, Recorder]:
    options = EngineOptions(mode="sparse", **(SMALL | more))
    recorder = Recorder(Session(backend, target(), None, options, draft()), list(PROMPT), RequestOptions(max_tokens=20))
    return recorder.run(), recorder


def test_a_trace_has_the_sets_that_layers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the engine's own forwards, below everything that records; the tokens are those of an unrecorded run."""
    how: dict[str, Any] = {"reselection_layers": (1,), "reselection_rank": 0, "reselection_by_kv_head": True}
    plain = Session(backend, target(), None, EngineOptions(mode="sparse", **SMALL, **how), draft())
    tokens = plain.generate(list(PROMPT), RequestOptions(max_tokens=20)).tokens
    seen: dict[int, list[Any]] = {}
    inner = type(target())._chosen  # type: ignore[attr-defined]

    def watched(self: Any, i: int, q: Any, num_tokens: Any, cache: Any, token_set: Any) -> Any:
        made = inner(self, i, q, num_tokens, cache, token_set)
        if made:
            seen.setdefault(cache.lengths[0], []).append([rows_of(one)[0] for one in made])
        return made

    monkeypatch.setattr(type(target()), "_chosen", watched)
    trace, recorder = recorded(**how)
    assert trace.tokens[len(PROMPT) :] == tokens
    sparse = [r for r in trace.rounds if r.kept is not None]
    assert sparse
    for r in sparse:
        assert set(r.own) == {1} and len(r.own[1]) == 2
        # The forward that asks, what it asks, and the engine's.
        assert seen[r.length] == [r.own[1]] * 3
    assert any(r.own[1][0] != r.own[1][1] and r.positions not in r.own[1] for r in sparse)
    raw = trace.as_dict()["rounds"][0]
    assert [unpacked(part) for part in raw["own"][1]] == trace.rounds[0].own[1]
    assert '"own":{"1":[' in render(trace)
    # Recovery of that layer is by its own sets, kv head by kv head.
    first = trace.rounds[0]
    recorder.measure_recovery(trace, 1)
    fed_ = trace.tokens[first.length : first.length + 1 + first.accepted]
    store = target().new_cache(1, 200)
    target().forward(backend.tokens([trace.tokens[: first.length]]), [first.length], store, logits="none")
    out = target().forward(backend.tokens([fed_]), [len(fed_)], store, tap=Tap({1: (0, 1, 2, 3)}), logits="none")
    held = 0.0
    for kv, part in enumerate(first.own[1]):
        tap = Tap({1: (2 * kv, 2 * kv + 1)})
        mass = backend.score({1: out.queries[1][:, :, 2 * kv : 2 * kv + 2]}, tap, target(), store, [first.length])[0]
        held += mass[part].sum() / mass.sum() / 2
    assert first.recovery is not None and abs(first.recovery[1] - held) < 2e-3


def test_layers_that_read_all_or_what_another_chose_say_so() -> None:
    trace, recorder = recorded(dense_layers=(0,), reselection_layers=(1,), reselection_rank=0, reselection_reuse=True)
    recorder.measure_recovery(trace, 100)
    for r in trace.rounds:
        if r.kept is not None:
            assert r.own[0] is None and r.own[2] == r.own[1] and len(r.own[1]) == 1
            assert r.recovery is None or r.recovery[0] == 1.0


def test_high_fidelity_is_traced_on_torch(tmp_path: Path) -> None:
    session = load(str(write(tmp_path / "model", max_position_embeddings=512)), device="cpu", options=EngineOptions(
        mode="sparse", fidelity="high", budget=64, drafter="none"))  # fmt: skip
    trace = Recorder(session, "It was a long walk and the rain did not stop. " * 6, RequestOptions(max_tokens=4)).run()
    layers, heads = session.target.spec.num_layers, session.target.spec.num_kv_heads
    for r in trace.rounds:
        if r.kept is not None:
            assert list(r.own) == list(range(layers)) and all(len(sets) == heads for sets in r.own.values())
            assert all(len(part) == min(64, r.length) for sets in r.own.values() for part in sets)
