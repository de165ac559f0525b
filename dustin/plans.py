"""Ways to spend a round, and what one showed: the words of mode auto's planner."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """One way to spend the next round. `exact_block` and `budget` are 0 where a plan has none of its own."""

    mode: str
    num_draft_tokens: int = 0
    exact_block: int = 0
    budget: int = 0

    @property
    def provisional(self) -> int:
        """Tokens of a block that sparse rounds propose; the drafts that end it are left to the dense check alone."""
        return max(1, self.exact_block - self.num_draft_tokens)

    @property
    def family(self) -> tuple[str, int]:
        """What must be seen by itself to be known: mode and budget."""
        return self.mode, self.budget

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Kinds and sizes of the rounds that it takes, as `Costs` has them."""
        if self.mode == "exact":
            return [(f"sparse {self.budget}", self.num_draft_tokens), ("check", self.exact_block)]
        return [("plain", 0) if self.mode == "ar" else (self.mode, self.num_draft_tokens)]

    def __str__(self) -> str:
        block = f", block {self.exact_block}" if self.exact_block else ""
        budget = f", budget {self.budget}" if self.budget else ""
        return f"{self.mode}, {self.num_draft_tokens} drafts{block}{budget}" if self.mode != "ar" else "ar"


@dataclass
class Look:
    """What one round of `kind` (plain, dense, sparse, check, last) showed: drafts planned, those kept of each row, seconds.

    For a check `offered` has the provisional tokens of each row that it covered. `last` are the drafts that it judged after them:
    seconds of drafting them, and those kept of rows where all before them were.
    """

    kind: str
    planned: int
    accepted: list[int]
    seconds: float
    offered: list[int] = field(default_factory=list)
    # False where the round could not be begun ahead, as those that follow one of its kind are: it took longer than they will.
    warm: bool = True
