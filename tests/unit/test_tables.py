"""README tables are what bench/results say."""

from __future__ import annotations

from bench.tables import README, regenerate


def test_readme_tables_are_generated_from_the_result_rows() -> None:
    text = README.read_text()
    assert "<!-- table:cpu -->" in text
    assert regenerate(text) == text
