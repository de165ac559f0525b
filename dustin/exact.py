"""Mode exact: two-level speculation. Sparse rounds propose a block of tokens, one dense pass checks it (TriForce)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dustin.interfaces import Array, Drafts
from dustin.planning import Look
from dustin.sequence import Event, padded

if TYPE_CHECKING:
    from dustin.engine import Engine


def exact_block(engine: Engine) -> list[Event]:
    """One block for all active rows: up to `exact_block` provisional tokens each, checked; the committed ones as events."""
    base = engine.target_cache.lengths
    judged_by: list[list[tuple[Array, int]]] = [[] for _ in engine.rows]
    proposing = {row.row for row in engine.rows if row.active and row.remaining > 1}
    started = len(proposing)
    while proposing:
        proposing = _propose(engine, proposing, judged_by)
        if engine.warp.greedy and 2 * len(proposing) < started:
            # A few slow rows would keep all others waiting. Greedy tokens do not depend on where a block ends.
            break
    provisional = [row.tokens[row.committed :] if row.active else [] for row in engine.rows]
    for row in engine.rows:
        del row.tokens[row.committed :]
    engine.target_cache.rollback(base)
    return _dense_check(engine, provisional, judged_by)


def _propose(engine: Engine, proposing: set[int], judged_by: list[list[tuple[Array, int]]]) -> set[int]:
    """One sparse round whose tokens stay provisional; returns the rows that want another."""
    began = time.perf_counter()
    drafts = engine.draft(proposing, engine.chosen.num_draft_tokens, True)
    out = engine.verify(drafts, proposing, engine.select(drafts, proposing))
    verdict = engine.judge(drafts, out)
    engine.memory.learn_verified(out.queries, verdict.num_accepted, proposing)
    host = engine.backend.read(verdict)
    engine.look("sparse", engine.chosen.num_draft_tokens, host, proposing, began)
    going = set()
    for row in engine.rows:
        if row.row not in proposing:
            continue
        if not host.finite[row.row]:
            # The dense check decides: it sees the same row and reports NaN if its own logits have it.
            continue
        accepted = host.num_accepted[row.row]
        engine.count_drafts(row, drafts.num_drafts[row.row], accepted)
        room = min(row.remaining - 1, engine.chosen.exact_block - (len(row.tokens) - row.committed))
        tokens = host.tokens[row.row][: accepted + 1][:room]
        if verdict.probabilities is not None:
            judged_by[row.row] += [(verdict.probabilities, i) for i in range(len(tokens))]
        open_end = row.extend_provisionally(tokens)
        if open_end and row.remaining > 1 and len(row.tokens) - row.committed < engine.chosen.exact_block:
            going.add(row.row)
    engine.roll_back()
    return going


def _dense_check(engine: Engine, provisional: list[list[int]], judged_by: list[list[tuple[Array, int]]]) -> list[Event]:
    """One dense pass over all that was proposed; a row's tokens stay up to the first one the target would not have given."""
    began = time.perf_counter()
    counts = tuple(len(tokens) for tokens in provisional)
    backend = engine.backend
    probabilities = None
    if any(counts) and any(judged_by):
        probabilities = backend.ragged_rows([parts[:n] for parts, n in zip(judged_by, counts, strict=True)])
    drafts = Drafts(backend.tokens(provisional) if any(counts) else None, counts, probabilities)
    taking = {row.row for row in engine.rows if row.active}
    out = engine.verify(drafts, taking, None)
    width = max(counts)
    accept = padded([row.uniforms.draw(n) if row.row in taking else [] for row, n in zip(engine.rows, counts, strict=True)], width)
    final = [row.uniforms.draw(1)[0] if row.row in taking else 0.0 for row in engine.rows]
    verdict = engine.rule.judge(backend, drafts, out.logits, engine.warp, engine.penalty_context(), accept, final)
    engine.memory.learn_verified(out.queries, verdict.num_accepted, taking)
    host = engine.read(verdict, out)
    if engine.planner is not None and any(counts):
        kept, offered = [host.num_accepted[b] for b in taking], [counts[b] for b in taking]
        engine.looks.append(Look("check", engine.chosen.num_draft_tokens, kept, time.perf_counter() - began, offered))
    engine.stats.dense_checks += len(taking)
    engine.stats.checked_tokens += sum(counts)
    engine.stats.check_accepted_tokens += sum(host.num_accepted[b] for b in taking)
    return engine.commit(drafts, host, taking, dense=True, count=False)
