"""Measured costs of a card, shipped: what rounds of a batch and context take before any was timed, for mode auto to begin with.

A file of dustin/costs has, for pairs of models on one card, milliseconds of the parts of a round over a grid of contexts and
batches (`python -m bench costs` writes it from the rows of the regime table). Between the cells of a grid lie straight lines;
a pair that was not measured is taken from the nearest one, scaled by the bytes that both read. What the engine itself adds
is learnt as a run goes on, per kind of round.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dustin.interfaces import ModelSpec

VERSION = 1
SHIPPED = Path(__file__).resolve().parent / "costs"
# How fast what the engine adds is learnt: the share that one more measurement has.
_LEARN = 0.3
# Weights that differ by less than this are those of one shape (padding, another vocabulary).
_SAME_BYTES = 1.1
# Another shape: seconds a layer takes at least, and bytes a second (fits 0.5B and 7B shapes on an H200 within a fifth).
_LAYER_SECONDS, _BYTES_PER_SECOND = 25e-6, 4.0e12
# A dense pass of more rows is captured in steps of so many.
_EXACT_ROWS, _ROW_STEP = 8, 4


class Line:
    """A quantity by a count: straight lines between what was measured, the last one goes on; one point alone lies on a line
    through 0. Never below half of the least measured."""

    def __init__(self, points: Mapping[int, float]) -> None:
        """Raise ValueError without any point."""
        if not points:
            raise ValueError("points is empty, expected one measurement or more")
        self.points = dict(sorted(points.items()))
        self._least = min(self.points.values()) / 2

    def __call__(self, count: float) -> float:
        """The quantity at `count`."""
        known = list(self.points.items())
        if len(known) == 1:
            return max(self._least, known[0][1] * count / known[0][0])
        pairs = list(zip(known, known[1:], strict=False))
        (a, low), (b, high) = next((pair for pair in pairs if count <= pair[1][0]), pairs[-1])
        return max(self._least, low + (high - low) * (count - a) / (b - a))


@dataclass(frozen=True)
class Parts:
    """Milliseconds of the parts of a round at one context and batch.

    By rows of a sequence: `check` a dense pass, `verify` a sparse one. By drafts: `draft` on a sparse cache, `dense_draft` on
    all of it. `choose` scores and selects. `wider` has what `verify` and `draft` take more for each token of budget.
    """

    check: Line
    verify: Line
    draft: Line
    dense_draft: Line
    choose: float
    budget: int
    wider: Mapping[str, float] = field(default_factory=dict)

    def dense_ms(self, drafts: int, drafter: str = "draft") -> float:
        """A round of classic speculation, the draft reading whichever costs less."""
        return self.drafting_ms(drafts, drafter) + self.check(_rows(drafts + 1))

    def drafting_ms(self, drafts: int, drafter: str = "draft") -> float:
        """The drafts of a dense round."""
        return 0.0 if drafter != "draft" else min(self.dense_draft(drafts), self.draft(drafts) + self.choose)

    def sparse_ms(self, drafts: int, budget: int, drafter: str = "draft") -> float:
        """A round with a sparse verification and, where a model drafts, a sparse draft."""
        more = budget - self.budget
        verify = self.verify(drafts + 1) + more * self.wider.get("verify", 0.0)
        draft = self.draft(drafts) + more * drafts * self.wider.get("draft", 0.0) if drafts and drafter == "draft" else 0.0
        return max(verify, self.verify(drafts + 1) / 2) + max(0.0, draft) + self.choose

    def check_ms(self, block: int) -> float:
        """The dense check of a block and the pending token."""
        return self.check(_rows(block + 1))


def _rows(rows: int) -> int:
    return rows if rows <= _EXACT_ROWS else -(-rows // _ROW_STEP) * _ROW_STEP


@dataclass(frozen=True)
class Cell:
    """What was measured at one context (tokens of a row) and batch: `ms`[part][count], see Parts."""

    context: int
    batch: int
    ms: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class PairCosts:
    """A grid of cells for one target and draft. `engine_ms` is what the engine added to a kind of round where it was measured,
    `warm_up` the seconds that recording a round's graphs takes."""

    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    budget: int
    wide_budget: int
    cells: tuple[Cell, ...]
    engine_ms: Mapping[str, float] = field(default_factory=dict)
    warm_up: float = 0.0
    name: str = ""

    def parts(self, context: float, batch: float) -> Parts:
        """The parts at any context and batch: along contexts for each batch that was measured, then along batches."""
        by_batch: dict[int, dict[int, Cell]] = {}
        for cell in self.cells:
            by_batch.setdefault(cell.batch, {})[cell.context] = cell

        def at(part: str, count: str) -> float:
            values = {}
            for size, cells in by_batch.items():
                points = {c: cell.ms[part][count] for c, cell in cells.items() if count in cell.ms.get(part, {})}
                if points:
                    values[size] = _between(points, context)
            return _between(values, batch)

        counts: dict[str, set[str]] = {}
        for cell in self.cells:
            for part, by_count in cell.ms.items():
                counts.setdefault(part, set()).update(by_count)
        lines = {part: Line({int(n): at(part, n) for n in found}) for part, found in counts.items()}
        return Parts(
            lines["check"], lines["verify"], lines["draft"], lines["dense_draft"], at("choose", "1"), self.budget,
            {part: self._a_token(lines, part) for part in ("verify", "draft")},
        )  # fmt: skip

    def _a_token(self, lines: Mapping[str, Line], part: str) -> float:
        """What one more token of budget adds to a part (a draft: to each of its steps), from the wider budget's measurement."""
        wide = lines.get(f"wide_{part}")
        if wide is None:
            return 0.0
        count, ms = next(iter(wide.points.items()))
        more = max(0.0, ms - lines[part](count)) / (self.wide_budget - self.budget)
        return more / count if part == "draft" else more


def _between(points: Mapping[int, float], place: float) -> float:
    """On the line through the measured neighbours; one point alone holds everywhere."""
    return next(iter(points.values())) if len(points) == 1 else Line(points)(place)


@dataclass
class Corrections:
    """Seconds (or, for a pair that was not measured itself, a factor) by which the engine's rounds differ from the parts' sum,
    by kind; shared by all batches and contexts of a run."""

    scaled: bool = False
    by_kind: dict[str, float] = field(default_factory=dict)

    def apply(self, kind: str, seconds: float) -> float:
        """What the engine is expected to take; what is known of other kinds serves one that was never seen."""
        known = self.by_kind
        if self.scaled:
            usual = math.exp(sum(math.log(f) for f in known.values()) / len(known)) if known else 1.0
            return seconds * known.get(kind, usual)
        usual = sum(known.values()) / len(known) if known else 0.0
        return max(0.2 * seconds, seconds + known.get(kind, usual))

    def learn(self, kind: str, forecast: float, measured: float) -> None:
        """One more measurement of a kind of round."""
        found = measured / forecast if self.scaled else measured - forecast
        before = self.by_kind.get(kind)
        self.by_kind[kind] = found if before is None else before + _LEARN * (found - before)


@dataclass
class Forecast:
    """Seconds of every kind of round at one batch and context, before the engine's own timing replaces them."""

    parts: Parts
    corrections: Corrections
    drafter: str
    # Factors for the target's and the draft's parts, where another pair was measured.
    scale: tuple[float, float] = (1.0, 1.0)
    warm_up: float = 0.0

    def seconds(self, kind: str, size: int) -> float | None:
        """`plain`, `dense`, `sparse BUDGET` and `last` by drafts, `check` by block; None for what the file does not know."""
        raw = self._raw(kind, size)
        return None if raw is None else self.corrections.apply(kind.partition(" ")[0], raw)

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """The engine took this long, compilation and recording apart."""
        raw = self._raw(kind, size)
        if raw is not None:
            self.corrections.learn(kind.partition(" ")[0], raw, seconds)

    def _raw(self, kind: str, size: int) -> float | None:
        parts, (target, draft) = self.parts, self.scale
        name, _, budget = kind.partition(" ")
        if name == "plain":
            return 1e-3 * target * parts.check(1)
        if name == "dense":
            drafting = parts.drafting_ms(size, self.drafter)
            return 1e-3 * (draft * drafting + target * (parts.dense_ms(size, self.drafter) - drafting))
        if name == "sparse":
            verify = parts.sparse_ms(size, int(budget), "none")
            return 1e-3 * (target * verify + draft * (parts.sparse_ms(size, int(budget), self.drafter) - verify))
        if name == "last":
            return 1e-3 * draft * parts.draft(size) if self.drafter == "draft" and size else 0.0
        return 1e-3 * target * parts.check_ms(size) if name == "check" else None


class CardCosts:
    """The forecasts for one pair of models on one card."""

    def __init__(self, pair: PairCosts, target: ModelSpec, draft: ModelSpec | None, drafter: str) -> None:
        self._pair, self._target, self._draft, self._drafter = pair, target, draft, drafter
        exact = _same(pair.target, target) and (draft is None or _same(pair.draft, draft))
        known = {} if not exact else {kind: ms / 1e3 for kind, ms in pair.engine_ms.items()}
        self.corrections = Corrections(not exact, known)
        self.name = pair.name if exact else f"{pair.name}, scaled"

    def forecast(self, lengths: Sequence[int]) -> Forecast:
        """For rows of these committed lengths."""
        batch, context = len(lengths), sum(lengths) / len(lengths)
        tokens = sum(lengths)
        scale = (1.0, 1.0)
        if self.corrections.scaled:
            draft = _roofline_of(self._draft, tokens) / _roofline(self._pair.draft, tokens) if self._draft is not None else 1.0
            scale = _roofline_of(self._target, tokens) / _roofline(self._pair.target, tokens), draft
        return Forecast(self._pair.parts(context, batch), self.corrections, self._drafter, scale, self._pair.warm_up)


def shape_of(spec: ModelSpec) -> dict[str, Any]:
    """What costs are keyed by, as the file has it."""
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "bytes_per_kv_token", "weight_bytes")
    return {name: getattr(spec, name) for name in names}


def _same(shape: Mapping[str, Any], spec: ModelSpec) -> bool:
    own = shape_of(spec)
    apart = max(own["weight_bytes"], shape["weight_bytes"]) / max(1, min(own["weight_bytes"], shape["weight_bytes"]))
    return apart < _SAME_BYTES and all(own[name] == shape[name] for name in own if name != "weight_bytes")


def _roofline(shape: Mapping[str, Any], tokens: int) -> float:
    read = shape["weight_bytes"] + tokens * shape["bytes_per_kv_token"]
    return float(shape["num_layers"] * _LAYER_SECONDS + read / _BYTES_PER_SECOND)


def _roofline_of(spec: ModelSpec, tokens: int) -> float:
    return _roofline(shape_of(spec), tokens)


def _distance(pair: PairCosts, target: ModelSpec, draft: ModelSpec | None) -> float:
    apart = 0.0 if _same(pair.target, target) else 1.0
    sides: list[tuple[Mapping[str, Any], ModelSpec | None]] = [(pair.target, target), (pair.draft, draft)]
    for shape, spec in sides:
        if spec is not None:
            apart += abs(math.log(max(1, spec.weight_bytes) / shape["weight_bytes"]))
    return apart


def find(card: str, target: ModelSpec, draft: ModelSpec | None, drafter: str) -> CardCosts | None:
    """The costs for these models on `card` (the driver's name of it); None where nothing of it was measured."""
    if not card or drafter not in ("draft", "lookup"):
        return None
    # As a word of it: a GH200 is no H200.
    pairs = [pair for name, known in _shipped().items() if re.search(rf"\b{re.escape(name)}\b", card, re.I) for pair in known]
    if not pairs:
        return None
    return CardCosts(min(pairs, key=lambda pair: _distance(pair, target, draft)), target, draft, drafter)


@functools.cache
def _shipped() -> dict[str, tuple[PairCosts, ...]]:
    """Part of a card's name -> its pairs."""
    found = {}
    for path in sorted(SHIPPED.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[content["card"]] = read_pairs(content, str(path))
    return found


def read_pairs(content: Mapping[str, Any], where: str) -> tuple[PairCosts, ...]:
    """The pairs of a file's content. Raise ValueError that names `where` for another version."""
    if content.get("version") != VERSION:
        raise ValueError(f"{where} has version {content.get('version')!r}, expected {VERSION}")
    return tuple(
        PairCosts(
            pair["target"], pair["draft"], pair["budget"], pair["wide_budget"],
            tuple(Cell(cell["context"], cell["batch"], cell["ms"]) for cell in pair["cells"]),
            pair.get("engine_ms", {}), pair.get("warm_up_seconds", 0.0), pair["name"],
        )
        for pair in content["pairs"]
    )  # fmt: skip
