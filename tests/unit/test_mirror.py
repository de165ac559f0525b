"""What ranks of tensor parallelism share in any array library: one rule for what went wrong on one of them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dustin.backends.common.mirror import Mirrored, Problem, RankCache, SplitModel, attempt, raise_first
from dustin.backends.common.steps import Steps
from dustin.errors import MemoryLimitError, ModelError, UsageError
from tests.unit.rank_helpers import mlx_launch


def met(error: Exception) -> Problem:
    """What the other ranks hear of an error."""

    def action() -> None:
        raise error

    value, problem = attempt(action)
    assert value is None
    return problem


def test_a_result_is_no_problem() -> None:
    """Also one that is false."""
    assert attempt(lambda: 0) == (0, None)


@pytest.mark.parametrize("error", [UsageError("give less"), MemoryLimitError("5 pages " * 500)])
def test_own_errors_travel_whole(error: Exception) -> None:
    """Kind and words, however long."""
    assert met(error) == (type(error), str(error))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "(MemoryError)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
            "Tried to allocate 2.00 GiB)",
        ),
        (RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes. Error code 12"), "9 bytes)"),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum"), "allocate 9 bytes"),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), "499000"),
        (RuntimeError("[malloc_or_wait] Unable to allocate 9 bytes."), "allocate 9 bytes"),
    ],
)
def test_a_lack_of_memory_in_any_words(error: Exception, words: str) -> None:
    """The engine tries again with less where it meets MemoryLimitError, so no library may hide one."""
    problem = met(error)
    assert problem is not None and problem[0] is MemoryLimitError
    assert words in problem[1] and problem[1].endswith("lower --max-kv-size")


def test_torch_names_a_lack_of_memory_so() -> None:
    """The words that are looked for are those of the installed version."""
    assert attempt(lambda: torch.empty(1 << 55, dtype=torch.uint8))[1][0] is MemoryLimitError  # type: ignore[index]


def test_a_librarys_error_is_cut() -> None:
    """A stack of C++ frames after its first words."""
    assert met(RuntimeError("no such kernel" + "\nframe" * 900)) == (
        ModelError,
        "RuntimeError: " + ("no such kernel" + "\nframe" * 900)[:1000] + " ...",
    )


class OneRank(Steps):
    """Rank 0 of two, whose peer answers what it is told to."""

    size = 2

    def __init__(self, peer: Problem) -> None:
        super().__init__()
        self.peer, self.orders = peer, []  # type: ignore[var-annotated]

    def order(self, what: str, values: dict[str, Any], arrays: Any = ()) -> None:
        """Remember what was told."""
        self.orders.append((what, values))

    def agree(self, mine: Problem) -> list[Problem]:
        """Both answers, as they come from another process."""
        return [pickle.loads(pickle.dumps(x)) for x in (mine, self.peer)]


def split_model(peer: Problem) -> tuple[SplitModel, OneRank]:
    """A model whose own shard makes caches of 10 bytes."""
    cache = SimpleNamespace(capacity=8, num_bytes=10, lengths=(0,), batch=1)
    ranks = OneRank(peer)
    local = SimpleNamespace(scale=1.0, new_cache=lambda batch, capacity: cache)
    return SplitModel(ranks, [("free", 3)], 7, local, None), ranks  # type: ignore[arg-type]


def test_a_cache_on_every_rank() -> None:
    """It is told with what has waited, and is as large as both shards."""
    model, ranks = split_model(None)
    cache = model.new_cache(1, 8)
    assert isinstance(cache, RankCache) and cache.num_bytes == 20
    (order,) = ranks.orders
    assert order == ("new_cache", {"cache": cache.number, "batch": 1, "capacity": 8, "model": 7, "first": [("free", 3)]})


def test_a_rank_without_memory_is_named_and_the_ranks_go_on() -> None:
    """The engine asks again with less."""
    model, ranks = split_model((MemoryLimitError, "the KV cache asks for too much"))
    for _ in range(2):
        with pytest.raises(MemoryLimitError, match="^rank 1: the KV cache asks for too much$"):
            model.new_cache(1, 8)
    assert len(ranks.orders) == 2


def test_the_other_ranks_keep_a_cache_that_all_have() -> None:
    """And none that another could not make."""
    local = SimpleNamespace(new_cache=lambda batch, capacity: (batch, capacity))
    held = Mirrored()
    for number, peer in ((1, None), (2, (MemoryLimitError, "no room"))):
        held.new_cache(OneRank(peer), local, {"cache": number, "batch": 2, "capacity": 5})
    assert held.caches == {1: (2, 5)}


def test_all_ranks_with_one_problem_say_it_once() -> None:
    """No rank is named where all have it."""
    with pytest.raises(ModelError, match="^no file$"):
        raise_first([(ModelError, "no file")] * 2)


def test_mlx_ranks_agree_on_answers_of_any_length() -> None:
    """Longer than one exchange holds, on one rank only: no rank may refuse it alone, since the others would wait."""
    code = (
        "from dustin.backends.mlx_metal.ranks import join\n"
        "ranks = join()\n"
        "for mine in (ranks.rank, '\\u00fc' * 9000 * ranks.rank, 'end'):\n"
        "    found = ranks.agree(mine)\n"
        "    if ranks.rank == 0: print([len(str(x)) for x in found], flush=True)\n"
    )
    ended = mlx_launch("-c", code)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert lines == ["[1, 1]", "[0, 9000]", "[3, 3]"], ended
