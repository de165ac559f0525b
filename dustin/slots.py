"""Continuous batching: a fixed number of slots that sequences join and leave between rounds, prompts read in chunks beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol, cast

from dustin.config import EngineOptions, RequestOptions
from dustin.engine import Engine
from dustin.errors import UsageError
from dustin.interfaces import Drafter, Drafts, ForwardResult, KVCache, Tap, TokenLogprobs, Verdict
from dustin.planning import AutoPlanner
from dustin.prefill import padded_tokens, piece_alone, read_together, recorded_prompts
from dustin.sequence import Event, Sequence, warp_batch

_NOTHING = RequestOptions(max_tokens=1)
# Tokens compared at once: prompts of 100,000 tokens meet many slots between two rounds.
_COMPARED = 1024
# A temperature at which every token is about as likely as any other.
_HOT = 1e9
# Prompt tokens scored at once: their logits are whole vocabularies.
_SCORED = 64
# So many times in a row others may read before the one that came first.
_OVERTAKEN = 4
# Rows worth copying from another slot rather than reading them again.
_WORTH_COPYING = 32


class SlotDrafter(Drafter, Protocol):
    """A drafter whose rows begin anew one by one."""

    def admit(self, row: int, keep: int, source: int) -> None:
        """Row `row` begins a new sequence whose first `keep` tokens are those of row `source`."""
        ...

    def read(self, prompts: Seq[Seq[int]], most: Seq[int]) -> list[int]:
        """Read the first tokens of some rows, at most most[b] new ones; how many tokens each row has then."""
        ...


class SlotEngine(Engine):
    """An Engine whose rows are slots: `open`, then `admit`, `read_chunk`, `step` and `release` in any order.

    A slot is free, reading its prompt, or active. What a finished sequence left in the cache stays until the slot is taken
    again: a prompt that begins with the same tokens reads only the rest. Only rows that dense attention wrote are kept, so
    the answer equals a cold run's. A sequence's tokens do not depend on who else is in the batch (up to rounding).
    """

    # A row that joins would refresh the pools of the others, who would then read other tokens than alone.
    pools = False

    def open(self, cache: KVCache, num_slots: int, share: bool = True) -> None:
        """Begin with `num_slots` free slots over an empty cache of that many sequences.

        Without `share` each sequence reads the whole of its prompt. Raise UsageError for a selector that looks at the prompt's
        last rows, which chunks read at different times do not keep.
        """
        if self.selector.prompt_rows > 1:
            raise UsageError(f"selector {self.selector.name!r} is for single batches, not for slots: use --select dustin")
        self.cache = cache
        self.rows = [_nobody(slot) for slot in range(num_slots)]
        self.memory.rows, self.memory.set_lengths = self.rows, (0,) * num_slots
        self.drafter.start([row.tokens for row in self.rows], cache.capacity + self.options.num_draft_tokens, None)
        self._following: dict[int, tuple[Sequence, int]] = {}
        self.reused = [0] * num_slots
        self._arrived, self._passed = [0] * num_slots, 0
        self._overdue: Sequence | None = None
        self._joined: list[tuple[list[Sequence], Verdict, ForwardResult]] = []
        self._share = share
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._scoring: dict[int, int] = {}
        # Slots whose prompts the draft reads when it is first asked for drafts.
        self._postponed: set[int] = set()
        self._auto = (self.planner, self.options) if self.planner is not None else None
        self._refresh_warp()

    # Slots.

    @property
    def free(self) -> list[int]:
        """Slots that a sequence can be admitted to."""
        return [row.row for row in self.rows if not row.active and not row.reading]

    @property
    def reading(self) -> list[Sequence]:
        """Sequences whose prompts are being read."""
        return [row for row in self.rows if row.reading]

    def reusable(self, slot: int, prompt: list[int]) -> int:
        """How many leading tokens of `prompt` the free slot's cache rows hold. One at least is read again, for its logits."""
        row = self.rows[slot]
        return _common(row.tokens, prompt, min(self._dense(row), len(prompt) - 1))

    def _dense(self, row: Sequence) -> int:
        """Leading cache rows of a slot that any sequence with the same tokens may use."""
        return 0 if row.finish_reason == "error" else min(row.dense_rows, self.target_cache.lengths[row.row])

    def admit(self, sequence: Sequence, prompt_logprobs: int | None = None) -> None:
        """Take the free slot `sequence.row`; its prompt is read by `read_chunk`. Raise ValueError when it is taken or too small.

        What the prompt has in common with the slot's last sequence, or with any other slot's, is not read again (`reused`).
        Where the other one is itself still being read, this one waits for it. With `prompt_logprobs` (0 or more alternatives)
        every row is read, and `prompt_logprobs[slot]` has an entry for each prompt token but the first when the first token comes.
        """
        slot = sequence.row
        old, cache = self.rows[slot], self.target_cache
        if old.active or old.reading:
            raise ValueError(f"slot {slot} is taken, expected a free one of {self.free}")
        if sequence.prompt_length + sequence.limit > cache.capacity:
            raise ValueError(f"the sequence needs {sequence.prompt_length + sequence.limit} rows, the slot has {cache.capacity}")
        self.prompt_logprobs.pop(slot, None)
        fresh = prompt_logprobs is not None or not self._share
        keep = 0 if fresh else self.reusable(slot, sequence.tokens)
        leader, shared = old, keep
        for row in self.rows if not fresh else []:
            most = row.prompt_length if row.reading else self._dense(row)
            common = _common(row.tokens, sequence.tokens, min(most, sequence.prompt_length - 1))
            if row is not old and common >= shared + _WORTH_COPYING:
                leader, shared = row, common
        sequence.reading = True
        self.rows[slot] = sequence
        self._arrived[slot] = max(self._arrived) + 1
        self.stats.sequences += 1
        self.stats.prompt_tokens += sequence.prompt_length
        self.reused[slot] = 0
        self._begin_with(slot, keep, slot)
        if leader is not old:
            self._following[slot] = (leader, shared)
        self._postponed.discard(slot)
        if prompt_logprobs is None and not self._draft_reads(sequence):
            self._postponed.add(slot)
        if prompt_logprobs is not None:
            self.prompt_logprobs[slot] = []
            if sequence.prompt_length > 1:
                self._scoring[slot] = prompt_logprobs

    def _draft_reads(self, new: Sequence) -> bool:
        """Whether a draft model reads this prompt beside the target. Not where mode auto expects plain rounds: should it look at
        drafts after all, the draft reads what it has missed."""
        drawn = new.request.sampling.temperature > 0 or not self.warp.greedy
        if self._auto is None or self.drafter.model is None or drawn:
            return True
        planner, others = self._auto[0], [row for row in self.rows if row is not new and (row.active or row.reading)]
        if not others:
            planner.begin_text()
        lengths, begun = [new.prompt_length, *(row.committed for row in others)], any(row.active for row in others)
        # Those that come together are decided for together.
        unread = new.prompt_length if begun else sum(lengths)
        return planner.drafts_soon(lengths, len(self.rows) - len(lengths), new.limit, unread, begun)

    def _begin_with(self, slot: int, keep: int, source: int) -> None:
        """The slot's cache rows become the first `keep` of `source`."""
        cache = self.target_cache
        if source == slot:
            cache.rollback([keep if b == slot else n for b, n in enumerate(cache.lengths)])
        else:
            cache.copy_row(source, slot, keep)
        self._slot_drafter.admit(slot, keep, source)
        self.rows[slot].dense_rows = keep
        self.stats.reused_prompt_tokens += keep - self.reused[slot]
        self.reused[slot] = keep

    def _follow(self) -> None:
        """Copy what other slots have read by now for those that wait for it."""
        for slot, (leader, shared) in list(self._following.items()):
            row, there = self.rows[slot], 0
            if self.rows[leader.row] is leader:
                there = min(self._dense(leader), shared)
                if there < shared and leader.reading:
                    continue
            del self._following[slot]
            if row.reading and there > self.target_cache.lengths[slot]:
                self._begin_with(slot, there, leader.row)

    def release(self, slot: int, reason: str = "cancelled") -> None:
        """End the sequence of a slot between rounds; its dense rows stay for a prompt that begins alike."""
        row = self.rows[slot]
        if row.finish_reason is None:
            row.finish_reason = reason
        row.reading = row.joining = False
        self._following.pop(slot, None)
        self._scoring.pop(slot, None)
        self._refresh_warp()

    # Prompts.

    def read_chunk(self, most: int) -> list[Event]:
        """Read about `most` prompt tokens of the slots that are reading (see `_in_turn`); a whole prompt gives its first token."""
        self.begin_chunk(most)
        return self.finish_chunk()

    def begin_chunk(self, most: int) -> None:
        """Tell the device to read them. A round of the others may come before `finish_chunk`: it waits for its own tokens alone."""
        if not self.reading:
            return
        began = time.perf_counter()
        self._follow()
        for slot in list(self._scoring):
            self._score_prompt(slot)
        spent = 0
        while (reading := self._in_turn()) and spent < most:
            shares = self._shares(reading, most)
            # A prompt's last tokens are read on at once: they are not worth a round's wait.
            if spent and spent + sum(shares) > most + most // 4:
                break
            self._note_turn(reading, shares)
            self._read(shares)
            spent += sum(shares)
            if not recorded_prompts(self.backend):
                break
        self.disturbed = True
        self.stats.prefill_seconds += time.perf_counter() - began

    def finish_chunk(self) -> list[Event]:
        """The first tokens of the prompts that `begin_chunk` read to their ends."""
        began, events = time.perf_counter(), []
        joined, self._joined = self._joined, []
        for rows, verdict, out in joined:
            # Read before anything that the device was told later, but for log-probabilities.
            host = self.read(verdict, out)
            # Not those that were released meanwhile.
            joining = {row.row for row in rows if self.rows[row.row] is row and row.joining}
            if not joining:
                continue
            self._set_reading(joining, False)
            self.memory.join(joining)
            self.memory.learn_last(out.queries, joining)
            events += self.commit(Drafts(None, (0,) * len(self.rows)), host, joining, count=False)
            self._after(events)
        self.stats.prefill_seconds += time.perf_counter() - began
        return events

    def _in_turn(self) -> list[Sequence]:
        """Those that may read on, in whose turn it is: who has least left first, so that most answers begin soon; of those with as
        much the first to come. Who came before all others and is overtaken reads every fifth time."""
        waiting = {*self._following, *self._scoring}
        reading = [row for row in self.reading if not row.joining and row.row not in waiting]
        left = self._unread
        return sorted(reading, key=lambda row: (row is not self._overdue, left(row), self._arrived[row.row]))

    def _unread(self, row: Sequence) -> int:
        return row.prompt_length - self.target_cache.lengths[row.row]

    def _shares(self, reading: list[Sequence], most: int) -> list[int]:
        """Prompt tokens each slot reads in the next call, `most` together, given in turn. Where calls of single prompts are
        recorded the first reads alone, or several short ones together."""
        left, shares, room = [self._unread(row) for row in reading], {}, most
        if recorded := recorded_prompts(self.backend):
            small = getattr(self.backend, "recorded_rows", 0)
            together = read_together(left, len(self.rows), small)
            if together == 1:
                shares[reading[0].row] = piece_alone(left[0], most, recorded)
            else:
                each = min(small, max(1, most // together))
                shares = {row.row: min(n, each) for row, n in zip(reading[:together], left, strict=False)}
        else:
            for row, n in zip(reading, left, strict=True):
                shares[row.row] = min(n, room)
                room -= shares[row.row]
        return [shares.get(slot, 0) for slot in range(len(self.rows))]

    def _note_turn(self, reading: list[Sequence], shares: list[int]) -> None:
        """Who waits longest and how often others went before: see `_in_turn`."""
        oldest = min(reading, key=lambda row: self._arrived[row.row])
        self._passed = 0 if shares[oldest.row] else self._passed + 1
        self._overdue = oldest if self._passed >= _OVERTAKEN else None

    def _read(self, shares: list[int]) -> None:
        """One call of the target, and one of the draft, for shares[b] prompt tokens of each slot."""
        cache = self.target_cache
        goals = [have + share if share else 0 for have, share in zip(cache.lengths, shares, strict=True)]
        # The last prompt token is the draft's to feed with the first token the target emits.
        wanted = [
            row.tokens[: min(goal, row.prompt_length - 1)] if row.row not in self._postponed else []
            for row, goal in zip(self.rows, goals, strict=True)
        ]
        reached = self._slot_drafter.read(wanted, shares)
        # A draft that kept fewer rows catches up first.
        parts = [
            row.tokens[have:goal] if goal and there >= len(want) else []
            for row, have, goal, want, there in zip(self.rows, cache.lengths, goals, wanted, reached, strict=True)
        ]
        if any(parts):
            self._read_parts(parts)

    def _score_prompt(self, slot: int) -> None:
        """Read a piece of the slot's prompt and note the log-probability of each of its tokens given those before it."""
        row, cache = self.rows[slot], self.target_cache
        start = cache.lengths[slot]
        part = row.tokens[start : min(start + _SCORED, row.prompt_length)]
        parts = [part if b == slot else [] for b in range(len(self.rows))]
        counts = [len(each) for each in parts]
        out = self.target.forward(self.backend.tokens(parts), counts, cache, logits="all")
        # A verdict that keeps every token: any draft that has some probability passes u = 0, and heat gives some to all.
        drafts = self.backend.tokens([each[1:] for each in parts])
        hot = replace(self.warp, **{f: (v,) * len(self.rows) for f, v in vars(_NOTHING.sampling).items() if f != "seed"})
        hot = replace(hot, temperature=(_HOT,) * len(self.rows))
        judged = self.backend.probabilities(out.logits, hot, None, drafts)
        zeros = [[0.0] * (len(part) - 1)] * len(self.rows)
        verdict = self.backend.accept_sampled(
            drafts, [max(0, n - 1) for n in counts], None, judged, out.logits, zeros, [0.0] * len(self.rows)
        )
        found = self.backend.read(verdict, out.logits, self._scoring[slot]).logprobs
        if found is not None:
            self.prompt_logprobs[slot] += found[slot][: len(part) - 1]
        # The last row is read again: its successor's entry needs its logits, and the first new token does.
        last = start + len(part) - 1
        cache.rollback([last if b == slot else n for b, n in enumerate(cache.lengths)])
        row.dense_rows = last
        self._slot_drafter.read([row.tokens[:last] if b == slot else [] for b in range(len(self.rows))], counts)
        if last == row.prompt_length - 1:
            del self._scoring[slot]

    def _read_parts(self, parts: list[list[int]]) -> None:
        cache = self.target_cache
        joining = {
            row.row
            for row, part in zip(self.rows, parts, strict=True)
            if part and cache.lengths[row.row] + len(part) == row.prompt_length
        }
        out = self.target.forward(
            padded_tokens(self.backend, parts),
            [len(part) for part in parts],
            cache,
            tap=Tap(self.tap.heads, last_row_only=True) if joining else None,
            logits="last" if joining else "none",
        )
        for row, part in zip(self.rows, parts, strict=True):
            if part:
                row.dense_rows = cache.lengths[row.row]
        if not joining:
            return
        # The first token is a verification without drafts.
        self._uniforms = [row.uniforms.draw(1) if row.row in joining else [] for row in self.rows]
        self._set_reading(joining, False)
        verdict = self.judge(Drafts(None, (0,) * len(self.rows)), out)
        self._set_reading(joining, True)
        self._joined.append(([self.rows[slot] for slot in joining], verdict, out))

    def _set_reading(self, joining: set[int], reading: bool) -> None:
        """Whether these rows, whose first token is not read yet, take part."""
        for slot in joining:
            self.rows[slot].reading = self.rows[slot].joining = reading
        self._refresh_warp()

    # Rounds.

    def step(self) -> list[Event]:
        """One round for all active slots: see Engine.step."""
        if self._auto is not None:
            self._plan(*self._auto)
        events = super().step()
        self._after(events)
        return events

    def _plan(self, planner: AutoPlanner, auto: EngineOptions) -> None:
        """What mode auto does this round: the clock decides for greedy batches alone, so that a seed repeats."""
        if self.warp.greedy:
            self.planner, self.options = planner, auto
        else:
            self.planner = None
            self.options = replace(auto, mode="dense" if self.drafter.name == "draft" else "ar")

    def _after(self, events: list[Event]) -> None:
        if any(event.finish_reason for event in events):
            self._refresh_warp()

    def _refresh_warp(self) -> None:
        """Sampling parameters of the active rows; others are neutral, so that they cost nothing and change no path."""
        samplings = [row.request.sampling if row.active else _NOTHING.sampling for row in self.rows]
        self.warp = warp_batch(samplings)

    def penalty_context(self) -> list[list[int]] | None:
        return [row.tokens if row.active else [] for row in self.rows] if self.warp.penalised else None

    @property
    def _slot_drafter(self) -> SlotDrafter:
        return cast(SlotDrafter, self.drafter)


def _common(tokens: list[int], others: list[int], most: int) -> int:
    """How many of the first `most` tokens are equal."""
    for start in range(0, most, _COMPARED):
        stop = min(start + _COMPARED, most)
        if tokens[start:stop] != others[start:stop]:
            return next(i for i in range(start, stop) if tokens[i] != others[i])
    return most


def _nobody(slot: int) -> Sequence:
    """What stands in a slot that nobody has used yet."""
    row = Sequence(slot, [0], _NOTHING, 1, frozenset(), None)
    row.finish_reason = "stop"
    return row
