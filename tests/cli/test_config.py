"""Configuration files and variables: precedence, refusals, `dustin config` and `dustin completion`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from dustin import cli as command_line
from dustin.config_file import config_path, read_config, variables, walk
from dustin.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory, no user configuration, no variables of ours."""
    for name in os.environ:
        if name.startswith("DUSTIN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def parse(monkeypatch: pytest.MonkeyPatch, args: list[str], name: str = "generate") -> dict[str, object]:
    """What `args` mean, after environment and files: the command's body is replaced."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(command_line.cli.commands[name], "callback", lambda **values: seen.update(values))
    assert command_line.run(args) == 0
    return seen


def user_file(text: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text)


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert command_line.run([*args, "--json"]) == 0
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)["options"]}


# Precedence.


def test_flag_beats_variable_beats_local_file_beats_user_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ["generate", "hi"]
    assert parse(monkeypatch, name)["budget"] == 1024
    user_file("budget = 100\nseed = 3\n")
    assert parse(monkeypatch, name)["budget"] == 100
    (place / "dustin.toml").write_text("budget = 200\n")
    assert (parse(monkeypatch, name)["budget"], parse(monkeypatch, name)["seed"]) == (200, 3)
    rows = shown(capsys, "config")
    assert (rows["budget"]["source"], rows["budget"]["value"]) == ("file dustin.toml", 200)
    assert rows["seed"]["source"] == f"file {config_path()}" and rows["top-k"]["source"] == "default"
    monkeypatch.setenv("DUSTIN_BUDGET", "300")
    assert parse(monkeypatch, name)["budget"] == 300
    assert shown(capsys, "config")["budget"] == {"key": "budget", "value": 300, "source": "environment DUSTIN_BUDGET"}
    assert parse(monkeypatch, [*name, "--budget", "400"])["budget"] == 400


@pytest.mark.parametrize(
    ("name", "value", "parameter", "meant"),
    [
        ("DUSTIN_TEMP", "0.5", "temperature", 0.5),
        ("DUSTIN_TEMPERATURE", "0.5", "temperature", 0.5),
        ("DUSTIN_SELECT", "history", "selector", "history"),
        ("DUSTIN_SELECTOR", "history", "selector", "history"),
        ("DUSTIN_JSON", "true", "as_json", True),
        ("DUSTIN_LOGPROBS", "2", "top_logprobs", 2),
        ("DUSTIN_FILE", "a.txt", "files", ("a.txt",)),
        ("DUSTIN_SPARSE_DRAFT", "no", "sparse_draft", False),
    ],
)
def test_variables_are_called_as_the_flags_are(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, parameter: str, meant: object
) -> None:
    monkeypatch.setenv(name, value)
    assert parse(monkeypatch, ["generate", "hi"])[parameter] == meant


def test_a_variable_of_a_wrong_value_is_named_as_it_was_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUSTIN_TEMP", "warm")
    assert command_line.run(["generate", "hi"]) == 2
    assert "(from the variable DUSTIN_TEMP)" in capsys.readouterr().err
    monkeypatch.setenv("DUSTIN_TEMP", "0.5")
    assert shown(capsys, "config")["temp"]["source"] == "environment DUSTIN_TEMP"


def test_a_section_beats_the_top_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("budget = 300\nmax-tokens = 5\ntemp = 0.5\n[generate]\nmax_tokens = 6\nstop = ['a', 'b']\n[chat]\nseed = 9\n")
    values = parse(monkeypatch, ["--config", str(file), "generate", "--seed", "3", "hi"])
    assert (values["budget"], values["max_tokens"], values["temperature"], values["seed"]) == (300, 6, 0.5, 3)
    assert values["stop"] == ("a", "b")
    assert parse(monkeypatch, ["--config", str(file), "chat"], "chat")["seed"] == 9


def test_a_value_at_the_top_may_suit_some_commands_only(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "dustin.toml").write_text("max-tokens = 1\n")
    assert parse(monkeypatch, ["generate", "hi"])["max_tokens"] == 1
    assert command_line.run(["bench"]) == 2
    assert "1 is not in the range x>=2 (from dustin.toml)" in capsys.readouterr().err
    (place / "dustin.toml").write_text("[bench]\nmax-tokens = 1\n")
    assert command_line.run(["generate", "hi"]) == 2
    assert "dustin.toml: max-tokens: 1 is not in the range x>=2" in capsys.readouterr().err


def test_a_layer_is_a_whole_number_in_files_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "dustin.toml").write_text("mode = 'sparse'\ndense-layers = 1.5\n")
    assert command_line.run(["generate", "hi"]) == 2
    assert "dense_layers is (1.5,), expected whole numbers" in capsys.readouterr().err


def test_config_names_the_only_file(monkeypatch: pytest.MonkeyPatch, place: Path, tmp_path: Path) -> None:
    (place / "dustin.toml").write_text("budget = 200\n")
    (tmp_path / "c.toml").write_text("seed = 1\n")
    values = parse(monkeypatch, ["--config", str(tmp_path / "c.toml"), "generate", "hi"])
    assert (values["budget"], values["seed"]) == (1024, 1)
    monkeypatch.setenv("DUSTIN_CONFIG", str(tmp_path / "c.toml"))
    assert parse(monkeypatch, ["generate", "hi"])["budget"] == 1024


def test_sections_of_sub_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[models.fetch]\nforce = true\n")
    seen: dict[str, object] = {}
    fetch = command_line.cli.commands["models"].commands["fetch"]  # type: ignore[attr-defined]
    monkeypatch.setattr(fetch, "callback", lambda **values: seen.update(values))
    assert command_line.run(["--config", str(tmp_path / "c.toml"), "models", "fetch"]) == 0
    assert seen["force"] is True


# Refusals.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budgte = 3", "no command has an option 'budgte'; nearest: budget"),
        ("zzz = 3", "no command has an option 'zzz'; `dustin config` lists what there is"),
        ("[generat]\nbudget = 3", "no command is called 'generat'; nearest: generate"),
        ("[generate]\nmax-token = 3", "`dustin generate` has no option 'max-token'; nearest: max-tokens"),
        ("[doctor]\nbudget = 3", "`dustin doctor` has no option 'budget'"),
        ("[models.fetsh]\nforce = true", "no command is called 'models fetsh'; nearest: fetch"),
        ("budget = ", "cannot read the configuration"),
        ("budget = 'many'", "budget is 'many', expected a whole number"),
        ("budget = 3.5", "budget is 3.5, expected a whole number"),
        ("budget = true", "budget is True, expected a whole number"),
        ("temp = '1'", "temp is '1', expected a number"),
        ("ignore-eos = 1", "ignore-eos is 1, expected true or false"),
        ("model = 7", "model is 7, expected text in quotes"),
        ("stop = 'x'", "stop is 'x', expected a list: ['x']"),
        ("stop = [1]", "stop is 1, expected text in quotes"),
        ("mode = 'fast'", "mode: 'fast' is not one of"),
        ("temp = 0.1\ntemperature = 0.2", "'temp' and 'temperature' are one option"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(command_line.cli, file)
    assert message in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("content", [None, b"model = '\xff'", "folder"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    assert command_line.run(["--config", str(file), "generate", "hi"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and str(file) in err


# dustin config.


@pytest.mark.parametrize("command", [" ".join(path) for path, _ in walk(command_line.cli)])
def test_what_it_prints_is_a_file_that_means_the_same(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(capsys, "config", *command.split())
    assert command_line.run(["config", *command.split()]) == 0
    text = capsys.readouterr().out
    tomllib.loads(text)
    (tmp_path / "c.toml").write_text(text)
    after = shown(capsys, "--config", str(tmp_path / "c.toml"), "config", *command.split())
    assert {key: row["value"] for key, row in after.items()} == {key: row["value"] for key, row in before.items()}
    assert all(row["source"].startswith("file ") for key, row in after.items() if f"\n{key} =" in text)  # type: ignore[attr-defined]


def test_config_points_out_variables_that_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUSTIN_BUGDET", "1")
    monkeypatch.setenv("DUSTIN_CACHE", "/x")
    assert command_line.run(["config"]) == 0
    out = capsys.readouterr().out
    assert "# DUSTIN_BUGDET is set but means nothing; nearest: DUSTIN_BUDGET" in out and "DUSTIN_CACHE is" not in out
    assert command_line.run(["config", "nothing"]) == 2
    assert "no command is called 'nothing'" in capsys.readouterr().err


def test_every_variable_in_the_sources_is_known() -> None:
    import re

    from dustin.config_file import OTHER_VARIABLES

    options = [option for _, command in walk(command_line.cli) for option in command.params if isinstance(option, click.Option)]
    known = {name for option in options for name in variables(option)} | set(OTHER_VARIABLES)
    for folder in ("dustin", "backends", "triton_kernels", "metal_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            used = set(re.findall(r"[\"'](DUSTIN_[A-Z_]+)[\"']", path.read_text())) - {"DUSTIN_"}
            assert used <= known, f"{path}: add it to dustin.config_file.OTHER_VARIABLES"


# Completion.


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_the_script_that_click_makes(shell: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUSTIN_")}
    command = [sys.executable, "-m", "dustin"]
    run = {"capture_output": True, "text": True, "check": False, "cwd": ROOT}
    ours = subprocess.run([*command, "completion", shell], env=environment, **run)  # type: ignore[call-overload]
    clicks = subprocess.run(command, env=environment | {"_DUSTIN_COMPLETE": f"{shell}_source"}, **run)  # type: ignore[call-overload]
    assert ours.returncode == 0 and ours.stdout.strip() == clicks.stdout.strip() and "_DUSTIN_COMPLETE" in ours.stdout


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = tmp_path / "dustin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dustin "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(dustin completion bash)"; '
        'for words in "dustin gen" "dustin generate --max-" "dustin chat --mode e" "dustin chat -m Smol"; do '
        "COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _dustin_completion dustin; "
        'echo "${COMPREPLY[@]}"; done'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [bash, "--norc", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.stdout.splitlines() == ["generate", "--max-tokens --max-kv-size", "exact", "SmolLM2-135M-Instruct"], done.stderr


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
