"""What a run tells of itself at its end."""

from __future__ import annotations

from collections import Counter

from dustin.stats import Stats


def auto(rounds: dict[str, int], forecast: dict[str, float]) -> str:
    stats = Stats(mode="auto", drafter="self", selector="dustin", scoring="heuristic, target layers 1, 2")
    stats.mode_rounds = Counter(rounds)
    stats.plan = {"plan": "ar", "forecast_tokens_per_s": forecast}
    return "\n".join(stats.summary_lines())


def test_a_short_auto_run_speaks_of_nothing_that_it_did_not_use() -> None:
    text = auto({"ar": 19}, {})
    assert "mode auto (ar 19 rounds)" in text
    assert not any(word in text for word in ("drafter", "selector", "plan", "scoring"))
    assert "mode auto (no rounds)" in auto({}, {})


def test_a_longer_one_tells_what_it_chose_and_why() -> None:
    text = auto({"exact": 3, "ar": 2}, {"ar": 10.0, "exact(k=64)": 21.04})
    assert "mode auto (exact 3, ar 2 rounds), drafter self, selector dustin" in text
    assert "auto: last plan ar; tokens/s of a row it expects of ar: 10.0, exact(k=64): 21.0" in text
    assert "scoring heads: heuristic, target layers 1, 2" in text
