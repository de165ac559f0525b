"""The bench of mode exact: what it accepts, what it reports, and that it sees a token that is not plain decoding's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import exact
from dustin.stats import Stats


@pytest.mark.parametrize("pairs", ["32", "32:x", "32:1024,", ":5"])
def test_bad_pairs_are_named(pairs: str) -> None:
    result = CliRunner().invoke(exact.main, ["--exact", pairs])
    assert result.exit_code == 2
    assert f"{pairs!r}, expected block:budget pairs" in result.output


def outcome(tokens: list[list[int]]) -> exact.Outcome:
    gaps = [[0.5, 0.25, 0.01, 2.0]] * len(tokens)
    return exact.Outcome(tokens, [2] * len(tokens), gaps, 1.0, Stats())


def test_a_difference_beyond_the_noise_is_no_near_tie() -> None:
    plain = outcome([[5, 6, 7, 8], [5, 6, 7, 8]])
    base = {"bench": "exact"}
    for at, fine in ((2, True), (1, False), (0, False)):
        tokens = [list(row) for row in plain.tokens]
        tokens[1][at] = 9
        rows = exact.report("exact", replace(plain, tokens=tokens), plain, ["novel", "code"], [0.0, 0.02], base)
        by_kind = {row["kind"]: row for row in rows}
        assert by_kind["novel"]["identical"] == 1 and by_kind["novel"]["near_ties_only"]
        assert by_kind["code"]["identical"] == 0
        assert by_kind["code"]["near_ties_only"] is by_kind["all"]["near_ties_only"] is fine
        assert by_kind["all"]["differences"] == [{"prompt": 1, "token": at, "top2_gap": plain.gaps[1][at]}]
        assert by_kind["all"]["tokens_per_dense_read"] == 1.5


def test_a_text_that_ends_early_differs() -> None:
    plain = outcome([[5, 6, 7, 8]])
    assert exact.differences(replace(plain, tokens=[[5, 6]]), plain) == [{"prompt": 0, "token": 2, "top2_gap": 0.01}]


@pytest.mark.slow
def test_every_mode_equals_plain_decoding_on_random_models(tmp_path: Path) -> None:
    out = tmp_path / "exact.jsonl"
    args = ["--random", "--device", "cpu", "--context", "150", "--per-kind", "1", "--fp32-per-kind", "1", "--dtypes", "float32"]
    result = CliRunner().invoke(exact.main, [*args, "--tokens", "8", "--exact", "8:64", "--output", str(out)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    whole = {row["mode"]: row for row in rows if row["kind"] == "all"}
    assert set(whole) == {"ar", "dense", "exact 8, budget 64"}
    assert all(row["identical"] == row["prompts"] == 2 for row in whole.values())
