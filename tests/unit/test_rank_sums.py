"""Products summed in shared memory, and graphs that are given up before their communicator ends, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dustin.backends.common.steps import Steps
from dustin.backends.torch_triton import cuda_graphs
from dustin.backends.torch_triton.symmetric import LIMIT_BYTES, Sums, SymmetricSum
from dustin.errors import RankError


class Doubled(SymmetricSum):
    """Another rank that has the same."""

    def sum(self, x: torch.Tensor) -> None:
        """Twice x."""
        x.mul_(2)


class Rank(Sums):
    """A rank whose other one has the same."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Twice x, as a collective gives it."""
        return x.mul_(2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_product_in_shared_memory_equals_one_by_collectives(rows: int, biased: bool) -> None:
    """Where it fits and its bytes divide among the ranks; else collectives do it."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 24), torch.randn(32, 24), torch.randn(32) if biased else None
    plain, shared = Rank(), Rank()
    memory = torch.full((1024,), float("nan"))
    shared.symmetric = Doubled({torch.float32: memory}, "group", 2)
    found = shared.linear_sum(x, weight, bias)
    torch.testing.assert_close(found, plain.linear_sum(x, weight, bias))
    torch.testing.assert_close(found, 2 * F.linear(x, weight, bias))
    assert (found.data_ptr() == memory.data_ptr()) == (rows * 32 <= 1024)


def test_room_is_refused_where_the_operation_would_be() -> None:
    """Another dtype, no rows, too many, and bytes that do not divide."""
    room = SymmetricSum({torch.bfloat16: torch.zeros(LIMIT_BYTES // 2, dtype=torch.bfloat16)}, "group", 4).room
    assert room(3, 32, torch.bfloat16).shape == (3, 32)
    assert room(256, 8192, torch.bfloat16) is not None
    for refused in ((3, 32, torch.float32), (0, 32, torch.bfloat16), (257, 8192, torch.bfloat16), (3, 9, torch.bfloat16)):
        assert room(*refused) is None


def test_graphs_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured function runs by itself afterwards."""
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    def function() -> Any:
        calls.append("run")
        return "outputs"

    captured = cuda_graphs.Captured(function, torch.device("cpu"), enabled=False)
    captured._graph, captured.outputs = Graph(), "captured"  # type: ignore[assignment]
    cuda_graphs._shared.add(captured)
    assert captured() == "captured"
    cuda_graphs.drop_shared()
    assert captured() == "outputs" and captured.pool is None and calls == ["replay", "run"] and not cuda_graphs._shared


def test_a_step_cut_short_refuses_every_later_one() -> None:
    """Errors that all ranks meet do not."""
    steps = Steps()
    with pytest.raises(ValueError), steps.together(ValueError):
        raise ValueError
    with steps.together():
        assert steps.busy == 1
    with pytest.raises(KeyboardInterrupt), steps.together():
        raise KeyboardInterrupt
    assert steps.busy == 0
    for _ in range(2):
        with pytest.raises(RankError, match="out of step: KeyboardInterrupt cut a step short"), steps.together():
            pass
