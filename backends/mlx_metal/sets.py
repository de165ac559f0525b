"""Token sets, and what the host knows of them without reading: whether a row's set is everything decides dense or sparse."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from dustin.interfaces import TokenSet


@dataclass(frozen=True)
class HostFacts:
    """Row b of a set holds `counts[b]` tokens (None: the device alone knows), all below `bounds[b]`."""

    counts: tuple[int | None, ...]
    bounds: tuple[int, ...]


# By id of the counts array, with weak references to both arrays: facts stay with the arrays when policy wraps them anew.
_KNOWN: dict[int, tuple[weakref.ref[mx.array], weakref.ref[mx.array], HostFacts]] = {}


def remember(token_set: TokenSet, counts: Sequence[int | None], bounds: Sequence[int]) -> TokenSet:
    """Keep the facts of a set as long as its arrays live; returns the set."""
    key = id(token_set.counts)
    counts_ref = weakref.ref(token_set.counts, lambda _: _KNOWN.pop(key, None))
    _KNOWN[key] = (counts_ref, weakref.ref(token_set.indices), HostFacts(tuple(counts), tuple(bounds)))
    return token_set


def facts_of(token_set: TokenSet) -> HostFacts | None:
    """What was remembered of a set's arrays, or None."""
    found = _KNOWN.get(id(token_set.counts))
    if found is None or found[0]() is not token_set.counts or found[1]() is not token_set.indices:
        return None
    return found[2]


def set_of_layer(token_set: TokenSet | None, layer: int) -> TokenSet | None:
    """The set that `layer` reads: its own in `by_layer`, none (dense) in `dense_layers`, else the shared one."""
    if token_set is None or layer in token_set.by_layer:
        return None if token_set is None else token_set.by_layer[layer]
    return None if layer in token_set.dense_layers else token_set


def checked(token_set: TokenSet | None, lengths: Sequence[int]) -> TokenSet | None:
    """The set with facts; one from elsewhere is read, once. Raise ValueError where it does not fit the lengths."""
    if token_set is None:
        return None
    by_layer = {layer: checked(part, lengths) for layer, part in token_set.by_layer.items()}
    if facts_of(token_set) is not None:
        return replace(token_set, by_layer=by_layer)
    rows, counts = token_set.indices.tolist(), token_set.counts.tolist()
    if len(rows) != len(lengths):
        raise ValueError(f"token_set has {len(rows)} rows, expected {len(lengths)}")
    for b, (row, count, length) in enumerate(zip(rows, counts, lengths, strict=True)):
        if not 0 <= count <= min(len(row), length):
            raise ValueError(f"token_set.counts[{b}] is {count}, expected 0 to {min(len(row), length)}")
        chosen = row[:count]
        if chosen and (chosen[0] < 0 or chosen[-1] >= length or any(x >= y for x, y in zip(chosen, chosen[1:], strict=False))):
            raise ValueError(f"token_set.indices[{b}] are not ascending within 0..{length - 1}")
    indices, sizes = (x if x.dtype == mx.int32 else x.astype(mx.int32) for x in (token_set.indices, token_set.counts))
    made = replace(token_set, indices=indices, counts=sizes, by_layer=by_layer)
    return remember(made, counts, [row[count - 1] + 1 if count else 0 for row, count in zip(rows, counts, strict=True)])


def extend(token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
    """A new set: row b keeps entries below min(starts[b], stops[b]) and gains starts[b]..stops[b]-1; the same by layer."""
    batch, width = token_set.indices.shape
    if len(starts) != len(stops) or len(starts) != batch:
        raise ValueError(f"{len(starts)} starts and {len(stops)} stops, expected {batch} of each")
    # indices [B, k]: the kept ones are a prefix because they ascend.
    start, stop = (mx.array(list(x), mx.int32)[:, None] for x in (starts, stops))
    at = mx.arange(width)[None]
    kept = ((at < token_set.counts[:, None]) & (token_set.indices < mx.minimum(start, stop))).sum(axis=1, keepdims=True)
    kept = kept.astype(mx.int32)
    grown = [max(0, b - a) for a, b in zip(starts, stops, strict=True)]
    at = mx.arange(width + max(grown), dtype=mx.int32)[None]
    old = mx.pad(token_set.indices, [(0, 0), (0, max(grown))])
    indices = mx.where(at < kept, old, start + at - kept).astype(mx.int32)
    by_layer = {layer: extend(part, starts, stops) for layer, part in token_set.by_layer.items()}
    made = TokenSet(indices, kept[:, 0] + mx.array(grown, mx.int32), token_set.dense_layers, by_layer)
    facts = facts_of(token_set)
    if facts is None:
        return made
    known: list[int | None] = []
    for count, bound, a, b in zip(facts.counts, facts.bounds, starts, stops, strict=True):
        # Known where nothing is cut off, or where the set is everything below its bound.
        least = min(a, b)
        left = None if count is None else count if least >= bound else least if count == bound else None
        known.append(None if left is None else left + max(0, b - a))
    return remember(made, known, stops)


def replace_set_rows(old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
    """Row b from `new` where rows[b], else from `old`; padded to the wider of the two. Layers' own sets come from `new`."""
    width = max(old.indices.shape[1], new.indices.shape[1])
    taken = mx.array([bool(row) for row in rows])
    wide = [mx.pad(part.indices, [(0, 0), (0, width - part.indices.shape[1])]) for part in (new, old)]
    by_layer = {
        layer: replace_set_rows(old.by_layer[layer], part, rows) if layer in old.by_layer else part
        for layer, part in new.by_layer.items()
    }
    indices, counts = mx.where(taken[:, None], *wide), mx.where(taken, new.counts, old.counts)
    made = TokenSet(indices, counts, new.dense_layers, by_layer)
    both = facts_of(new), facts_of(old)
    if both[0] is None or both[1] is None:
        return made
    picked = [both[0] if row else both[1] for row in rows]
    return remember(made, [f.counts[b] for b, f in enumerate(picked)], [f.bounds[b] for b, f in enumerate(picked)])
