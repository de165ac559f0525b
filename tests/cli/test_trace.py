"""`dustin trace` as a user runs it, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import dustin, fails

OPTIONS = ["--budget", 48, "-n", 12, "--ignore-eos", "--recovery-rounds", 4]
TEXT = "It was a long walk, <b>and</b> the rain did not stop & nobody spoke. " * 4


def test_page_and_json_are_written_and_the_answer_is_generates(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    page, raw = tmp_path / "t.html", tmp_path / "t.json"
    done = dustin(environment, "trace", "-m", model, *OPTIONS, "-o", page, "--json", raw, TEXT)
    assert done.returncode == 0, done.stderr
    plain = dustin(environment, "generate", "-m", model, *OPTIONS[:-2], "--mode", "sparse", TEXT)
    assert done.stdout.rstrip("\n") == plain.stdout.rstrip("\n")
    assert f"wrote {page}" in done.stderr and "generated: 12 tokens" in done.stderr
    trace = json.loads(raw.read_text())
    assert trace["info"]["mode"] == "sparse" and len(trace["pieces"]) == len(trace["tokens"]) == trace["prompt_tokens"] + 12
    assert TEXT in "".join(trace["pieces"])
    assert any(r["recovery"] for r in trace["rounds"])
    assert page.read_text().startswith("<!doctype html>") and "<b>and" not in page.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mode", "auto"], "mode 'auto' is not traced"),
        (["--mode", "ar"], "mode 'ar' is not traced"),
        (["-o", "/no/such/folder/t.html"], "there is no folder"),
        (["--budget", "9000"], "no round of mode 'sparse' chooses tokens"),
        (["--recovery-rounds", "-1"], "recovery-rounds"),
        (["--logprobs", "2"], "No such option '--logprobs'"),
    ],
)
def test_what_cannot_work_is_refused(
    args: list[str], message: str, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    fails(dustin(environment, "trace", "-m", model, "-n", 4, "-o", tmp_path / "t.html", *args, TEXT), 2, message)


def test_png_says_what_to_install(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        arguments = ["trace", "-m", model, *OPTIONS, "-o", tmp_path / "t.html", "--png", tmp_path / "t.png", TEXT]
        fails(dustin(environment, *arguments), 2, "pip install matplotlib")
    else:
        done = dustin(environment, "trace", "-m", model, *OPTIONS, "-o", tmp_path / "t.html", "--png", tmp_path / "t.png", TEXT)
        assert done.returncode == 0 and (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
