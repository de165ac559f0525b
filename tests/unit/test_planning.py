"""The planner of mode auto against simulated machines and texts: what it chooses, and what choosing cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pytest

from dustin.evidence import Acceptance, Clock, PriceList
from dustin.interfaces import ModelSpec
from dustin.planning import AutoPlanner, Look, Plan, few_drafts

SPEC = ModelSpec("t", "x", 4, 4, 2, 8, 100, 100_000, "float32", "f", bytes_per_kv_token=1, weight_bytes=1)
BUDGET = 1024


@dataclass(frozen=True)
class Machine:
    """Seconds of one plain step, one draft step, each more verified row, a sparse step, as shares of a plain step."""

    draft: float = 0.1
    row: float = 0.05
    sparse: float = 0.4
    plain: float = 0.02
    noise: float = 0.03
    warm_up: float = 20.0
    by_budget: float = 0.1

    def dense_round(self, drafts: int) -> float:
        return self.plain * (1 + (self.draft + self.row) * drafts)

    def sparse_round(self, drafts: int, budget: int) -> float:
        step = self.sparse * (1 - self.by_budget + self.by_budget * budget / BUDGET)
        return self.plain * (step + (self.draft + self.row) * drafts)

    def drafts(self, drafts: int) -> float:
        return self.plain * self.draft * drafts

    def check(self, tokens: int) -> float:
        return self.plain * (1 + self.row * tokens)


@dataclass(frozen=True)
class Text:
    """Chance that a draft is kept, and that a sparse token survives the dense check."""

    alpha: float
    beta: float
    small: float = 1.3

    def agreement(self, budget: int) -> float:
        """A set of half the size errs `small` times as often."""
        return self.beta if budget == BUDGET else 1 - self.small * (1 - self.beta)


def expected_rate(plan: Plan, machine: Machine, text: Text, rng: np.random.Generator) -> float:
    """Tokens a second of one row under a fixed plan, without noise: exact up to how many sparse rounds fill a block."""
    n = plan.num_draft_tokens
    if plan.mode == "ar":
        return 1 / machine.plain
    if plan.mode == "dense":
        return sum(text.alpha**i for i in range(n + 1)) / machine.dense_round(n)
    played = [sparse_rounds(text.alpha, n, plan, rng) for _ in range(40)]
    beta, tokens = text.agreement(plan.budget), 0.0
    for _, have in played:
        last = sum(text.alpha**i for i in range(1, min(n, plan.exact_block - have) + 1))
        tokens += (sum(beta**i for i in range(have + 1)) + beta**have * last) / len(played)
    rounds = float(np.mean([rounds for rounds, _ in played]))
    return tokens / (rounds * machine.sparse_round(n, plan.budget) + machine.drafts(n) + machine.check(plan.exact_block))


def sparse_rounds(alpha: float, drafts: int, plan: Plan, rng: np.random.Generator) -> tuple[int, int]:
    """Sparse rounds of a block, and the provisional tokens they bring."""
    rounds = have = 0
    while have < plan.provisional:
        have, rounds = have + kept(alpha, drafts, rng) + 1, rounds + 1
    return rounds, min(plan.exact_block, have)


def kept(chance: float, most: int, rng: np.random.Generator) -> int:
    return int(np.argmin([*(rng.random(most) < chance), False]))


def play(
    plan: Plan, machine: Machine, text: Text, rows: int, rng: np.random.Generator, warm: set[tuple[str, int]]
) -> tuple[list[Look], float, float]:
    """One round or block: looks, tokens of a row on average, seconds."""

    def clock(kind: str, size: int, seconds: float) -> float:
        first = machine.warm_up if (kind, size) not in warm else 1.0
        warm.add((kind, size))
        return seconds * first * float(np.exp(machine.noise * rng.standard_normal()))

    if plan.mode == "ar":
        seconds = clock("plain", 0, machine.plain)
        return [Look("plain", 0, [0] * rows, seconds)], 1.0, seconds
    n = plan.num_draft_tokens
    if plan.mode == "dense":
        accepted = [kept(text.alpha, n, rng) for _ in range(rows)]
        seconds = clock("dense", n, machine.dense_round(n))
        return [Look("dense", n, accepted, seconds)], 1 + float(np.mean(accepted)), seconds
    looks = []
    have = [0] * rows
    while min(have) < plan.provisional:
        going = [b for b in range(rows) if have[b] < plan.provisional]
        accepted = [kept(text.alpha, n, rng) for _ in going]
        for b, a in zip(going, accepted, strict=True):
            have[b] = min(plan.exact_block, have[b] + a + 1)
        looks.append(Look("sparse", n, accepted, clock(f"sparse {plan.budget}", n, machine.sparse_round(n, plan.budget))))
    survived = [kept(text.agreement(plan.budget), have[b], rng) for b in range(rows)]
    last = {b: kept(text.alpha, min(n, plan.exact_block - have[b]), rng) for b in range(rows) if survived[b] == have[b]}
    full = [last[b] for b in last if plan.exact_block - have[b] >= n]
    if n:
        looks.append(Look("last", n, full, clock("last", n, machine.drafts(n))))
    looks.append(Look("check", n, survived, clock("check", plan.exact_block, machine.check(plan.exact_block)), have))
    brought = 1 + float(np.mean([survived[b] + last.get(b, 0) for b in range(rows)]))
    return looks, brought, sum(look.seconds for look in looks)


def drive(
    planner: AutoPlanner, machine: Machine, text_at: Callable[[float], Text], tokens: int, seed: int, rows: int = 1
) -> Iterator[tuple[Plan, float, float]]:
    """Run until a row has `tokens` tokens: each round's plan, tokens and seconds."""
    rng = np.random.default_rng(seed)
    warm: set[tuple[str, int]] = set()
    done = 0.0
    while done < tokens:
        plan = planner.choose([32_000] * rows)
        looks, brought, seconds = play(plan, machine, text_at(done), rows, rng, warm)
        planner.record(looks, seconds)
        done += brought
        yield plan, brought, seconds


MACHINES = {
    f"draft {d}, row {r}, sparse {s}": Machine(draft=d, row=r, sparse=s)
    for d, r, s in [*itertools.product((0.02, 0.3), (0.01, 0.2), (0.15, 0.95)), (0.1, 0.03, 0.4)]
}
TEXTS = [Text(a, b) for a, b in itertools.product((0.2, 0.6, 0.9), (0.85, 0.98))]


def candidates(drafter: str = "draft") -> list[Plan]:
    planner = AutoPlanner(SPEC, drafter, BUDGET)
    planner.habits.checks[BUDGET] = 1e3, 1e3
    return planner._plans([32_000])


def fastest(machine: Machine, text: Text) -> tuple[Plan, float, dict[Plan, float]]:
    rates = {plan: expected_rate(plan, machine, text, np.random.default_rng(0)) for plan in candidates()}
    best = max(rates, key=lambda plan: rates[plan])
    return best, rates[best], rates


@pytest.mark.parametrize("name", MACHINES)
def test_the_chosen_plans_are_close_to_the_best_fixed_one(name: str) -> None:
    """In two runs of four at least: one can be unlucky with the little that it sees of a mode. Middle runs have 94.6 % and more."""
    machine, failures = MACHINES[name], []
    for i, text in enumerate(TEXTS):
        shares: list[float] = []
        while sum(share >= 0.92 for share in shares) < 2 and len(shares) < 4:
            shares.append(settled_share(machine, text, 20 * len(shares) + i))
        if sum(share >= 0.92 for share in shares) < 2:
            failures.append(f"{text}: {[round(share, 3) for share in shares]} of {fastest(machine, text)[0]}")
    assert not failures, "\n".join(failures)


def settled_share(machine: Machine, text: Text, seed: int) -> float:
    """Speed of a run's second half, looks included, as a share of the best fixed plan's: by the plans' true speeds."""
    _, speed, rates = fastest(machine, text)
    run = list(drive(AutoPlanner(SPEC, "draft", BUDGET), machine, lambda _: text, 1500, seed=seed))
    late = run[len(run) // 2 :]
    time = {plan: sum(n for p, n, _ in late if p == plan) / rates[plan] for plan in {p for p, _, _ in late}}
    return sum(t * rates[plan] for plan, t in time.items()) / sum(time.values()) / speed


def test_a_planner_that_never_learns_would_fail_the_test_above() -> None:
    machine = MACHINES["draft 0.3, row 0.2, sparse 0.95"]
    _, speed, rates = fastest(machine, TEXTS[0])
    assert rates[Plan("dense", 5)] < 0.7 * speed


@pytest.mark.parametrize("drafter", ["draft", "lookup", "self"])
def test_regret_is_bounded_when_the_text_changes_midway(drafter: str) -> None:
    machine = Machine(draft=0.05, row=0.03, sparse=0.95, warm_up=2.0)
    easy, hard = Text(0.95, 0.9), Text(0.05, 0.6)
    for order in ((easy, hard, easy), (hard, easy, hard)):
        runs = [spent_and_ideal(drafter, machine, order, seed) for seed in range(3)]
        always = min(
            sum(500 / expected_rate(plan, machine, text, np.random.default_rng(0)) for text in order)
            for plan in (Plan("ar"), Plan("dense", 5))
        )
        # Of the middle run. Against one that knows the text in advance: what looking and noticing costs, warm-up included.
        assert median(spent / ideal for spent, ideal in runs) < 1.3
        assert median(spent / always for spent, _ in runs) < 1.12


def spent_and_ideal(drafter: str, machine: Machine, order: tuple[Text, Text, Text], seed: int) -> tuple[float, float]:
    """Seconds of a run without its first rounds, and those of one that knows which text comes when."""
    run = list(drive(AutoPlanner(SPEC, drafter, BUDGET), machine, lambda done: order[min(2, int(done // 500))], 1500, seed=seed))
    done, ideal = sum(n for _, n, _ in run[:20]), 0.0
    speeds = [fastest(machine, text)[1] for text in order]
    for _, tokens, _ in run[20:]:
        ideal += tokens / speeds[min(2, int(done // 500))]
        done += tokens
    return sum(seconds for _, _, seconds in run[20:]), ideal


def test_a_batch_is_planned_by_its_slowest_row() -> None:
    machine, text = Machine(draft=0.05, row=0.02, sparse=0.15), Text(0.7, 0.97)
    factors = []
    for seed in range(5):
        planner = AutoPlanner(SPEC, "draft", BUDGET)
        list(drive(planner, machine, lambda _: text, 400, seed=seed, rows=8))
        assert planner.as_dict()["plan"].startswith("exact")
        factors.append(planner.habits.rounds_factor)
    # 1 is what mean acceptance promises.
    assert median(factors) > 1.03


def test_short_contexts_are_never_planned_sparse_and_small_caches_stay_plain() -> None:
    planner = AutoPlanner(SPEC, "draft", BUDGET)
    assert all(plan.mode != "exact" for plan in planner._plans([1500, 40_000]))
    light = AutoPlanner(replace(SPEC, weight_bytes=10**9), "lookup", BUDGET)
    assert {light.choose([500]) for _ in range(20)} == {Plan("ar")}


def test_a_later_run_starts_from_what_is_known() -> None:
    machine, text = Machine(), Text(0.9, 0.9)
    first = AutoPlanner(SPEC, "draft", BUDGET)
    list(drive(first, machine, lambda _: text, 300, seed=1))
    second = AutoPlanner(SPEC, "draft", BUDGET)
    second.prices = first.prices
    assert second.choose([32_000]).mode == "dense"
    other = AutoPlanner(SPEC, "draft", BUDGET)
    other.prices = first.prices
    # Another batch: prices are the neighbour's until there are own ones.
    assert other.choose([32_000] * 4).mode == "dense"


def test_acceptance_is_counted_by_position_and_fades() -> None:
    seen = Acceptance()
    for _ in range(300):
        seen.observe([2, 2], 5)
    rates = seen.rates(5)
    assert rates[0] > 0.95 and rates[1] > 0.95 and rates[2] < 0.1
    assert seen.tokens(5) == pytest.approx(3, abs=0.2)
    for _ in range(300):
        seen.observe([0], 5)
    assert seen.rates(1)[0] < 0.1


def test_the_first_measurement_is_an_upper_bound_only() -> None:
    clock = Clock()
    clock.observe(4, 9.0)
    assert clock.seconds(4, 1.0) == 9.0
    clock.observe(8, 99.0)
    clock.observe(4, 3.0)
    assert clock.seconds(4, 1.0) == 3.0
    assert clock.seconds(2, 1.0) == pytest.approx(2.0)
    assert clock.seconds(8, 1.0) == pytest.approx(5.0)
    for _ in range(8):
        clock.observe(4, 3.0)
    clock.observe(4, 50.0)
    assert clock.seconds(4, 1.0) == pytest.approx(3.0)


def test_where_a_first_round_is_dear_a_short_run_tries_few_plans() -> None:
    text = Text(0.7, 0.9)
    made = {}
    for warm_up in (1.0, 300.0):
        machine = Machine(draft=0.1, row=0.03, sparse=0.95, warm_up=warm_up)
        run = list(drive(AutoPlanner(SPEC, "draft", BUDGET), machine, lambda _: text, 250, seed=2))
        made[warm_up] = {plan for plan, _, _ in run}
        _, speed, rates = fastest(machine, text)
        usual = max(made[warm_up], key=lambda plan, run=run: sum(n for p, n, _ in run if p == plan))
        assert rates[usual] > 0.85 * speed
    assert len(made[300.0]) <= 4 and len(made[300.0]) <= len(made[1.0])


@pytest.mark.parametrize(("by_budget", "small", "best"), [(0.9, 1.02, BUDGET // 2), (0.05, 2.5, BUDGET)])
def test_the_budget_is_chosen_by_what_it_costs_and_what_it_loses(by_budget: float, small: float, best: int) -> None:
    machine, text = Machine(draft=0.02, row=0.01, sparse=0.3, by_budget=by_budget, warm_up=2.0), Text(0.6, 0.97, small)
    _, speed, rates = fastest(machine, text)
    run = list(drive(AutoPlanner(SPEC, "draft", BUDGET), machine, lambda _: text, 2500, seed=4))
    late = run[len(run) // 2 :]
    spent = {plan: sum(n for p, n, _ in late if p == plan) / rates[plan] for plan in {p for p, _, _ in late}}
    chosen = max(spent, key=lambda plan: spent[plan])
    assert chosen.mode == "exact" and chosen.budget == best
    assert rates[chosen] > 0.95 * speed


def test_no_budget_below_what_the_protected_tokens_need() -> None:
    for budget, tried in ((200, {0, 200}), (300, {0, 300, 150})):
        planner = AutoPlanner(SPEC, "draft", budget, least=144)
        assert {plan.budget for plan in planner._plans([5000])} == {0, budget}
        for _ in range(20):
            planner.habits.check(budget, [16], [16])
        assert {plan.budget for plan in planner._plans([5000])} == tried


def test_few_numbers_of_drafts_where_each_is_recorded() -> None:
    few = [[1], [3], [2, 4], [2, 5], [2, 4, 7], [2, 4, 7], [2, 4, 7, 9], [2, 4, 7, 11], [2, 4, 7, 11, 15]]
    assert [few_drafts(most) for most in (1, 3, 4, 5, 7, 8, 9, 12, 15)] == few
    machine, text = Machine(draft=0.05, row=0.02, sparse=0.15), Text(0.7, 0.97)
    run = list(drive(AutoPlanner(SPEC, "draft", BUDGET, recorded=True), machine, lambda _: text, 1500, seed=3))
    assert {plan.num_draft_tokens for plan, *_ in run} <= {0, 2, 5}
    assert {plan.exact_block for plan, *_ in run} <= {0, 7, 15, 31}


def test_what_ran_at_one_context_is_tried_at_all() -> None:
    """A context that grows over a power of two, or shrinks for the next text, costs no recordings."""
    prices = PriceList()
    short, more = (prices.of("draft", [n, n], None) for n in (4000, 70_000))
    more.observe("dense", 8, 1.0)
    assert short.tried("dense", 8) and not short.tried("dense", 6) and not short.clocks["dense"].seen


def test_a_round_that_could_not_be_begun_ahead_prices_nothing_but_its_first_time() -> None:
    planner = AutoPlanner(SPEC, "draft", BUDGET)
    planner.choose([32_000])
    planner._plan = Plan("dense", 3)
    for seconds, warm in ((3.0, False), (2.0, False), (1.0, True), (2.0, False)):
        planner.record([Look("dense", 3, [2], seconds, warm=warm)], seconds)
    assert planner.costs.clocks["dense"].measured(3) == pytest.approx(1.0) and planner.costs.clocks["dense"].count(3) == 2
    assert planner.habits.dense._tested[0] > 3  # What they kept counts all the same.


def test_less_than_nothing_is_nothing() -> None:
    clock = Clock()
    for _ in range(3):
        clock.observe(2, -0.5)
    assert clock.measured(2) == 0.0


def test_recording_is_a_price_of_trying_a_size_and_of_nothing_else() -> None:
    planner = AutoPlanner(SPEC, "draft", BUDGET)
    planner.choose([32_000])
    planner._plan = Plan("dense", 3)
    for recording in (2.0, 0.0, 5.0):
        planner.record([Look("dense", 3, [2], 0.1)], 0.1, recording)
    clock = planner.costs.clocks["dense"]
    assert clock.measured(3) == pytest.approx(0.1)
    assert planner.costs.warm_up("dense") == planner.costs.warm_up("exact") == pytest.approx(2.0)
    # The first size of a kind pays for what all of them share: another is taken to cost what the cheapest did.
    planner._plan = Plan("dense", 5)
    for recording in (0.5, 0.0):
        planner.record([Look("dense", 5, [2], 0.1)], 0.1, recording)
    assert planner.costs.warm_up("dense") == pytest.approx(0.5) and planner.costs.warm_up("exact") == pytest.approx(2.0)
    # What a session may spend on trying a size is earned by rounds, not by recording.
    assert planner.prices.elapsed == pytest.approx(0.3)


def test_plain_decoding_that_was_timed_at_a_bad_moment_is_timed_again() -> None:
    """Three rounds, while something else kept the device busy, must not keep a session from what is fastest."""
    planner, rng = AutoPlanner(SPEC, "draft", BUDGET, 4, 16, recorded=True), np.random.default_rng(0)
    plain, dense, seen, spent = 0.002, 0.005, 0, {}
    for round_ in range(2500):
        plan = planner.choose([600 + round_ // 4])
        drafts = plan.num_draft_tokens if plan.mode == "dense" else 0
        seen += not drafts
        seconds = (dense if drafts else 0.004 if seen <= 3 else plain) * rng.uniform(0.97, 1.03)
        kept = int(rng.random() < 0.5) + int(rng.random() < 0.4) if drafts else 0
        planner.record([Look("dense" if drafts else "plain", drafts, [min(kept, drafts)], seconds)], seconds)
        if round_ >= 1500:
            spent[plan.mode] = spent.get(plan.mode, 0.0) + seconds
    assert spent["ar"] > 0.85 * sum(spent.values())


def test_a_short_text_beside_blocks_in_use_is_planned() -> None:
    """Of blocks nothing is promised any more, and dense rounds, which never ran, have their recordings to earn."""
    planner = AutoPlanner(SPEC, "draft", BUDGET, recorded=True)
    planner.choose([32_000] * 4)
    for kind, size in (("plain", 0), ("sparse 1024", 2), ("check", 15)):
        for seconds in (3.0, 0.02, 0.02, 0.02):
            planner.costs.observe(kind, size, seconds)
    planner._plan = planner._home = Plan("exact", 2, 15, BUDGET)
    planner._now, planner._next_look, planner._again = 1.0, 0.0, None
    planner._unmeasured = lambda budgets: None  # type: ignore[method-assign]
    assert planner.choose([32_000] * 3 + [40], left=300).mode in ("ar", "dense")
