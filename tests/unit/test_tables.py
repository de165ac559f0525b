"""Tables of README and docs are what bench/results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.tables import PAGES, TABLES, regenerate


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_generated_from_the_result_rows(page: Path) -> None:
    text = page.read_text()
    assert regenerate(text) == text, "run `python -m bench tables`"


def test_every_table_is_shown_somewhere() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- table:{name} -->" not in text] == []
