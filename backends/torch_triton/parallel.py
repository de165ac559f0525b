"""A model split over ranks: what rank 0 holds of it, and each rank's part of a forward, of a scoring and of loading.

Every rank scores with the heads it owns and the partial scores are summed; the set is chosen on
rank 0 and sent with the tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dustin.backends.torch_triton import loading
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.ranks import Ranks
from dustin.backends.torch_triton.sharding import Shard
from dustin.backends.torch_triton.weights import Weights, build
from dustin.errors import DustinError, MemoryLimitError, ModelError
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet

# Of each weight file this much is compared between ranks.
_SAMPLES, _SAMPLE_BYTES = 64, 4096

Make = Callable[[ModelConfig, Weights, str, Ranks], Any]
Problem = tuple[type[DustinError], str] | None


class ParallelCache:
    """KVCache of interfaces.py on rank 0: its own shard, and a number by which the other ranks know theirs.

    Changes of length wait and travel with the next order, so that they cost no message of their own.
    """

    def __init__(self, ranks: Ranks, mailbox: list[tuple[Any, ...]], number: int, local: Any) -> None:
        self.ranks, self.number, self.local = ranks, number, local
        self._mailbox = mailbox
        self.capacity = local.capacity
        self.num_bytes = local.num_bytes * ranks.size
        weakref.finalize(self, mailbox.append, ("free", number))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        return self.local.lengths

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.local.batch

    def rollback(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shorten to lengths[b]; return how many rows each dropped. Raise ValueError on a longer length."""
        before = self.local.lengths
        dropped = self.local.rollback(lengths)
        if before != self.local.lengths:
            self._mailbox.append(("rollback", self.number, self.local.lengths))
        return dropped

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`, on every rank."""
        self.local.copy_row(source, target, length)
        self._mailbox.append(("copy_row", self.number, source, target, length))

    def take(self, rows: Sequence[int], capacity: int | None = None) -> ParallelCache:
        """A new cache with copies of the given sequences, on every rank."""
        local = self.local.take(rows, capacity)
        number = next_number()
        self._mailbox.append(("take", self.number, number, tuple(rows), capacity))
        return ParallelCache(self.ranks, self._mailbox, number, local)


_numbers = iter(range(1, 1 << 62))


def next_number() -> int:
    """A number that no model or cache of this run has had."""
    return next(_numbers)


def collect(mailbox: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Take what waits. A cache that is freed in between adds to the list, which must not be lost."""
    waiting = list(mailbox)
    del mailbox[: len(waiting)]
    return waiting


class ParallelModel:
    """Model of interfaces.py on rank 0: each call is told to the other ranks, then made on the own shard."""

    def __init__(self, ranks: Ranks, mailbox: list[tuple[Any, ...]], number: int, local: Any, spec: ModelSpec) -> None:
        self.ranks, self.number, self.local, self.spec = ranks, number, local, spec
        self.scale = local.scale
        self._mailbox = mailbox

    def order(self, what: str, values: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Tell the other ranks, and what has waited before it."""
        with self.ranks.together():
            waiting = collect(self._mailbox)
            self.ranks.order(what, values | {"model": self.number, "first": waiting}, tensors)

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError on a size out of range."""
        self.local.limit_vocabulary(size)
        self._mailbox.append(("limit", self.number, size))
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def new_cache(self, batch: int, capacity: int) -> ParallelCache:
        """An empty cache on every rank. Raise MemoryLimitError naming the rank that lacks memory."""
        number = next_number()
        with self.ranks.together():
            self.order("new_cache", {"cache": number, "batch": batch, "capacity": capacity})
            local, problem = attempt(lambda: self.local.new_cache(batch, capacity))
            problems = self.ranks.agree(problem)
        raise_first(problems)
        return ParallelCache(self.ranks, self._mailbox, number, local)

    def forward(
        self,
        tokens: torch.Tensor,
        num_tokens: Sequence[int],
        cache: ParallelCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward."""
        layers = [] if token_set is None else sorted(token_set.by_layer)
        sets = [] if token_set is None else [token_set, *(token_set.by_layer[i] for i in layers)]
        values = {
            "cache": cache.number,
            "num_tokens": tuple(num_tokens),
            "dense_layers": None if token_set is None else tuple(token_set.dense_layers),
            "layers": layers,
            "tap": tap,
            "logits": logits,
        }
        self.order("forward", values, [tokens, *(x for part in sets for x in (part.indices, part.counts))])
        with self.ranks.together():
            return forward_part(self.ranks, self.spec, self.local, cache.local, tokens, token_set, values)


def forward_part(
    ranks: Ranks, spec: ModelSpec, local: Any, cache: Any, tokens: torch.Tensor, token_set: TokenSet | None, values: dict[str, Any]
) -> ForwardResult:
    """One rank's part of a forward; rank 0 gets the logits and the queries of all tapped heads."""
    tap: Tap | None = values["tap"]
    ranks.variant = None if tap is None else (tuple(sorted(tap.heads.items())), tap.last_row_only)
    own = None if tap is None else Tap(_own_heads(tap.heads, ranks.rank, spec, ranks.size), tap.last_row_only)
    out = local.forward(tokens, values["num_tokens"], cache, token_set=token_set, tap=own, logits=values["logits"])
    if tap is None or not tap.heads:
        return out
    if ranks.rank:
        if out.queries:
            ranks.give(torch.cat([out.queries[layer] for layer in sorted(out.queries)], 2))
        return out
    return ForwardResult(out.logits, _assemble(ranks, spec, tap, out.queries, tokens, local))


def _own_heads(heads: Mapping[int, tuple[int, ...]], rank: int, spec: ModelSpec, size: int) -> dict[int, tuple[int, ...]]:
    """Of the tapped heads those of `rank`, by its own numbers."""
    share = spec.num_heads // size
    mine = {layer: tuple(head - rank * share for head in some if head // share == rank) for layer, some in heads.items()}
    return {layer: some for layer, some in mine.items() if some}


def _assemble(
    ranks: Ranks, spec: ModelSpec, tap: Tap, own: Mapping[int, torch.Tensor], tokens: torch.Tensor, local: Any
) -> dict[int, torch.Tensor]:
    """layer -> [B, R, S, D] on rank 0 from every rank's heads."""
    batch, rows = tokens.shape[0], 1 if tap.last_row_only else tokens.shape[1]
    share = spec.num_heads // ranks.size
    found: dict[int, dict[int, torch.Tensor]] = {layer: {} for layer in tap.heads}
    for rank in range(ranks.size):
        held = _own_heads(tap.heads, rank, spec, ranks.size)
        if not held:
            continue
        if rank == 0:
            parts = [own[layer] for layer in sorted(held)]
        else:
            count = sum(len(some) for some in held.values())
            like = torch.empty(batch, rows, count, spec.head_dim, dtype=local.dtype, device=local.device)
            parts = list(ranks.take_from(rank, like).split([len(held[layer]) for layer in sorted(held)], 2))
        for layer, part in zip(sorted(held), parts, strict=True):
            for i, head in enumerate(held[layer]):
                found[layer][rank * share + head] = part[:, :, i]
    return {layer: torch.stack([found[layer][head] for head in some], 2) for layer, some in tap.heads.items()}


def partial_scores(
    ranks: Ranks,
    spec: ModelSpec,
    score: Callable[..., torch.Tensor],
    local: Any,
    cache: Any,
    queries: Mapping[int, torch.Tensor],
    values: dict[str, Any],
    within: TokenSet | None = None,
) -> torch.Tensor:
    """[B, N] fp32 on rank 0: the mean attention mass of each token, every rank's heads in it.

    `score` is the backend's score or page_scores, with `values["more"]` as its last arguments.
    """
    heads: Mapping[int, tuple[int, ...]] = values["heads"]
    share = spec.num_heads // ranks.size
    own = _own_heads(heads, ranks.rank, spec, ranks.size)
    mine = {layer: queries[layer][:, :, [i for i, head in enumerate(heads[layer]) if head // share == ranks.rank]] for layer in own}
    lengths = values["lengths"]
    total = sum(q.shape[1] * q.shape[2] for q in queries.values())
    if mine:
        weight = sum(q.shape[1] * q.shape[2] for q in mine.values()) / total
        mass = score(mine, Tap(own), local, cache, lengths, *([within] if within is not None else values["more"]))
        outside = mass == float("-inf")
        mass = torch.where(outside, 0.0, mass * weight)
    else:
        mass = torch.zeros(len(lengths), values["columns"], device=ranks.device)
    summed = ranks.sum_on_first(mass)
    columns = summed.shape[1]
    if within is not None:
        used = torch.arange(within.indices.shape[1], device=summed.device)[None] < within.counts[:, None]
        # Unused entries go to a column of their own, which is cut off.
        at = torch.where(used, within.indices.long(), columns)
        outside = torch.ones(len(lengths), columns + 1, dtype=torch.bool, device=summed.device).scatter_(1, at, False)[:, :columns]
    else:
        at = torch.arange(columns, device=summed.device)[None]
        outside = at >= torch.tensor(lengths, device=summed.device)[:, None]
    return summed.masked_fill(outside, float("-inf"))


def load_shard(ranks: Ranks, make: Make, source: Path, dtype: str) -> tuple[Any, ModelSpec]:
    """This rank's model and the spec of the whole. Raise on every rank what any rank met, naming that rank."""

    def read() -> tuple[Any, ModelConfig, str, str]:
        config, fetch, name = loading.open_source(source)
        shard = Shard(ranks.rank, ranks.size)
        weights = build(config, fetch, loading.choose_dtype(dtype, ranks.device), ranks.device, shard)
        return make(shard.config(config), weights, name, ranks), config, name, _identity(config, source)

    found, problem = attempt(read)
    raise_first(ranks.agree(problem))
    local, config, name, digest = found
    answers = ranks.agree((digest, str(local.dtype), str(source)))
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2]:
            raise ModelError(
                f"rank {rank} loaded another model than rank 0: {answer[2]} ({answer[1]}), expected {answers[0][2]} "
                f"({answers[0][1]}): give every rank the same model folder"
            )
    held = sum(ranks.agree(local.weights.num_bytes))
    spec = dataclasses.replace(
        local.spec,
        name=name,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        bytes_per_kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * local.dtype.itemsize,
        weight_bytes=held,
        fingerprint=digest,
    )
    return local, spec


def _identity(config: ModelConfig, source: Path) -> str:
    """sha256 of the configuration, and of every weight file's size and some of its bytes."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode())
    for path in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def attempt(action: Callable[[], Any]) -> tuple[Any, Problem]:
    """The result of an action, or the error that every rank should hear of."""
    try:
        return action(), None
    except DustinError as error:
        return None, (type(error), str(error))
    except torch.OutOfMemoryError as error:
        return None, (MemoryLimitError, str(error).split(". ")[0])
    except (OSError, ValueError, RuntimeError) as error:
        return None, (ModelError, f"{type(error).__name__}: {error}")


def raise_first(problems: Sequence[Problem]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            raise kind(text if all(p == problem for p in problems) else f"rank {rank}: {text}")
