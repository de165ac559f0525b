"""The table of bench/results/exact.jsonl: identity with plain decoding, and tokens for each dense read, by kind of text."""

from __future__ import annotations

from typing import Any

from bench import rows
from bench.decode_tables import markdown


def exact() -> str:
    """A line a dtype and mode: prompts with identical tokens, the largest gap at a difference, tokens a dense read by kind."""
    found = rows.read(rows.RESULTS / "exact.jsonl")
    kinds = [kind for kind in dict.fromkeys(row["kind"] for row in found) if kind != "all"]
    lines: list[list[str]] = []
    for dtype, mode in dict.fromkeys((row["dtype"], row["mode"]) for row in found):
        mine = {row["kind"]: row for row in found if (row["dtype"], row["mode"]) == (dtype, mode)}
        if mode == "ar" or "all" not in mine:
            continue
        lines.append(_line(dtype, mode, mine, kinds))
    head = ["dtype", "mode", "identical", "largest gap at a first difference", "largest move of a gap", "all", *kinds]
    whole = [row for row in found if row["kind"] == "all"]
    first = whole[0]
    runs = dict.fromkeys((row["command"], row["commit"]) for row in whole if row["mode"] != "ar")
    note = (
        f"{first['model']} with {first['draft']}, {first['device']}; prompts of {first['context']} tokens and more, up to "
        f"{first['max_tokens']} tokens generated, all in one batch; gaps in logits. "
        + "; ".join(f"`{command}` at {commit}" for command, commit in runs)
        + "."
    )
    return markdown(head, lines) + "\n\n" + note


def _line(dtype: str, mode: str, mine: dict[str, Any], kinds: list[str]) -> list[str]:
    whole = mine["all"]
    gaps = [entry["top2_gap"] for entry in whole["differences"]]
    speeds = [f"{mine[kind]['tokens_per_dense_read']:.1f}" if kind in mine else "" for kind in ("all", *kinds)]
    largest = f"{max(gaps):.3g}" if gaps else "none"
    return [dtype, mode, f"{whole['identical']} of {whole['prompts']}", largest, f"{whole['noise_max']:.2g}", *speeds]
