"""Tables over bench/results/fidelity.jsonl: what is asked of sparse attention beside what was measured, and every budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import rows
from bench.fidelity_plan import BUDGETS
from bench.fidelity_run import OUT

Row = dict[str, Any]
# The shortest context that something is asked of.
ASKED_FROM = 8192
# What a track is judged by in the table of budgets, with the digits shown.
MEASURES = {
    "chat": ("agreement", 3), "text": ("perplexity_ratio", 2),
    "needle": ("accuracy_of_dense", 2), "tracking": ("accuracy_of_dense", 2), "qa": ("accuracy_of_dense", 2),
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """A number of one row: `name` of `track` at `budget` (from `long` on at the bytes of `bytes_of` tokens), at least or at most
    `limit`; several tracks count together, by points."""

    text: str
    tracks: tuple[str, ...]
    name: str
    limit: float
    at_most: bool = False
    budget: int = 1024
    bytes_of: int = 0
    digits: int = 3

    def met(self, value: float) -> bool:
        """Whether the value suffices."""
        return value <= self.limit if self.at_most else value >= self.limit

    def value(self, found: Rows, context: int, budget: int = 0, selector: str = "dustin", heads: str = "") -> float | None:
        """The number asked for; with `budget` that of another one."""
        row = self.row(found, context, budget, selector, heads)
        return None if row is None else float(row[self.name])

    def row(self, found: Rows, context: int, budget: int = 0, selector: str = "dustin", heads: str = "") -> Row | None:
        """The row of `value`; of several tracks their points added up, over as many of dense attention's on the same questions."""
        bytes_of = self.bytes_of if context > LONG and not budget else 0
        parts = [found.find(track, context, budget or self.budget, selector, heads, bytes_of) for track in self.tracks]
        if len(parts) == 1 or None in parts:
            return parts[0] if len(parts) == 1 else None
        mine, dense = (sum(row[name] * row["questions"] for row in parts if row) for name in ("accuracy", "accuracy_dense"))
        return {self.name: mine / dense, "questions": sum(row["questions"] for row in parts if row)} if dense else None


LONG = 16384
HALVES, FIXED = ("history", "lookahead"), ("streaming", "snapkv")
BESIDE = "questions, k = 512: no worse than `history`, `lookahead`"
ABOVE = "questions, k = 512: 10 points above `streaming`, `snapkv`"
MID = {
    track: f"profile's KL on {track} no worse than `mid`'s at a quarter of its scoring bytes, k = 1024"
    for track in ("chat", "text")
}
DEMANDS = (
    Demand("needles and facts together, k = 512: .98 of dense attention's points", ("needle", "qa"), "accuracy_of_dense", 0.98,
           budget=512, digits=2),
    Demand("needles, k = 512: .98 of dense attention's points", ("needle",), "accuracy_of_dense", 0.98, budget=512, digits=2),
    Demand("variable tracking, k = 512: .98 of dense attention's points", ("tracking",), "accuracy_of_dense", 0.98, budget=512,
           digits=2),
    Demand("facts (qa), k = 512: .98 of dense attention's points", ("qa",), "accuracy_of_dense", 0.98, budget=512, digits=2),
    Demand("chat agreement .945 (k = 1024; 32k: bytes of 1,536 tokens)", ("chat",), "agreement", 0.945, bytes_of=1536),
    Demand("chat hard flips at most .015 (same cells)", ("chat",), "hard_flips", 0.015, at_most=True, bytes_of=1536),
    Demand("text perplexity ratio at most 1.04, k = 1024", ("text",), "perplexity_ratio", 1.04, at_most=True),
)  # fmt: skip


class Rows:
    """The rows, found by what they are about. `dustin` stands for the pair's profile, or the heuristic where there is none."""

    def __init__(self) -> None:
        self.made = rows.read(OUT)
        self.best = "profile" if any(row.get("heads") == "profile" for row in self.made) else "heuristic"

    def contexts(self) -> list[int]:
        """All contexts, shortest first."""
        return sorted({row["context"] for row in self.made})

    def long(self) -> list[int]:
        """The contexts that something is asked of; all of them where none is so long."""
        return [context for context in self.contexts() if context >= ASKED_FROM] or self.contexts()

    def find(
        self, track: str, context: int, budget: int, selector: str = "dustin", heads: str = "", bytes_of: int = 0
    ) -> Row | None:
        """A sparse cell; with `bytes_of` the one whose bytes are those of so many tokens, whatever its budget."""
        for row in self.made:
            if (row["track"], row["context"], row["selector"], row["heads"]) != (track, context, selector, heads or self.best):
                continue
            if row.get("what") or row.get("mode") in ("dense", "ar") or row.get("sparse_draft") is False:
                continue
            if row.get("top_mass") or row.get("lookahead_lag") or row.get("bytes_like"):
                continue
            if row.get("bytes_of_budget", 0) == bytes_of and (bytes_of or row["budget"] == budget):
                return row
        return None

    def like(self, track: str, context: int, heads: str) -> Row | None:
        """The cell of `dustin` at the bytes that k = 1024 tokens chosen by `heads` take."""
        wanted = (track, context, "dustin", self.best, f"{heads}, k=1024")
        names = ("track", "context", "selector", "heads", "bytes_like")
        return next((row for row in self.made if tuple(row.get(name) for name in names) == wanted), None)

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

    def of(demand: Demand) -> Callable[[int], str]:
        def cell(context: int) -> str:
            row = demand.row(found, context)
            if row is None:
                return ""
            shown = _interval(row, demand.name, demand.digits)
            shown += f" of {row['questions']} questions" if "questions" in row else ""
            return f"{shown} {'yes' if demand.met(row[demand.name]) else '**no**'}"

        return cell

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

    def profile(track: str) -> Callable[[int], str]:
        def cell(context: int) -> str:
            mine, mid = found.find(track, context, 1024), found.find(track, context, 1024, heads="mid")
            if found.best != "profile" or mine is None or mid is None:
                return ""
            share = mine["scoring_bytes_per_round"] / mid["scoring_bytes_per_round"]
            tail = f" against {mid['kl']:.3f}, {100 * share:.0f} % of its bytes"
            return _said(mine["kl"], mine["kl"] <= mid["kl"] and share <= 0.25, 3, tail)

        return cell

    def half(track: str) -> Callable[[int], str]:
        def cell(context: int) -> str:
            mine, mid = found.like(track, context, "mid"), found.find(track, context, 1024, heads="mid")
            if mine is None or mid is None:
                return ""
            return _said(mine["kl"], mine["kl"] <= mid["kl"] / 2, 3, f" against {mid['kl']:.3f}, k = {mine['budget']}")

        return cell

    def acceptance(context: int) -> str:
        sparse, dense = found.accepted(context, "sparse"), found.accepted(context, "dense", True)
        if sparse is None or dense is None:
            return ""
        return _said(sparse, sparse >= 0.95 * dense, 2, f" against {dense:.2f}")

    lines = {
        **{demand.text: of(demand) for demand in DEMANDS},
        BESIDE: beside(HALVES, 0.0),
        ABOVE: beside(FIXED, 0.1),
        **{text: profile(track) for track, text in MID.items()},
        **{f"aim: at the bytes of `mid` with k = 1024 half of its KL on {track}": half(track) for track in MID},
        "tokens a round within 5 % of dense speculation, both sides sparse": acceptance,
    }
    contexts = found.long()
    made = [[text, *(cell(context) for context in contexts)] for text, cell in lines.items()]
    return markdown(["asked", *(str(context) for context in contexts)], [line for line in made if any(line[1:])])


# What would have to be better, by what is there where the shared set is not.
_LACKS = (
    ("oracle", "the prediction"),
    ("layers", "sharing one set among all layers"),
    ("budget", "tokens"),
    ("more", "tokens, and sharing"),
)


def _against(found: Rows, context: int) -> list[Demand]:
    """Demands whose limit is what another selector has on the same questions or traces."""
    made = []
    mine = found.find("tasks", context, 512)
    for names, more, text in ((HALVES, 0.0, BESIDE), (FIXED, 0.1, ABOVE)):
        others = [row for name in names if (row := found.find("tasks", context, 512, name))]
        if mine and len(others) == len(names) and all(row["questions"] == mine["questions"] for row in others):
            limit = max(row["accuracy"] for row in others) + more
            made.append(Demand(text, ("tasks",), "accuracy", limit, budget=512, digits=2))
    for track, text in MID.items():
        mid = found.find(track, context, 1024, heads="mid")
        made += [Demand(text, (track,), "kl", mid["kl"], at_most=True)] if mid and found.best == "profile" else []
    return made


def unmet() -> str:
    """A line for each demand and context that is not met: what stands there instead where the set is predicted perfectly, where
    layers choose for themselves and where it is larger, so what lacks."""
    from bench.tables import markdown

    found, lines = Rows(), []
    pairs = [(demand, context) for context in found.long() for demand in [*DEMANDS, *_against(found, context)]]
    order = list(dict.fromkeys(demand.text for demand, _ in pairs))
    for demand, context in sorted(pairs, key=lambda pair: (order.index(pair[0].text), pair[1])):
        mine = demand.value(found, context)
        if mine is None or demand.met(mine):
            continue
        budget = demand.budget
        tried = {
            "oracle": demand.value(found, context, budget, "oracle", "heuristic"),
            "by layer": demand.value(found, context, budget, "oracle by layer", "heuristic"),
            "layers": demand.value(found, context, budget, heads="high"),
            "budget": demand.value(found, context, 2 * budget),
            "more": demand.value(found, context, 2 * budget, heads="high"),
        }
        there = [what for name, what in _LACKS if (value := tried[name]) is not None and demand.met(value)]
        whole = all(tried[name] is not None for name in ("oracle", "layers"))
        lacks = there[0] if there else "none of these is enough" if whole else ""
        dense = found.find("tasks", context, budget)
        if demand.name == "accuracy" and dense and not demand.met(dense["accuracy_dense"]):
            lacks = f"room: dense attention has {dense['accuracy_dense']:.2f}"
        shown = ["" if value is None else f"{value:.{demand.digits}f}" for value in tried.values()]
        sign = "at most" if demand.at_most else "at least"
        limit = f"{mine:.{demand.digits}f}, {sign} {demand.limit:.{demand.digits}f}"
        lines.append([demand.text, str(context), limit, *shown, lacks])
    head = ["asked", "context", "measured", "one set, perfectly predicted", "one a layer, perfectly predicted"]
    head += ["high fidelity", "twice the tokens", "high fidelity, twice the tokens", "what lacks"]
    return markdown(head, lines)


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
