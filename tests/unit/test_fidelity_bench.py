"""The fidelity bench end to end on tiny random models: every track and kind of question at every context, and its tables."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import fidelity, fidelity_cells, fidelity_documents, fidelity_required, fidelity_tables, selectors
from bench.fidelity_plan import ASKED, BUDGETS, PEERS, TRACKS, scoring_for
from dustin import config, selection
from dustin.generation import load
from dustin.interfaces import Tap
from dustin.reading import read_prompts
from dustin.scoring import Scoring
from tests.tiny_model import write

pytestmark = pytest.mark.usefixtures("short_documents")
CONTEXTS = ("1600", "3200")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(write(folder / name, seed=seed, max_position_embeddings=4096)) for seed, name in enumerate(("target", "draft"))]


def bench(models: list[str], out: Path, *more: str) -> list[dict[str, Any]]:
    args = ["--model", models[0], "--draft-model", models[1], "--device", "cpu", "--dtype", "float32", "--documents", "2"]
    args += ["--tokens", "8", "--lists", "1", "--at-once", "12", "--drift-tokens", "26", "--profile", "none", "--out", str(out)]
    result = CliRunner().invoke(fidelity.main, [*args, "--contexts", ",".join(CONTEXTS), *more])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def made(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return bench(models, tmp_path_factory.mktemp("rows") / "fidelity.jsonl", "--debug")


@pytest.mark.slow
def test_every_track_and_kind_of_question_is_run_at_every_context(made: list[dict[str, Any]]) -> None:
    for context in map(int, CONTEXTS):
        mine = [row for row in made if row["context"] == context]
        assert {row["track"] for row in mine} >= {*ASKED, "chat", "text", "layers"}
        asked = {kind for row in mine if row["track"] in ("tasks", "words") for kind in row["by_kind"]}
        assert asked == {kind for kinds in ASKED.values() for kind in kinds}
        by_selector = {row["selector"] for row in mine if row["track"] == "tasks"}
        assert by_selector == {"dustin", "oracle", "oracle by layer", *PEERS}
        # Short documents have a quarter of the budgets, and none below 64 tokens.
        part = 4 if context <= 2048 else 1
        budgets = {row["budget"] for row in mine if row["track"] == "chat" and row["selector"] == "dustin" and "kl" in row}
        assert budgets >= {b // part for b in BUDGETS if 64 <= b // part < context}
    assert {row["track"] for row in made} - {"needle", "tracking", "qa", "layers"} == set(TRACKS) - {"acceptance", "further"}
    assert sum(row.get("what") == "acceptance" for row in made) == 3 * len(CONTEXTS)


def test_peers_have_no_sets_of_the_layers_own() -> None:
    scoring = Scoring(Tap({0: (0,)}), Tap({}), reselection=Tap({0: (0,)}), reselection_rank=32)
    assert all(scoring_for(name, scoring) is scoring for name in ("dustin", "history", "lookahead"))
    assert all(not scoring_for(name, scoring).reselection.heads for name in ("specattn", "quest", "oracle", "dense"))


@pytest.mark.slow
def test_dense_against_dense_is_no_loss(made: list[dict[str, Any]]) -> None:
    dense = [row for row in made if row["selector"] == "dense"]
    assert dense
    assert all(row["agreement"] == 1 and row["kl"] < 1e-9 and row["share_of_dense_bytes"] == 1 for row in dense)
    assert all(row["accuracy_of_dense"] in (0, 1) for row in made if row.get("mode") == "dense" and "accuracy" in row)


@pytest.mark.slow
def test_more_budget_loses_less(made: list[dict[str, Any]]) -> None:
    cells = [row for row in made if row["selector"] == "dustin" and row["track"] == "text" and row["context"] == 3200]
    plain = {row["budget"]: row["kl"] for row in cells if row["heads"] == "heuristic"}
    assert plain[2048] < plain[512] < plain[128]


@pytest.mark.slow
def test_parts_can_be_run_alone_on_the_same_documents(models: list[str], made: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = bench(models, tmp_path / "part.jsonl", "--tracks", "chat", "--contexts", "1600", "--regions", "3200")
    assert {row["track"] for row in alone} == {"chat"}
    chat = [row for row in made if row["track"] == "chat" and row["context"] == 1600 and "kl" in row]

    def cell(row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("selector", "heads", "budget", "bytes_of_budget", "top_mass", "lookahead_lag")
        return tuple(row.get(name) for name in names)

    whole = {cell(row): row["kl"] for row in chat}
    assert len(alone) > 20
    # Two runs may break a near tie of scores apart, and a random model makes much of one token: a cell or two may differ.
    assert sum(row["kl"] == whole[cell(row)] for row in alone) >= len(alone) - 2


@pytest.mark.slow
def test_long_answers_need_no_other_context(models: list[str], tmp_path: Path) -> None:
    alone = bench(models, tmp_path / "drift.jsonl", "--tracks", "drift", "--contexts", "1600")
    assert [(row["track"], row["rectify"], row["tokens"]) for row in alone] == [("drift", None, 26), ("drift", 256, 26)]


@pytest.mark.slow
def test_the_tables_show_the_rows(made: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in made))
    monkeypatch.setattr(fidelity_required, "OUT", out)
    monkeypatch.setattr(fidelity_tables, "OUT", out)
    cell = next(row for row in made if row["track"] == "text" and row["budget"] == 1024 and row["selector"] == "dustin")
    asked = fidelity_required.required()
    met = "yes" if cell["perplexity_ratio"] <= 1.04 else "**no**"
    line = next(line for line in asked.splitlines() if "text perplexity ratio" in line)
    assert f"| {cell['perplexity_ratio']:.3f} [" in line and line.endswith(f"] {met} |")
    assert "| text: perplexity ratio | 1024 |" in fidelity_required.budgets()
    # Random models answer nothing: none of the questions' demands is met, whatever reads them.
    unmet = [line.split(" | ") for line in fidelity_required.unmet().splitlines() if line.startswith("| needles, k = 512")]
    assert [line[2:6] for line in unmet if line[1] == "3200"] == [["0.00, at least 0.98", *["0.00"] * 3]]
    assert "common words" in fidelity_tables.kinds()
    assert "dense attention, share of all points" in fidelity_tables.tasks()


def test_documents_come_back_after_a_shorter_context(models: list[str]) -> None:
    session = load(*models, device="cpu", dtype="float32")
    documents = fidelity_documents.make(session.tokenizer, [1600], 2, 8, 0)
    pair = fidelity_cells.Pair(session, documents, 1600, 64, 256, 0)
    whole = [reading.cache.dump(1) for reading in pair.readings]
    pair.settle(1500)
    for reading in pair.readings:
        read_prompts(session.backend, reading.model, reading.cache, [[7] * 40] * 2, Tap({}), 256)
    pair.settle(1600)
    for reading, rows in zip(pair.readings, whole, strict=True):
        assert reading.cache.lengths == (1600, 1600)
        for mine, before in zip(reading.cache.dump(1), rows, strict=True):
            np.testing.assert_allclose(mine, before, rtol=1e-3, atol=1e-4)


def test_a_batch_of_questions_lets_its_caches_go_before_the_next(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    session = load(*models, device="cpu", dtype="float32")
    documents = fidelity_documents.make(session.tokenizer, [1600], 1, 8, 0)
    pair = fidelity_cells.Pair(session, documents, 1600, 64, 256, 2)
    kind, alive, taken = type(pair.readings[0].cache), [], []
    take = kind.take

    def counted(cache, rows, capacity=None):
        gc.collect()
        alive.append(sum(ref() is not None for ref in taken))
        made = take(cache, rows, capacity)
        taken.append(weakref.ref(made))
        return made

    monkeypatch.setattr(kind, "take", counted)
    scoring = fidelity_cells.named_scoring("heuristic", session, {})
    ways = [fidelity_cells.Way("dense", "dense", "dustin", scoring, "heuristic", 256)]
    asked = fidelity_cells.answer(pair, 1600, 3, ways, float("inf"))
    assert len(asked) == len(ways[0].scores) == 3
    # Three batches, each of a target's and a draft's copy: none finds one of those before it.
    assert alive == [0, 1] * 3


def test_an_unknown_track_is_named(models: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "rows.jsonl")
    args = ["--model", models[0], "--draft-model", "", "--device", "cpu", "--tracks", "tasks,songs", "--out", out]
    result = CliRunner().invoke(fidelity.main, args)
    assert result.exit_code == 2
    assert "--tracks 'songs': expected some of tasks, chat" in result.output


def test_all_selectors_stand_in_one_table(models: list[str], tmp_path: Path) -> None:
    args = ["--model", models[0], "--draft-model", models[1], "--device", "cpu", "--dtype", "float32", "--context", "1600"]
    args += ["--documents", "2", "--tokens", "13", "--budget", "256", "--profile", "none", "--out", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(selectors.main, args)
    assert result.exit_code == 0, result.output
    lines = [line.split("|")[1].strip() for line in result.stdout.splitlines() if line.startswith("|")][2:]
    assert lines == list(selectors.SELECTORS)


def test_a_selector_of_someones_own_stands_beside_the_others(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that always keeps the end of the text is what `streaming` is."""
    monkeypatch.setattr(selectors, "ADDED_SELECTORS", added := {})
    for module in (config, selection):
        monkeypatch.setattr(module, "ADDED_SELECTORS", added)
    (tmp_path / "mine.py").write_text(
        "import dustin\n"
        "from dustin.selectors.base import BaseSelector\n"
        "class Newest(BaseSelector):\n"
        "    def select(self, context):\n"
        "        if self._fits(context): return None\n"
        "        recent = self._options.budget - self._options.num_sink_tokens\n"
        "        return self._choose(context.backend, None, None, context.lengths, recent=recent)\n"
        "dustin.add_selector('newest', Newest)\n"
    )
    args = ["--model", models[0], "--draft-model", "", "--device", "cpu", "--dtype", "float32", "--context", "1600"]
    args += ["--documents", "2", "--tokens", "13", "--budget", "256", "--profile", "none", "--select", "newest,streaming,history"]
    result = CliRunner().invoke(selectors.main, [*args, "--out", str(tmp_path / "a.jsonl")])
    assert result.exit_code == 2 and "--select 'newest': expected some of dustin, " in result.output
    result = CliRunner().invoke(selectors.main, [*args, "--plugin", str(tmp_path / "mine.py"), "--out", str(tmp_path / "b.jsonl")])
    assert result.exit_code == 0, result.output
    mine, streaming, history = (line.split("|")[2:] for line in result.stdout.splitlines()[-3:])
    assert mine == streaming != history
