"""Mode exact: two-level speculation. Sparse rounds propose a block of tokens, one dense pass checks it (TriForce)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dustin.interfaces import Array, Drafts
from dustin.planning import Look
from dustin.sequence import Event, padded

if TYPE_CHECKING:
    from dustin.engine import Engine


def exact_block(engine: Engine) -> list[Event]:
    """One block for all active rows: up to `exact_block` tokens each, checked; the committed ones as events.

    The last tokens of a block are drafts that no sparse pass has seen: the dense pass, which reads everything anyway, judges
    them with the rest, so that one sparse pass a block is saved.
    """
    base = engine.target_cache.lengths
    judged_by: list[list[tuple[Array, int]]] = [[] for _ in engine.rows]
    proposing = {row.row for row in engine.rows if row.active and row.remaining > 1}
    started = len(proposing)
    while proposing:
        proposing = _propose(engine, proposing, judged_by)
        if engine.warp.greedy and 2 * len(proposing) < started:
            # A few slow rows would keep all others waiting. Greedy tokens do not depend on where a block ends.
            break
    last = _draft_last(engine, judged_by)
    offered = [row.tokens[row.committed :] if row.active else [] for row in engine.rows]
    for row in engine.rows:
        del row.tokens[row.committed :]
    engine.target_cache.rollback(base)
    return _dense_check(engine, offered, last, judged_by)


def _most_provisional(engine: Engine) -> int:
    """Tokens that a row's sparse rounds propose before it waits: the block without its last drafts, where those are certain."""
    return engine.chosen.provisional if engine.drafter.name in ("draft", "self") else engine.chosen.exact_block


def _draft_last(engine: Engine, judged_by: list[list[tuple[Array, int]]]) -> list[int]:
    """Drafts after each row's provisional tokens, up to the end of the block; how many each row got."""
    block, most = engine.chosen.exact_block, engine.chosen.num_draft_tokens
    room = [block - (len(row.tokens) - row.committed) for row in engine.rows]
    # Nothing follows a provisional end of sequence.
    taking = {
        row.row
        for row, free in zip(engine.rows, room, strict=True)
        if row.active and row.remaining > 1 and free > 0 and row.tokens[-1] not in row.eos
    }
    last, began = [0] * len(engine.rows), engine.clock()
    drafts = engine.draft(taking, most, False) if taking and most else None
    # A token that was looked up has no distribution, which the provisional tokens beside it have.
    if drafts is None or drafts.tokens is None or (drafts.probabilities is None and not engine.warp.greedy):
        return last
    found = engine.backend.host_tokens(drafts.tokens)
    for row in engine.rows:
        if row.row in taking:
            before = len(row.tokens)
            row.extend_provisionally(found[row.row][: min(drafts.num_drafts[row.row], room[row.row])])
            last[row.row] = len(row.tokens) - before
            if drafts.probabilities is not None:
                judged_by[row.row] += [(drafts.probabilities, i) for i in range(last[row.row])]
    if engine.planner is not None:
        engine.looks.append(Look("last", most, [], engine.clock() - began))
    return last


def _propose(engine: Engine, proposing: set[int], judged_by: list[list[tuple[Array, int]]]) -> set[int]:
    """One sparse round whose tokens stay provisional; returns the rows that want another."""
    began = engine.clock()
    drafts = engine.draft(proposing, engine.chosen.num_draft_tokens, True)
    out = engine.verify(drafts, proposing, engine.select(drafts, proposing))
    verdict = engine.judge(drafts, out)
    engine.memory.learn_verified(out.queries, verdict.num_accepted, proposing)
    engine.foresee(drafts, verdict, proposing)
    host = engine.backend.read(verdict)
    engine.drafter.settle(host)
    engine.look("sparse", engine.chosen.num_draft_tokens, host, proposing, began)
    going, most = set(), _most_provisional(engine)
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
        if open_end and row.remaining > 1 and len(row.tokens) - row.committed < most:
            going.add(row.row)
    engine.roll_back()
    return going


def _dense_check(
    engine: Engine, offered: list[list[int]], last: list[int], judged_by: list[list[tuple[Array, int]]]
) -> list[Event]:
    """One dense pass over all that was proposed; a row's tokens stay up to the first one the target would not have given.

    `last` counts the drafts at the end of each row's `offered` tokens.
    """
    began = engine.clock()
    counts = tuple(len(tokens) for tokens in offered)
    backend = engine.backend
    probabilities = None
    if any(counts) and any(judged_by):
        probabilities = backend.ragged_rows([parts[:n] for parts, n in zip(judged_by, counts, strict=True)])
    width = max(counts)
    if engine.chosen.exact_block < getattr(backend, "recorded_rows", 0) and engine.warp.greedy and not engine.warp.penalised:
        # A check of fewer rows would be another shape, to be recorded first.
        width = max(width, engine.chosen.exact_block)
    wide = [[*tokens, *[0] * (width - len(tokens))] for tokens in offered]
    drafts = Drafts(backend.tokens(wide) if any(counts) else None, counts, probabilities)
    taking = {row.row for row in engine.rows if row.active}
    out = engine.verify(drafts, taking, None)
    accept = padded([row.uniforms.draw(n) if row.row in taking else [] for row, n in zip(engine.rows, counts, strict=True)], width)
    final = [row.uniforms.draw(1)[0] if row.row in taking else 0.0 for row in engine.rows]
    verdict = engine.rule.judge(backend, drafts, out.logits, engine.warp, engine.penalty_context(), accept, final)
    engine.memory.learn_verified(out.queries, verdict.num_accepted, taking)
    host = engine.read(verdict, out)
    planned = engine.chosen.num_draft_tokens
    provisional = [n - drafted for n, drafted in zip(counts, last, strict=True)]
    tested = [row.row for row in engine.rows if last[row.row] and host.num_accepted[row.row] >= provisional[row.row]]
    for b in tested:
        engine.count_drafts(engine.rows[b], last[b], host.num_accepted[b] - provisional[b])
    if engine.planner is not None and any(counts):
        kept, checked = [min(host.num_accepted[b], provisional[b]) for b in taking], [provisional[b] for b in taking]
        engine.looks.append(Look("check", planned, kept, engine.clock() - began, checked))
        for look in engine.looks:
            if look.kind == "last":
                look.accepted = [host.num_accepted[b] - provisional[b] for b in tested if last[b] == planned]
    engine.stats.dense_checks += len(taking)
    engine.stats.checked_tokens += sum(counts)
    engine.stats.check_accepted_tokens += sum(host.num_accepted[b] for b in taking)
    return engine.commit(drafts, host, taking, dense=True, count=False)
