"""The bench of the selector's variants end to end on tiny random models, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import variants
from tests.tiny_model import write

pytestmark = pytest.mark.usefixtures("short_documents")
NAMES = (
    "heuristic", "oracle", "oracle by layer", "rectified every 12 tokens", "twice the budget", "both decays .85",
    "128 recent tokens", "maxima over rows and layers and kv heads", "the question's scores kept",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    models = [str(write(folder / name, seed=seed, max_position_embeddings=4096)) for seed, name in enumerate(("target", "draft"))]
    out = folder / "variants.jsonl"
    args = ["--model", models[0], "--draft-model", models[1], "--device", "cpu", "--dtype", "float32", "--documents", "1"]
    args += ["--context", "1400", "--regions", "", "--tokens", "20", "--questions", "5", "--at-once", "3", "--budget", "256"]
    result = CliRunner().invoke(variants.main, [*args, "--variants", ",".join(NAMES), "--out", str(out), "--debug"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_every_variant_is_asked_and_replayed(made: list[dict[str, Any]]) -> None:
    asked = {row["selector"]: row for row in made if row["track"] == "tasks"}
    assert set(asked) == {*NAMES, "dense attention", "dense attention once more"}
    assert all(row["questions"] == 5 for row in asked.values())
    assert asked["dense attention once more"]["accuracy"] == asked["dense attention"]["accuracy"]
    kl = {(row["track"], row["selector"], row["budget"]): row["kl"] for row in made if "kl" in row}
    for track in ("chat", "text"):
        # What the window looks at is not what any prediction chooses, and all variants choose sets of their own.
        sets = [kl[track, name, 256] for name in ("heuristic", "both decays .85", "maxima over rows and layers and kv heads")]
        assert len({round(x, 9) for x in [*sets, kl[track, "oracle", 256], kl[track, "oracle by layer", 256]]}) == 5
        assert kl[track, "twice the budget", 512] == kl[track, "heuristic", 512]


@pytest.mark.slow
def test_the_table_has_a_line_a_variant(made: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in made))
    monkeypatch.setattr(variants, "OUT", out)
    table = variants.table()
    assert all(f"| {name} |" in table for name in NAMES) and "5 questions at budget 256" in table


def test_an_unknown_variant_is_named() -> None:
    result = CliRunner().invoke(variants.main, ["--variants", "heuristic,none such", "--model", "x"])
    assert result.exit_code == 2 and "'none such'" in result.output
