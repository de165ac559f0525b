"""What `--mode auto` does: the lossless plan (mode, drafts a round, block) with the most tokens a second by what was measured.

Two things are known of a plan: what a round brings (acceptance by position, agreement of sparse and dense attention a token)
and what it costs (seconds of a round, of a dense check). Both are measured as the run goes on, fade with age, and serve every
plan: a plan that never ran is priced from those that did. The price list outlives a run, since costs belong to the machine.
On a card whose costs are shipped (dustin.cost_model) it begins with those instead of trying plans in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dustin.evidence import Costs, Habits, PriceList
from dustin.interfaces import ModelSpec
from dustin.outlook import AR, Outlook
from dustin.plans import Look, Plan

__all__ = ["AutoPlanner", "Look", "Plan"]

# Without a draft model a speculative round must promise this much before it is tried: KV bytes of a plain step over weight bytes.
_MIN_KV_SHARE = 0.4
# Change plans for this much more speed. A mode out of use gets a look for a share of the time: the larger one while it would
# win if the evidence were one standard error better. Looks for which a draft must read much first are half as many.
_MARGIN, _LOOK_SHARE, _DOUBT_SHARE = 1.02, 0.02, 0.05
# Drafts are given up for plain decoding where they would lose even if acceptance were so many standard errors better: a few bad
# rounds are chance, and without drafts nothing is learnt that could correct it.
_GIVE_UP = 1.25
# A plain step ages what is known of drafts as so many rounds do, down to so many observations.
_PLAIN_AGE, _PLAIN_LEAST = 0.5, 2.0
# After a round with drafts so many tokens are new to the draft; of so many the time to read them is told from the round's.
_USUALLY_UNREAD, _FAR_BEHIND = 2, 256
# A draft that missed tokens reads so many of them in the time of a plain step, until that was timed.
_READ_PER_STEP = 400.0
# Steps of plain decoding are timed again for this share of the time, two at once.
_PLAIN_SHARE = 0.005
# Plain decoding is timed where it would win if the card's cost model had it too slow by this factor.
_MODEL_DOUBT = 1.25
# A plan is thought over after so many rounds, then whenever it is twice as old, at last every so many: thinking takes a
# millisecond or two, a third of a short round.
_THINK_ROUNDS, _THINK_LATER = 4, 24
# A warm-up meets blocks whose speed is this share of the best other plan's, where a check keeps this share of its tokens; or,
# without costs of the card, where the KV has so many times the bytes of the weights.
_NEAR, _USUAL_AGREEMENT, _HEAVY_KV_SHARE = 0.95, (95.0, 100.0), 2.0
# Checked tokens from which on a budget counts as known.
_KNOWN_TOKENS = 100.0
# Agreement is known to a hundredth, which is several hundredths of speed: a budget is left for a clear gain only.
_BUDGET_MARGIN = 1.06
# Where every number of drafts, and every block, has shapes of its own to record, few are worth it: with their pending token 7, 11
# and 15 fill the rows that a GPU's graphs are made for, and one more would be padded by three. In the measured cells of an H200,
# and between them, bench.regimes has these within 3 % of the best; 2, 4, 6, 8 missed it by 5 %, and 4, 8 by 10 %.
_FEW_DRAFTS, _FEW_BLOCKS = (2, 4, 7, 11), (7, 15, 31, 63, 127)
_DRAFTS, _BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15), (4, 7, 11, 15, 23, 31, 63, 127)


def few_drafts(most: int) -> list[int]:
    """Numbers of drafts up to `most` that are worth their recordings."""
    last = most - 1 if most - 1 in _FEW_DRAFTS[2:] else most
    return [*(n for n in _FEW_DRAFTS if n < most - 1), last]


class AutoPlanner:
    """Chooses the plan of each round: `ar`, `dense` with some drafts, `exact` with some drafts and a block.

    Only greedy runs are planned: the choice goes by the clock, and which tokens a seed gives must not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        drafter: str,
        budget: int,
        most_drafts: int = 5,
        most_block: int = 32,
        least: int = 1,
        recorded: bool = False,
    ) -> None:
        """`budget`, `most_drafts` and `most_block` are upper bounds; a budget below `least` tokens is not tried.

        `recorded`: the backend records calls by their shape, so few numbers of drafts are tried.
        """
        self._spec, self._drafter, self._budget = spec, drafter, budget
        self._budgets = [budget, *(half for half in (budget // 2,) if half >= max(1, least))]
        self._length, self._batch = 0.0, 1
        self._in_use = budget
        self.prices = PriceList()
        self._drafts = few_drafts(most_drafts) if recorded else sorted({n for n in _DRAFTS if n < most_drafts} | {most_drafts})
        blocks = [n for n in (_FEW_BLOCKS if recorded else _BLOCKS) if n <= most_block]
        self._blocks = blocks if blocks and most_block - blocks[-1] <= 1 else [*blocks, most_block]
        self._outlook = Outlook(drafter, self._drafts, self._blocks, self._budgets)
        self._habits: Habits | None = None
        self._costs: Costs | None = None
        # The plan of this round, and the one that looks at others come back to.
        self._plan = self._home = AR
        # Whether nothing was decided for the text at hand.
        self._fresh = True
        self._left: int | None = None
        self._unread = 0
        self._now, self._settled, self._think_at = 0.0, 0, 0
        self._seen_at: dict[tuple[str, int], float] = {}
        self._look_seconds: dict[tuple[str, int], float] = {}
        self._next_look, self._looking = 0.0, False
        self._again: Plan | None = None
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

    def choose(self, lengths: Sequence[int], idle: int = 0, left: int | None = None, unread: int = 0) -> Plan:
        """The plan of the next round for rows with these committed lengths (tokens), beside `idle` rows of the batch.

        `left` tokens may still come (None: very many): what costs something first, as recording a shape or the `unread` tokens
        that the draft has missed, must earn that in the time that they take.
        """
        if not self._worth_trying(lengths):
            self._plan = self._home = AR
            return self._plan
        costs = self.prices.of(self._drafter, lengths, self._costs, idle)
        self._settled = self._settled + 1 if costs is self._costs else 0
        self._costs, self._left, self._unread = costs, left, unread
        self._length, self._batch = sum(lengths) / len(lengths), len(lengths)
        if 0 < self._settled < self._think_at and not self._looking and self._plan in self._forecast:
            return self._plan
        budgets = self._known_budgets(lengths)
        look = self._again or self._unmeasured(budgets) or self._look_again(budgets)
        # A round of a size that never ran counts little, so a look has two; a block has several rounds anyway.
        self._again = look if look is not None and self._again is None and look.mode != "exact" else None
        self._looking = look is not None
        before, self._plan = self._plan, look or self._best(budgets)
        self._home = self._plan if look is None else self._home
        if self._plan != before:
            # A new plan is thought over soon: it may cost more than was foretold.
            self._settled = 0
        # A block is several rounds.
        rounds = 4 if self._plan.mode == "exact" else 1
        self._think_at = self._settled + max(_THINK_ROUNDS // rounds, min(_THINK_LATER // rounds, self._settled))
        return self._plan

    def begin_text(self) -> None:
        """The rows of a batch that goes on hold new texts: what the ones before accepted counts less for them."""
        if self._habits is not None:
            self._habits = self.prices.habits[self._drafter] = self._habits.faded()
        self._fresh = True

    def drafts_soon(self, lengths: Sequence[int], idle: int, left: int, unread: int, begun: bool = False) -> bool:
        """Whether drafts are expected to serve rows of these lengths, the first of which is new: the draft has yet to read `unread`
        tokens, and at most `left` are to come. `begun`: others have begun to answer."""
        if (begun and self._home.mode != "ar") or not self.habits.dense.known or not self._worth_trying(lengths):
            return True
        self._costs = self.prices.of(self._drafter, lengths, self._costs, idle)
        self._length, self._batch, self._left, self._unread = sum(lengths) / len(lengths), len(lengths), left, unread
        # Texts among themselves begin from nothing; their first round is thought over by itself.
        self._home, self._settled = AR, -1
        self._home = self._best(self._known_budgets(lengths))
        return self._home.mode != "ar"

    def worth_warming(self, lengths: Sequence[int]) -> list[Plan]:
        """The block, if any, that a warm-up for rows of these lengths should meet beside plain and dense rounds.

        The best, where it is about as fast as dense rounds by the card's costs, or, without those, where much more KV is read than
        weights are.
        """
        if not self._worth_trying(lengths) or not lengths or min(lengths) < 2 * self._budget or self._drafter == "self":
            return []
        costs, usual = self.prices.of(self._drafter, lengths, None), Habits(checks={self._budget: _USUAL_AGREEMENT})
        speeds = self._outlook.speeds(usual, costs, sum(lengths) / len(lengths), len(lengths), self._budgets[:1])
        best = max((plan for plan in speeds if plan.mode == "exact"), key=speeds.__getitem__)
        if costs.foreseen("check", best.exact_block) is None:
            heavy = sum(lengths) * self._spec.bytes_per_kv_token >= _HEAVY_KV_SHARE * self._spec.weight_bytes
            return [best] if heavy else []
        return [best] if speeds[best] >= _NEAR * max(speed for plan, speed in speeds.items() if plan.mode != "exact") else []

    def _known_budgets(self, lengths: Sequence[int]) -> list[int]:
        """Budgets that blocks are planned with: none in short contexts, nor after a warm-up without blocks, nor where the target
        drafts for itself on a sparse cache, which IS a sparse block with a dense check."""
        if self._drafter == "self" or min(lengths) < 2 * self._budget or (self.costs.warmed and not self.costs.met("check")):
            return []
        # A smaller budget is a refinement: first the larger one must be well known, and in use or worth it.
        known = self.habits.checks.get(self._budget, (0.0, 0.0))[1] >= _KNOWN_TOKENS
        return self._budgets if known else self._budgets[:1]

    def _plans(self, lengths: Sequence[int]) -> list[Plan]:
        return self._outlook.plans(self._known_budgets(lengths))

    def _speeds(self, budgets: Sequence[int], doubt: float = 0.0) -> dict[Plan, float]:
        speeds = self._outlook.speeds(self.habits, self.costs, self._length, self._batch, budgets, doubt)
        return {plan: speed for plan, speed in speeds.items() if self._open(plan)} if self.costs.warmed else speeds

    def _seconds(self, plan: Plan, hopeful: bool = False) -> float:
        return self._outlook.seconds(self.costs, self.habits, plan, self._length, self._batch, hopeful)

    def _unmeasured(self, budgets: Sequence[int]) -> Plan | None:
        """Plans that price the others: plain decoding, the middle and the largest number of drafts, one middling block."""
        middle = self._drafts[len(self._drafts) // 2]
        probes = [("plain", 0, AR), ("dense", middle, Plan("dense", middle))]
        if self._drafts[-1] != middle and self.habits.dense.rates(1)[0] > 0.5:
            probes.append(("dense", self._drafts[-1], Plan("dense", self._drafts[-1])))
        for kind, size, plan in probes:
            if self.costs.count(kind, size) < 2 and self._open(plan):
                return plan
        block = next((n for n in self._blocks if n >= 15), self._blocks[-1])
        plan = Plan("exact", middle if middle < block else 0, block, self._budget)
        wanted = budgets and self._open(plan) and self.costs.count("check", block) < 2
        if wanted and self._could_win(plan.family, budgets, self._speeds(budgets)):
            return plan
        return None

    def _best(self, budgets: Sequence[int]) -> Plan:
        """What to do until the next thought: the plan in use, or one that is clearly faster and earns what it costs first."""
        self._forecast = forecast = self._speeds(budgets)
        home = self._home
        current = forecast.get(home, 0.0)
        # What the drafts in use may bring: to give them up takes more than a few bad rounds.
        drafting, fresh, self._fresh = home.mode != "ar", self._fresh, False
        hopes = self._speeds(budgets, _GIVE_UP) if drafting or fresh else {}
        hopeful = hopes.get(home, 0.0) if drafting else 0.0
        kept = max((speed for plan, speed in forecast.items() if plan.budget == self._in_use), default=0.0)
        for best in sorted(forecast, key=forecast.__getitem__, reverse=True):
            gain = forecast[best] / current - 1 if current else 1.0
            if fresh and not drafting and best != home and not self._recording_of(best) + self._catch_up(best):
                # A text begins with drafts where they may win: a few rounds tell.
                gain = hopes[best] / current - 1 if current else 1.0
            if best == home or gain < _MARGIN - 1:
                continue
            if best.mode == "ar" and forecast[best] < _MARGIN * hopeful:
                continue
            if best.budget not in (0, self._in_use) and forecast[best] < _BUDGET_MARGIN * kept:
                continue
            if self._earned(gain, current, best):
                self._in_use = best.budget or self._in_use
                return best
        return home

    def _earned(self, gain: float, speed: float, plan: Plan) -> bool:
        """Whether `gain` over `speed` (tokens a second of a row) makes up for what `plan` costs first before the answer ends; or
        that is recording, which later answers find done, and takes a small share of the session's time."""
        recording, reading = self._recording_of(plan), self._catch_up(plan)
        left = self.prices.tokens_left(self._left)
        if left is None:
            return gain * self.prices.elapsed >= recording
        if gain / (1 + gain) * left / max(speed, 1e-9) >= recording + reading:
            return True
        return reading == 0.0 and self.prices.recording + recording <= _LOOK_SHARE * self.prices.elapsed

    def _recording_of(self, plan: Plan) -> float:
        """Seconds that a plan takes to record or compile: none once its sizes ran. The first of all pays them whatever it is."""
        return 0.0 if self.costs.untouched or self._tried(plan) else self.costs.warm_up(plan.mode)

    def _catch_up(self, plan: Plan) -> float:
        """Seconds that a draft needs first for what it has not read."""
        if plan.mode == "ar" or self._drafter != "draft" or self._unread <= _USUALLY_UNREAD:
            return 0.0
        each = self.prices.reading.get(self._drafter)
        return self._unread * ((self.costs.seconds("plain", 0) or 1e-3) / _READ_PER_STEP if each is None else each)

    def _open(self, plan: Plan) -> bool:
        """Whether a plan may be chosen: after a warm-up only what it met, so that nobody's answer waits for a recording."""
        return not self.costs.warmed or self._tried(plan)

    def _tried(self, plan: Plan) -> bool:
        return plan.mode == "ar" or all(self.costs.tried(kind, size) for kind, size in plan.sizes)

    def _look_again(self, budgets: Sequence[int]) -> Plan | None:
        """A mode, or budget, out of use that could win if all its guesses were right gets a look, for a small share of the time."""
        if self._now < self._next_look or not self._now:
            return None
        speeds = self._speeds(budgets)
        current = speeds.get(self._home, 0.0)
        if not self.costs.timed("plain", 0) and _MODEL_DOUBT * speeds[AR] > current:
            # The cost model foretold it: it is what nothing may be slower than, so it is timed where it might win.
            return AR
        doubted = self._speeds(budgets, doubt=1.0)
        waits = []
        for family in dict.fromkeys(plan.family for plan in speeds if plan.family != self._home.family):
            if family == AR.family:
                # Nothing may be slower than plain decoding, and what it was timed at may have been an accident: by the clock
                # alone. A round of any other plan contains one of its steps, whatever they were timed at.
                wait = min(self._seconds(AR), self._seconds(self._home)) / _PLAIN_SHARE
                due = self._seen_at.get(family, 0.0) + wait
                if self._now > due:
                    return AR
                waits.append(max(wait / 8, due - self._now))
                continue
            plans = [plan for plan in speeds if plan.family == family]
            # What ran before has its graphs: another size would cost its warm-up for a look.
            tried = [plan for plan in plans if self._tried(plan)]
            plan = max(tried or plans, key=doubted.__getitem__)
            doubtful = doubted[plan] > _MARGIN * current
            recording = 0.0 if tried else self.costs.warm_up(plan.mode)
            # Nothing is promised of a plan in use whose budget is known no more: a short text came beside the others.
            gain = max(0.0, doubted[plan] / current - 1) if current else 1.0
            if recording and not self._earned(gain, current, plan):
                continue
            reading = self._catch_up(plan)
            costs = self._seconds(plan) + max(self._look_seconds.get(family, 0.0), reading) + reading + recording
            wait = costs / (_DOUBT_SHARE if doubtful else _LOOK_SHARE)
            due = self._seen_at.get(family, 0.0) + wait
            if self._now > due and (doubtful or self._could_win(family, budgets, speeds)):
                return plan
            waits.append(max(wait / 8, due - self._now))
        # Until the first of them is due nothing of this need be thought of, unless the evidence changes meanwhile.
        self._next_look = self._now + min(waits, default=0.0) / 4
        return None

    def _could_win(self, family: tuple[str, int], budgets: Sequence[int], speeds: dict[Plan, float]) -> bool:
        """Whether a plan of this mode and budget would win if every guess were kept and what was never timed were cheap."""
        now = max(speeds[AR], speeds.get(self._home, 0.0))
        plans = [plan for plan in self._outlook.plans(budgets) if plan.family == family and self._open(plan)]
        ideal = ((1 + (plan.exact_block or plan.num_draft_tokens)) / self._seconds(plan, hopeful=True) for plan in plans)
        return any(speed > _MARGIN * now for speed in ideal)

    # Measuring.

    def record(self, looks: Sequence[Look], seconds: float, recording: float = 0.0) -> None:
        """What the last round showed: one look, or (mode exact) the sparse rounds of a block and its check.

        `recording` are seconds of recording shapes, which neither `seconds` nor those of the looks contain. They are part of
        what trying a new size costs; of a size that ran before they say nothing.
        """
        plan, costs, habits = self._plan, self.costs, self.habits
        self._now += seconds
        self._seen_at[plan.family] = self._now
        if self._looking:
            # What a look costs beyond its usual rounds: a draft that fell behind reads what it missed.
            excess = seconds - sum(look.seconds for look in looks if look.warm)
            before = 0.0 if self._again is not None else self._look_seconds.get(plan.family, 0.0)
            self._look_seconds[plan.family] = before + (excess if looks and not looks[0].warm else 0.0)
        if self._unread > _FAR_BEHIND and looks and plan.mode != "ar":
            self.prices.note_reading(self._drafter, max(0.0, seconds - self._seconds(plan)) / self._unread)
        self.prices.recording += recording
        for look in looks:
            kind = f"sparse {plan.budget}" if look.kind == "sparse" else look.kind
            size = plan.exact_block if look.kind == "check" else look.planned
            # The time that a new size's recording and compilation took promises nothing of what is to come.
            known = costs.clocks[kind].count(size) > 0
            self.prices.elapsed += look.seconds if known else 0.0
            if look.warm or not known:
                costs.observe(kind, size, look.seconds + (0.0 if known else recording))
            recording = recording if known else 0.0
            if look.kind == "plain":
                # Texts change: what drafts brought some time ago says less and less. Not where a look would cost much.
                habits.dense.age(_PLAIN_AGE if self._unread <= _FAR_BEHIND else 0.0, _PLAIN_LEAST)
            if look.kind == "dense" or (look.kind == "last" and look.accepted):
                habits.dense.observe(look.accepted, look.planned)
            elif look.kind == "sparse":
                habits.sparse.observe(look.accepted, look.planned)
            elif look.kind == "check":
                habits.check(plan.budget, look.accepted, look.offered)
        rounds = sum(look.kind == "sparse" for look in looks)
        if rounds and plan.exact_block:
            factor = rounds / self._outlook.rounds(habits, plan, self._batch)
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
