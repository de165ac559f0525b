"""The shipped cost model: lines between what was measured, other shapes, and a planner that begins with it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dustin import cost_model
from dustin.cost_model import CardCosts, Cell, Line, PairCosts, find, read_pairs, shape_of
from dustin.evidence import PriceList
from dustin.planning import AutoPlanner, Plan
from tests.unit.test_planning import BUDGET, SPEC, Machine, Text, drive, expected_rate

BIG = replace(SPEC, num_layers=28, bytes_per_kv_token=57344, weight_bytes=15_000_000_000)
SMALL = replace(SPEC, num_layers=24, bytes_per_kv_token=12288, weight_bytes=1_000_000_000)


def cell(context: int, batch: int) -> Cell:
    """Costs that grow with context and batch and their product, as reading weights and keys does."""
    a = 3.0 + 0.01 * batch + 2e-6 * context + 1e-5 * context * batch
    ms = {
        "check": {str(n): a + 0.1 * n * batch for n in (1, 9, 33)}, "verify": {str(n): 2 + 0.02 * n * batch for n in (3, 6)},
        "draft": {str(n): 0.6 * n for n in (2, 6)}, "dense_draft": {"3": 0.3 * a}, "choose": {"1": 0.1 + 1e-6 * context * batch},
        "wide_verify": {"6": 2 + 0.12 * batch + 0.256}, "wide_draft": {"6": 3.6 + 0.512 * 6},
    }  # fmt: skip
    return Cell(context, batch, ms)


# 128k x 16 and 64k x 16 did not fit.
CELLS = tuple(cell(n, b) for n in (2048, 8192, 32768, 131072) for b in (1, 4, 16) if n * b <= 8 * 131072)
PAIR = PairCosts(shape_of(BIG), shape_of(SMALL), 512, 1024, CELLS, {"plain": 0.5}, 0.3, "big + small")


@pytest.mark.parametrize(("context", "batch"), [(8192, 4), (20000, 3), (5000, 10), (100_000, 2), (131072, 12), (2048, 32)])
def test_between_and_beyond_the_grid_lie_straight_lines(context: int, batch: int) -> None:
    got, want = PAIR.parts(context, batch), PairCosts({}, {}, 512, 1024, (cell(context, batch),)).parts(0, 0)
    for part in ("check", "verify", "draft", "dense_draft"):
        for count in (1, 3, 5, 17):
            assert getattr(got, part)(count) == pytest.approx(getattr(want, part)(count), rel=1e-6)
    assert got.choose == pytest.approx(want.choose)
    # A wider set: what one more token adds, to a draft for each of its steps.
    assert got.wider == {"verify": pytest.approx(0.256 / 512), "draft": pytest.approx(0.512 / 512)}
    more = got.sparse_ms(3, 1024) - got.sparse_ms(3, 512)
    assert more == pytest.approx(0.256 + 3 * 0.512)


def test_a_line_never_falls_below_half_of_its_least() -> None:
    line = Line({3: 3.0, 6: 9.0})
    assert [line(n) for n in (3, 4, 6, 8, 0)] == [3.0, 5.0, 9.0, 13.0, 1.5]
    assert Line({2: 4.0})(3) == 6.0
    with pytest.raises(ValueError, match="points is empty"):
        Line({})


def test_rows_of_a_check_are_rounded_as_the_graphs_are() -> None:
    parts = PAIR.parts(8192, 4)
    assert parts.check_ms(7) == parts.check(8) and parts.check_ms(16) == parts.check(20) == parts.check_ms(19)


def test_a_card_is_found_by_its_name_and_another_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "_shipped", lambda: {"H200": (PAIR, replace(PAIR, target=shape_of(SMALL), name="small"))})
    found = find("NVIDIA H200 NVL", BIG, SMALL, "draft")
    assert found is not None and found.name == "big + small" and not found.corrections.scaled
    other = find("NVIDIA H200", replace(BIG, num_layers=20, weight_bytes=9_000_000_000), SMALL, "draft")
    assert other is not None and other.name == "big + small, scaled"
    for unknown in ("NVIDIA A100", "NVIDIA GH200 480GB", ""):
        assert find(unknown, BIG, SMALL, "draft") is None
    # The target drafting for itself was not measured.
    assert find("NVIDIA H200", BIG, None, "self") is None


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="here has version 7, expected 1"):
        read_pairs({"version": 7}, "here")


def test_the_engine_s_own_share_is_learnt_by_kind() -> None:
    card = CardCosts(PAIR, BIG, SMALL, "draft")
    forecast = card.forecast([8192] * 4)
    parts = PAIR.parts(8192, 4)
    assert forecast.seconds("plain", 0) == pytest.approx(1e-3 * (parts.check(1) + 0.5))
    for _ in range(30):
        forecast.observe("dense", 3, 1e-3 * (parts.dense_ms(3) + 2.0))
    # Other sizes of the kind and other cells know it too; other kinds keep their own.
    assert forecast.seconds("dense", 5) == pytest.approx(1e-3 * (parts.dense_ms(5) + 2.0), rel=1e-3)
    elsewhere = PAIR.parts(32768, 1)
    assert card.forecast([32768]).seconds("dense", 5) == pytest.approx(1e-3 * (elsewhere.dense_ms(5) + 2.0), rel=1e-3)
    assert forecast.seconds("plain", 0) == pytest.approx(1e-3 * (parts.check(1) + 0.5))
    assert forecast.seconds("sparse 512", 3) == pytest.approx(1e-3 * (parts.sparse_ms(3, 512) + 1.25), rel=1e-3)
    assert forecast.seconds("something else", 3) is None


def test_a_pair_that_was_not_measured_is_scaled_by_what_it_reads_and_then_learnt() -> None:
    half = replace(BIG, num_layers=14, weight_bytes=BIG.weight_bytes // 2, bytes_per_kv_token=BIG.bytes_per_kv_token // 2)
    card = CardCosts(PAIR, half, SMALL, "draft")
    known, scaled = CardCosts(PAIR, BIG, SMALL, "draft").forecast([8192]), card.forecast([8192])
    plain = known.seconds("plain", 0)
    assert plain is not None
    assert scaled.seconds("plain", 0) == pytest.approx((plain - 0.5e-3) / 2, rel=1e-3)
    before = scaled.seconds("check", 15)
    scaled.observe("plain", 0, 2 * (plain - 0.5e-3) / 2)
    assert scaled.seconds("check", 15) == pytest.approx(2 * (before or 0.0))


def card_of(machine: Machine, error: float = 1.0) -> CardCosts:
    """A cost model of the simulated machine; with `error` it has speculation cost that much."""
    rows, drafts = (1, 3, 9, 33), (2, 6)
    plain = 1e3 * machine.plain

    def verify(n: int, budget: int) -> float:
        return 1e3 * machine.sparse_round(n - 1, budget) - plain * machine.draft * (n - 1)

    ms = {
        "check": {str(n): 1e3 * machine.check(n - 1) for n in rows},
        "draft": {str(n): error * plain * machine.draft * n for n in drafts},
        "wide_draft": {"6": error * plain * machine.draft * 6},
        "dense_draft": {"3": error * plain * machine.draft * 3},
        "verify": {str(n): error * verify(n, BUDGET // 2) for n in (3, 6)}, "wide_verify": {"6": error * verify(6, BUDGET)},
        "choose": {"1": 0.0},
    }  # fmt: skip
    pair = PairCosts(shape_of(SPEC), shape_of(SPEC), BUDGET // 2, BUDGET, (Cell(32_000, 1, ms),), {}, 0.1, "simulated")
    return CardCosts(pair, SPEC, SPEC, "draft")


def test_a_run_that_begins_with_the_card_s_costs_is_faster_from_the_start() -> None:
    spent = {True: 0.0, False: 0.0}
    for draft, text in itertools.product((0.03, 0.4), (Text(0.8, 0.93), Text(0.3, 0.85))):
        machine = Machine(draft=draft, row=0.02, sparse=0.3, warm_up=20.0)
        for with_card, seed in itertools.product((True, False), range(4)):
            planner = AutoPlanner(SPEC, "draft", BUDGET)
            if with_card:
                planner.prices.cards["draft"] = card_of(machine)
            spent[with_card] += sum(seconds for _, _, seconds in drive(planner, machine, lambda _, t=text: t, 150, seed=seed))
    assert spent[True] < 0.9 * spent[False]


@pytest.mark.parametrize(("draft", "text"), [(0.03, Text(0.8, 0.93)), (0.03, Text(0.3, 0.85)), (0.4, Text(0.8, 0.93))])
def test_it_ends_up_with_as_good_a_plan(draft: float, text: Text) -> None:
    machine = Machine(draft=draft, row=0.02, sparse=0.3, warm_up=20.0)
    planner = AutoPlanner(SPEC, "draft", BUDGET)
    planner.prices.cards["draft"] = card_of(machine)
    run = list(drive(planner, machine, lambda _: text, 1500, seed=5))
    rates = {plan: expected_rate(plan, machine, text, np.random.default_rng(0)) for plan in planner._plans([32_000])}
    late = run[len(run) // 2 :]
    spent = {plan: sum(n for p, n, _ in late if p == plan) / rates[plan] for plan in {p for p, _, _ in late}}
    usual = max(spent, key=lambda plan: spent[plan])
    assert rates[usual] > 0.95 * max(rates.values())


def test_rows_that_take_no_part_are_computed_too() -> None:
    """One sequence in eight slots: the products of eight, the keys of one."""
    prices = PriceList()
    prices.cards["draft"] = CardCosts(PAIR, BIG, SMALL, "draft")
    alone, beside, eight = (
        prices.of("draft", lengths, None, idle).seconds("dense", 5)
        for lengths, idle in (([8192], 0), ([8192], 7), ([8192] * 8, 0))
    )
    assert alone < beside < eight
    assert prices.of("draft", [8192], None, 7) is not prices.of("draft", [8192], None)


def test_wrong_costs_are_found_out() -> None:
    # The model has speculation three times cheaper than it is: plain decoding wins, and is found.
    machine, text = Machine(draft=0.5, row=0.1, sparse=0.9, warm_up=2.0), Text(0.5, 0.85)
    planner = AutoPlanner(SPEC, "draft", BUDGET)
    planner.prices.cards["draft"] = card_of(machine, error=1 / 3)
    run = list(drive(planner, machine, lambda _: text, 1500, seed=6))
    late = run[len(run) // 2 :]
    plain = sum(n for p, n, _ in late if p == Plan("ar"))
    assert plain > 0.8 * sum(n for _, n, _ in late)
