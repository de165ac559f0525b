"""How many drafts each replayed round keeps: drawn from measured histograms, or from a fixed agreement a token."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch

# A token's chance to be kept: 0.80 of a draft in a round (3.7 tokens a round at 5 drafts), 0.93 of the sparse target's in a
# dense check (13 tokens at block 32), which is what real pairs were measured at.
AGREEMENT, CHECK_AGREEMENT = 0.80, 0.93


@dataclass(frozen=True)
class Acceptance:
    """Shares of each number of kept drafts, by kind ("sparse", "dense" rounds, "check"); kinds that are missing are geometric."""

    label: str
    shares: dict[str, list[float]] = field(default_factory=dict)

    def shares_of(self, kind: str, most: int) -> list[float]:
        """P(kept = 0 .. most): what lies above `most` counts as all kept."""
        if kind not in self.shares:
            p = CHECK_AGREEMENT if kind == "check" else AGREEMENT
            return [(1 - p) * p**n for n in range(most)] + [p**most]
        known = self.shares[kind]
        if most >= len(known) and kind == "check":
            # Longer blocks than were measured: what was kept whole goes on to be kept as it was on average so far.
            longest, whole = len(known) - 1, known[-1]
            rate = whole ** (1 / longest)
            tail = [whole * (1 - rate) * rate**n for n in range(most - longest)]
            return [*known[:longest], *tail, whole * rate ** (most - longest)]
        if most >= len(known):
            raise click.UsageError(f"{kind}: {most} drafts, but kept drafts were measured up to {len(known) - 1} only")
        return [*known[:most], sum(known[most:])]

    def most(self, kind: str) -> int:
        """How many drafts the histogram reaches to."""
        return len(self.shares[kind]) - 1 if kind in self.shares else 128

    def expected(self, kind: str, most: int) -> float:
        """Mean tokens of a round or check with `most` drafts: the kept ones and one more."""
        return 1 + sum(n * share for n, share in enumerate(self.shares_of(kind, most)))

    def table(self, kind: str, most: int, count: int, batch: int, seed: int) -> torch.Tensor:
        """[count, batch] int32 on the CPU: kept drafts, evenly spread over the shares, in a shuffled order."""
        steps = torch.tensor(self.shares_of(kind, most), dtype=torch.float64).cumsum(0)
        # Stratified: few rounds then still bring what is expected.
        place = (torch.arange(count * batch, dtype=torch.float64) + 0.5) / (count * batch)
        kept = torch.searchsorted(steps, place * steps[-1]).clamp(max=most)
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))
        return kept[order].view(count, batch).to(torch.int32)


def geometric() -> Acceptance:
    """The fixed agreements."""
    return Acceptance(f"replayed: each draft kept with probability {AGREEMENT}, each checked token with {CHECK_AGREEMENT}")


def measured(path: Path, text: str) -> Acceptance:
    """Histograms of `bench decode_real` for one kind of text (all of them when empty). Raise UsageError without any."""
    entries = [e for e in json.loads(path.read_text())["entries"] if not text or e["text"] == text]
    counts: dict[str, Counter[int]] = {}
    most: dict[str, int] = {}
    for entry in entries:
        kind = "check" if entry["kind"] == "check" else entry["mode"]
        counts.setdefault(kind, Counter()).update({int(n): c for n, c in entry["counts"].items()})
        most[kind] = max(most.get(kind, 0), entry["most"])
    if not counts:
        raise click.UsageError(f"{path} has no histogram for the text {text!r}")
    shares = {kind: [c[n] / sum(c.values()) for n in range(most[kind] + 1)] for kind, c in counts.items()}
    source = ", ".join(sorted({entry["model"] for entry in entries}))
    return Acceptance(f"replayed from {path.name}, measured on {source}, text {text or 'all'}", shares)


def choose(name: str, path: Path, text: str) -> Acceptance:
    """`geometric`, `measured`, or `auto`: measured where the file exists."""
    if name == "geometric" or (name == "auto" and not path.exists()):
        return geometric()
    return measured(path, text)


def histogram(accepted: torch.Tensor) -> dict[str, float]:
    """Share of each number of accepted drafts."""
    values = Counter(accepted.flatten().tolist())
    return {str(n): round(values[n] / accepted.numel(), 4) for n in sorted(values)}


def rounds_until(tokens: int, shares: list[float]) -> int:
    """Rounds after which half of the sequences have so many tokens, when a round keeps n drafts with chance shares[n]."""
    reached, rounds = [1.0] + [0.0] * (tokens - 1), 0  # chance of each number of tokens below the goal
    while sum(reached) > 0.5:
        rounds += 1
        after = [0.0] * tokens
        for have, chance in enumerate(reached):
            for kept, share in enumerate(shares):
                if have + kept + 1 < tokens:
                    after[have + kept + 1] += chance * share
        reached = after
    return rounds
