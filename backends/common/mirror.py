"""What ranks of tensor parallelism share in any array library: caches by number, steps that wait, orders of a forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dustin.errors import DustinError, ModelError, UsageError
from dustin.interfaces import Array, ModelSpec, Tap, TokenSet

Problem = tuple[type[DustinError], str] | None
Mailbox = list[tuple[Any, ...]]

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


def raise_first(problems: Sequence[Problem]) -> None:
    """Raise the first rank's problem, naming the rank unless all have the same."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            raise kind(text if all(p == problem for p in problems) else f"rank {rank}: {text}")
