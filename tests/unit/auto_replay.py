"""A machine for the planner of mode auto: the real pair's acceptance, replayed, at the round costs measured on one H200.

Qwen2.5-Coder 1.5B with its 0.5B. A text is a row of flags, whether the draft's token there is the target's; they come from the
measured histograms of drafts kept in a round, with easy and hard stretches. Any plan can be played on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dustin import cost_model
from dustin.evidence import PriceList
from dustin.interfaces import ModelSpec
from dustin.planning import AutoPlanner, few_drafts
from dustin.plans import Look, Plan

BUDGET = 1024
TOKENS = 192


@dataclass(frozen=True)
class Cell:
    """One measured cell. Milliseconds: `plain` a plain step, `base` + `draft` * n a dense round of n drafts, `exact` a block.

    `kept` is the histogram of drafts kept in a round of as many drafts as its last entry.
    """

    text: str
    context: int
    batch: int
    plain: float
    base: float
    draft: float
    kept: dict[int, float]
    # Instead of a histogram: for so many tokens each draft is right with this chance, then with that.
    turns: tuple[tuple[int, float], ...] = ()

    def passage(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Whether the draft is right at each place."""
        if not self.turns:
            return flags(self.kept, tokens, rng)
        return np.concatenate([rng.random(count) < chance for count, chance in self.turns])

    def milliseconds(self, plan: Plan, active: int) -> float:
        share = 0.6 + 0.4 * active / self.batch
        if plan.mode == "ar":
            return share * self.plain
        if plan.mode == "dense":
            return share * (self.base + self.draft * plan.num_draft_tokens)
        return share * (self.plain + 0.6 * self.base + self.draft * plan.num_draft_tokens) * (1 + plan.exact_block / 4)


# bench/results/decode.jsonl and acceptance.json: steps of `decode_real`, drafts kept of 8 (of 4 in novels at 8k).
CELLS = [
    Cell("code", 8192, 1, 1.92, 2.3, 0.68, {0: 1, 1: 1, 2: 1, 8: 17}),
    Cell("code", 32000, 1, 2.24, 2.6, 0.7, {0: 6, 1: 4, 2: 1, 3: 3, 5: 2, 6: 3, 7: 2, 8: 9}),
    Cell("code", 32000, 16, 4.9, 5.4, 0.76, {0: 94, 1: 59, 2: 63, 3: 31, 4: 25, 5: 23, 6: 14, 7: 12, 8: 173}),
    Cell("code", 8192, 4, 1.89, 2.3, 0.72, {0: 1, 2: 3, 3: 3, 5: 1, 6: 4, 7: 5, 8: 60}),
    Cell("code", 32000, 4, 2.57, 3.7, 0.63, {0: 10, 1: 14, 2: 17, 3: 10, 4: 2, 5: 6, 6: 6, 7: 6, 8: 41}),
    Cell("code", 8192, 16, 2.45, 3.2, 0.7, {0: 94, 1: 59, 2: 63, 3: 31, 4: 25, 5: 23, 6: 14, 7: 12, 8: 173}),
    Cell("novel", 8192, 1, 1.92, 2.6, 0.6, {0: 17, 1: 13, 2: 9, 3: 4, 4: 21}),
    Cell("novel", 32000, 1, 2.23, 3.1, 0.57, {0: 12, 1: 8, 2: 1, 3: 2, 4: 1, 5: 3, 6: 1, 7: 1, 8: 9}),
]


def flags(kept: dict[int, float], tokens: int, rng: np.random.Generator, stretch: float = 0.4) -> np.ndarray:
    """Whether the draft is right at each of `tokens` places; a round is like the one before with chance `stretch`."""
    numbers, most = np.array(sorted(kept)), max(kept)
    edges = np.cumsum([kept[n] for n in sorted(kept)]) / sum(kept.values())
    made: list[bool] = []
    place = rng.random()
    while len(made) < tokens + 32:
        place = rng.random() if rng.random() > stretch else float(np.clip(place + 0.15 * rng.standard_normal(), 0, 0.999999))
        n = int(numbers[np.searchsorted(edges, place, side="right")])
        # Of as many as were drafted nobody knows what the next one would have been: the text goes on.
        made += [True] * n + ([True] if n == most else [False])
    return np.array(made)


def shape(which: str) -> ModelSpec:
    """The specification that the shipped costs were measured for."""
    pair = cost_model._shipped()["H200"][0]
    known: Any = getattr(pair, which)
    return cast(ModelSpec, SimpleNamespace(**known))


def planner(prices: PriceList, most: int = 8, block: int = 32) -> AutoPlanner:
    """A planner as the engine makes one for each call, on the card that the costs are of."""
    made = AutoPlanner(shape("target"), "draft", BUDGET, most, block, 144, recorded=True)
    made.prices = prices
    if "draft" not in prices.cards:
        prices.cards["draft"] = cost_model.find("NVIDIA H200", shape("target"), shape("draft"), "draft")
    return made


@dataclass
class Machine:
    """One batch of texts on their way. Milliseconds of what is recorded the first time, and of a draft's reading a token."""

    cell: Cell
    seed: int
    tokens: int = TOKENS
    recording: float = 80.0
    unread_ms: float = 0.0055
    noise: float = 0.02
    recorded: set[Any] = field(default_factory=set)
    trace: list[tuple[Plan, float, float]] = field(default_factory=list)
    milliseconds: float = 0.0

    def play(self, choose: Callable[..., Plan], record: Callable[..., None] | None = None, unread: int = 0) -> float:
        """Tokens a second of all rows; `unread` tokens of a prompt the draft has not read when the call begins."""
        rng = np.random.default_rng(self.seed)
        rows = [self.cell.passage(self.tokens, rng) for _ in range(self.cell.batch)]
        at = [0] * len(rows)
        behind, total, clock = unread, 0.0, np.random.default_rng(self.seed + 1)
        cold = True
        while True:
            active = [b for b in range(len(rows)) if at[b] < self.tokens]
            if not active:
                break
            lengths = [self.cell.context + at[b] for b in active]
            left = max(self.tokens - at[b] for b in active)
            plan = choose(lengths, len(rows) - len(active), left=left, unread=behind)
            made, looks, ms = self._round(plan, active, rows, at, clock)
            late = 0.0
            drafts = plan.mode != "ar"
            if drafts:
                late = self.unread_ms * behind + (2.5 if cold and ms else 0.0)
                behind = 0
            else:
                behind += 1
            key = (self.cell.batch, plan)
            new = 0.0 if key in self.recorded else self.recording
            self.recorded.add(key)
            for look in looks:
                look.seconds += 1e-3 * late / len(looks)
                look.warm = not (drafts and cold)
            cold = not drafts
            if record is not None:
                record(looks, 1e-3 * (ms + late), 1e-3 * new)
            total += ms + late + new
            self.trace.append((plan, ms + late + new, made))
        self.milliseconds = total
        return 1e3 * self.tokens * len(rows) / total

    def _round(
        self, plan: Plan, active: list[int], rows: list[np.ndarray], at: list[int], clock: np.random.Generator
    ) -> tuple[float, list[Look], float]:
        ms = self.cell.milliseconds(plan, len(active)) * float(np.exp(self.noise * clock.standard_normal()))
        if plan.mode == "ar":
            for b in active:
                at[b] += 1
            return 1.0, [Look("plain", 0, [0] * len(active), 1e-3 * ms)], ms
        kept = []
        n = plan.num_draft_tokens if plan.mode == "dense" else plan.exact_block
        for b in active:
            run = rows[b][at[b] : at[b] + n]
            k = int(np.argmin([*run, False]))
            kept.append(k)
            at[b] = min(self.tokens, at[b] + k + 1)
        if plan.mode == "exact":
            looks = [Look("sparse", plan.num_draft_tokens, kept, 0.5e-3 * ms)]
            looks.append(Look("check", plan.num_draft_tokens, kept, 0.5e-3 * ms, [n] * len(active)))
            return 1 + float(np.mean(kept)), looks, ms
        return 1 + float(np.mean(kept)), [Look("dense", n, kept, 1e-3 * ms)], ms


def fixed(cell: Cell, plan: Plan, seed: int, tokens: int = TOKENS) -> float:
    """Tokens a second where every round is of `plan`, recorded before."""
    machine = Machine(cell, seed, tokens, recording=0.0)
    return machine.play(lambda *a, **k: plan)


def best_fixed(cell: Cell, seed: int, tokens: int = TOKENS, most: int = 8) -> tuple[Plan, float]:
    """The best plan of the menu for this very text, and what it makes."""
    plans = [Plan("ar"), *(Plan("dense", n) for n in few_drafts(most))]
    return max(((plan, fixed(cell, plan, seed, tokens)) for plan in plans), key=lambda found: found[1])


def run(prices: PriceList, cell: Cell, seed: int, tokens: int = TOKENS, recorded: set[Any] | None = None, **more: Any) -> Machine:
    """One call in mode auto; the machine has its trace."""
    chosen = planner(prices)
    machine = Machine(cell, seed, tokens, recorded=recorded if recorded is not None else set(), **more)
    machine.play(chosen.choose, chosen.record)
    return machine


def warmed(prices: PriceList, batch: int, most: int = 8) -> PriceList:
    """What a warm-up leaves: plain and dense rounds with few numbers of drafts were met."""
    prices.warm("draft", batch, 65536, {("plain", 0), *(("dense", n) for n in few_drafts(most))})
    return prices


Answers = list[tuple[int, dict[int, float]]]


def serve(cell: Cell, answers: Answers, mode: str, seed: int = 0, drafts: int = 5) -> float:
    """Milliseconds that one client waits for answers of so many tokens to texts that accept as the histograms say, the draft's
    reading of their prompts with it; one planner for all, as a server has."""
    chosen = planner(warmed(PriceList(), 1, 5), 5)
    total = 0.0
    for number, (tokens, kept) in enumerate(answers):
        place = replace(cell, kept=kept)
        machine = Machine(place, seed + number, tokens, recording=0.0)
        unread = 0
        if mode == "auto":
            chosen.begin_text()
            unread = cell.context if not chosen.drafts_soon([cell.context], 0, 256, cell.context) else 0
            machine.play(lambda *a, left, **k: chosen.choose(*a, left=left + 256 - tokens, **k), chosen.record, unread)  # noqa: B023
            chosen.prices.note_answer(tokens)
        else:
            plan = Plan("ar") if mode == "ar" else Plan("dense", drafts)
            machine.play(lambda *a, plan=plan, **k: plan)
        read = 0.0 if mode == "ar" or unread else machine.unread_ms * cell.context
        total += machine.milliseconds + read
    return total
