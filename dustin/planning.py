"""What `--mode auto` does: the lossless plan (mode, drafts a round, block) with the most tokens a second by what was measured.

Two things are known of a plan: what a round brings (acceptance by position, agreement of sparse and dense attention a token)
and what it costs (seconds of a round, of a dense check). Both are measured as the run goes on, fade with age, and serve every
plan: a plan that never ran is priced from those that did. The price list outlives a run, since costs belong to the machine.
On a card whose costs are shipped (dustin.cost_model) it begins with those instead of trying plans in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dustin.evidence import Costs, Habits, PriceList
from dustin.interfaces import ModelSpec

# Without a draft model a speculative round must promise this much before it is tried: KV bytes of a plain step over weight bytes.
_MIN_KV_SHARE = 0.4
# Change plans for this much more speed. A mode out of use gets a look for a share of the time: the larger one while it would
# win if the evidence were one standard error better.
_MARGIN, _LOOK_SHARE, _DOUBT_SHARE = 1.02, 0.02, 0.15
# Plain decoding is timed where it would win if the card's cost model had it too slow by this factor.
_MODEL_DOUBT = 1.25
# A settled plan is thought over every so many rounds: thinking takes a fraction of a millisecond.
_THINK_ROUNDS = 4
# Checked tokens from which on a budget counts as known.
_KNOWN_TOKENS = 100.0
# Agreement is known to a hundredth, which is several hundredths of speed: a budget is left for a clear gain only.
_BUDGET_MARGIN = 1.06
_DRAFTS, _BLOCKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15), (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    """One way to spend the next round. `exact_block` and `budget` are 0 where a plan has none of its own."""

    mode: str
    num_draft_tokens: int = 0
    exact_block: int = 0
    budget: int = 0

    @property
    def provisional(self) -> int:
        """Tokens of a block that sparse rounds propose; the drafts that end it are left to the dense check alone."""
        return max(1, self.exact_block - self.num_draft_tokens)

    @property
    def family(self) -> tuple[str, int]:
        """What must be seen by itself to be known: mode and budget."""
        return self.mode, self.budget

    def __str__(self) -> str:
        block = f", block {self.exact_block}" if self.exact_block else ""
        budget = f", budget {self.budget}" if self.budget else ""
        return f"{self.mode}, {self.num_draft_tokens} drafts{block}{budget}" if self.mode != "ar" else "ar"


@dataclass
class Look:
    """What one round of `kind` (plain, dense, sparse, check) showed: drafts planned, those kept of each row, seconds.

    For a check `offered` has the provisional tokens of each row that it covered. `last` are the drafts that it judged after them:
    seconds of drafting them, and those kept of rows where all before them were.
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

    def __init__(
        self, spec: ModelSpec, drafter: str, budget: int, most_drafts: int = 5, most_block: int = 32, least: int = 1
    ) -> None:
        """`budget`, `most_drafts` and `most_block` are upper bounds; a budget below `least` tokens is not tried."""
        self._spec, self._drafter, self._budget = spec, drafter, budget
        self._budgets = [budget, *(half for half in (budget // 2,) if half >= max(1, least))]
        self._length = 0.0
        self._in_use = budget
        self.prices = PriceList()
        self._drafts = sorted({n for n in _DRAFTS if n < most_drafts} | {most_drafts})
        self._blocks = sorted({n for n in _BLOCKS if n < most_block} | {most_block})
        self._habits: Habits | None = None
        self._costs: Costs | None = None
        self._plan = Plan("ar")
        self._now, self._settled = 0.0, 0
        self._seen_at: dict[tuple[str, int], float] = {}
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
        self._length = sum(lengths) / len(lengths)
        if self._settled % _THINK_ROUNDS and self._plan in self._forecast and self._plan.mode != "exact":
            return self._plan
        self._plan = self._unmeasured(lengths) or self._look_again(lengths) or self._best(lengths)
        return self._plan

    def _plans(self, lengths: Sequence[int]) -> list[Plan]:
        plans = [Plan("ar"), *(Plan("dense", n) for n in self._drafts)]
        # The target drafting for itself on a sparse cache IS a sparse block with a dense check.
        if self._drafter != "self" and min(lengths) >= 2 * self._budget:
            shapes = [(n, block) for n in (0, *self._drafts) for block in self._blocks]
            # A smaller budget is a refinement: first the larger one must be well known, and in use or worth it.
            known = self.habits.checks.get(self._budget, (0.0, 0.0))[1] >= _KNOWN_TOKENS
            plans += [Plan("exact", n, block, budget) for budget in self._budgets[: None if known else 1] for n, block in shapes]
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
        plan = Plan("exact", middle, block, self._budget)
        if plan in self._plans(lengths) and self.costs.count("check", block) < 2 and self._could_win(plan.family, lengths):
            return plan
        return None

    def _best(self, lengths: Sequence[int]) -> Plan:
        self._forecast = {plan: self.tokens_per_second(plan) for plan in self._plans(lengths)}
        current = self._forecast.get(self._plan, 0.0)
        kept = max((speed for plan, speed in self._forecast.items() if plan.budget == self._in_use), default=0.0)
        for best in sorted(self._forecast, key=lambda plan: -self._forecast[plan]):
            gain = self._forecast[best] / current - 1 if current else 1.0
            if best == self._plan or gain < _MARGIN - 1:
                return self._plan
            if best.budget not in (0, self._in_use) and self._forecast[best] < _BUDGET_MARGIN * kept:
                continue
            # What never ran has its capture or compilation to pay: over as long as has passed it must earn that. The first
            # plan of all pays it whatever it is.
            if self._tried(best) or self.costs.untouched or gain * self._now >= self.costs.warm_up:
                self._in_use = best.budget or self._in_use
                return best
        return self._plan

    def _tried(self, plan: Plan) -> bool:
        tried = self.costs.tried
        if plan.mode == "exact":
            return tried(f"sparse {plan.budget}", plan.num_draft_tokens) and tried("check", plan.exact_block)
        return plan.mode == "ar" or tried("dense", plan.num_draft_tokens)

    def _look_again(self, lengths: Sequence[int]) -> Plan | None:
        """A mode, or budget, out of use that could win if all its guesses were right gets a look, for a small share of the time."""
        if not self.costs.timed("plain", 0) and self._forecast:
            # The cost model foretold it: it is what nothing may be slower than, so it is timed where it might win.
            if _MODEL_DOUBT * self.tokens_per_second(Plan("ar")) > self.tokens_per_second(self._plan):
                return Plan("ar")
        families = dict.fromkeys(plan.family for plan in self._plans(lengths) if plan.mode != "ar")
        for family in families:
            plans = [plan for plan in self._plans(lengths) if plan.family == family]
            if self._plan.family == family:
                continue
            plan = max(plans, key=lambda plan: self.tokens_per_second(plan, doubt=1.0))
            doubtful = self.tokens_per_second(plan, doubt=1.0) > _MARGIN * self.tokens_per_second(self._plan)
            wait = self._seconds(plan) / (_DOUBT_SHARE if doubtful else _LOOK_SHARE)
            if self._now - self._seen_at.get(family, 0.0) > wait and (doubtful or self._could_win(family, lengths)):
                return plan
        return None

    def _could_win(self, family: tuple[str, int], lengths: Sequence[int]) -> bool:
        """Whether a plan of this mode and budget would win if every guess were kept and what was never timed were cheap."""
        now = max(self.tokens_per_second(Plan("ar")), self.tokens_per_second(self._plan))
        plans = [plan for plan in self._plans(lengths) if plan.family == family]
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
        beta, proposed = habits.agreement(plan.budget, doubt), min(plan.exact_block, self._proposed(plan))
        kept = proposed if beta == 1 else beta * (1 - beta**proposed) / (1 - beta)
        last = round(plan.exact_block - proposed) if self._drafter == "draft" else 0
        drafted = habits.dense.tokens(min(plan.num_draft_tokens, last), doubt) - 1
        return 1.0 + kept + beta**proposed * drafted

    def _proposed(self, plan: Plan) -> float:
        """Tokens that the sparse rounds of a block propose: as many as they must, and half of what the last one brings more."""
        # Prompt lookup often finds nothing: its blocks are not cut for it.
        least = plan.provisional if self._drafter == "draft" else plan.exact_block
        return least + (self._a_round(plan) - 1) / 2

    def _a_round(self, plan: Plan) -> float:
        habits = self.habits
        return (habits.sparse if habits.sparse.known else habits.dense).tokens(plan.num_draft_tokens)

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
        sparse = self._sparse_seconds(plan, plain, hopeful)
        if sparse is None:
            # Never timed: taken to cost what a dense round does, or, hopefully, little beside the drafts.
            sparse = max(dense - 0.9 * plain, 0.1 * plain) if hopeful else dense
        check = costs.seconds("check", plan.exact_block, plain) or 1.5 * plain
        last = costs.seconds("last", drafts) if self._drafter == "draft" else 0.0
        return self._rounds(plan) * sparse + check + (max(0.0, dense - plain) if last is None else last)

    def _sparse_seconds(self, plan: Plan, plain: float, hopeful: bool) -> float | None:
        """Seconds of a sparse round: timed at this budget, or at another and moved by what reading a token costs."""
        drafts, budget = plan.num_draft_tokens, plan.budget
        for other in sorted(self._budgets, key=lambda other: abs(other - budget)):
            step = self._sparse_step(other, plain)
            found = self.costs.seconds(f"sparse {other}", drafts, step)
            if found is not None and hopeful and other != budget:
                return found * min(1.0, budget / other)
            if found is not None:
                # From reading `other` tokens to reading them all, a step grows from `step` to `plain`.
                a_token = max(0.0, plain - step) / max(1.0, self._length - other)
                return max(0.3 * found, found + a_token * (budget - other))
        return None

    def _sparse_step(self, budget: int, plain: float) -> float:
        """Seconds of a sparse round without drafts, from one with drafts: what these cost is known from dense rounds."""
        costs, least, clock = self.costs, 0.05 * plain, self.costs.clocks[f"sparse {budget}"]
        found = []
        for n in clock.sizes:
            drafting = (costs.seconds("dense", n, plain) or plain) - plain
            found.append(max(least, clock.measured(n) - max(0.0, drafting)))
        return min(found, default=plain)

    def _rounds(self, plan: Plan) -> float:
        """Sparse rounds of one block."""
        return max(1.0, self.habits.rounds_factor * self._proposed(plan) / self._a_round(plan))

    # Measuring.

    def record(self, looks: Sequence[Look], seconds: float) -> None:
        """What the last round showed: one look, or (mode exact) the sparse rounds of a block and its check."""
        plan, costs, habits = self._plan, self.costs, self.habits
        self._now += seconds
        self._seen_at[plan.family] = self._now
        for look in looks:
            kind = f"sparse {plan.budget}" if look.kind == "sparse" else look.kind
            costs.observe(kind, plan.exact_block if look.kind == "check" else look.planned, look.seconds)
            if look.kind == "dense" or (look.kind == "last" and look.accepted):
                habits.dense.observe(look.accepted, look.planned)
            elif look.kind == "sparse":
                habits.sparse.observe(look.accepted, look.planned)
            elif look.kind == "check":
                habits.check(plan.budget, look.accepted, look.offered)
        rounds = sum(look.kind == "sparse" for look in looks)
        if rounds and plan.exact_block:
            factor = rounds * self._a_round(plan) / self._proposed(plan)
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
            "check_agreement": {str(budget): round(habits.agreement(budget), 4) for budget in sorted(habits.checks)},
            "round_ms": {
                kind: {str(size): round(1e3 * clock.measured(size), 3) for size in clock.sizes}
                for kind, clock in clocks.items()
                if clock.sizes
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
