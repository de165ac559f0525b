"""What ranks of tensor parallelism share in any array library: caches by number, steps that wait, orders of a forward."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dustin.errors import DustinError, MemoryLimitError, ModelError, UsageError
from dustin.interfaces import Array, ModelSpec, Tap, TokenSet

Problem = tuple[type[DustinError], str] | None
Mailbox = list[tuple[Any, ...]]

# Libraries may append stacks of many kilobytes; our own messages travel whole.
_LONGEST = 1000
# Only CUDA has a type for it; CPU torch and MLX raise RuntimeErrors with these words.
_NO_MEMORY = re.compile(r"out of memory|resource limit \S+ exceeded|(can't|(unable|attempting|failed) to) allocate", re.IGNORECASE)

_numbers = iter(range(1, 1 << 62))


def next_number() -> int:
    """A number that no model or cache of this run has had."""
    return next(_numbers)


def collect(mailbox: Mailbox) -> Mailbox:
    """Take what waits. A cache that is freed in between adds to the list, which must not be lost."""
    waiting = list(mailbox)
    del mailbox[: len(waiting)]
    return waiting


class RankCache:
    """KVCache of dustin.interfaces on rank 0 of `size`: its own shard, and a number by which the other ranks know theirs.

    Changes of length wait and travel with the next order, so that they cost no message of their own.
    """

    def __init__(self, mailbox: Mailbox, number: int, local: Any, size: int) -> None:
        self._mailbox, self.number, self.local, self._size = mailbox, number, local, size
        self.capacity = local.capacity
        self.num_bytes = local.num_bytes * size
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

    def take(self, rows: Sequence[int], capacity: int | None = None) -> RankCache:
        """A new cache with copies of the given sequences, on every rank."""
        local, number = self.local.take(rows, capacity), next_number()
        self._mailbox.append(("take", self.number, number, tuple(rows), capacity))
        return RankCache(self._mailbox, number, local, self._size)


class SplitModel:
    """Model of dustin.interfaces on rank 0, what is the same in any array library: each call is told to the other ranks,
    then made on the own shard. `ranks` is the backend's Ranks."""

    def __init__(self, ranks: Any, mailbox: Mailbox, number: int, local: Any, spec: ModelSpec) -> None:
        self.ranks, self.number, self.local, self.spec = ranks, number, local, spec
        self.scale = local.scale
        self._mailbox = mailbox

    @property
    def own_sets(self) -> bool:
        """Whether layers can choose sets of their own: not where ranks share a kv head."""
        return self.spec.num_kv_heads % self.ranks.size == 0

    def order(self, what: str, values: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
        """Tell the other ranks, and what has waited before it."""
        with self.ranks.together():
            waiting = collect(self._mailbox)
            self.ranks.order(what, values | {"model": self.number, "first": waiting}, arrays)

    def new_cache(self, batch: int, capacity: int) -> RankCache:
        """An empty cache on every rank. Raise MemoryLimitError naming the rank that lacks memory."""
        number = next_number()
        with self.ranks.together():
            self.order("new_cache", {"cache": number, "batch": batch, "capacity": capacity})
            local, problem = attempt(lambda: self.local.new_cache(batch, capacity))
            problems = self.ranks.agree(problem)
        raise_first(problems)
        return RankCache(self._mailbox, number, local, self.ranks.size)


class Mirrored:
    """On a rank other than 0: the models (with the whole model's spec) and caches that rank 0 knows by number."""

    def __init__(self) -> None:
        self.models: dict[int, tuple[Any, ModelSpec]] = {}
        self.caches: dict[int, Any] = {}

    def change(self, what: str, number: int, *rest: Any) -> None:
        """One step that waited for an order."""
        if what == "limit":
            self.models[number][0].limit_vocabulary(rest[0])
        elif what == "rollback":
            self.caches[number].rollback(rest[0])
        elif what == "copy_row":
            self.caches[number].copy_row(*rest)
        elif what == "take":
            self.caches[rest[0]] = self.caches[number].take(rest[1], rest[2])
        else:
            self.caches.pop(number, None)

    def new_cache(self, ranks: Any, local: Any, values: Mapping[str, Any]) -> None:
        """The other ranks' part of SplitModel.new_cache: kept where every rank has one."""
        cache, problem = attempt(lambda: local.new_cache(values["batch"], values["capacity"]))
        if not any(ranks.agree(problem)):
            self.caches[values["cache"]] = cache


def forward_order(
    cache: RankCache, num_tokens: Sequence[int], token_set: TokenSet | None, tap: Tap | None, logits: str
) -> tuple[dict[str, Any], list[Array]]:
    """Values of a forward's order, and the arrays of its set, which follow the tokens; see `set_of_order`. Raise UsageError
    on a reselection whose heads lie on several ranks."""
    again = None if token_set is None else token_set.reselection
    if again is not None and not again.by_kv_head:
        raise UsageError(
            "with --tensor-parallel a layer's set cannot be chosen by heads of several ranks: give --reselection-by-kv-head true, "
            "or --reselection-layers none"
        )
    layers = [] if token_set is None else sorted(token_set.by_layer)
    sets = [] if token_set is None else [token_set, *(token_set.by_layer[i] for i in layers)]
    values = {
        "cache": cache.number,
        "num_tokens": tuple(int(n) for n in num_tokens),
        "dense_layers": None if token_set is None else tuple(token_set.dense_layers),
        "layers": layers,
        "again": again,
        "tap": tap,
        "logits": logits,
    }
    return values, [x for part in sets for x in (part.indices, part.counts)]


def set_of_order(values: Mapping[str, Any], arrays: Sequence[Array]) -> TokenSet | None:
    """The token set that travelled with a forward."""
    if values["dense_layers"] is None:
        return None
    pairs = [(arrays[i], arrays[i + 1]) for i in range(0, len(arrays), 2)]
    by_layer = {layer: TokenSet(*pair) for layer, pair in zip(values["layers"], pairs[1:], strict=True)}
    return TokenSet(*pairs[0], values["dense_layers"], by_layer, values["again"])


def own_reselection(token_set: TokenSet | None, rank: int, spec: ModelSpec, size: int) -> TokenSet | None:
    """The set with the reselection of the kv heads of `rank`, by its own numbers. Raise UsageError where ranks share a kv head."""
    if token_set is None or token_set.reselection is None:
        return token_set
    if spec.num_kv_heads % size:
        raise UsageError(
            f"{size} ranks share {spec.num_kv_heads} kv heads, which then cannot choose sets of their own: start fewer ranks, or "
            "give --reselection-layers none"
        )
    again = token_set.reselection
    return replace(token_set, reselection=replace(again, heads=own_heads(again.heads, rank, spec.num_heads // size)))


def own_heads(heads: Mapping[int, tuple[int, ...]], rank: int, share: int) -> dict[int, tuple[int, ...]]:
    """Of the tapped heads those of `rank`, which holds `share`, by its own numbers."""
    mine = {layer: tuple(head - rank * share for head in some if head // share == rank) for layer, some in heads.items()}
    return {layer: some for layer, some in mine.items() if some}


def check_same(answers: Sequence[tuple[str, str, str]], what: str) -> None:
    """Raise ModelError where a rank's (digest, dtype, source) names another model than rank 0's."""
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2]:
            raise ModelError(
                f"rank {rank} loaded another model than rank 0: {answer[2]} ({answer[1]}), expected {answers[0][2]} "
                f"({answers[0][1]}): give every rank the same {what}"
            )


def attempt(action: Callable[[], Any]) -> tuple[Any, Problem]:
    """The result of an action, or the error that every rank should hear of: our own errors as they are, a lack of memory as
    MemoryLimitError in whatever words the library has for it, its other errors as ModelError."""
    try:
        return action(), None
    except DustinError as error:
        return None, (type(error), str(error))
    except (MemoryError, OSError, ValueError, RuntimeError) as error:
        text = str(error) if len(str(error)) <= _LONGEST else str(error)[:_LONGEST] + " ..."
        if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
            # torch explains its allocator after the first two sentences.
            words = ". ".join(text.split(". ")[:2]) or type(error).__name__
            return None, (MemoryLimitError, f"not enough memory ({words}): start more ranks, or lower --max-kv-size")
        return None, (ModelError, f"{type(error).__name__}: {text}")


def raise_first(problems: Sequence[Problem]) -> None:
    """Raise the first rank's problem, naming the rank unless all have the same."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            raise kind(text if all(p == problem for p in problems) else f"rank {rank}: {text}")
