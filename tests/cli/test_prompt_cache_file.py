"""--prompt-cache-file on the command line: a document is read once, and files of other models are refused."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from tests import tiny_model
from tests.cli.running import dustin, fails, first_output, popen


def test_generate_reads_a_document_once(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a document of some length. " * 8)
    kept = tmp_path / "a.kv"
    ask = ["generate", "-m", model, "-n", 6, "--json", "-f", tmp_path / "a.txt"]
    cached = [*ask, "--prompt-cache-file", kept]
    assert json.loads(dustin(environment, *cached, "one?").stdout)["stats"]["reused_prompt_tokens"] == 0
    again = dustin(environment, *cached, "another?")
    plain = json.loads(dustin(environment, *ask, "another?").stdout)
    assert json.loads(again.stdout)["tokens"] == plain["tokens"]
    assert json.loads(again.stdout)["stats"]["reused_prompt_tokens"] > 200 and f"prompt cache {kept}: " in again.stderr


def test_ctrl_c_keeps_what_was_read(
    slow: Path, environment: dict[str, str], tmp_path: Path, start: list[subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "a.txt").write_text("a document of some length. " * 8)
    ask = ["generate", "-m", slow, "-f", tmp_path / "a.txt", "--prompt-cache-file", tmp_path / "a.kv", "what?"]
    start.append(popen(environment, *ask, "-n", 40_000, "--ignore-eos"))
    first_output(start[0])
    start[0].send_signal(signal.SIGINT)
    start[0].communicate(timeout=60)
    assert start[0].returncode == 130
    again = dustin(environment, *ask, "-n", 2, "--json")
    assert json.loads(again.stdout)["stats"]["reused_prompt_tokens"] > 200


def test_a_chat_goes_on_from_its_file(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    draft = tiny_model.write(tmp_path / "draft", seed=3, num_hidden_layers=1)
    chat = ["chat", "-m", model, "--draft-model", draft, "-n", 6, "--prompt-cache-file", tmp_path / "c.kv"]
    save = tmp_path / "c.json"
    first = dustin(environment, *chat, stdin=f"{'words ' * 20}\n/save {save}\n")
    second = dustin(environment, *chat, stdin=f"/load {save}\nmore\n/stats\n")
    assert first.returncode == second.returncode == 0, second.stderr
    assert "of them reused)" in second.stderr


def test_what_cannot_work_is_refused(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    generate = ["generate", "-n", 2, "hi", "--prompt-cache-file"]
    assert dustin(environment, *generate, tmp_path / "a.kv", "-m", model).returncode == 0
    other = tiny_model.write(tmp_path / "other", seed=5)
    fails(dustin(environment, *generate, tmp_path / "a.kv", "-m", other), 2, "holds the KV of tiny", "delete this one")
    fails(dustin(environment, *generate, tmp_path / "none" / "a.kv", "-m", model), 2, "there is no folder")
    fails(dustin(environment, *generate, tmp_path, "-m", model), 2, "is a directory")
    (tmp_path / "text.kv").write_text("notes of mine, not to be written over")
    fails(dustin(environment, *generate, tmp_path / "text.kv", "-m", model), 2, "cannot read the prompt cache")
    assert (tmp_path / "text.kv").read_text().startswith("notes")
