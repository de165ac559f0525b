"""The regime rows, the cost model made of them, and what mode auto chooses with it in every measured cell."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from bench import decode_acceptance, regime_tables, regimes, rows
from dustin.cost_model import SHIPPED, read_pairs

EVERYTHING = rows.read(regimes.FILE)
CELLS = regimes.measured_cells(EVERYTHING)
COSTS = json.loads((SHIPPED / "nvidia-h200.json").read_text())
PAIRS = {pair.name: pair for pair in read_pairs(COSTS, "the shipped costs")}


def replayed() -> decode_acceptance.Acceptance:
    return decode_acceptance.choose("measured", rows.RESULTS / "acceptance.json", "")


@pytest.mark.parametrize("acceptance", ["measured", "geometric"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_auto_is_within_five_percent_of_the_best_mode_in_every_measured_cell(name: str, acceptance: str) -> None:
    assumed = replayed() if acceptance == "measured" else decode_acceptance.geometric()
    own = [cell for cell in CELLS if cell["model"] == name]
    assert len(own) >= 12
    missed = []
    for cell in own:
        found = regimes.best_settings(assumed, cell["parts_ms"], cell["budget"], cell["batch"])
        best = max(regimes.speed(found[mode]) for mode in regimes.LOSSLESS if mode in found)
        made = regimes.auto_choice(PAIRS[name], assumed, cell, own=True)
        if regimes.speed(made) < 0.95 * best:
            missed.append(f"{cell['context']} x {cell['batch']}: {made['plan']} has {regimes.speed(made) / best:.3f} of the best")
        # And never below plain decoding.
        assert regimes.speed(made) >= regimes.speed(found["ar"])
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_the_few_numbers_of_drafts_that_a_gpu_records_lose_little(name: str) -> None:
    assumed = replayed()
    for cell in (cell for cell in CELLS if cell["model"] == name):
        found = regimes.best_settings(assumed, cell["parts_ms"], cell["budget"], cell["batch"])
        best = max(regimes.speed(found[mode]) for mode in regimes.LOSSLESS if mode in found)
        made = regimes.auto_choice(PAIRS[name], assumed, cell, own=True, recorded=True)
        assert regimes.speed(made) >= max(0.96 * best, regimes.speed(found["ar"])), made["plan"]
        if not cell.get("between"):
            # The grid without this cell: what lies between its neighbours is read off lines.
            made = regimes.auto_choice(PAIRS[name], assumed, cell, recorded=True)
            assert regimes.speed(made) >= max(0.9 * best, regimes.speed(found["ar"])), made["plan"]


def test_a_planner_that_always_drafts_alike_would_miss() -> None:
    assumed, shares = replayed(), []
    for cell in CELLS:
        parts = regimes.parts_of(cell["parts_ms"], cell["budget"])
        found = regimes.best_settings(assumed, cell["parts_ms"], cell["budget"], cell["batch"])
        best = max(regimes.speed(found[mode]) for mode in regimes.LOSSLESS)
        shares.append(assumed.expected("dense", 2) / parts.dense_ms(2) / best)
    assert min(shares) < 0.8


def test_the_shipped_costs_are_those_of_the_rows() -> None:
    assert regimes.cost_file(CELLS, EVERYTHING) == COSTS


def test_the_rows_follow_from_the_parts() -> None:
    for cell in CELLS:
        own = {
            row["mode"]: row
            for row in EVERYTHING
            if row.get("regime") and all(row[name] == cell[name] for name in ("model", "context", "batch"))
        }
        for row in regimes.mode_rows(replayed(), cell["parts_ms"], cell["budget"], cell["batch"]):
            assert own[row["mode"]]["tokens_per_second"] == pytest.approx(row["tokens_per_second"], rel=1e-3)


def test_tables_say_what_does_not_fit() -> None:
    table = regime_tables.regimes("Qwen2.5-7B")
    line = next(text for text in table.splitlines() if text.startswith("| 130048"))
    assert line.count("does not fit") == 2 and "x" in line
