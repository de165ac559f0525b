"""What the planner of mode auto knows: what rounds bring (acceptance) and what they cost (seconds), measured and fading."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dustin.cost_model import CardCosts, Forecast

# Old evidence fades to 1/e within so many rounds, and checked tokens: long enough to tell plans apart, short beside a text.
_MEMORY_ROUNDS, _MEMORY_TOKENS = 60.0, 250.0
# What earlier texts accepted counts for the next as so many observations of each position.
_CARRIED = 16.0
# Rates are rounded to this where a table is kept for them.
_SHARE_STEP = 0.04
# What a position without evidence is taken to accept, and with how many observations' weight. The real pair: .75 to .83 on
# novels, .80 to .97 on code.
_PRIOR, _PRIOR_WEIGHT = 0.8, 2.0
# Agreement of the sparse target with the dense one, a token: the real pair measured 0.9 to 0.99, so one bad check says little.
_CHECK_PRIOR, _CHECK_WEIGHT = 0.93, 8.0
# Texts have easy and hard stretches, so a token whose predecessors were kept is kept more often: positions of a block that are
# counted apart, and the weight that all of them together have for each.
_SPANS, _SPAN_WEIGHT = (4, 8, 16), 12.0
# Disagreement with dense attention falls by this power of the budget: .093, .073, .054 at 512, 1024, 2048 tokens of 32k.
_BUDGET_POWER = 0.39
# Answers whose lengths are remembered, and how many of them tell what the next may have.
_ANSWERS, _FEW_ANSWERS = 32, 3
# What one budget's evidence may count for another, in tokens.
_SHARED_WEIGHT = 100.0


class Acceptance:
    """By position, how often a draft was kept whose predecessors were: counts that fade, pooled where a position has few."""

    def __init__(self) -> None:
        self._tested: defaultdict[int, float] = defaultdict(float)
        self._kept: defaultdict[int, float] = defaultdict(float)

    def observe(self, accepted: Sequence[int], planned: int) -> None:
        """One round: row b kept accepted[b] of `planned` drafts (a row for which nothing was found kept none)."""
        self.age(1.0)
        for kept in accepted:
            for position in range(min(kept + 1, planned)):
                self._tested[position] += 1
                self._kept[position] += position < kept

    def age(self, rounds: float, least: float = 0.0) -> None:
        """The text went on by so many rounds: what was seen before tells less, but no position less than `least` observations."""
        fade = math.exp(-rounds / _MEMORY_ROUNDS)
        for position, tested in self._tested.items():
            share = max(fade, min(1.0, least / tested)) if tested else 1.0
            self._tested[position] = tested * share
            self._kept[position] *= share

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._tested)

    def rates(self, drafts: int) -> list[float]:
        """Chance that the draft at each position is kept when those before it are."""
        pooled = (sum(self._kept.values()) + _PRIOR * _PRIOR_WEIGHT) / (sum(self._tested.values()) + _PRIOR_WEIGHT)
        kept, tested, prior = self._kept.get, self._tested.get, pooled * _PRIOR_WEIGHT
        return [(kept(i, 0.0) + prior) / (tested(i, 0.0) + _PRIOR_WEIGHT) for i in range(drafts)]

    def tokens(self, drafts: int, doubt: float = 0.0) -> float:
        """Expected tokens of a round with so many drafts: the kept ones and one of the target's own."""
        return self.tokens_by_drafts(drafts, doubt)[drafts]

    def tokens_by_drafts(self, most: int, doubt: float = 0.0) -> list[float]:
        """Expected tokens of a round with 0, 1, .. `most` drafts."""
        made, alive = [1.0], 1.0
        # Positions share what they know, so the error is that of all observations together.
        seen = sum(self._tested.values()) + _PRIOR_WEIGHT
        for rate in self.rates(most):
            alive *= min(1.0, rate + doubt * math.sqrt(rate * (1 - rate) / seen)) if doubt else rate
            made.append(made[-1] + alive)
        return made

    def shares(self, drafts: int) -> tuple[float, ...]:
        """P(0, 1, .. `drafts` are kept), from the first position's rate and the mean of the others', rounded: what is worked
        out from them is kept for the next time."""
        rates = self.rates(drafts)
        later = sum(rates[1:]) / max(1, drafts - 1)
        rounded = [round(rate / _SHARE_STEP) * _SHARE_STEP for rate in (*rates[:1], *[later] * (drafts - 1))]
        chances, alive = [], 1.0
        for rate in rounded:
            chances.append(alive * (1 - rate))
            alive *= rate
        return (*chances, alive)

    def faded(self, weight: float) -> Acceptance:
        """A copy in which no position has more than `weight` observations."""
        copy = Acceptance()
        for position, tested in self._tested.items():
            share = min(1.0, weight / tested) if tested else 0.0
            copy._tested[position] = tested * share
            copy._kept[position] = self._kept[position] * share
        return copy


class Clock:
    """Seconds by a size (drafts of a round, tokens of a check): the last few measurements of each, a line between them.

    The first of a size pays for compilation and capture: it counts as an upper bound until there is a second.
    """

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._seen: dict[int, deque[float]] = {}
        self._mean: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        """One measurement."""
        # Less the seconds of recordings, which others may have made meanwhile, it can come out below nothing.
        seconds = max(0.0, seconds)
        if size not in self._first:
            self._first[size] = seconds
            return
        self._seen.setdefault(size, deque(maxlen=9)).append(seconds)
        times = sorted(self._seen[size])
        usual = [t for t in times if t <= 3 * times[len(times) // 2]]
        self._mean[size] = sum(usual) / len(usual)

    def count(self, size: int) -> int:
        """How often a size was measured (up to ten), the first time included."""
        return (size in self._first) + len(self._seen.get(size, ()))

    @property
    def warm_ups(self) -> list[float]:
        """Seconds by which first measurements exceeded later ones."""
        return [max(0.0, self._first[size] - self.measured(size)) for size in self._seen]

    @property
    def seen(self) -> bool:
        """Whether anything was measured at all."""
        return bool(self._first)

    @property
    def sizes(self) -> list[int]:
        """What was measured twice or more."""
        return sorted(self._seen)

    def measured(self, size: int) -> float:
        """Mean seconds without outliers (what lies above three medians: a capture, a pause of the machine)."""
        return self._mean[size]

    def has(self, size: int) -> bool:
        """Whether this size was measured twice or more."""
        return size in self._mean

    def seconds(self, size: int, zero: float) -> float | None:
        """Measured, or on the line through the nearest measured sizes; `zero` is what size 0 takes. None without any."""
        if size in self._seen:
            return self.measured(size)
        bound = self._first.get(size)
        if not self._seen:
            return bound
        known = {0: zero} | {n: self.measured(n) for n in self._seen}
        below = max((n for n in known if n < size), default=0)
        above = min((n for n in known if n > size), default=None)
        if above is None:
            above, below = below, max((n for n in known if n < below), default=below)
        slope = max(0.0, (known[above] - known[below]) / (above - below)) if above != below else 0.0
        line = max(1e-9, known[below] + slope * (size - below))
        return line if bound is None else min(line, bound)


@dataclass
class Ran:
    """Kinds and sizes of rounds that ran with one number of rows, whatever the context; up to `warmed` tokens of context a warm-up
    met what may be asked."""

    sizes: set[tuple[str, int]] = field(default_factory=set)
    warmed: int = 0


class Costs:
    """Seconds for one size of batch and context; what was not timed here comes from the card's cost model, or else from a
    neighbouring size, scaled.

    `plain` of size 0, `dense` and `sparse BUDGET` rounds by drafts, `check` by the tokens of a block.
    """

    def __init__(
        self, base: Costs | None = None, forecast: Forecast | None = None, ran: Ran | None = None, context: int = 0
    ) -> None:
        """For rows of about `context` tokens. `ran` has the kinds and sizes that ran with as many rows, at whatever context: what
        is recorded serves all of them."""
        self.clocks: defaultdict[str, Clock] = defaultdict(Clock)
        self._base, self._forecast = base, forecast
        self._ran, self._context = ran if ran is not None else Ran(), context
        self._ratio = 1.0

    @property
    def warmed(self) -> bool:
        """Whether a warm-up met what may be asked of as many rows."""
        return self._ran.warmed >= max(1, self._context)

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """One measurement; where model or neighbour has the same, it tells how they compare."""
        clock = self.clocks[kind]
        clock.observe(size, seconds)
        self._ran.sizes.add((kind, size))
        if not clock.has(size):
            return
        if self._forecast is not None:
            self._forecast.observe(kind, size, clock.measured(size))
        elif self._base is not None and self._base.clocks[kind].has(size):
            ratio = clock.measured(size) / self._base.clocks[kind].measured(size)
            self._ratio += 0.3 * (ratio - self._ratio)

    def warm_up(self, kind: str = "") -> float:
        """Seconds that the first round of a size takes beyond its later ones: the least that another size of this kind took, or
        else the most of any kind, or what was foreseen."""
        if kind in self.clocks and self.clocks[kind].warm_ups:
            # The first size of a kind pays for what all of them share.
            return min(self.clocks[kind].warm_ups)
        every = [seconds for clock in self.clocks.values() for seconds in clock.warm_ups]
        foreseen = self._forecast.warm_up if self._forecast is not None else 0.0
        return max(max(every, default=foreseen), self._base.warm_up(kind) if self._base is not None else 0.0)

    @property
    def untouched(self) -> bool:
        """Whether nothing ran yet, here or at the neighbouring size."""
        return not any(clock.seen for clock in self.clocks.values()) and (self._base is None or self._base.untouched)

    def tried(self, kind: str, size: int) -> bool:
        """Whether it ran with as many rows, or at the neighbouring size."""
        return (kind, size) in self._ran.sizes or (not self.warmed and self._base is not None and self._base.tried(kind, size))

    def met(self, kind: str) -> bool:
        """Whether any size of this kind ran with as many rows."""
        return any(ran == kind for ran, _ in self._ran.sizes)

    def foreseen(self, kind: str, size: int) -> float | None:
        """What the card's cost model says of a size that was not timed here."""
        if self._forecast is None or self.clocks[kind].has(size):
            return None
        return self._forecast.seconds(kind, size)

    def timed(self, kind: str, size: int) -> bool:
        """Whether it was timed apart from its first run, here or at the neighbouring size."""
        return self.clocks[kind].has(size) or (self._base is not None and self._base.timed(kind, size))

    def count(self, kind: str, size: int) -> int:
        """Measurements of this size, or of the neighbour's; what the card's cost model knows counts as measured."""
        if self._forecast is not None and self._forecast.seconds(kind, size) is not None:
            return 2
        return max(self.clocks[kind].count(size), self._base.count(kind, size) if self._base is not None else 0)

    def seconds(self, kind: str, size: int, zero: float = 0.0) -> float | None:
        """Best estimate: measured here, the cost model's, measured next door, on a line; None without any."""
        here = self.clocks[kind]
        foreseen = self.foreseen(kind, size)
        if foreseen is not None:
            return foreseen
        if here.has(size) or self._base is None:
            return here.seconds(size, zero)
        there = self._base.seconds(kind, size, zero / self._ratio)
        return here.seconds(size, zero) if there is None else there * self._ratio


def _span_bounds() -> zip[tuple[int, int]]:
    """First position and end of each span."""
    return zip((0, *_SPANS), (*_SPANS, 1 << 30), strict=True)


@dataclass
class Habits:
    """What rounds bring, apart from the machine: acceptance in dense and in sparse rounds, agreement a checked token."""

    dense: Acceptance = field(default_factory=Acceptance)
    sparse: Acceptance = field(default_factory=Acceptance)
    # Budget -> tokens that dense checks kept, and tokens they tested.
    checks: dict[int, tuple[float, float]] = field(default_factory=dict)
    # The same by position: budget -> for each span of positions in a block [kept, tested].
    spans: dict[int, list[list[float]]] = field(default_factory=dict)
    # Sparse rounds of a block over those that mean acceptance promises: the last round overshoots, the slowest row counts.
    rounds_factor: float = 1.0

    def faded(self) -> Habits:
        """A copy for the next text, with the weight of a few observations."""
        checks = {}
        for budget, (kept, checked) in self.checks.items():
            share = min(1.0, 8.0 / checked) if checked else 0.0
            checks[budget] = kept * share, checked * share
        # What is known by position is the shape of a curve, which the next text is likely to have too.
        spans = {budget: [[0.3 * k, 0.3 * n] for k, n in known] for budget, known in self.spans.items()}
        return Habits(self.dense.faded(_CARRIED), self.sparse.faded(_CARRIED), checks, spans, self.rounds_factor)

    def check(self, budget: int, kept: Sequence[int], offered: Sequence[int]) -> None:
        """One dense check: of offered[b] tokens the first kept[b] survived."""
        tested = sum(k + (k < n) for k, n in zip(kept, offered, strict=True))
        fade = math.exp(-tested / max(1, len(kept)) / _MEMORY_TOKENS)
        before = self.checks.get(budget, (0.0, 0.0))
        self.checks[budget] = before[0] * fade + sum(kept), before[1] * fade + tested
        spans = self.spans.setdefault(budget, [[0.0, 0.0] for _ in range(len(_SPANS) + 1)])
        for counts in spans:
            counts[:] = (count * fade for count in counts)
        for k, n in zip(kept, offered, strict=True):
            for (first, last), counts in zip(_span_bounds(), spans, strict=True):
                counts[0] += min(k, last) - min(k, first)
                counts[1] += min(k + (k < n), last) - min(k + (k < n), first)

    def agreed(self, budget: int, most: int, doubt: float = 0.0) -> list[float]:
        """P(the first 0, 1, .. `most` tokens of a block survive its check); with `doubt` as in `agreement`."""
        usual = self.agreement(budget)
        better = self.agreement(budget, doubt) - usual
        spans = self.spans.get(budget, [[0.0, 0.0]] * (len(_SPANS) + 1))
        rates = [min(1.0, (k + usual * _SPAN_WEIGHT) / (n + _SPAN_WEIGHT) + better) for k, n in spans]
        made = [1.0]
        for (first, last), rate in zip(_span_bounds(), rates, strict=True):
            for _ in range(min(last, most) - min(first, most)):
                made.append(made[-1] * rate)
        return made

    def agreement(self, budget: int, doubt: float = 0.0) -> float:
        """Chance that a sparse token survives its check; with `doubt`, so many standard errors better.

        A budget without evidence is taken to err as another does, by the power of the budgets that the real pair showed.
        """
        prior, weight = _CHECK_PRIOR, _CHECK_WEIGHT
        others = [(checked, other) for other, (_, checked) in self.checks.items() if other != budget and checked]
        if others:
            seen, other = max(others)
            kept, checked = self.checks[other]
            weight = max(weight, min(_SHARED_WEIGHT, 0.3 * seen))
            known = (kept + _CHECK_PRIOR * _CHECK_WEIGHT) / (checked + _CHECK_WEIGHT)
            prior = max(0.0, 1 - (1 - known) * (other / budget) ** _BUDGET_POWER)
        kept, checked = self.checks.get(budget, (0.0, 0.0))
        share = (kept + prior * weight) / (checked + weight)
        weight += checked
        return min(1.0, share + doubt * math.sqrt(share * (1 - share) / weight)) if doubt else share


class PriceList:
    """Costs by drafter, batch and context (powers of two) and the latest habits, kept over the runs of a session."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, int, int, int], Costs] = {}
        self._ran: defaultdict[tuple[str, int], Ran] = defaultdict(Ran)
        self.habits: dict[str, Habits] = {}
        # Drafter -> what forecasts the costs that were never timed, where something of this card was measured.
        self.cards: dict[str, CardCosts | None] = {}
        # Seconds of rounds so far, and of recording shapes within them.
        self.elapsed = self.recording = 0.0
        # Drafter -> seconds in which it reads a token that it missed.
        self.reading: dict[str, float] = {}
        self._answers: deque[int] = deque(maxlen=_ANSWERS)

    def warm(self, drafter: str, rows: int, context: int, sizes: Iterable[tuple[str, int]]) -> None:
        """A warm-up met these kinds and sizes of rounds with so many rows, of up to `context` tokens."""
        ran = self._ran[drafter, rows]
        ran.sizes.update(sizes)
        ran.warmed = max(ran.warmed, context)

    def note_reading(self, drafter: str, seconds: float) -> None:
        """A draft read tokens that it had missed, each in so many seconds."""
        before = self.reading.get(drafter, seconds)
        self.reading[drafter] = before + 0.5 * (seconds - before)

    def note_answer(self, tokens: int) -> None:
        """An answer of so many tokens ended."""
        self._answers.append(tokens)

    def tokens_left(self, limit: int | None) -> float | None:
        """Tokens of a row that are expected still, where no more than `limit` may come: what answers had, at whatever place this
        one is; None where nobody knows."""
        if limit is None or len(self._answers) < _FEW_ANSWERS:
            return limit
        return min(limit, sum(self._answers) / len(self._answers))

    def of(self, drafter: str, lengths: Sequence[int], last: Costs | None, idle: int = 0) -> Costs:
        """The costs at these lengths (tokens of each active row) beside `idle` rows; new ones start from `last` or any of this
        drafter. A device computes rows that take no part, but reads no tokens for them."""
        context = sum(lengths) // max(1, len(lengths))
        key = (drafter, (len(lengths) + idle).bit_length(), len(lengths).bit_length(), context.bit_length())
        if key not in self._costs:
            same = [costs for (name, *_), costs in self._costs.items() if name == drafter]
            card = self.cards.get(drafter)
            forecast = card.forecast([*lengths, *[0] * idle]) if card is not None else None
            ran = self._ran[drafter, len(lengths) + idle]
            self._costs[key] = Costs(last if last in same else same[-1] if same else None, forecast, ran, context)
        return self._costs[key]
