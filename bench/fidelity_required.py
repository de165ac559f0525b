"""Tables over bench/results/fidelity.jsonl: what is asked of sparse attention beside what was measured, and every budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import rows
from bench.fidelity_plan import BUDGETS
from bench.fidelity_run import OUT

Row = dict[str, Any]
# What a track is judged by in the table of budgets, with the digits shown.
MEASURES = {
    "chat": ("agreement", 3), "text": ("perplexity_ratio", 2),
    "needle": ("accuracy_of_dense", 2), "tracking": ("accuracy_of_dense", 2), "qa": ("accuracy_of_dense", 2),
}  # fmt: skip


class Rows:
    """The rows, found by what they are about. `dustin` stands for the pair's profile, or the heuristic where there is none."""

    def __init__(self) -> None:
        self.made = rows.read(OUT)
        self.best = "profile" if any(row.get("heads") == "profile" for row in self.made) else "heuristic"

    def contexts(self) -> list[int]:
        """All contexts, shortest first."""
        return sorted({row["context"] for row in self.made})

    def find(
        self, track: str, context: int, budget: int, selector: str = "dustin", heads: str = "", bytes_of: int = 0
    ) -> Row | None:
        """A sparse cell; with `bytes_of` the one whose bytes are those of so many tokens, whatever its budget."""
        for row in self.made:
            if (row["track"], row["context"], row["selector"], row["heads"]) != (track, context, selector, heads or self.best):
                continue
            if row.get("what") or row.get("mode") == "dense" or row.get("sparse_draft") is False:
                continue
            if row.get("top_mass") or row.get("lookahead_lag"):
                continue
            if row.get("bytes_of_budget", 0) == bytes_of and (bytes_of or row["budget"] == budget):
                return row
        return None

    def accepted(self, context: int, mode: str, sparse_draft: bool = True) -> float | None:
        """Tokens a round of whole engines."""
        for row in self.made:
            same = (row["context"], row.get("mode"), row.get("sparse_draft")) == (context, mode, sparse_draft)
            if row.get("what") == "acceptance" and same:
                return float(row["acceptance_length"])
        return None


def _said(value: float, met: bool, digits: int = 3, tail: str = "") -> str:
    return f"{value:.{digits}f}{tail} {'yes' if met else '**no**'}"


def _interval(row: Row, name: str, digits: int) -> str:
    ends = row.get(f"{name}_ci95")
    return f"{row[name]:.{digits}f}" + (f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else "")


def required() -> str:
    """A line a demand: what was measured at each context, and whether that is enough."""
    from bench.tables import markdown

    found = Rows()

    def points(track: str) -> Callable[[int], str]:
        def cell(context: int) -> str:
            row = found.find(track, context, 512)
            if row is None:
                return ""
            return f"{_interval(row, 'accuracy_of_dense', 2)} {'yes' if row['accuracy_of_dense'] >= 0.98 else '**no**'}"

        return cell

    def together(context: int) -> str:
        parts = [row for track in ("needle", "qa") if (row := found.find(track, context, 512)) is not None]
        if len(parts) < 2:
            return ""
        mine, dense = (sum(row[name] * row["questions"] for row in parts) for name in ("accuracy", "accuracy_dense"))
        return _said(mine / dense, mine >= 0.98 * dense, 2, f" of {sum(row['questions'] for row in parts)} questions")

    def chat(name: str, limit: float, sign: int) -> Callable[[int], str]:
        def cell(context: int) -> str:
            row = found.find("chat", context, 1024, bytes_of=1536 if context > 16384 else 0)
            return _said(row[name], sign * row[name] >= sign * limit) if row else ""

        return cell

    def perplexity(context: int) -> str:
        row = found.find("text", context, 1024)
        return _said(row["perplexity_ratio"], row["perplexity_ratio"] <= 1.04) if row else ""

    def beside(names: tuple[str, ...], least: float) -> Callable[[int], str]:
        def cell(context: int) -> str:
            mine = found.find("tasks", context, 512)
            others = [found.find("tasks", context, 512, name) for name in names]
            # Runs that asked other questions say nothing about one another.
            if mine is None or any(row is None or row["questions"] != mine["questions"] for row in others):
                return ""
            theirs = max(row["accuracy"] for row in others if row)
            return _said(mine["accuracy"], mine["accuracy"] - theirs >= least, 2, f" against {theirs:.2f}")

        return cell

    def profile(context: int) -> str:
        mine, mid = found.find("chat", context, 1024), found.find("chat", context, 1024, heads="mid")
        if found.best != "profile" or mine is None or mid is None:
            return ""
        share = mine["scoring_bytes_per_round"] / mid["scoring_bytes_per_round"]
        tail = f" against {mid['kl']:.3f}, {100 * share:.0f} % of its bytes"
        return _said(mine["kl"], mine["kl"] <= mid["kl"] and share <= 0.25, 3, tail)

    def equal_bytes(context: int) -> str:
        mine, mid = (found.find("chat", context, 0, heads=heads, bytes_of=3072) for heads in ("", "mid"))
        if found.best != "profile" or mine is None or mid is None:
            return ""
        return _said(mine["kl"], mine["kl"] <= mid["kl"], 3, f" against {mid['kl']:.3f}")

    def acceptance(context: int) -> str:
        sparse, dense = found.accepted(context, "sparse"), found.accepted(context, "dense", True)
        if sparse is None or dense is None:
            return ""
        return _said(sparse, sparse >= 0.95 * dense, 2, f" against {dense:.2f}")

    lines = {
        "needles and facts together, k = 512: .98 of dense attention's points": together,
        "needles, k = 512: .98 of dense attention's points": points("needle"),
        "variable tracking, k = 512: .98 of dense attention's points": points("tracking"),
        "facts (qa), k = 512: .98 of dense attention's points": points("qa"),
        "chat agreement .945 (k = 1024; 32k: bytes of 1,536 tokens)": chat("agreement", 0.945, 1),
        "chat hard flips at most .015 (same cells)": chat("hard_flips", 0.015, -1),
        "text perplexity ratio at most 1.04, k = 1024": perplexity,
        "questions, k = 512: no worse than `history`, `lookahead`": beside(("history", "lookahead"), 0.0),
        "questions, k = 512: 10 points above `streaming`, `snapkv`": beside(("streaming", "snapkv"), 0.1),
        "profile's KL no worse than `mid`'s at a quarter of its scoring bytes, k = 1024": profile,
        "profile's KL no worse than `mid`'s at equal bytes, those of 3,072 tokens": equal_bytes,
        "tokens a round within 5 % of dense speculation, both sides sparse": acceptance,
    }
    contexts = found.contexts()
    made = [[text, *(cell(context) for context in contexts)] for text, cell in lines.items()]
    return markdown(["asked", *(str(context) for context in contexts)], [line for line in made if any(line[1:])])


def budgets() -> str:
    """`dustin` at every budget, a line a track and budget, with 95 % intervals over documents."""
    from bench.tables import markdown

    found = Rows()
    contexts = found.contexts()
    lines = []
    for track, (name, digits) in MEASURES.items():
        for budget in BUDGETS:
            cells = [found.find(track, context, budget) for context in contexts]
            shown = [_interval(row, name, digits) if row else "" for row in cells]
            if any(shown):
                lines.append([f"{track}: {name.replace('_', ' ')}", str(budget), *shown])
    return markdown(["track", "budget", *(str(context) for context in contexts)], lines)
