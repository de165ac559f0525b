"""Tables of README and docs are what bench/results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import decode_tables, regime_tables
from bench import rows as result_rows
from bench.tables import PAGES, TABLES, regenerate


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_generated_from_the_result_rows(page: Path) -> None:
    text = page.read_text()
    assert regenerate(text) == text, "run `python -m bench tables`"


def test_every_table_is_shown_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- table:{name} -->" not in text] == []


def test_a_table_says_which_commit_a_row_is_of() -> None:
    made = [{"commit": name} for name in ("old", "new", "older", "new", "new", "old")]
    commits = result_rows.Commits(made)
    assert [commits.mark(row) for row in made] == [" [a]", "", " [b]", "", "", " [a]"]
    assert str(commits) == "new, [a] at old, [b] at older"
    assert str(result_rows.Commits(made[:1])) == "old"


def test_when_tokens_are_read_is_said_of_the_rows_that_say_so() -> None:
    """Older rows waited for them."""
    old = {"mode": "ar", "ratio": 1.0}
    new = {"mode": "sparse", "ratio": 2.0, "reads": "one round behind"}
    peer = {"mode": "transformers generate (sdpa)", "ratio": 0.1}
    assert decode_tables._reads([old, old | {"reads": None}, peer]) == ""
    assert decode_tables._reads([new, new, peer]).startswith("the host reads")
    assert decode_tables._reads([old, new, new, peer]).startswith("in 2 of 3 rows (`reads`) the host reads")


def test_what_the_first_runs_of_auto_began_with_is_said() -> None:
    cold, warm = {"mode": "auto"}, {"mode": "auto", "warm_up_seconds": 3.6}
    assert regime_tables._first_runs([{"mode": "ar"}, cold]).endswith("when nothing of it is recorded")
    mixed = regime_tables._first_runs([cold, warm])
    assert "a warm-up" in mixed and "in rows of older commits its first" in mixed
    assert regime_tables._first_runs([warm, warm | {"warm_up_seconds": 8.4}]).endswith("4 to 8 s")
