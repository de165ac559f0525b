"""Calibration of own sets: which layers choose, for whom else, by what."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dustin.calibrate_command import calibrate
from dustin.interfaces import ModelSpec
from dustin.own_set_search import by_importance, candidates, choosing, held
from dustin.scoring import heuristic, kv_heads_of
from tests.tiny_model import write

SPEC = ModelSpec("m", "a", 8, 8, 2, 64, 100, 4096, "bfloat16", "f", bytes_per_kv_token=8 * 2 * 2 * 64 * 2)


def test_the_layers_that_choose_are_the_best_of_all_choices() -> None:
    rng = random.Random(0)
    shares = [[1.0 if i == j else rng.random() for j in range(7)] for i in range(7)]

    def total(chosen: tuple[int, ...]) -> float:
        ends = [*chosen[1:], 7]
        return sum(sum(shares[first][first:end]) for first, end in zip(chosen, ends, strict=True))

    for count in (1, 2, 3, 5, 7):
        every = [(0, *rest) for rest in itertools.combinations(range(1, 7), count - 1)]
        assert choosing(shares, count) == max(every, key=total)
    assert choosing(shares, 9) == tuple(range(7))


def test_candidates_have_fewer_layers_that_serve_those_after_them() -> None:
    alike = [[1.0 if i // 4 == j // 4 else 0.1 for j in range(8)] for i in range(8)]
    made = candidates(heuristic(SPEC, None), SPEC, alike)
    assert {scoring.reselection_rank for scoring in made} == {32, 64}
    assert all(scoring.reselection_by_kv_head for scoring in made)
    every = [scoring for scoring in made if len(scoring.reselection.heads) == 8]
    assert every and not any(scoring.reselection_reuse for scoring in every)
    two = [scoring for scoring in made if len(scoring.reselection.heads) == 2]
    assert two and all(list(scoring.reselection.heads) == [0, 4] and scoring.reselection_reuse for scoring in two)
    assert kv_heads_of(SPEC) == [(0, 1, 2, 3), (4, 5, 6, 7)]


class Measured:
    """A calibrator whose KL rises by what is known of each layer that does not choose."""

    def __init__(self, rises: dict[int, float], patience: int = 100) -> None:
        self.rises, self.left, self.single = rises, patience, dict[str, dict[str, float]]()
        self.target = SimpleNamespace(spec=SPEC)

    def trial(self, scoring):
        self.left -= 1
        missing = set(range(8)) - set(scoring.reselection.heads)
        assert scoring.reselection_reuse == bool(missing)
        return None if self.left < 0 else SimpleNamespace(kl=0.1 + sum(self.rises[layer] for layer in missing), scoring=scoring)


def test_layers_without_which_the_kl_rises_most_choose() -> None:
    calibrator = Measured({1: 0.0, 2: 0.5, 3: 0.01, 4: 0.02, 5: 0.9, 6: 0.0, 7: 0.03})
    made = by_importance(calibrator, heuristic(SPEC, None), 64)  # type: ignore[arg-type]
    chosen = [list(scoring.reselection.heads) for scoring in made]
    assert chosen == [[0, 2, 3, 4, 5, 7], [0, 2, 5, 7], [0, 2, 5], [0, 5]]
    assert list(calibrator.single["own set"])[:2] == ["5", "2"]
    assert by_importance(Measured(calibrator.rises, 5), heuristic(SPEC, None), 64) == []  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write(folder / "target", head_dim=32, num_hidden_layers=3, max_position_embeddings=2048))


def test_a_layer_holds_most_of_its_own_attention(model: str) -> None:
    from dustin.calibration import CalibrationOptions, record
    from dustin.generation import load

    session = load(model, None, device="cpu", dtype="float32")
    options = CalibrationOptions(context=400, documents=2, tokens=14)
    replay = record(session.backend, session.target, None, session.tokenizer, options, lambda line: None)
    shares = held(replay, budget=60)
    assert len(shares) == 3 and all(len(row) == 3 for row in shares)
    for j in range(3):
        assert max(range(3), key=lambda i: shares[i][j]) == j
        assert all(0 < shares[i][j] <= 1 for i in range(3))


def test_calibrate_writes_a_profile_of_own_sets(model: str, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    args = ["--model", model, "--device", "cpu", "--dtype", "float32", "--context", "400", "--documents", "2", "--tokens", "16"]
    args += ["--allowance", "300", "--max-seconds", "20", "--own-sets", "--out", str(out)]
    result = CliRunner().invoke(calibrate, args)
    assert result.exit_code == 0, result.output
    scoring = json.loads(out.read_text())["scoring"]
    assert scoring["reselection_rank"] == 32 and scoring["reselection_by_kv_head"]
    assert 1 <= len(scoring["reselection_heads"]) <= 3
    assert scoring["reselection_reuse"] == (len(scoring["reselection_heads"]) < 3)
    assert "own sets: KL" in result.output
    record = json.loads(out.read_text())["record"]
    assert record["one_shared_set"]["kl"] > 0 and record["chosen"]["kl"] > 0


def test_a_pair_with_a_profile_keeps_its_scoring(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second calibration begins with the first one's profile, and searches own sets alone."""
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    args = ["--model", model, "--device", "cpu", "--dtype", "float32", "--context", "400", "--documents", "1", "--tokens", "16"]
    args += ["--allowance", "300", "--max-seconds", "3"]
    first = CliRunner().invoke(calibrate, args)
    assert first.exit_code == 0, first.output
    before = json.loads(Path(first.output.splitlines()[-1]).read_text())
    second = CliRunner().invoke(calibrate, [*args, "--own-sets", "--out", str(tmp_path / "own.json")])
    assert second.exit_code == 0, second.output
    assert "one more target layer" in first.output and "one more target layer" not in second.output
    assert "own sets of" in second.output
    after = json.loads((tmp_path / "own.json").read_text())
    assert after["scoring"]["target_heads"] == before["scoring"]["target_heads"]
    assert after["scoring"]["reselection_heads"]


def test_bytes_that_leave_nothing_beside_compact_keys_are_named(model: str, tmp_path: Path) -> None:
    args = ["--model", model, "--device", "cpu", "--dtype", "float32", "--context", "900", "--documents", "1", "--tokens", "16"]
    args += ["--allowance", "192", "--max-seconds", "10", "--own-sets", "--out", str(tmp_path / "p.json")]
    result = CliRunner().invoke(calibrate, args)
    assert result.exit_code != 0
    assert "leave nothing to read" in str(result.exception or result.output)
