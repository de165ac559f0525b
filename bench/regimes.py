"""The regime table's rows and the shipped cost model, from the measured parts of rounds (rows of `bench decode --regimes`).

Parts are measured once; which drafts, block and mode are best follows from them and from how many drafts a round keeps. So
the rows of all modes can be made anew for another acceptance, and the costs that `--mode auto` begins with are those very parts.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench import decode_acceptance, rows
from bench.decode_acceptance import Acceptance
from dustin.blocks import block_course, block_tokens
from dustin.cost_model import SHIPPED, VERSION, CardCosts, Cell, PairCosts, Parts, read_pairs
from dustin.interfaces import ModelSpec
from dustin.planning import AutoPlanner

FILE = rows.RESULTS / "decode.jsonl"
WIDE_BUDGET, RECTIFY_INTERVAL = 1024, 256
MOST_DRAFTS, MOST_BLOCK = 8, 32
# What a round of a new shape takes longer the first time, kernels compiled: its graphs are recorded.
WARM_UP_SECONDS = 0.15
MODES, LOSSLESS = ("ar", "dense", "exact", "rectified", "sparse"), ("ar", "dense", "exact")
Times = dict[str, dict[str, float]]


def parts_of(ms: Times, budget: int) -> Parts:
    """What was measured in one cell, as the cost model reads it."""
    return PairCosts({}, {}, budget, WIDE_BUDGET, (Cell(0, 0, ms),)).parts(0, 0)


def plans(acceptance: Acceptance, parts: Parts, ms: Times, budget: int, batch: int) -> list[dict[str, Any]]:
    """Every setting of every mode: tokens and milliseconds of a round (exact: of a checked block; rectified: of an interval)."""
    a = acceptance
    found: list[dict[str, Any]] = [{"mode": "ar", "tokens": 1.0, "ms": parts.check(1)}]
    for gamma in range(1, min(MOST_DRAFTS, a.most("sparse"), a.most("dense")) + 1):
        sparse_draft = parts.draft(gamma) + parts.choose <= parts.dense_draft(gamma)
        found.append({
            "mode": "dense", "tokens": a.expected("dense", gamma), "ms": parts.dense_ms(gamma), "num_draft_tokens": gamma,
            "draft": "sparse" if sparse_draft else "dense",
        })  # fmt: skip
        tokens, took = a.expected("sparse", gamma), parts.sparse_ms(gamma, budget)
        found.append({"mode": "sparse", "tokens": tokens, "ms": took, "num_draft_tokens": gamma})
        if "rectify" in ms:
            count, pass_ms = next(iter(ms["rectify"].items()))
            rounds = math.ceil(RECTIFY_INTERVAL / tokens)
            total = rounds * took + pass_ms * rounds * tokens / int(count)
            found.append({"mode": "rectified", "tokens": rounds * tokens, "ms": total, "num_draft_tokens": gamma,
                          "rectify_interval": RECTIFY_INTERVAL})  # fmt: skip
        for block in range(gamma + 1, MOST_BLOCK + 1):
            found.append(exact_plan(a, parts, gamma, block, budget, batch))
    return found


def exact_plan(acceptance: Acceptance, parts: Parts, drafts: int, block: int, budget: int, batch: int) -> dict[str, Any]:
    """Mode exact: sparse rounds as the engine runs them, the drafts that end the block, the dense check."""
    rounds, course = block_course(tuple(acceptance.shares_of("sparse", drafts)), max(1, block - drafts), block, batch)
    most = min(block, acceptance.most("check"))
    shares = acceptance.shares_of("check", most)
    agreed = [1.0]
    for n in range(most):
        agreed.append(max(0.0, agreed[-1] - shares[n]))
    # Beyond what was measured the agreement goes on falling as it did on average.
    agreed += [agreed[most] ** ((most + n) / most) for n in range(1, block - most + 1)]
    kept = list(itertools.accumulate([0.0, *agreed[1:]]))
    drafted = [acceptance.expected("dense", n) - 1 for n in range(drafts + 1)]
    total = rounds * parts.sparse_ms(drafts, budget) + (parts.draft(drafts) if drafts else 0.0) + parts.check_ms(block)
    tokens = block_tokens(course, block, agreed, kept, drafted)
    return {"mode": "exact", "tokens": tokens, "ms": total, "num_draft_tokens": drafts, "exact_block": block}


def speed(plan: dict[str, Any]) -> float:
    """Tokens a millisecond of one row."""
    return float(plan["tokens"] / plan["ms"])


def best_settings(acceptance: Acceptance, ms: Times, budget: int, batch: int) -> dict[str, dict[str, Any]]:
    """Mode -> its fastest setting."""
    every = plans(acceptance, parts_of(ms, budget), ms, budget, batch)
    return {mode: max((p for p in every if p["mode"] == mode), key=speed) for mode in dict.fromkeys(p["mode"] for p in every)}


def mode_rows(acceptance: Acceptance, ms: Times, budget: int, batch: int) -> list[dict[str, Any]]:
    """What the rows of a cell's modes have of their own, `ar` first."""
    found = best_settings(acceptance, ms, budget, batch)
    winner, lossless = (
        max((mode for mode in found if mode in among), key=lambda mode: speed(found[mode])) for among in (MODES, LOSSLESS)
    )
    made = []
    for mode, best in found.items():
        row = {
            "mode": mode, "tokens_per_second": round(1e3 * batch * speed(best), 1),
            "tokens_per_second_per_sequence": round(1e3 * speed(best), 2), "ratio": round(speed(best) / speed(found["ar"]), 3),
            "acceptance": acceptance.label if mode != "ar" else None, "regime": True, "wins": mode == winner,
            "wins_lossless": mode == lossless, "method": "sum of graph replays of its parts",
            "tokens_per_step": round(best["tokens"], 3), "step_ms": round(best["ms"], 3), "budget": budget,
        }  # fmt: skip
        made.append(row | {name: value for name, value in best.items() if name not in ("mode", "tokens", "ms")})
    return made


def measured_cells(everything: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that have a cell's parts."""
    return [row for row in everything if row.get("regime") and "parts_ms" in row]


def rederived(everything: list[dict[str, Any]], acceptance: Acceptance) -> list[dict[str, Any]]:
    """All rows, those of regimes made anew from the measured parts."""
    kept = [row for row in everything if not row.get("regime")]
    names = ("bench", "card", "model", "weights", "dtype", "context", "batch", "scoring", "baseline", "command", "commit")
    for cell in measured_cells(everything):
        common = {name: cell[name] for name in names}
        for row in mode_rows(acceptance, cell["parts_ms"], cell["budget"], cell["batch"]):
            own = {"parts_ms": cell["parts_ms"], "shapes": cell["shapes"], "between": cell.get("between", False)}
            kept.append(common | row | (own if row["mode"] == "ar" else {}))
    return kept


def engine_ms(everything: list[dict[str, Any]]) -> dict[str, float]:
    """What the engine adds to the graphs of a round of each kind, from the rows of a real pair: the mean over its cells."""
    kinds = {"ar": "plain", "dense": "dense", "sparse": "sparse"}
    found: dict[str, list[float]] = {}
    for row in everything:
        if row["weights"] == "real" and row["mode"] in kinds and row.get("probed_graphs_ms"):
            found.setdefault(kinds[row["mode"]], []).append(row["step_ms"] - row["probed_graphs_ms"])
    added = {kind: round(max(0.0, sum(values) / len(values)), 3) for kind, values in found.items()}
    # A check is one dense verification, as a dense round is.
    return added | ({"check": added["dense"]} if "dense" in added else {})


def auto_choice(
    pair: PairCosts, acceptance: Acceptance, cell: dict[str, Any], own: bool = False, recorded: bool = False
) -> dict[str, Any]:
    """What mode auto settles on in a cell when rounds keep what `acceptance` says, and its speed by that cell's own parts.

    The planner is given `pair`'s grid without this cell, unless `own`: so it is its interpolation that is judged. `recorded`: it
    tries the few numbers of drafts that it does where each has shapes to record.
    """
    context, batch, budget = cell["context"], cell["batch"], cell["budget"]
    others = tuple(c for c in pair.cells if own or (c.context, c.batch) != (context, batch))
    specs = [_spec(shape) for shape in (pair.target, pair.draft)]
    planner = AutoPlanner(specs[0], "draft", budget, MOST_DRAFTS, MOST_BLOCK, recorded=recorded)
    planner.prices.cards["draft"] = CardCosts(replace(pair, cells=others, engine_ms={}), *specs, "draft")
    for kind, habit in (("dense", planner.habits.dense), ("sparse", planner.habits.sparse)):
        shares = acceptance.shares_of(kind, MOST_DRAFTS)
        for _ in range(4):
            habit.observe([n for n, share in enumerate(shares) for _ in range(round(100 * share))], MOST_DRAFTS)
    most = min(MOST_BLOCK, acceptance.most("check"))
    kept = [n for n, share in enumerate(acceptance.shares_of("check", most)) for _ in range(round(100 * share))]
    for _ in range(4):
        planner.habits.check(budget, kept, [most] * len(kept))
    plan = planner.choose([context] * batch)
    parts = parts_of(cell["parts_ms"], budget)
    drafts = plan.num_draft_tokens
    if plan.mode == "ar":
        made = {"mode": "ar", "tokens": 1.0, "ms": parts.check(1)}
    elif plan.mode == "dense":
        made = {"mode": "dense", "tokens": acceptance.expected("dense", drafts), "ms": parts.dense_ms(drafts)}
    else:
        made = exact_plan(acceptance, parts, drafts, plan.exact_block, plan.budget, batch)
    return made | {"plan": str(plan)}


def _spec(shape: dict[str, Any]) -> ModelSpec:
    return ModelSpec("", "", vocab_size=1, context_length=1 << 30, dtype="", fingerprint="", **shape)


def cost_file(cells: list[dict[str, Any]], everything: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a card's file: a grid for each pair, without the cells that judge its interpolation."""
    pairs = []
    for model in dict.fromkeys(row["model"] for row in cells):
        own = [row for row in cells if row["model"] == model and not row.get("between")]
        own.sort(key=lambda row: (row["batch"], row["context"]))
        pairs.append({
            "name": model, **own[0]["shapes"], "budget": own[0]["budget"], "wide_budget": WIDE_BUDGET,
            "engine_ms": engine_ms(everything), "warm_up_seconds": WARM_UP_SECONDS,
            "record": {"command": own[0]["command"], "commit": own[0]["commit"], "scoring": own[0]["scoring"]},
            "cells": [
                {"context": row["context"], "batch": row["batch"],
                 "ms": {part: ms for part, ms in row["parts_ms"].items() if part != "rectify"}}
                for row in own
            ],
        })  # fmt: skip
    return {"version": VERSION, "card": cells[0]["card"].removeprefix("NVIDIA ").split(" ")[0], "pairs": pairs}


def write_costs(path: Path, content: dict[str, Any]) -> None:
    """One line a cell."""
    read_pairs(content, str(path))
    head = {**content, "pairs": [{**pair, "cells": []} for pair in content["pairs"]]}
    text = json.dumps(head, indent=1)
    for pair in content["pairs"]:
        lines = ",\n    ".join(json.dumps(cell) for cell in pair["cells"])
        text = text.replace('"cells": []', f'"cells": [\n    {lines}\n   ]', 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@click.command()
@click.option("--acceptance", default="auto", type=click.Choice(["auto", "measured", "geometric"]), show_default=True)
@click.option("--text", default="", help="Kind of text of the measured histograms. Default: all.")
@click.option("--file", "path", type=click.Path(path_type=Path), default=FILE, show_default=True, help="Rows with measured parts.")
@click.option("--costs", type=click.Path(path_type=Path), help="Where the cost model goes. Default: where dustin looks for it.")
def main(acceptance: str, text: str, path: Path, costs: Path | None) -> None:
    """Rows of the regime table, and the cost model of mode auto, from the measured parts of rounds."""
    everything = rows.read(path)
    cells = measured_cells(everything)
    if not cells:
        raise click.ClickException(f"{path} has no rows of `python -m bench decode --regimes all`: measure them first")
    replayed = decode_acceptance.choose(acceptance, rows.RESULTS / "acceptance.json", text)
    rows.write(path, rederived(everything, replayed))
    content = cost_file(cells, everything)
    target = costs or SHIPPED / f"nvidia-{content['card'].lower()}.json"
    write_costs(target, content)
    click.echo(f"{len(cells)} cells, {replayed.label}; costs of {len(content['pairs'])} pairs in {target}")
