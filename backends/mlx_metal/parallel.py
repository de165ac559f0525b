"""Tensor parallelism on mx.distributed, started by `mlx.launch`: mlx-lm's `shard` splits the target, rank 0 drives.

Rank 0 alone runs the engine and tells the other ranks which model calls to mirror, so ranks cannot diverge. Heads are split
over ranks: each scores with its own, and the scores are summed. A draft lives on rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from dustin.backends.common.config import ModelConfig
from dustin.backends.common.mirror import (
    Mailbox,
    Mirrored,
    RankCache,
    SplitModel,
    attempt,
    check_same,
    collect,
    forward_order,
    next_number,
    own_heads,
    raise_first,
    set_of_order,
)
from dustin.backends.mlx_metal import backend as single
from dustin.backends.mlx_metal import loading
from dustin.backends.mlx_metal.backend import MlxBackend
from dustin.backends.mlx_metal.model import MlxModel
from dustin.backends.mlx_metal.ranks import Ranks, join, leave
from dustin.errors import DustinError, RankError, UsageError
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet


def create(device: str = "auto") -> MlxBackend:
    """Rank 0's backend; on another rank this follows rank 0 to the end of the run, then ends the process."""
    ranks = join()
    if ranks.rank:
        follow()
        raise SystemExit(0)
    with ranks.together(DustinError):
        ranks.order("open", {"device": device, "first": []})
        made, problem = attempt(lambda: single.create(device))
        raise_first(ranks.agree(problem))
    return ParallelMlxBackend(ranks, made)


def follow() -> None:
    """On a rank other than 0: mirror rank 0's calls until it lets go. Raise RankError naming the rank that failed."""
    ranks = join()
    try:
        _Follower(ranks).run()
    except Exception as error:
        raise RankError(f"rank {ranks.rank} failed: {type(error).__name__}: {error}") from error
    leave()


class ParallelMlxModel(SplitModel):
    """Model of dustin.interfaces on rank 0."""

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on (the head is whole on rank 0)."""
        self.local.limit_vocabulary(size)
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def forward(
        self,
        tokens: mx.array,
        num_tokens: Sequence[int],
        cache: RankCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward."""
        if token_set is not None and token_set.reselection is not None:
            raise UsageError("reselection layers do not work over several MLX ranks: give --reselection-layers none")
        values, members = forward_order(cache, num_tokens, token_set, tap, logits)
        with self.ranks.together():
            self.order("forward", values, [tokens, *members])
            return _forward(self.ranks, self.spec, self.local, cache.local, tokens, token_set, values)


class ParallelMlxBackend(MlxBackend):
    """Rank 0's backend: `load` splits a target, `score` sums over ranks."""

    def __init__(self, ranks: Ranks, made: MlxBackend) -> None:
        super().__init__(made.device, made.gate)
        self.ranks = ranks
        self._mailbox: Mailbox = []

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> Any:
        """A target split over the ranks, or (role "draft") a whole model on rank 0. Raise ModelError, UsageError."""
        if role == "draft":
            return super().load(source, dtype=dtype)
        number = next_number()
        # An error of loading is raised on all ranks.
        with self.ranks.together(DustinError):
            waiting = collect(self._mailbox)
            self.ranks.order("load", {"model": number, "source": str(source), "dtype": dtype, "first": waiting})
            local, spec = _load(self.ranks, self, Path(source), dtype)
        return ParallelMlxModel(self.ranks, self._mailbox, number, local, spec)

    def score(
        self,
        queries: Mapping[int, mx.array],
        tap: Tap,
        model: Any,
        cache: Any,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> mx.array:
        """[B, max(lengths)] fp32: see Backend.score."""
        if not isinstance(model, ParallelMlxModel):
            return super().score(queries, tap, model, cache, lengths, within)
        return self._partial("score", super().score, queries, tap, model, cache, lengths, (), within)

    def page_scores(
        self, queries: Mapping[int, mx.array], tap: Tap, model: Any, cache: Any, lengths: Sequence[int], page_size: int
    ) -> mx.array:
        """[B, max(lengths)] fp32: see Backend.page_scores."""
        if not isinstance(model, ParallelMlxModel):
            return super().page_scores(queries, tap, model, cache, lengths, page_size)
        return self._partial("page_scores", super().page_scores, queries, tap, model, cache, lengths, (page_size,), None)

    def _partial(
        self, what: str, score: Any, queries: Mapping[int, mx.array], tap: Tap, model: ParallelMlxModel, cache: RankCache,
        lengths: Sequence[int], more: tuple[int, ...], within: TokenSet | None,
    ) -> mx.array:  # fmt: skip
        """Every rank's part of a score, summed."""
        layers = sorted(queries)
        values = {
            "cache": cache.number,
            "heads": {layer: tuple(tap.heads[layer]) for layer in layers},
            "lengths": tuple(int(n) for n in lengths),
            "more": more,
            "within": within is not None,
        }
        members = [] if within is None else [within.indices, within.counts]
        with self.ranks.together():
            model.order(what, values, [*(queries[layer] for layer in layers), *members])
            return _score(self.ranks, model.spec, score, model.local, cache.local, queries, values, within)


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shapes of one of `size` ranks. Raise UsageError naming what they cannot share evenly."""
    for what, count in (("query heads", config.num_heads), ("kv heads", config.num_kv_heads)):
        if count % size:
            fits = [str(n) for n in range(1, config.num_kv_heads + 1) if not (config.num_heads % n or config.num_kv_heads % n)]
            raise UsageError(f"{size} ranks cannot share {count} {what} evenly: use {' or '.join(fits)} ranks")
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def _load(ranks: Ranks, backend: MlxBackend, source: Path, dtype: str) -> tuple[MlxModel, ModelSpec]:
    """This rank's shard and the spec of the whole. Raise on every rank what any rank met."""

    def read() -> tuple[MlxModel, ModelConfig]:
        inner, config, name = loading.load(source, loading.choose_dtype(dtype))
        shapes = local_config(config, ranks.size)
        whole = MlxModel(inner, config, name, backend.gate).spec
        inner.shard(ranks.group)
        mx.eval(inner.parameters())
        return MlxModel(inner, shapes, name, backend.gate), whole

    found, problem = attempt(read)
    raise_first(ranks.agree(problem))
    local, spec = found
    check_same(ranks.agree((spec.fingerprint, spec.dtype, str(source))), "model")
    return local, spec


def _forward(
    ranks: Ranks, spec: ModelSpec, local: MlxModel, cache: Any, tokens: mx.array, token_set: TokenSet | None, values: dict[str, Any]
) -> ForwardResult:
    """One rank's part of a forward; all ranks get the logits, and the queries of all tapped heads."""
    tap: Tap | None = values["tap"]
    share = spec.num_heads // ranks.size
    own = None if tap is None else Tap(own_heads(tap.heads, ranks.rank, share), tap.last_row_only)
    out = local.forward(tokens, values["num_tokens"], cache, token_set=token_set, tap=own, logits=values["logits"])
    mx.eval([x for x in (out.logits, *out.queries.values()) if x is not None])
    if tap is None or not tap.heads:
        return out
    batch, rows = tokens.shape[0], 1 if tap.last_row_only else tokens.shape[1]
    queries = {}
    for layer, heads in sorted(tap.heads.items()):
        most = max(sum(head // share == rank for head in heads) for rank in range(ranks.size))
        held = out.queries.get(layer)
        blank = mx.zeros((batch, rows, most, spec.head_dim), local.dtype)
        mine = blank if held is None else mx.concatenate([held, blank[:, :, : most - held.shape[2]]], axis=2)
        everyone = ranks.gather(mine)
        seen = [0] * ranks.size
        parts = []
        for head in heads:
            rank = head // share
            parts.append(everyone[rank, :, :, seen[rank]])
            seen[rank] += 1
        queries[layer] = mx.stack(parts, axis=2)
    return ForwardResult(out.logits, queries)


def _score(
    ranks: Ranks, spec: ModelSpec, score: Any, local: MlxModel, cache: Any, queries: Mapping[int, mx.array], values: dict[str, Any],
    within: TokenSet | None,
) -> mx.array:  # fmt: skip
    """[B, max(lengths)] fp32: the mean attention mass of each token, every rank's heads in it.

    `score` is the backend's score or page_scores, with `values["more"]` as its last arguments.
    """
    heads: Mapping[int, tuple[int, ...]] = values["heads"]
    share, lengths = spec.num_heads // ranks.size, values["lengths"]
    own = own_heads(heads, ranks.rank, share)
    total = sum(q.shape[1] * q.shape[2] for q in queries.values())
    mass = mx.zeros((len(lengths), max(lengths)), mx.float32)
    if own:
        places = {layer: [i for i, head in enumerate(heads[layer]) if head // share == ranks.rank] for layer in own}
        mine = {layer: queries[layer][:, :, mx.array(at, mx.int32)] for layer, at in places.items()}
        weight = sum(q.shape[1] * q.shape[2] for q in mine.values()) / total
        found = score(mine, Tap(own), local, cache, lengths, *([within] if within is not None else values["more"]))
        mass = mx.where(mx.isinf(found[:, : max(lengths)]), 0.0, found[:, : max(lengths)] * weight)
    return mx.where(_outside(lengths, within), -mx.inf, ranks.sum(mass))


def _outside(lengths: tuple[int, ...], within: TokenSet | None) -> mx.array:
    """[B, max(lengths)] bool: tokens that are not scored."""
    columns = max(lengths)
    if within is None:
        return mx.arange(columns)[None] >= mx.array(lengths)[:, None]
    used = mx.arange(within.indices.shape[1])[None] < within.counts[:, None]
    # Unused entries go to a column of their own, which is cut off.
    at = mx.where(used, within.indices, columns).astype(mx.int32)
    return mx.put_along_axis(mx.ones((len(lengths), columns + 1), mx.bool_), at, mx.array(False), axis=1)[:, :columns]


class _Follower:
    """A rank other than 0: does what rank 0 orders until it says `end`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._backend: MlxBackend | None = None
        self._held = Mirrored()

    def run(self) -> None:
        """Follow to the end."""
        while True:
            what, values, arrays = self._ranks.next_order()
            for step in values["first"]:
                self._held.change(*step)
            if what == "end":
                return
            self._do(what, values, arrays)

    def _do(self, what: str, values: dict[str, Any], arrays: list[mx.array]) -> None:
        if what == "open":
            self._backend, problem = attempt(lambda: single.create(values["device"]))
            self._ranks.agree(problem)
            return
        if self._backend is None:
            raise RuntimeError("no backend was opened")
        if what == "load":
            try:
                self._held.models[values["model"]] = _load(self._ranks, self._backend, Path(values["source"]), values["dtype"])
            except DustinError:
                # Rank 0 raises the same and decides how to go on.
                return
            return
        local, spec = self._held.models[values["model"]]
        if what == "new_cache":
            self._held.new_cache(self._ranks, local, values)
        elif what == "forward":
            cache = self._held.caches[values["cache"]]
            _forward(self._ranks, spec, local, cache, arrays[0], set_of_order(values, arrays[1:]), values)
        elif what in ("score", "page_scores"):
            layers, score = sorted(values["heads"]), getattr(self._backend, what)
            within = TokenSet(arrays[-2], arrays[-1]) if values["within"] else None
            queries = dict(zip(layers, arrays, strict=False))
            _score(self._ranks, spec, score, local, self._held.caches[values["cache"]], queries, values, within)
