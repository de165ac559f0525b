"""What an engine of mode auto tells its planner before and after each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dustin.planning import AutoPlanner, Look
from dustin.sequence import Event

if TYPE_CHECKING:
    from dustin.engine import Engine

# Rounds after which the statistics get the planner's decision anew: to write it down takes as long as a thought.
_TOLD_ROUNDS = 64


def plan_round(engine: Engine, planner: AutoPlanner) -> None:
    """Let the planner choose the next round, knowing what is to come of the rows and what a draft model has not read of them."""
    going, cache = [row for row in engine.rows if row.active], engine.drafter.cache
    unread = 0 if cache is None else sum(row.committed - cache.lengths[row.row] for row in going)
    left = max((row.remaining for row in going), default=0)
    engine.chosen = planner.choose([row.committed for row in going], len(engine.rows) - len(going), left, unread)
    engine.selector.resize(engine.chosen.budget or engine.options.budget)


def learn_round(
    engine: Engine, planner: AutoPlanner, looks: Sequence[Look], events: Sequence[Event], seconds: float, recording: float
) -> None:
    """The round took `seconds`, those of `recording` shapes apart, and brought `events`."""
    planner.record(looks, seconds, recording)
    for event in events:
        if event.finish_reason:
            planner.prices.note_answer(len(engine.rows[event.row].generated))
    if not engine.active or engine.stats.rounds % _TOLD_ROUNDS == 0:
        engine.stats.plan = planner.as_dict()
