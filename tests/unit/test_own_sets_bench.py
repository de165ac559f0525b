"""The bench of own sets end to end on tiny random models: every part at every context, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import limit_tables, own_sets
from tests.tiny_model import write

pytestmark = pytest.mark.usefixtures("short_documents")
CONTEXTS = (1400,)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    # Keys of 64 numbers: what the compact keys of 64 want.
    sizes = {"head_dim": 64, "max_position_embeddings": 4096}
    return [str(write(folder / name, seed=seed, **sizes)) for seed, name in enumerate(("target", "draft"))]


def bench(models: list[str], out: Path, *more: str) -> Any:
    args = ["--model", models[0], "--draft-model", models[1], "--device", "cpu", "--dtype", "float32", "--documents", "1"]
    args += ["--tokens", "8", "--at-once", "8", "--drift-tokens", "26", "--choosing", "0", "--out", str(out)]
    return CliRunner().invoke(own_sets.main, [*args, "--contexts", ",".join(map(str, CONTEXTS)), *more])


@pytest.fixture(scope="module")
def made(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("rows") / "own_sets.jsonl"
    result = bench(models, out, "--debug")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_part_has_its_rows(made: list[dict[str, Any]]) -> None:
    for context in CONTEXTS:
        # Short documents have a quarter of the budgets.
        part = 4 if context <= 2048 else 1
        mine = [row for row in made if row["context"] == context]
        replayed = {(row["track"], row["selector"], row["heads"], row["budget"]) for row in mine if "kl" in row}
        for cell in own_sets.CELLS:
            if not cell.bytes_of:
                assert ("chat", cell.selector, cell.heads, cell.budget // part) in replayed
        assert ("text", "dustin", own_sets.CELLS[1].heads, 1024 // part) in replayed
        asked = {(row["mode"], row["heads"], row["budget"]) for row in mine if row["track"] == "tasks"}
        ways = [(heads.format("0"), budget // part) for heads, budget in own_sets.ASKED]
        assert asked == {("dense", *ways[0]), *(("sparse", *way) for way in ways)}
        assert ("chat", "dustin", "none+at0c64kv", 1024 // part) in replayed
        accepted = [row for row in mine if row.get("what") == "acceptance"]
        assert [(row["mode"], row["heads"], row["sparse_draft"]) for row in accepted] == [
            ("dense", "heuristic", True), ("sparse", own_sets.OWN, True), ("sparse", own_sets.OWN, False),
            ("sparse", own_sets.AHEAD, True), ("sparse", "heuristic", True),
        ]  # fmt: skip
    drift = [row for row in made if row["track"] == "drift"]
    assert [(row["context"], row["rectify"]) for row in drift] == [(max(CONTEXTS), None), (max(CONTEXTS), 256)]


def test_own_sets_are_chosen_in_the_forward_and_whole_keys_come_closest_to_dense_attention(made: list[dict[str, Any]]) -> None:
    chat = {row["heads"]: row for row in made if row["track"] == "chat" and row["context"] == CONTEXTS[0] and "kl" in row}
    assert "chosen anew at layers 0-1 by kv head by compact keys of 64" in chat["none+every1c64kv"]["scoring"]
    assert 0 < chat["none+every1c64kv"]["kl"]
    # Compact keys are read instead of whole ones.
    assert chat["none+every1c64kv"]["share_of_dense_bytes"] < chat["none+every1kv"]["share_of_dense_bytes"]


def test_the_tables_name_every_form(made: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "own_sets.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in made))
    monkeypatch.setattr(limit_tables, "OWN", out)
    assert "own sets by kv head, compact keys of 64, k=256" in limit_tables.own_sets()
    assert "own sets by kv head, compact keys of 64, 1 layers choose for all, k=256" in limit_tables.own_sets()
    asked = limit_tables.own_sets_questions()
    assert "own sets by kv head, compact keys of 64, k=128" in asked
    assert "tasks 1400" in asked
    accepted = limit_tables.own_sets_acceptance()
    assert "own sets by kv head, compact keys of 64, k=256, dense draft" in accepted
    assert "dense speculation" in accepted


def test_unknown_tracks_are_named(models: list[str], tmp_path: Path) -> None:
    result = bench(models, tmp_path / "rows.jsonl", "--tracks", "chat,taxt")
    assert result.exit_code == 2
    assert "--tracks 'taxt': expected some of chat, text, further, questions, acceptance, drift" in result.output


def test_the_tables_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"card": "a card", "dtype": "bfloat16", "model": "Big + small shapes", "command": "bench decode", "commit": "abc"}
    synthetic = common | {"weights": "random", "context": 31744, "batch": 8, "acceptance": "geometric"}
    real = common | {"weights": "real", "text": "code", "context": 8192, "batch": 1}
    rows = [
        synthetic | {"mode": "ar", "tokens_per_second": 100.0, "ratio": 1.0, "budget": None},
        synthetic
        | {
            "mode": "own sets, sparse draft",
            "tokens_per_second": 250.4,
            "ratio": 2.5,
            "budget": 1024,
            "verify_attention_us": 3200.0,
        },
        real | {"mode": "sparse, fidelity high", "tokens_per_second": 70.0, "ratio": 1.4, "acceptance_length": 3.21},
    ]
    out = tmp_path / "speed.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(limit_tables, "SPEED", out)
    speed = limit_tables.own_sets_speed()
    assert "| Big: ar | 100 (1.00x) |" in speed
    assert "| Big: own sets, sparse draft, k=1024 | 250 (2.50x, choosing and reading 3.2 ms) |" in speed
    assert "fidelity high" not in speed
    assert "| sparse, fidelity high | 70 (1.40x, 3.21 a round) |" in limit_tables.own_sets_engine()
