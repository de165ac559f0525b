"""What `bench decode` replays and how it finds the best setting of a mode."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

pytest.importorskip("torch")

from bench import decode_acceptance as acceptance
from bench.regimes import best_settings


def test_a_table_brings_what_is_expected_of_it():
    replayed = acceptance.geometric()
    assert replayed.expected("sparse", 5) == pytest.approx(sum(0.8**n for n in range(6)))
    table = replayed.table("sparse", 5, 256, 8, seed=1)
    assert table.shape == (256, 8)
    assert float(table.float().mean()) + 1 == pytest.approx(replayed.expected("sparse", 5), abs=0.01)
    assert int(table.max()) == 5


def test_measured_histograms_are_merged_by_kind_and_cut_at_the_drafts_asked_for(tmp_path: Path):
    entries = [
        {"kind": "round", "mode": "sparse", "text": "code", "model": "a", "most": 4, "counts": {"0": 1, "4": 3}},
        {"kind": "round", "mode": "sparse", "text": "novel", "model": "a", "most": 4, "counts": {"0": 3, "2": 1}},
        {"kind": "check", "mode": "exact", "text": "code", "model": "a", "most": 8, "counts": {"8": 2}},
    ]
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"entries": entries}))
    every = acceptance.measured(path, "")
    assert every.expected("sparse", 4) == pytest.approx(1 + (3 * 4 + 2) / 8)
    assert every.expected("sparse", 1) == pytest.approx(1 + 4 / 8)
    assert acceptance.measured(path, "code").expected("sparse", 4) == pytest.approx(4.0)
    assert every.expected("check", 8) == 9.0
    # A longer block goes on as the measured one: kept whole there, so here; else with the mean rate.
    assert every.expected("check", 20) == 21.0
    mixed = acceptance.Acceptance("", {"check": [0.5, 0.0, 0.5]})
    longer = mixed.shares_of("check", 4)
    assert sum(longer) == pytest.approx(1) and longer[:2] == [0.5, 0.0] and longer[4] == pytest.approx(0.25)
    assert every.most("dense") == 128
    with pytest.raises(click.UsageError, match="measured up to 4"):
        every.expected("sparse", 5)
    with pytest.raises(click.UsageError, match="no histogram for the text 'speech'"):
        acceptance.measured(path, "speech")


def test_rounds_go_on_until_half_of_the_rows_have_their_tokens():
    assert acceptance.rounds_until(1, [1.0]) == 1
    # One token a round, or three.
    assert acceptance.rounds_until(3, [0.6, 0.0, 0.4]) == 2
    assert acceptance.rounds_until(3, [0.4, 0.0, 0.6]) == 1
    assert acceptance.rounds_until(7, [1.0]) == 7


def test_the_best_setting_of_a_mode_by_the_parts_of_a_round():
    def parts(draft: float, choose: float, rectify: float = 100.0) -> dict[str, dict[str, float]]:
        return {
            "draft": {"2": 2 * draft, "6": 6 * draft}, "dense_draft": {"3": 9.0}, "verify": {"3": 3.0, "9": 5.0},
            "check": {"1": 10.0, "33": 12.0}, "choose": {"1": choose}, "rectify": {"160": rectify},
        }  # fmt: skip

    replayed = acceptance.geometric()
    cheap = best_settings(replayed, parts(0.1, 0.2), 512, 4)
    assert cheap["ar"] == {"mode": "ar", "tokens": 1.0, "ms": 10.0}
    assert cheap["dense"]["draft"] == "sparse"

    def speed(cell: dict[str, dict[str, float]], mode: str) -> float:
        return cell[mode]["tokens"] / cell[mode]["ms"]

    assert speed(cheap, "sparse") > speed(cheap, "rectified") > speed(cheap, "exact")
    # A slow dense pass costs the rectified mode alone.
    slow = best_settings(replayed, parts(0.1, 0.2, rectify=1000.0), 512, 4)
    assert speed(slow, "rectified") < speed(cheap, "rectified") and slow["sparse"] == cheap["sparse"]
    # A costly choice of the set: the draft reads everything instead, and drafts less.
    dear = best_settings(replayed, parts(0.1, 50.0), 512, 4)
    assert dear["dense"]["draft"] == "dense"
    assert dear["dense"]["num_draft_tokens"] < cheap["dense"]["num_draft_tokens"]


def test_reads_come_a_call_behind_and_none_is_lost():
    import torch

    from bench.decode_rounds import Reads

    made = torch.zeros(2, dtype=torch.int32)
    reads, seen = Reads(made), []
    for n in range(4):
        made.fill_(n)
        seen += reads.ask()
        # What comes after the question does not change the answer.
        made.fill_(-1)
    assert seen + reads.last() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("size", [12, 15, 17, 20])
def test_drafts_that_no_row_is_left_for_are_cut_evenly(size):
    import torch

    from bench.decode_exact import cut_drafts

    provisional, last = torch.tensor([2, 1, 4, 1], dtype=torch.int32), 2
    wanted = provisional + 1 + last
    for turn in range(4):
        cut = cut_drafts(wanted, size, torch.tensor([turn]))
        assert int((wanted - cut).sum()) == min(size, int(wanted.sum()))
        assert int(cut.max()) - int(cut.min()) <= 1
        assert int(cut.min()) >= 0
