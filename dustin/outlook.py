"""What every plan of mode auto promises, in tokens a second of one row: by what rounds were seen to bring, and to cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dustin.blocks import block_course, block_tokens
from dustin.evidence import Costs, Habits
from dustin.plans import Plan

AR = Plan("ar")
_BLOCK_DRAFTS = (1, 2, 3, 4, 6, 8)


class Outlook:
    """The plans within bounds, and what they promise. All of them are priced at once: the planner thinks between rounds."""

    def __init__(self, drafter: str, drafts: Sequence[int], blocks: Sequence[int], budgets: Sequence[int]) -> None:
        self._drafter, self._drafts, self._blocks, self._budgets = drafter, drafts, blocks, budgets
        self._dense = {n: Plan("dense", n) for n in drafts}
        # Blocks hardly tell neighbouring numbers of drafts apart, and each to be thought through takes time.
        block_drafts = [0, *(n for n in drafts if len(drafts) < len(_BLOCK_DRAFTS) or n in _BLOCK_DRAFTS or n == drafts[-1])]
        self._exact = {
            budget: {(n, block): Plan("exact", n, block, budget) for n in block_drafts for block in blocks if block > n}
            for budget in budgets
        }

    def plans(self, budgets: Sequence[int]) -> list[Plan]:
        """Plain decoding, dense rounds, and blocks at these budgets."""
        return [AR, *self._dense.values(), *(plan for budget in budgets for plan in self._exact[budget].values())]

    def speeds(
        self, habits: Habits, costs: Costs, length: float, batch: int, budgets: Sequence[int], doubt: float = 0.0
    ) -> dict[Plan, float]:
        """Tokens a second of a row for each of `plans`; with `doubt`, if acceptance were so many standard errors better.

        `length` is the mean context of the `batch` rows, in tokens.
        """
        plain = costs.seconds("plain", 0) or 1e-3
        tokens = habits.dense.tokens_by_drafts(self._drafts[-1], doubt)
        dense = {n: costs.seconds("dense", n, plain) or plain * (1 + 0.1 * n) for n in self._drafts}
        found = {AR: 1 / plain} | {plan: tokens[n] / dense[n] for n, plan in self._dense.items()}
        drafted = [t - 1.0 for t in tokens] if self._drafter == "draft" else [0.0]
        checks = {block: self._check_seconds(costs, block, plain) for block in self._blocks if budgets}
        last = {n: self._last_seconds(costs, n, plain, dense.get(n, plain)) for n in (0, *self._drafts) if budgets}
        shares = {n: self._shares(habits, n) for n in last}
        for budget in budgets:
            agreed = habits.agreed(budget, self._blocks[-1], doubt)
            kept = list(itertools.accumulate(agreed[1:], initial=0.0))
            sparse = {n: self._sparse_seconds(costs, n, budget, plain, dense.get(n, plain), length) for n in last}
            for (n, block), plan in self._exact[budget].items():
                rounds, course = self._course(shares[n], n, block, batch)
                seconds = max(1.0, rounds * habits.rounds_factor) * sparse[n] + checks[block] + last[n]
                found[plan] = block_tokens(course, block, agreed, kept, drafted[: n + 1]) / seconds
        return found

    def rounds(self, habits: Habits, plan: Plan, batch: int) -> float:
        """Sparse rounds that a block of `plan` is expected to take."""
        drafts = plan.num_draft_tokens
        return self._course(self._shares(habits, drafts), drafts, plan.exact_block, batch)[0]

    @staticmethod
    def _shares(habits: Habits, drafts: int) -> tuple[float, ...]:
        return (habits.sparse if habits.sparse.known else habits.dense).shares(drafts)

    def _course(
        self, shares: tuple[float, ...], drafts: int, block: int, batch: int
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        # Prompt lookup often finds nothing: its blocks are not cut for it.
        least = max(1, block - drafts) if self._drafter == "draft" else block
        return block_course(shares, least, block, batch)

    # Seconds.

    def seconds(self, costs: Costs, habits: Habits, plan: Plan, length: float, batch: int, hopeful: bool = False) -> float:
        """Seconds of a round or block of `plan`; `hopeful`: what was never timed costs little beside the drafts."""
        plain = costs.seconds("plain", 0) or 1e-3
        n = plan.num_draft_tokens
        if plan.mode == "ar":
            return plain
        dense = (costs.seconds("dense", n, plain) or plain * (1 + 0.1 * n)) if n else plain
        if plan.mode == "dense":
            return dense
        rounds = max(1.0, self.rounds(habits, plan, batch) * habits.rounds_factor)
        sparse = self._sparse_seconds(costs, n, plan.budget, plain, dense, length, hopeful)
        return rounds * sparse + self._check_seconds(costs, plan.exact_block, plain) + self._last_seconds(costs, n, plain, dense)

    @staticmethod
    def _check_seconds(costs: Costs, block: int, plain: float) -> float:
        return costs.seconds("check", block, plain) or 1.5 * plain

    def _last_seconds(self, costs: Costs, drafts: int, plain: float, dense: float) -> float:
        """Seconds of the drafts that end a block."""
        if self._drafter != "draft" or not drafts:
            return 0.0
        last = costs.seconds("last", drafts)
        return max(0.0, dense - plain) if last is None else last

    def _sparse_seconds(
        self, costs: Costs, drafts: int, budget: int, plain: float, dense: float, length: float, hopeful: bool = False
    ) -> float:
        """Seconds of a sparse round: timed at this budget, or at another and moved by what reading a token costs."""
        foreseen = costs.foreseen(f"sparse {budget}", drafts)
        if foreseen is not None:
            return foreseen
        for other in sorted(self._budgets, key=lambda other: abs(other - budget)):
            step = self._sparse_step(costs, other, plain)
            found = costs.seconds(f"sparse {other}", drafts, step)
            if found is not None and hopeful and other != budget:
                return found * min(1.0, budget / other)
            if found is not None:
                # From reading `other` tokens to reading them all, a step grows from `step` to `plain`.
                a_token = max(0.0, plain - step) / max(1.0, length - other)
                return max(0.3 * found, found + a_token * (budget - other))
        # Never timed: taken to cost what a dense round does, or, hopefully, little beside the drafts.
        return max(dense - 0.9 * plain, 0.1 * plain) if hopeful else dense

    @staticmethod
    def _sparse_step(costs: Costs, budget: int, plain: float) -> float:
        """Seconds of a sparse round without drafts, from one with drafts: what these cost is known from dense rounds."""
        least, clock = 0.05 * plain, costs.clocks[f"sparse {budget}"]
        found = []
        for n in clock.sizes:
            drafting = (costs.seconds("dense", n, plain) or plain) - plain
            found.append(max(least, clock.measured(n) - max(0.0, drafting)))
        return min(found, default=plain)
