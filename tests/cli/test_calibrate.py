"""`dustin calibrate` as a user runs it, on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny_model
from tests.cli.running import dustin, fails

QUICK = ["--context", 300, "--documents", 1, "--tokens", 16, "--allowance", 900, "--max-seconds", 2, "--num-draft-tokens", 3]


def test_a_profile_is_written_and_used_from_then_on(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    draft = tiny_model.write(tmp_path / "draft", seed=4, num_hidden_layers=1)
    environment = environment | {"DUSTIN_CACHE": str(tmp_path / "cache")}
    pair = ["-m", model, "--draft-model", draft, "--backend", "numpy"]
    sparse = ["generate", *pair, "--mode", "sparse", "--budget", 48, "-n", 4, "--ignore-eos", "hello " * 20]
    assert "scoring heads: heuristic" in dustin(environment, *sparse).stderr
    done = dustin(environment, "calibrate", *pair, *QUICK)
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "cache") and "calibrated in" in done.stderr and "tried, KL" in done.stderr
    content = json.loads(path.read_text())
    assert content["version"] == 1 and content["record"]["chosen"]["kl"] <= content["record"]["heuristic"]["kl"]
    said = dustin(environment, *sparse).stderr
    assert f"scoring heads: profile {content['name']}" in said
    assert "scoring heads: heuristic" in dustin(environment, *sparse[:-1], "--profile", "none", sparse[-1]).stderr


def test_a_context_that_does_not_fit_is_named(model: Path, environment: dict[str, str]) -> None:
    quick = [*QUICK[2:], "--context", 9000]
    done = dustin(environment, "calibrate", "-m", model, "--backend", "numpy", *quick)
    fails(done, 2, "context is 9000 tokens and 16 more")
    fails(dustin(environment, "calibrate", "-m", model, "--allowance", 3), 2, "Invalid value for '--allowance'")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--allowance", 192], "the bytes of 192 tokens leave nothing to read at context 300: raise --allowance"),
        (["--own-sets"], "a key of tiny has 8 numbers, expected 32 or more for the compact keys"),
    ],
)
def test_what_cannot_be_searched_is_said_before_prompts_are_read(
    model: Path, environment: dict[str, str], options: list[object], said: str
) -> None:
    done = dustin(environment, "calibrate", "-m", model, "--draft-model", model, "--backend", "torch", *QUICK, *options)
    fails(done, 2, said)
    assert "needles" not in done.stderr


@pytest.mark.parametrize("kind", ["no folder", "folder", "cache"])
def test_a_profile_that_cannot_be_written_is_said_before_the_search(
    model: Path, environment: dict[str, str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").write_text("here")
    out = {"no folder": ["--out", tmp_path / "file" / "p.json"], "folder": ["--out", tmp_path], "cache": []}[kind]
    environment = environment | {"DUSTIN_CACHE": str(tmp_path / "file")}
    done = dustin(environment, "calibrate", "-m", model, "--backend", "numpy", *QUICK, *out)
    assert done.returncode == 2 and "calibrated in" not in done.stderr and str(tmp_path) in done.stderr
    assert (tmp_path / "file").read_text() == "here" and len(list(tmp_path.iterdir())) == 1
