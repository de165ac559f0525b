"""Replays of a round's device work: when a call becomes a graph, and whose its outputs are. Without a GPU a graph is a stand-in."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dustin.backends.torch_triton import cuda_replay  # noqa: E402


class Owner:
    """Something whose tensors a graph reads in place."""


class Stand:
    """What a graph does: the same outputs each time, written again."""

    made = 0
    seconds = 0.5
    pool = None
    bytes = 8

    def __init__(self, function: Any, device: torch.device, memory: Any) -> None:
        Stand.made += 1
        self._function, self._outputs = function, function()

    def __call__(self) -> Any:
        for mine, new in zip(self._outputs, self._function(), strict=True):
            mine.copy_(new)
        return self._outputs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> cuda_replay.Replays:
    monkeypatch.setattr(cuda_replay, "Captured", Stand)
    Stand.made = 0
    made = cuda_replay.Replays(torch.device("cpu"))
    made.enabled = True
    return made


def work(inputs: cuda_replay.Inputs) -> tuple[torch.Tensor, ...]:
    return (inputs["a"] + inputs["b"], inputs["a"] * 2)


def call(replays: cuda_replay.Replays, owner: Any, value: float, width: int = 3, key: str = "k") -> tuple[torch.Tensor, ...]:
    return replays(owner, key, {"a": torch.full((width,), value), "b": torch.arange(float(width))}, work)


def test_the_third_call_of_a_kind_is_captured_and_every_call_gives_its_own_result(replays: cuda_replay.Replays) -> None:
    owner, results = Owner(), []
    for i in range(6):
        results.append(call(replays, owner, float(i)))
        assert Stand.made == int(i >= cuda_replay.CAPTURE_AT - 1)
    for i, (total, double) in enumerate(results):
        assert total.tolist() == [i, i + 1, i + 2] and double.tolist() == [2 * i] * 3
    assert replays.seconds == 0.5


def test_other_shapes_keys_and_owners_have_graphs_of_their_own(replays: cuda_replay.Replays) -> None:
    owners = [Owner(), Owner()]
    for i in range(4):
        for owner in owners:
            for width in (3, 4):
                for key in ("k", "l"):
                    total, _ = call(replays, owner, float(i), width, key)
                    assert total.tolist() == [i + j for j in range(width)]
    assert Stand.made == 8


def test_graphs_go_with_their_owner_and_are_bounded(replays: cuda_replay.Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_replay, "MOST", 2)
    owner = Owner()
    for key in ("a", "b", "c"):
        for i in range(4):
            assert call(replays, owner, float(i), key=key)[0].tolist() == [i, i + 1, i + 2]
    assert Stand.made == 2 and len(replays._graphs) == 1
    # Where the oldest graph was idle for long, the new call takes its place.
    monkeypatch.setattr(cuda_replay, "IDLE", 5)
    for i in range(8):
        assert call(replays, owner, float(i), key="b")[0].tolist() == [i, i + 1, i + 2]
    for i in range(4):
        assert call(replays, owner, float(i), key="c")[0].tolist() == [i, i + 1, i + 2]
    assert Stand.made == 3 and [key[0] for key in replays._graphs[owner]] == ["b", "c"]
    del owner
    gc.collect()
    assert len(replays._graphs) == 0


def test_calls_that_never_come_again_are_not_remembered(replays: cuda_replay.Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_replay, "MOST_SEEN", 10)
    owner = Owner()
    for i in range(100):
        call(replays, owner, 1.0, width=i + 1)
    assert len(replays._seen[owner]) <= 10 and Stand.made == 0


def test_nothing_is_captured_where_graphs_are_off(replays: cuda_replay.Replays) -> None:
    replays.enabled = False
    owner = Owner()
    for i in range(5):
        call(replays, owner, float(i))
    assert Stand.made == 0


def test_plain_verdicts_are_recorded_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from dustin.backends.torch_triton import cuda_backend

    def best_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(1).to(torch.int32), torch.isfinite(logits).all(1)

    monkeypatch.setattr(cuda_replay, "Captured", Stand)
    monkeypatch.setattr(cuda_backend, "argmax_rows", best_of)
    Stand.made = 0
    backend = cuda_backend.CudaBackend(torch.device("cpu"))
    backend._replays.enabled = True
    none, verdicts = torch.zeros(2, 0, dtype=torch.long), []
    for i in range(6):
        logits = torch.zeros(2, 1, 9)
        logits[0, 0, i] = logits[1, 0, 8 - i] = 1.0
        verdicts.append(backend.accept_greedy(none, [0, 0], logits))
    assert Stand.made == 1
    assert [v.tokens.tolist() for v in verdicts] == [[[i], [8 - i]] for i in range(6)]
    assert all(v.num_accepted.tolist() == [0, 0] and v.finite.tolist() == [True, True] for v in verdicts)
    monkeypatch.setattr(cuda_backend, "JUDGED_IN_GRAPH", 17)
    assert backend.accept_greedy(none, [0, 0], logits).tokens.tolist() == [[5], [3]]
    assert Stand.made == 1
