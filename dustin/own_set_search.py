"""Calibration of sets that layers choose themselves: which layers choose, for whom else, and by how large compact keys.

A layer's set may serve the layers after it, where those look at much the same tokens. Two things say which layers must choose:
how much of each layer's attention the set of an earlier one holds (those that choose are then the ones by which all layers keep
the most of theirs), and how much the KL rises where all layers choose but one. The second knows what the first does not: some
layers lose little attention and much of the answer. What is kept in the end is, as elsewhere in calibration, what has the lowest
KL at equal bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dustin.interfaces import Tap
from dustin.scoring import Scoring, full_layers, heuristic, kv_heads_of, with_own_sets, without_own_sets
from dustin.selection import COMPACT_RANKS

if TYPE_CHECKING:
    from dustin.calibration import Calibrator, Trial
    from dustin.interfaces import Measures, ModelSpec
    from dustin.replay import Replay

# Shares of the layers that choose, which are tried.
PARTS = (1.0, 0.75, 0.5, 0.35, 0.25)
# Rounds and tokens by which layers are compared.
COMPARED_ROUNDS = 3
COMPARED_BUDGET = 512


def held(replay: Replay, budget: int = COMPARED_BUDGET, rounds: int = COMPARED_ROUNDS) -> list[list[float]]:
    """[i][j]: the share of the attention of full layer j, in the order of `full_layers`, that a set of `budget` tokens chosen at
    full layer i holds, kv head by kv head: means over kv heads, sequences and a few rounds of the replay's dense reading."""
    backend: Measures = replay.backend
    target, cache, tap = replay.target.model, replay.target.cache, replay.target.tap
    layers, heads = full_layers(target.spec), kv_heads_of(target.spec)
    looked = range(0, len(replay.rounds), max(1, len(replay.rounds) // rounds))
    sums = [[0.0] * len(layers) for _ in layers]
    for i in looked:
        lengths = tuple(start + i * replay.height for start in replay.start)
        for mine in heads:
            scores = []
            for layer in layers:
                want = Tap({layer: mine})
                scores.append(
                    backend.score(backend.narrow_queries(replay.rounds[i].queries, tap, want), want, target, cache, lengths)
                )
            for a, by in enumerate(scores):
                chosen = backend.select(
                    by, None, lengths, budget=budget, num_sink_tokens=4, num_recent_tokens=32, num_draft_selected=0
                )
                for b, seen in enumerate(scores):
                    sums[a][b] += sum(backend.set_mass(chosen, seen)) / len(lengths)
    count = len(looked) * len(heads)
    return [[total / count for total in row] for row in sums]


def choosing(shares: Sequence[Sequence[float]], count: int) -> tuple[int, ...]:
    """The `count` places, the first among them, from which all places together hold the most where each serves itself and those
    after it up to the next: by dynamic programming over `shares` as `held` gives them."""
    size = len(shares)
    # best[j]: of places below j, with as many chosen as the round of the loop says.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * size]
    for _ in range(min(count, size)):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (size + 1)
        for end in range(1, size + 1):
            for first in range(end):
                before = best[first]
                if before is None:
                    continue
                total = before[0] + sum(shares[first][first:end])
                known = following[end]
                if known is None or total > known[0]:
                    following[end] = (total, (*before[1], first))
        best = following
    found = best[size]
    return found[1] if found is not None else ()


def chosen_at(scoring: Scoring, spec: ModelSpec, layers: Sequence[int], rank: int) -> Scoring:
    """The scoring with sets that the given layers' kv heads choose, for those after them too where not all layers do."""
    return with_own_sets(scoring, spec, layers, rank, reuse=len(layers) < len(full_layers(spec)))


def candidates(scoring: Scoring, spec: ModelSpec, shares: Sequence[Sequence[float]]) -> list[Scoring]:
    """The scoring with sets of the layers' own: chosen at all full layers or at fewer, by the ranks that a key has."""
    layers = full_layers(spec)
    counts = [max(1, round(part * len(layers))) for part in PARTS]
    chosen = [[layers[place] for place in choosing(shares, count)] for count in counts]
    ranks = [rank for rank in reversed(COMPACT_RANKS) if rank <= spec.head_dim]
    return [chosen_at(scoring, spec, some, rank) for rank in ranks for some in chosen]


def by_importance(calibrator: Calibrator, scoring: Scoring, rank: int) -> list[Scoring]:
    """Fewer layers that choose: those without which, each alone, the KL rises most. None where time is up before all are tried."""
    spec = calibrator.target.spec
    first, *rest = full_layers(spec)
    alone = [calibrator.trial(chosen_at(scoring, spec, [first, *(x for x in rest if x != layer)], rank)) for layer in rest]
    kls = [made.kl for made in alone if made is not None]
    if len(kls) < len(rest):
        return []
    ranked = [layer for _, layer in sorted(zip(kls, rest, strict=True), reverse=True)]
    calibrator.single["own set"] = {str(layer): round(kl, 4) for kl, layer in sorted(zip(kls, rest, strict=True), reverse=True)}
    counts = [max(1, round(part * (len(rest) + 1))) for part in PARTS[1:]]
    return [chosen_at(scoring, spec, [first, *ranked[: count - 1]], rank) for count in counts]


def begin(calibrator: Calibrator) -> tuple[Trial, Trial] | None:
    """The heuristic and the pair's profile at equal bytes: where a search for own sets begins that leaves the scoring as it is.
    None where the bytes do not allow for one of them."""
    calibrator.deadline = time.perf_counter() + calibrator.options.seconds
    base = heuristic(calibrator.target.spec, calibrator.draft.spec if calibrator.draft else None)
    start, known = calibrator.trial(base), calibrator.known
    best = None if known is None else calibrator.trial(without_own_sets(known))
    return (start, best) if start is not None and best is not None else None


def search(calibrator: Calibrator, best: Trial, shares: Sequence[Sequence[float]], say: Callable[[str], None]) -> Trial:
    """The best scoring with own sets at equal bytes, whether or not it is better than `best`, which has none. Raise UsageError
    where the bytes leave nothing to read beside them."""
    from dustin.errors import UsageError

    spec: Any = calibrator.target.spec
    bare = replace(best.scoring, refresh=1, dense_layers=())
    found = [made for made in (calibrator.trial(scoring) for scoring in candidates(bare, spec, shares)) if made is not None]
    rank = min(found, key=lambda made: made.kl).scoring.reselection_rank if found else 0
    others = by_importance(calibrator, bare, rank) if found else []
    found += [made for made in (calibrator.trial(scoring) for scoring in others) if made is not None]
    if not found:
        raise UsageError(
            f"the bytes of {calibrator.options.allowance} tokens leave nothing to read beside compact keys: raise --allowance"
        )
    for made in found:
        again = made.scoring
        which = ", ".join(map(str, again.reselection.heads))
        say(
            f"own sets of {len(again.reselection.heads)} layers ({which}), compact keys of {again.reselection_rank}: "
            f"KL {made.kl:.4f} at budget {made.budget}"
        )
    winner = min(found, key=lambda made: made.kl)
    verdict = "better" if winner.kl < best.kl else "worse"
    say(f"own sets: KL {winner.kl:.4f}, {verdict} than {best.kl:.4f} of one shared set at equal bytes")
    return winner
