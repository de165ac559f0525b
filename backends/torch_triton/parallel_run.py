"""Tensor parallelism: rank 0's backend, and the loop in which the other ranks mirror its model calls.

A target is split over the ranks (sharding.py); a draft lives on rank 0 alone, because a small model's all-reduces cost
more than its products.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dustin.backends.common.mirror import Mailbox, Mirrored, RankCache, attempt, collect, next_number, raise_first, set_of_order
from dustin.backends.torch_triton import loading
from dustin.backends.torch_triton.backend import TorchBackend
from dustin.backends.torch_triton.model import TorchModel
from dustin.backends.torch_triton.parallel import Make, ParallelModel, fit_part, forward_part, load_shard, partial_scores
from dustin.backends.torch_triton.ranks import Ranks, join, leave
from dustin.backends.torch_triton.sharding import Shard
from dustin.errors import DustinError, RankError, UsageError
from dustin.interfaces import Tap, TokenSet

# Triton's own variable: its kernels then run on the CPU, and so can the CUDA models of all ranks.
INTERPRETED = "TRITON_INTERPRET"


class Parallel:
    """What tensor parallelism changes of a torch backend: `load` splits a target, scores are summed over ranks."""

    ranks: Ranks
    make: Make

    def _start(self, ranks: Ranks, make: Make) -> None:
        self.ranks, self.make = ranks, make
        self.mailbox: Mailbox = []

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> Any:
        """A target split over the ranks, or (role "draft") a whole model on rank 0. Raise ModelError, UsageError."""
        if role == "draft":
            return super().load(source, dtype=dtype)  # type: ignore[misc]
        number = next_number()
        # What no number of ranks can do is refused here, before any rank reads weights.
        config, _, _ = loading.open_source(Path(source))
        Shard(0, self.ranks.size).config(config)
        # An error of loading is raised on all ranks.
        with self.ranks.together(DustinError):
            waiting = collect(self.mailbox)
            self.ranks.order("load", {"model": number, "source": str(source), "dtype": dtype, "first": waiting})
            local, spec = load_shard(self.ranks, self.make, Path(source), dtype)
        return ParallelModel(self.ranks, self.mailbox, number, local, spec)

    def score(
        self,
        queries: Mapping[int, torch.Tensor],
        tap: Tap,
        model: Any,
        cache: Any,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> torch.Tensor:
        """[B, Nmax] fp32: see Backend.score."""
        score = super().score  # type: ignore[misc]
        if not isinstance(model, ParallelModel):
            return score(queries, tap, model, cache, lengths, within)
        columns = self.score_columns(cache.local, lengths) if within is None else max(lengths)
        return self._partial("score", score, queries, tap, model, cache, lengths, columns, (), within)

    def page_scores(
        self, queries: Mapping[int, torch.Tensor], tap: Tap, model: Any, cache: Any, lengths: Sequence[int], page_size: int
    ) -> torch.Tensor:
        """[B, max(lengths)] fp32: see Backend.page_scores."""
        score = super().page_scores  # type: ignore[misc]
        if not isinstance(model, ParallelModel):
            return score(queries, tap, model, cache, lengths, page_size)
        return self._partial("page_scores", score, queries, tap, model, cache, lengths, max(lengths), (page_size,), None)

    def _partial(
        self, what: str, score: Any, queries: Mapping[int, torch.Tensor], tap: Tap, model: ParallelModel, cache: RankCache,
        lengths: Sequence[int], columns: int, more: tuple[int, ...], within: TokenSet | None,
    ) -> torch.Tensor:  # fmt: skip
        """Every rank's part of a score, summed."""
        layers = sorted(queries)
        values = {
            "cache": cache.number,
            "heads": {layer: tuple(tap.heads[layer]) for layer in layers},
            "lengths": tuple(int(n) for n in lengths),
            "columns": columns,
            "more": more,
            "within": within is not None,
        }
        sent = [queries[layer] for layer in layers] + ([] if within is None else [within.indices, within.counts])
        with torch.inference_mode(), self.ranks.together():
            model.order(what, values, sent)
            return partial_scores(self.ranks, model.spec, score, model.local, cache.local, queries, values, within)

    def score_columns(self, cache: Any, lengths: Sequence[int]) -> int:
        """Width of the array that `score` gives: whole pages on a paged cache."""
        pool = getattr(cache, "pool", None)
        longest = max(lengths)
        return longest if pool is None else max(1, -(-longest // pool.page_size)) * pool.page_size


class ParallelTorchBackend(Parallel, TorchBackend):  # type: ignore[misc]
    """Rank 0's backend on CPUs."""

    def __init__(self, ranks: Ranks) -> None:
        TorchBackend.__init__(self, ranks.device)
        self._start(ranks, TorchModel)


def _backends(device: torch.device) -> tuple[type[TorchBackend], Make]:
    """The local backend's class and its kind of model."""
    if device.type != "cuda" and os.environ.get(INTERPRETED) != "1":
        return TorchBackend, TorchModel
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel

    return CudaBackend, CudaModel


def _first(ranks: Ranks) -> TorchBackend:
    """Rank 0's backend on the ranks' device."""
    local, make = _backends(ranks.device)
    if local is TorchBackend:
        return ParallelTorchBackend(ranks)

    class ParallelCudaBackend(Parallel, local):  # type: ignore[misc, valid-type]
        """Rank 0's backend on GPUs."""

        def __init__(self) -> None:
            local.__init__(self, ranks.device)
            self._start(ranks, make)

    return ParallelCudaBackend()


def create(device: str = "auto") -> TorchBackend:
    """Rank 0's backend; on another rank this follows rank 0 to the end of the run, then ends the process."""
    ranks = join()
    if ranks.rank:
        follow()
        raise SystemExit(0)
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {device!r}, expected auto, cpu or cuda")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    with ranks.together(DustinError):
        ranks.order("open", {"device": kind, "first": []})
        _open(ranks, kind)
    return _first(ranks)


def _open(ranks: Ranks, kind: str) -> torch.device:
    """Take this rank's device. Raise on every rank what any rank met, naming that rank."""

    def take() -> torch.device:
        if kind == "cpu":
            return torch.device("cpu")
        number = int(os.environ.get("LOCAL_RANK", "0"))
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise UsageError(f"{found} GPUs are here, expected one for each rank: start fewer ranks or use --device cpu")
        return torch.device("cuda", number)

    device, problem = attempt(take)
    # Making the group waits for all ranks, so one that has no device says so first.
    raise_first(ranks.agree(problem))
    ranks.open(device)
    return device


def follow() -> None:
    """On a rank other than 0: mirror rank 0's calls until it lets go. Raise RankError naming the rank that failed first."""
    ranks = join()
    try:
        with ranks.guard():
            Follower(ranks).run()
    except RankError:
        ranks.drop_graphs()
        raise
    except Exception as error:
        ranks.drop_graphs()
        ranks.failed(f"{type(error).__name__}: {error}")
        raise RankError(f"rank {ranks.rank} failed: {type(error).__name__}: {error}") from error
    leave()


class Follower:
    """A rank other than 0: does what rank 0 orders until it says `end`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._backend: Any = None
        self._make: Make = TorchModel
        self._held = Mirrored()

    def run(self) -> None:
        """Follow to the end. Raise what this rank meets, after leaving word of it."""
        while True:
            what, values, tensors = self._ranks.next_order()
            for step in values["first"]:
                self._held.change(*step)
            if what == "end":
                return
            with torch.inference_mode():
                self._do(what, values, tensors)

    def _do(self, what: str, values: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        if what == "open":
            try:
                device = _open(self._ranks, values["device"])
            except DustinError:
                # Rank 0 raises the same and decides how to go on.
                return
            local, self._make = _backends(device)
            self._backend = local(device)
            return
        if what == "load":
            try:
                self._held.models[values["model"]] = load_shard(self._ranks, self._make, Path(values["source"]), values["dtype"])
            except DustinError:
                # Rank 0 raises the same and decides how to go on.
                return
            return
        local, spec = self._held.models[values["model"]]
        if what == "new_cache":
            self._held.new_cache(self._ranks, local, values)
        elif what == "fit":
            self._ranks.agree(fit_part(self._ranks, local, values["tokens"], values["rank"]))
        elif what == "forward":
            forward_part(
                self._ranks, spec, local, self._held.caches[values["cache"]], tensors[0], set_of_order(values, tensors[1:]), values
            )
        elif what in ("score", "page_scores"):
            layers, score = sorted(values["heads"]), getattr(self._backend, what)
            within = TokenSet(tensors[-2], tensors[-1]) if values["within"] else None
            queries = dict(zip(layers, tensors, strict=False))
            partial_scores(self._ranks, spec, score, local, self._held.caches[values["cache"]], queries, values, within)
