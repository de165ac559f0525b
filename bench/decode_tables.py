"""Tables of bench/results/decode.jsonl: whole rounds with random weights, one card and several."""

from __future__ import annotations

from typing import Any

from bench import rows

FILE = rows.RESULTS / "decode.jsonl"
LONG = 31744
USUAL_BUDGET = 512
DEFAULT = "2 layers + 3 draft layers, all heads"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, numbers right-aligned."""
    rule = ["---"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def whole_rounds() -> list[dict[str, Any]]:
    """Rows of rounds that ran whole at 32k on one card, random weights (and of what did not fit there)."""
    made = [row for row in rows.read(FILE) if row["weights"] == "random" and row["context"] == LONG]
    shown = [row for row in made if row.get("ratio") is not None or row.get("out_of_memory")]
    return [row for row in shown if not row.get("regime") and not row.get("tensor_parallel")]


def _label(row: dict[str, Any]) -> str:
    drafts = f", {row['num_draft_tokens']} drafts" if row.get("num_draft_tokens") else ""
    if row.get("drafts_in_check") not in (None, row.get("num_draft_tokens")):
        drafts += f" and {row['drafts_in_check']} at the end"
    budget = f", budget {row['budget']}" if row.get("budget") not in (None, USUAL_BUDGET) else ""
    return row["mode"] + drafts + budget


def _cell(row: dict[str, Any]) -> str:
    if row.get("out_of_memory"):
        return "out of memory"
    return f"{row['tokens_per_second']:.0f} ({row['ratio']:.2f}x)"


def decode() -> str:
    """Decode ratios on the GPU: one line a mode and scoring, one column a batch."""
    made = whole_rounds()
    batches = sorted({row["batch"] for row in made})
    commits = rows.Commits(made)
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in made:
        plain = row["mode"].split(" ")[0] in ("ar", "transformers") or row["mode"] == "dense"
        replayed = (row.get("acceptance") or "").partition("measured on ")[2] or "geometric, 0.80 a draft"
        key = (_label(row), "" if plain else row["scoring"], replayed if row.get("num_draft_tokens") else "")
        cells.setdefault(key, {})[row["batch"]] = _cell(row) + commits.mark(row)
    lines = [[*key, *(cell.get(batch, "") for batch in batches)] for key, cell in cells.items()]
    first = made[0]
    note = (
        "Tokens per second of the whole batch (ratio to our own dense decoding with CUDA graphs, of the same run). "
        f"{first['card']}, {first['model']}, {first['weights']} weights, {first['dtype']}, context {first['context']}, "
        f"budget {USUAL_BUDGET} where none is named; acceptance replayed, not measured here; {_reads(made)}commands "
        f"are in the rows, the first is `{first['command']}`; at {commits}."
    )
    return markdown(["mode", "scoring heads", "acceptance", *(f"batch {batch}" for batch in batches)], lines) + "\n\n" + note


def _reads(made: list[dict[str, Any]]) -> str:
    """When the host reads a round's tokens, where rows say that it is not at once."""
    ours = [row for row in made if row.get("ratio") is not None and not row["mode"].startswith("transformers")]
    behind = [row for row in ours if row.get("reads")]
    if not behind:
        return ""
    which = "" if len(behind) == len(ours) else f"in {len(behind)} of {len(ours)} rows (`reads`) "
    return f"{which}the host reads a round's tokens while the next one runs; "


def parts() -> str:
    """Where a round's time goes, in milliseconds."""
    names = ("round", "draft", "score", "select", "verify_attention", "verify_gemms", "accept", "host")
    lines = []
    for row in whole_rounds():
        # With the default scoring, or another budget, the scores and the sparse attention alone differ.
        if row.get("verify_gemms_us") is None or row["scoring"] == DEFAULT or row.get("budget") not in (None, USUAL_BUDGET):
            continue
        if row.get("exact_block"):
            several = "s" if row["rounds_per_check"] > 1 else ""
            text = f"the check of {_label(row)}, after {row['rounds_per_check']} sparse round{several}"
            row = row | {"round_us": 1e3 * row["check_ms"]}
        else:
            text = _label(row)
        text += ", scoring heads in one kv head" if "one kv head" in row["scoring"] else ""
        lines.append([f"{text}, batch {row['batch']}", *(_ms(row.get(f"{name}_us")) for name in names)])
    note = (
        "Milliseconds; each part captured and timed alone, host is what the whole round takes beyond its graph. The check of a "
        "block includes the drafts that end it."
    )
    return markdown(["", *(name.replace("_", " ") for name in names)], lines) + "\n\n" + note


def several_cards() -> str:
    """Rounds of a target split over cards, beside one card where the same cell was measured there at the same commit."""
    made = [row for row in rows.read(FILE) if row.get("tensor_parallel")]
    keys = ("commit", "batch", "mode", "num_draft_tokens", "model", "scoring")
    alone = {tuple(row.get(key) for key in keys): row for row in whole_rounds()}
    lines = []
    for row in sorted(made, key=lambda row: (row["tensor_parallel"], row["model"], row["batch"])):
        one = alone.get(tuple(row.get(key) for key in keys))
        drafts = f", {row['num_draft_tokens']} drafts" if row.get("num_draft_tokens") else ""
        name = row["model"].partition(" ")[0]
        lines.append([
            f"{name} over {row['tensor_parallel']}", str(row["batch"]), row["mode"] + drafts, f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}x", f"{row['attention_ratio']:.1f}x" if row.get("attention_ratio") else "",
            f"{row['tokens_per_second'] / one['tokens_per_second']:.2f}x" if one else "",
            f"{100 * row['collectives_share']:.0f} %" if "collectives_share" in row else "",
            f"{row['peak_memory_gb']:.0f}" if row.get("peak_memory_gb") else "",
        ])  # fmt: skip
    first = made[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in made))
    replayed = "; ".join(dict.fromkeys(f"acceptance {row['acceptance']}" for row in made if row["acceptance"]))
    note = (
        f"{first['card'].partition(' x ')[2]}s, random weights, {first['dtype']}, context {first['context']}, budget 512, scoring "
        f"{first['scoring']}; {replayed}. Attention: that of a dense check of as many "
        f"rows to that of a sparse one with scoring and selection. Commands in the rows, the first is "
        f"`{first['command']}`; commits: {commits}."
    )
    header = ["target, cards", "batch", "mode", "tok/s", "ratio to ar on these cards", "attention", "against one card"]
    header += ["collectives, share of a round", "GB a card"]
    return markdown(header, lines) + "\n\n" + note


def _ms(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds / 1e3:.2f}"
