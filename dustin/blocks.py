"""How a block of mode exact goes: sparse rounds until a row has its provisional tokens, and how many it has (dustin/exact.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

# Rounds that a plan is thought through for, and what chance of going on counts as none.
_MOST_ROUNDS, _NEVER, _NOTHING = 256, 1e-3, 1e-6
# Rows from which on a batch is taken to behave as its mean.
_MANY = 64
# Fineness of the tables of binomial tails.
_STEPS = 200


@functools.lru_cache(maxsize=16384)
def block_course(
    shares: tuple[float, ...], least: int, block: int, batch: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """(expected sparse rounds, (x, P(a row has x provisional tokens at the check)) for every x that occurs) of a block.

    A round keeps n drafts with chance shares[n] and brings one token more. A row takes part until it has `least` tokens, and
    has at most `block`; a batch stops once fewer than half of its rows go on.
    """
    have, done, final = np.zeros(block + 1), np.zeros(block + 1), np.zeros(block + 1)
    have[0] = 1.0
    brings = np.array([0.0, *shares])
    rounds, going = 0.0, 1.0
    for _ in range(_MOST_ROUNDS):
        rounds += going
        after = np.convolve(have, brings)
        have = after[: block + 1]
        have[block] += after[block + 1 :].sum()
        done[least:] += have[least:]
        have[least:] = 0.0
        waiting = float(have.sum())
        goes_on, still = _half_waits(waiting, batch)
        goes_on = min(going, goes_on)
        if going > goes_on:
            # Where a batch stops, fewer rows wait than on average.
            mean = still if waiting else 0.0
            final += (going - goes_on) * ((mean / waiting if waiting else 0.0) * have + (1 - mean) / max(1 - waiting, 1e-9) * done)
        going = goes_on
        if going < _NEVER:
            break
    if batch == 1:
        final = done + have
    final /= final.sum()
    return rounds, tuple((x, chance) for x, chance in enumerate(final.tolist()) if chance > _NOTHING)


def _half_waits(waiting: float, batch: int) -> tuple[float, float]:
    """Chance that half of the rows or more still wait when each does with chance `waiting`; the share that waits otherwise."""
    if batch > _MANY:
        return float(waiting >= 0.5), min(waiting, 0.5)
    table = _half_table(batch)
    place = waiting * _STEPS
    low = min(int(place), _STEPS - 1)
    (a, c), (b, d) = table[low], table[low + 1]
    return a + (b - a) * (place - low), c + (d - c) * (place - low)


@functools.cache
def _half_table(batch: int) -> list[tuple[float, float]]:
    """What _half_waits gives at `waiting` = 0, 1 / _STEPS, .. 1."""
    least, made = -(-batch // 2), []
    for step in range(_STEPS + 1):
        waiting = step / _STEPS
        chances = [math.comb(batch, k) * waiting**k * (1 - waiting) ** (batch - k) for k in range(least)]
        below = math.fsum(chances)
        made.append((1.0 - below, math.fsum(k * chance for k, chance in enumerate(chances)) / (batch * below) if below else 0.5))
    return made


def block_tokens(
    course: Sequence[tuple[int, float]], block: int, agreed: Sequence[float], kept: Sequence[float], drafted: Sequence[float]
) -> float:
    """Expected tokens of a checked block: provisional ones until the dense pass disagrees, where all are kept the drafts that
    end the block, and one token more.

    `course` as block_course gives it; agreed[n]: P(the first n are kept); kept[n]: expected kept of n provisional tokens;
    drafted[m]: expected kept of m drafts.
    """
    most = len(drafted) - 1
    return 1.0 + sum(chance * (kept[x] + agreed[x] * drafted[min(block - x, most)]) for x, chance in course)
