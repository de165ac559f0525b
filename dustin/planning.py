"""What `--mode auto` does: the lossless plan (mode, drafts a round, block) with the most tokens a second by what was measured.

Two things are known of a plan: what a round brings (acceptance by position, agreement of sparse and dense attention a token)
and what it costs (seconds of a round, of a dense check). Both are measured as the run goes on, fade with age, and serve every
plan: a plan that never ran is priced from those that did. The price list outlives a run, since costs belong to the machine.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dustin.interfaces import ModelSpec

# Without a draft model a speculative round must promise this much before it is tried: KV bytes of a plain step over weight bytes.
_MIN_KV_SHARE = 0.4
# Old evidence fades to 1/e within so many rounds, and checked tokens: long enough to tell plans apart, short beside a text.
_MEMORY_ROUNDS, _MEMORY_TOKENS = 40.0, 250.0
# What a position without evidence is taken to accept, and with how many observations' weight.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
# Agreement of the sparse target with the dense one, a token: the real pair measured 0.9 to 0.99.
_CHECK_PRIOR = 0.93
# Change plans for this much more speed. A mode out of use gets a look for a share of the time: the larger one while it would
# win if the evidence were one standard error better.
_MARGIN, _LOOK_SHARE, _DOUBT_SHARE = 1.02, 0.02, 0.15
# A settled plan is thought over every so many rounds: thinking takes a fraction of a millisecond.
_THINK_ROUNDS = 4
_DRAFTS, _BLOCKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15), (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    """One way to spend the next round. `exact_block` is 0 outside mode exact."""

    mode: str
    num_draft_tokens: int = 0
    exact_block: int = 0

    def __str__(self) -> str:
        block = f", block {self.exact_block}" if self.exact_block else ""
        return f"{self.mode}, {self.num_draft_tokens} drafts{block}" if self.mode != "ar" else "ar"


class Acceptance:
    """By position, how often a draft was kept whose predecessors were: counts that fade, pooled where a position has few."""

    def __init__(self) -> None:
        self._tested: defaultdict[int, float] = defaultdict(float)
        self._kept: defaultdict[int, float] = defaultdict(float)

    def observe(self, accepted: Sequence[int], planned: int) -> None:
        """One round: row b kept accepted[b] of `planned` drafts (a row for which nothing was found kept none)."""
        fade = math.exp(-1 / _MEMORY_ROUNDS)
        for counts in (self._tested, self._kept):
            for position in counts:
                counts[position] *= fade
        for kept in accepted:
            for position in range(min(kept + 1, planned)):
                self._tested[position] += 1
                self._kept[position] += position < kept

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._tested)

    def rates(self, drafts: int) -> list[float]:
        """Chance that the draft at each position is kept when those before it are."""
        pooled = (sum(self._kept.values()) + _PRIOR * _PRIOR_WEIGHT) / (sum(self._tested.values()) + _PRIOR_WEIGHT)
        kept, tested, prior = self._kept.get, self._tested.get, pooled * _PRIOR_WEIGHT
        return [(kept(i, 0.0) + prior) / (tested(i, 0.0) + _PRIOR_WEIGHT) for i in range(drafts)]

    def tokens(self, drafts: int, doubt: float = 0.0) -> float:
        """Expected tokens of a round with so many drafts: the kept ones and one of the target's own."""
        total, alive = 1.0, 1.0
        # Positions share what they know, so the error is that of all observations together.
        seen = sum(self._tested.values()) + _PRIOR_WEIGHT
        for rate in self.rates(drafts):
            alive *= min(1.0, rate + doubt * math.sqrt(rate * (1 - rate) / seen)) if doubt else rate
            total += alive
        return total

    def faded(self, weight: float) -> Acceptance:
        """A copy in which no position has more than `weight` observations."""
        copy = Acceptance()
        for position, tested in self._tested.items():
            share = min(1.0, weight / tested) if tested else 0.0
            copy._tested[position] = tested * share
            copy._kept[position] = self._kept[position] * share
        return copy


class Clock:
    """Seconds by a size (drafts of a round, tokens of a check): the last few measurements of each, a line between them.

    The first of a size pays for compilation and capture: it counts as an upper bound until there is a second.
    """

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._seen: dict[int, deque[float]] = {}

    def observe(self, size: int, seconds: float) -> None:
        """One measurement."""
        if size not in self._first:
            self._first[size] = seconds
        else:
            self._seen.setdefault(size, deque(maxlen=9)).append(seconds)

    def count(self, size: int) -> int:
        """How often a size was measured (up to ten), the first time included."""
        return (size in self._first) + len(self._seen.get(size, ()))

    @property
    def sizes(self) -> list[int]:
        """What was measured twice or more."""
        return sorted(self._seen)

    def measured(self, size: int) -> float:
        """Mean seconds without outliers (what lies above three medians: a capture, a pause of the machine)."""
        times = sorted(self._seen[size])
        usual = [t for t in times if t <= 3 * times[len(times) // 2]]
        return sum(usual) / len(usual)

    def seconds(self, size: int, zero: float) -> float | None:
        """Measured, or on the line through the nearest measured sizes; `zero` is what size 0 takes. None without any."""
        if size in self._seen:
            return self.measured(size)
        bound = self._first.get(size)
        if not self._seen:
            return bound
        known = {0: zero} | {n: self.measured(n) for n in self._seen}
        below = max((n for n in known if n < size), default=0)
        above = min((n for n in known if n > size), default=None)
        if above is None:
            above, below = below, max((n for n in known if n < below), default=below)
        slope = max(0.0, (known[above] - known[below]) / (above - below)) if above != below else 0.0
        line = max(1e-9, known[below] + slope * (size - below))
        return line if bound is None else min(line, bound)


class Costs:
    """Seconds for one size of batch and context; what was not measured here is taken from a neighbouring size, scaled.

    `plain` of size 0, `dense` and `sparse` rounds by drafts, `check` by the tokens of a block.
    """

    def __init__(self, base: Costs | None = None) -> None:
        self.clocks = {kind: Clock() for kind in ("plain", "dense", "sparse", "check")}
        self._base = base
        self._ratio = 1.0

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """One measurement; where the neighbour has the same, it tells how the two sizes compare."""
        self.clocks[kind].observe(size, seconds)
        if self._base is not None and size in self._base.clocks[kind].sizes and size in self.clocks[kind].sizes:
            ratio = self.clocks[kind].measured(size) / self._base.clocks[kind].measured(size)
            self._ratio += 0.3 * (ratio - self._ratio)

    def count(self, kind: str, size: int) -> int:
        """Measurements of this size, or of the neighbour's."""
        return max(self.clocks[kind].count(size), self._base.count(kind, size) if self._base is not None else 0)

    def seconds(self, kind: str, size: int, zero: float = 0.0) -> float | None:
        """Best estimate: measured here, measured next door, on a line; None without any measurement."""
        here = self.clocks[kind]
        if size in here.sizes or self._base is None:
            return here.seconds(size, zero)
        there = self._base.seconds(kind, size, zero / self._ratio)
        return here.seconds(size, zero) if there is None else there * self._ratio


@dataclass
class Habits:
    """What rounds bring, apart from the machine: acceptance in dense and in sparse rounds, agreement a checked token."""

    dense: Acceptance = field(default_factory=Acceptance)
    sparse: Acceptance = field(default_factory=Acceptance)
    kept: float = _CHECK_PRIOR * _PRIOR_WEIGHT
    checked: float = _PRIOR_WEIGHT
    # Sparse rounds of a block over those that mean acceptance promises: the last round overshoots, the slowest row counts.
    rounds_factor: float = 1.0

    def faded(self) -> Habits:
        """A copy for the next text, with the weight of a few observations."""
        share = min(1.0, 8.0 / self.checked)
        return Habits(self.dense.faded(8.0), self.sparse.faded(8.0), self.kept * share, self.checked * share, self.rounds_factor)


class PriceList:
    """Costs by drafter, batch and context (powers of two) and the latest habits, kept over the runs of a session."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, int, int], Costs] = {}
        self.habits: dict[str, Habits] = {}

    def of(self, drafter: str, lengths: Sequence[int], last: Costs | None) -> Costs:
        """The costs at these lengths (tokens of each active row); new ones start from `last` or any of this drafter."""
        key = (drafter, len(lengths).bit_length(), (sum(lengths) // max(1, len(lengths))).bit_length())
        if key not in self._costs:
            same = [costs for (name, _, _), costs in self._costs.items() if name == drafter]
            self._costs[key] = Costs(last if last in same else same[-1] if same else None)
        return self._costs[key]


@dataclass
class Look:
    """What one round of `kind` (plain, dense, sparse, check) showed: drafts planned, those kept of each row, seconds.

    For a check `offered` has the tokens of each row that it covered.
    """

    kind: str
    planned: int
    accepted: list[int]
    seconds: float
    offered: list[int] = field(default_factory=list)


class AutoPlanner:
    """Chooses the plan of each round: `ar`, `dense` with some drafts, `exact` with some drafts and a block.

    Only greedy runs are planned: the choice goes by the clock, and which tokens a seed gives must not.
    """

    def __init__(self, spec: ModelSpec, drafter: str, budget: int, most_drafts: int = 5, most_block: int = 32) -> None:
        self._spec, self._drafter, self._budget = spec, drafter, budget
        self.prices = PriceList()
        self._drafts = sorted({n for n in _DRAFTS if n < most_drafts} | {most_drafts})
        self._blocks = sorted({n for n in _BLOCKS if n < most_block} | {most_block})
        self._habits: Habits | None = None
        self._costs: Costs | None = None
        self._plan = Plan("ar")
        self._now, self._settled = 0.0, 0
        self._seen_at: dict[str, float] = {}
        self._forecast: dict[Plan, float] = {}

    @property
    def habits(self) -> Habits:
        """What rounds bring; begins as the last run's, faded."""
        if self._habits is None:
            known = self.prices.habits.get(self._drafter)
            self._habits = self.prices.habits[self._drafter] = known.faded() if known is not None else Habits()
        return self._habits

    @property
    def costs(self) -> Costs:
        """What rounds cost at the lengths of the last choice."""
        if self._costs is None:
            self._costs = Costs()
        return self._costs

    # Choosing.

    def choose(self, lengths: Sequence[int]) -> Plan:
        """The plan of the next round for rows with these committed lengths (tokens)."""
        if not self._worth_trying(lengths):
            self._plan = Plan("ar")
            return self._plan
        costs = self.prices.of(self._drafter, lengths, self._costs)
        self._settled = self._settled + 1 if costs is self._costs else 0
        self._costs = costs
        if self._settled % _THINK_ROUNDS and self._plan in self._forecast and self._plan.mode != "exact":
            return self._plan
        self._plan = self._unmeasured(lengths) or self._look_again(lengths) or self._best(lengths)
        return self._plan

    def _plans(self, lengths: Sequence[int]) -> list[Plan]:
        plans = [Plan("ar"), *(Plan("dense", n) for n in self._drafts)]
        # The target drafting for itself on a sparse cache IS a sparse block with a dense check.
        if self._drafter != "self" and min(lengths) >= 2 * self._budget:
            plans += [Plan("exact", n, block) for n in (0, *self._drafts) for block in self._blocks]
        return plans

    def _unmeasured(self, lengths: Sequence[int]) -> Plan | None:
        """Plans that price the others: plain decoding, the middle and the largest number of drafts, one middling block."""
        middle = self._drafts[len(self._drafts) // 2]
        probes = [("plain", 0, Plan("ar")), ("dense", middle, Plan("dense", middle))]
        if self._drafts[-1] != middle and self.habits.dense.rates(1)[0] > 0.5:
            probes.append(("dense", self._drafts[-1], Plan("dense", self._drafts[-1])))
        for kind, size, plan in probes:
            if self.costs.count(kind, size) < 2:
                return plan
        block = self._blocks[min(1, len(self._blocks) - 1)]
        plan = Plan("exact", middle, block)
        if plan in self._plans(lengths) and self.costs.count("check", block) < 2 and self._could_win("exact", lengths):
            return plan
        return None

    def _best(self, lengths: Sequence[int]) -> Plan:
        self._forecast = {plan: self.tokens_per_second(plan) for plan in self._plans(lengths)}
        best = max(self._forecast, key=lambda plan: self._forecast[plan])
        current = self._forecast.get(self._plan, 0.0)
        return self._plan if self._forecast[best] < _MARGIN * current else best

    def _look_again(self, lengths: Sequence[int]) -> Plan | None:
        """A mode out of use that could win if all its guesses were right gets a look, for a small share of the time."""
        for mode in ("dense", "exact"):
            plans = [plan for plan in self._plans(lengths) if plan.mode == mode]
            if not plans or self._plan.mode == mode:
                continue
            plan = max(plans, key=lambda plan: self.tokens_per_second(plan, doubt=1.0))
            doubtful = self.tokens_per_second(plan, doubt=1.0) > _MARGIN * self.tokens_per_second(self._plan)
            wait = self._seconds(plan) / (_DOUBT_SHARE if doubtful else _LOOK_SHARE)
            if self._now - self._seen_at.get(mode, 0.0) > wait and (doubtful or self._could_win(mode, lengths)):
                return plan
        return None

    def _could_win(self, mode: str, lengths: Sequence[int]) -> bool:
        """Whether the mode would beat the plan in use if every guess were kept and what was never timed were cheap."""
        now = max(self.tokens_per_second(Plan("ar")), self.tokens_per_second(self._plan))
        plans = [plan for plan in self._plans(lengths) if plan.mode == mode]
        return any(self._ideal(plan) / self._seconds(plan, hopeful=True) > _MARGIN * now for plan in plans)

    # Forecasts.

    def tokens_per_second(self, plan: Plan, doubt: float = 0.0) -> float:
        """Expected speed of one row; with `doubt`, if acceptance were so many standard errors better."""
        return self._tokens(plan, doubt) / self._seconds(plan)

    def _tokens(self, plan: Plan, doubt: float = 0.0) -> float:
        habits = self.habits
        if plan.mode == "ar":
            return 1.0
        if plan.mode == "dense":
            return habits.dense.tokens(plan.num_draft_tokens, doubt)
        beta = habits.kept / habits.checked
        beta = min(1.0, beta + doubt * math.sqrt(beta * (1 - beta) / habits.checked))
        kept = plan.exact_block if beta == 1 else beta * (1 - beta**plan.exact_block) / (1 - beta)
        return 1.0 + kept

    @staticmethod
    def _ideal(plan: Plan) -> float:
        return 1.0 + (plan.exact_block or plan.num_draft_tokens)

    def _seconds(self, plan: Plan, hopeful: bool = False) -> float:
        costs, drafts = self.costs, plan.num_draft_tokens
        plain = costs.seconds("plain", 0) or 1e-3
        if plan.mode == "ar":
            return plain
        dense = costs.seconds("dense", drafts, plain) or plain * (1 + 0.1 * drafts)
        if plan.mode == "dense":
            return dense
        sparse = costs.seconds("sparse", drafts, self._sparse_step(plain))
        if sparse is None:
            # Never timed: taken to cost what a dense round does, or, hopefully, little beside the drafts.
            sparse = max(dense - 0.9 * plain, 0.1 * plain) if hopeful else dense
        check = costs.seconds("check", plan.exact_block, plain) or 1.5 * plain
        return self._rounds(plan) * sparse + check

    def _sparse_step(self, plain: float) -> float:
        """Seconds of a sparse round without drafts, from one with drafts: what these cost is known from dense rounds."""
        costs, least = self.costs, 0.05 * plain
        found = []
        for n in costs.clocks["sparse"].sizes:
            drafting = (costs.seconds("dense", n, plain) or plain) - plain
            found.append(max(least, costs.clocks["sparse"].measured(n) - max(0.0, drafting)))
        return min(found, default=plain)

    def _rounds(self, plan: Plan) -> float:
        """Sparse rounds of one block."""
        habits = self.habits
        source = habits.sparse if habits.sparse.known else habits.dense
        return max(1.0, habits.rounds_factor * plan.exact_block / source.tokens(plan.num_draft_tokens))

    # Measuring.

    def record(self, looks: Sequence[Look], seconds: float) -> None:
        """What the last round showed: one look, or (mode exact) the sparse rounds of a block and its check."""
        plan, costs, habits = self._plan, self.costs, self.habits
        self._now += seconds
        self._seen_at[plan.mode] = self._now
        for look in looks:
            costs.observe(look.kind, plan.exact_block if look.kind == "check" else look.planned, look.seconds)
            if look.kind == "dense":
                habits.dense.observe(look.accepted, look.planned)
            elif look.kind == "sparse":
                habits.sparse.observe(look.accepted, look.planned)
            elif look.kind == "check":
                pairs = list(zip(look.accepted, look.offered, strict=True))
                checked = sum(kept + (kept < offered) for kept, offered in pairs)
                fade = math.exp(-checked / max(1, len(pairs)) / _MEMORY_TOKENS)
                habits.kept = habits.kept * fade + sum(look.accepted)
                habits.checked = habits.checked * fade + checked
        rounds = sum(look.kind == "sparse" for look in looks)
        if rounds and plan.exact_block:
            factor = rounds * habits.sparse.tokens(plan.num_draft_tokens) / plan.exact_block
            habits.rounds_factor += 0.2 * (factor - habits.rounds_factor)

    def as_dict(self) -> dict[str, Any]:
        """The last decision and the numbers behind it, for the stats: milliseconds, tokens a second of one row."""
        best: dict[str, tuple[str, float]] = {}
        for plan, speed in self._forecast.items():
            if speed > best.get(plan.mode, ("", 0.0))[1]:
                best[plan.mode] = (str(plan), speed)
        habits, clocks = self.habits, self.costs.clocks
        known = habits.dense.known
        return {
            "plan": str(self._plan),
            "forecast_tokens_per_s": {text: round(speed, 2) for text, speed in best.values()},
            "acceptance_by_position": [round(rate, 3) for rate in habits.dense.rates(self._drafts[-1])] if known else [],
            "check_agreement": round(habits.kept / habits.checked, 4) if clocks["check"].sizes else None,
            "round_ms": {
                kind: {str(size): round(1e3 * clock.measured(size), 3) for size in clock.sizes} for kind, clock in clocks.items()
            },
        }

    def _worth_trying(self, lengths: Sequence[int]) -> bool:
        if self._drafter == "draft":
            return bool(lengths)
        if self._drafter == "none" or not lengths:
            return False
        if self._drafter == "self" and max(lengths) < 2 * self._budget:
            return False
        return sum(lengths) * self._spec.bytes_per_kv_token >= _MIN_KV_SHARE * self._spec.weight_bytes
