"""What selection carries from round to round: which lookahead a round may score with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dustin.config import EngineOptions
from dustin.interfaces import Drafts, SelectionContext, Tap, TokenSet
from dustin.scoring import Scoring
from dustin.selectors.base import BaseSelector
from dustin.set_memory import SetMemory


class _Watching(BaseSelector):
    """Notes the lookahead that it is given, and reads everything."""

    needs_lookahead = True
    seen: Any = None

    def select(self, context: SelectionContext) -> TokenSet | None:
        self.seen = context.lookahead
        return None


@pytest.mark.parametrize(("read", "scores"), [((30, 12), True), ((29, 12), False), ((30, 99), True)])
def test_lagged_queries_score_only_what_the_draft_has_read(read: tuple[int, int], scores: bool) -> None:
    """A round without drafts leaves the draft's cache behind; a row that takes no part has nothing to score."""
    options = EngineOptions(mode="exact", lookahead_lag=1, budget=64)
    selector = _Watching("watching", options, Scoring(Tap({}), Tap({0: (0,)})))
    memory = SetMemory(SimpleNamespace(), selector, options)  # type: ignore[arg-type]
    memory.rows = [SimpleNamespace(row=b, active=True) for b in range(2)]  # type: ignore[misc]
    memory._lagged = queries = {0: object()}
    draft_cache = SimpleNamespace(lengths=read)
    context: Any = SelectionContext(
        memory.backend, None, None, (30, 0), None, None, None, draft_cache, None, None, None, (1, 0)  # type: ignore[arg-type]
    )
    memory.select(context, Drafts(None, (0, 0)), {0})
    assert selector.seen == (queries if scores else None)
