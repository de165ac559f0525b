"""Mode exact: two-level speculation. Sparse rounds propose a block of tokens, one dense pass checks it (TriForce)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dustin.interfaces import Array, Drafts
from dustin.planning import Look
from dustin.sequence import Event, padded

if TYPE_CHECKING:
    from dustin.engine import Engine


@dataclass
class _Block:
    """What a block offers its check beside the provisional tokens, which the rows hold.

    Row b's drafts after these are the first last[b] of ends[b]; judged_by[b] has the distribution behind each token of both.
    """

    judged_by: list[list[tuple[Array, int]]]
    ends: list[Array | None]
    last: list[int]

    def join(self, engine: Engine, offered: list[list[int]], width: int) -> Array:
        """Tokens [B, width] of the check. The host never sees the last drafts before their verdict: it need not wait for them."""
        tokens = engine.backend.tokens([[*row, *[0] * (width - len(row))] for row in offered])
        for ends in {id(ends): ends for ends in self.ends if ends is not None}.values():
            counts = [n if mine is ends else 0 for n, mine in zip(self.last, self.ends, strict=True)]
            tokens = engine.backend.insert_tokens(tokens, [len(row) for row in offered], ends, counts)
        return tokens


def exact_block(engine: Engine) -> list[Event]:
    """One block for all active rows: up to `exact_block` tokens each, checked; the committed ones as events.

    The last tokens of a block are drafts that no sparse pass has seen: the dense pass, which reads everything anyway, judges
    them with the rest, so that one sparse pass a block is saved. A row that has proposed enough drafts them beside the next
    round of the others, so that all drafts follow a round whose verdict they can be begun by.
    """
    base = engine.target_cache.lengths
    block = _Block([[] for _ in engine.rows], [None] * len(engine.rows), [0] * len(engine.rows))
    proposing, ending = {row.row for row in engine.rows if row.active and row.remaining > 1}, set[int]()
    started = len(proposing)
    while proposing:
        going = _propose(engine, block, proposing, ending)
        proposing, ending = going, proposing - going
        if engine.warp.greedy and 2 * len(proposing) < started:
            # A few slow rows would keep all others waiting. Greedy tokens do not depend on where a block ends.
            break
    _draft_last(engine, block, proposing | ending)
    offered = [row.tokens[row.committed :] if row.active else [] for row in engine.rows]
    for row in engine.rows:
        del row.tokens[row.committed :]
    engine.target_cache.rollback(base)
    return _dense_check(engine, block, offered)


def _last_drafts(engine: Engine) -> int:
    """Drafts that end a block: one more than a round's, since a check costs more than what judges those.

    Not where plans are priced without it, nor where what is drawn would depend on whether others go on.
    """
    most = engine.chosen.num_draft_tokens
    return most + 1 if most and engine.planner is None and engine.warp.greedy else most


def _most_provisional(engine: Engine) -> int:
    """Tokens that a row's sparse rounds propose before it waits: the block without its last drafts, where those are certain."""
    if engine.drafter.name not in ("draft", "self"):
        return engine.chosen.exact_block
    return max(1, engine.chosen.provisional - (_last_drafts(engine) - engine.chosen.num_draft_tokens))


def _room(engine: Engine, ending: set[int]) -> dict[int, int]:
    """How many drafts may end the block of each of these rows. Nothing follows a provisional end of sequence.

    Rows of a greedy batch are among them also where there is room for none: what comes after the check is begun for all rows
    or not at all, and for those whose draft has read the tokens that are checked.
    """
    rows = (row for row in engine.rows if row.row in ending and row.remaining > 1 and row.tokens[-1] not in row.eos)
    room = {row.row: max(0, engine.chosen.exact_block - (len(row.tokens) - row.committed)) for row in rows}
    return {b: free for b, free in room.items() if free or engine.warp.greedy}


def _end(engine: Engine, block: _Block, drafts: Drafts, room: dict[int, int]) -> None:
    """These drafts end the blocks of the rows that have room for some."""
    # A token that was looked up has no distribution, which the provisional tokens beside it have.
    if drafts.tokens is None or (drafts.probabilities is None and not engine.warp.greedy):
        return
    for b, free in room.items():
        block.last[b] = min(drafts.num_drafts[b], free)
        block.ends[b] = drafts.tokens if block.last[b] else None
        if drafts.probabilities is not None:
            block.judged_by[b] += [(drafts.probabilities, i) for i in range(block.last[b])]


def _draft_last(engine: Engine, block: _Block, ending: set[int]) -> None:
    """Drafts after the provisional tokens of the rows that have none yet, up to the end of the block."""
    most, room, began = _last_drafts(engine), _room(engine, ending), engine.clock()
    # What was begun is taken also where there is no room for it: the drafts after the check can then be begun too.
    if not most or not (any(room.values()) or (room and engine.warp.greedy and engine.drafter.foresees)):
        return
    _end(engine, block, engine.draft(set(room), most, False), room)
    if engine.planner is not None:
        engine.looks.append(Look("last", most, [], engine.clock() - began))


def _propose(engine: Engine, block: _Block, proposing: set[int], ending: set[int]) -> set[int]:
    """One sparse round whose tokens stay provisional; returns the rows that want another. Those `ending` draft beside them."""
    began, room = engine.clock(), _room(engine, ending)
    drafts = engine.draft(proposing | set(room), engine.chosen.num_draft_tokens, True)
    _end(engine, block, drafts, room)
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
        free = min(row.remaining - 1, engine.chosen.exact_block - (len(row.tokens) - row.committed))
        tokens = host.tokens[row.row][: accepted + 1][:free]
        if verdict.probabilities is not None:
            block.judged_by[row.row] += [(verdict.probabilities, i) for i in range(len(tokens))]
        open_end = row.extend_provisionally(tokens)
        if open_end and row.remaining > 1 and len(row.tokens) - row.committed < most:
            going.add(row.row)
    engine.roll_back(block.last)
    return going


def _dense_check(engine: Engine, block: _Block, offered: list[list[int]]) -> list[Event]:
    """One dense pass over all that was proposed; a row's tokens stay up to the first one the target would not have given."""
    began = engine.clock()
    provisional, last = [len(tokens) for tokens in offered], block.last
    counts = tuple(n + drafted for n, drafted in zip(provisional, last, strict=True))
    backend = engine.backend
    probabilities = None
    if any(counts) and any(block.judged_by):
        probabilities = backend.ragged_rows([parts[:n] for parts, n in zip(block.judged_by, counts, strict=True)])
    width = max(counts)
    if engine.chosen.exact_block < getattr(backend, "recorded_rows", 0) and engine.warp.greedy and not engine.warp.penalised:
        # A check of fewer rows would be another shape, to be recorded first.
        width = max(width, engine.chosen.exact_block)
    drafts = Drafts(block.join(engine, offered, width) if any(counts) else None, counts, probabilities)
    taking = {row.row for row in engine.rows if row.active}
    out = engine.verify(drafts, taking, None)
    accept = padded([row.uniforms.draw(n) if row.row in taking else [] for row, n in zip(engine.rows, counts, strict=True)], width)
    final = [row.uniforms.draw(1)[0] if row.row in taking else 0.0 for row in engine.rows]
    verdict = engine.rule.judge(backend, drafts, out.logits, engine.warp, engine.penalty_context(), accept, final)
    engine.memory.learn_verified(out.queries, verdict.num_accepted, taking)
    # Wherever the check cuts a block, the next drafts read the same set.
    engine.memory.recede([row.committed - 1 for row in engine.rows])
    if any(row.remaining > n + 1 for row, n in zip(engine.rows, counts, strict=True) if row.row in taking):
        engine.foresee(drafts, verdict, taking)
    host = engine.read(verdict, out)
    engine.drafter.settle(host)
    planned = engine.chosen.num_draft_tokens
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
