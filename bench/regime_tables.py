"""Tables of bench/results/decode.jsonl: the best mode by context and batch, and a real pair through the engine."""

from __future__ import annotations

from typing import Any

from bench import rows
from bench.decode_tables import markdown

FILE = rows.RESULTS / "decode.jsonl"
LOSSLESS = ("ar", "dense", "exact")
# Bytes of an H200's memory that weights and scratch leave for keys and values of the 7B and the 0.5B shape.
ROOM = 122e9


def regimes(target: str) -> str:
    """One line a context, one column a batch: the fastest mode with the same output, and the fastest of all where it differs."""
    made = [row for row in rows.read(FILE) if row.get("regime") and row["model"].startswith(target)]
    grid = [row for row in made if not _cell_of(made, row)["ar"].get("between")]
    contexts, batches = (sorted({row[name] for row in grid}) for name in ("context", "batch"))
    first = next(row for row in grid if row["mode"] == "ar")
    bytes_a_token = sum(first["shapes"][side]["bytes_per_kv_token"] for side in ("target", "draft"))
    lines = []
    commits = rows.Commits([row for row in grid if row["mode"] == "ar"])
    for context in contexts:
        line = [str(context)]
        for batch in batches:
            cell = {row["mode"]: row for row in grid if (row["context"], row["batch"]) == (context, batch)}
            missing = "does not fit" if context * batch * bytes_a_token > ROOM else ""
            line.append(_shown(cell) + commits.mark(cell["ar"]) if cell else missing)
        lines.append(line)
    speculative = next(row for row in grid if row.get("acceptance"))
    note = (
        f"{first['card']}, {first['model']}, random weights, {first['dtype']}, budget {first['budget']}, scoring "
        f"{first['scoring']}. Ratio to plain decoding of the cell, at the best number of drafts (up to 8) and the best block; "
        f"first the fastest mode with the same output, then, where it is faster, the fastest that changes it (in brackets "
        f"`rectified`, which bounds the change). Times are sums of graph replays of a round's parts; acceptance "
        f"{speculative['acceptance']}. `{first['command']}` at {commits}."
    )
    return markdown(["context", *(f"batch {batch}" for batch in batches)], lines) + "\n\n" + note


def _cell_of(made: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = ("model", "context", "batch")
    return {other["mode"]: other for other in made if all(other[name] == row[name] for name in names)}


def _shown(cell: dict[str, dict[str, Any]]) -> str:
    same = max((row for mode, row in cell.items() if mode in LOSSLESS), key=lambda row: row["ratio"])
    best = max(cell.values(), key=lambda row: row["ratio"])
    text = f"{same['mode']} {same['ratio']:.2f}x"
    if best is same:
        return text
    rectified = f" ({cell['rectified']['ratio']:.2f}x)" if "rectified" in cell else ""
    return f"{text}, {best['mode']} {best['ratio']:.2f}x{rectified}"


def auto() -> str:
    """How near to the best mode with the same output `auto` comes in every measured cell, with the few numbers of drafts and
    blocks that it tries where each has shapes to record, as on a GPU; the best has all of them."""
    import json

    from bench import decode_acceptance
    from bench import regimes as derived
    from dustin.cost_model import SHIPPED, read_pairs

    everything = rows.read(FILE)
    cells = derived.measured_cells(everything)
    replayed = decode_acceptance.choose("auto", rows.RESULTS / "acceptance.json", "")
    path = SHIPPED / "nvidia-h200.json"
    pairs = {pair.name: pair for pair in read_pairs(json.loads(path.read_text()), str(path))}
    lines = []
    for name in sorted({cell["model"] for cell in cells}):
        shares: dict[str, list[tuple[float, str]]] = {"shipped": [], "without": [], "between": []}
        for cell in (cell for cell in cells if cell["model"] == name):
            found = derived.best_settings(replayed, cell["parts_ms"], cell["budget"], cell["batch"])
            best = max(derived.speed(found[mode]) for mode in LOSSLESS if mode in found)
            where = f"{cell['context']} x {cell['batch']}"
            if cell.get("between"):
                made = derived.auto_choice(pairs[name], replayed, cell, recorded=True)
                shares["between"].append((derived.speed(made) / best, where))
                continue
            for kind, own in (("shipped", True), ("without", False)):
                made = derived.auto_choice(pairs[name], replayed, cell, own, recorded=True)
                shares[kind].append((derived.speed(made) / best, where))
        shown = [f"{100 * min(values)[0]:.1f} % ({min(values)[1]})" if values else "" for values in shares.values()]
        lines.append([name, str(len(shares["shipped"])), *shown])
    header = ["pair", "cells", "least share of the best, shipped costs", "the cell left out of them", "cells between the grid's"]
    return markdown(header, lines)


def real() -> str:
    """A real pair through the engine, acceptance measured."""
    made = [row for row in rows.read(FILE) if row["weights"] == "real"]
    texts = list(dict.fromkeys(row["text"] for row in made))
    made.sort(key=lambda row: (texts.index(row["text"]), row["context"], row["batch"]))
    lines = []
    commits = rows.Commits(made)
    for row in made:
        drafts = f", {row['num_draft_tokens']} drafts" if row.get("num_draft_tokens") and row["mode"] != "auto" else ""
        drafts += f", block {row['exact_block']}" if row.get("exact_block") else ""
        if row.get("mode_rounds"):
            drafts = ": " + ", ".join(f"{mode} {count}" for mode, count in row["mode_rounds"].items())
        host = row["probed_step_ms"] - row["probed_graphs_ms"] if row.get("probed_graphs_ms") else None
        same, runs = row.get("sequences_identical_to_ar"), row.get("runs_tokens_per_second") or []
        first_ratio = runs[0] * row["ratio"] / row["tokens_per_second"] if runs else None
        brought = (f"{row[name]:.2f}" if row.get(name) else "" for name in ("acceptance_length", "tokens_per_check"))
        lines.append([
            f"{row['text']}, {row['context']} x {row['batch']}", row["mode"] + drafts + commits.mark(row),
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}x", f"{row['full_batch_ratio']:.2f}x" if row.get("full_batch_ratio") else "",
            f"{first_ratio:.2f}x" if first_ratio else "", *brought, f"{row['step_ms']:.2f}",
            f"{host:.2f}" if host is not None else "",
            f"{same} of {row['batch']}" if same is not None else "",
        ])  # fmt: skip
    first = made[0]
    header = ["text, context x batch", "mode", "tok/s", "ratio", "while no row is done", "first run", "a round", "a dense check"]
    header += ["ms a step", "of it host", "identical to ar"]
    note = (
        f"{first['card']}, {first['model']}, real weights in {first['dtype']}, budget 1024, acceptance measured, through the "
        "engine. A step is a round, in mode exact a checked block; its host time is what the replayed graphs of one step leave "
        f"of it. Of `auto` a later run of a session; {_first_runs(made)}. Rows that "
        "differ from `ar` in a mode with the same output differ at near-ties of bf16 logits (top-2 gaps in "
        f"the rows). `{first['command']}` at {commits}."
    )
    return markdown([*header], lines) + "\n\n" + note


def _first_runs(made: list[dict[str, Any]]) -> str:
    """What the first runs of mode auto began with."""
    seconds = [row.get("warm_up_seconds") for row in made if row["mode"] == "auto"]
    warm = [each for each in seconds if each is not None]
    cold = "its first is the cell's first, when nothing of it is recorded"
    if not warm:
        return cold
    said = f"its first comes after a warm-up for the cell, which took {min(warm):.0f} to {max(warm):.0f} s"
    return said if len(warm) == len(seconds) else f"{said} (in rows of older commits {cold})"


def real_summary() -> list[list[str]]:
    """Lines of the README: a real pair at its largest context and batch, and transformers beside it."""
    made = [row for row in rows.read(FILE) if row["weights"] == "real" and row["text"] == "code"]
    if not made:
        return []
    largest = max((row["context"], row["batch"]) for row in made)
    cell = {row["mode"]: row for row in made if (row["context"], row["batch"]) == largest}
    where = f"one {made[0]['card'].removeprefix('NVIDIA ')}, Qwen2.5-Coder 1.5B + 0.5B, {largest[0]} tokens x {largest[1]}"
    lines = []
    for mode, same in (("auto", "same output"), ("sparse", "approximate"), ("transformers generate (sdpa)", "same output")):
        if mode in cell:
            name = f"{where}: `{mode}`" if not lines else f"the same: `{mode}`"
            lines.append([name, f"{cell[mode]['tokens_per_second']:.0f} tok/s", f"{cell[mode]['ratio']:.2f}x", same])
    return lines
