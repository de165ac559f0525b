"""The workflows parse, and everything they name exists: commands, modules, options, paths. And the lint finds what does not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
RUNNERS = {"ubuntu-latest", "ubuntu-24.04", "macos-15", "macos-14"}
TOP = {"name", "on", True, "jobs", "permissions", "env", "concurrency"}
STEP = {"name", "uses", "with", "run", "if", "env", "id", "working-directory"}
SHELL = {"if", "then", "else", "fi", "echo", "!", "sudo"}


def problems(text: str) -> list[str]:
    """What is wrong with a workflow, in words."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {str(error).splitlines()[0]}"]
    if not isinstance(content, dict):
        return ["not a mapping"]
    # YAML 1.1 reads a bare `on` as true.
    triggers = content.get("on", content.get(True))
    found = [] if triggers else ["no trigger under `on`"]
    found += [f"unknown key {key!r}" for key in content if key not in TOP]
    jobs = content.get("jobs") or {}
    if not jobs:
        found.append("no jobs")
    for name, job in jobs.items():
        found += [f"job {name}: {problem}" for problem in _job(job)]
    return found


def _job(job: dict[str, Any]) -> list[str]:
    found = [] if job.get("runs-on") in RUNNERS else [f"runs-on is {job.get('runs-on')!r}, expected one of {sorted(RUNNERS)}"]
    if not isinstance(job.get("timeout-minutes"), int):
        found.append("no timeout-minutes")
    text = yaml.safe_dump(job)
    axes = set((job.get("strategy") or {}).get("matrix") or {})
    used = set(re.findall(r"\$\{\{\s*matrix\.([\w-]+)\s*\}\}", text))
    found += [f"matrix.{axis} is used and not defined" for axis in sorted(used - axes)]
    for step in job.get("steps") or [{}]:
        found += [f"unknown step key {key!r}" for key in set(step) - STEP]
        if ("uses" in step) == ("run" in step):
            found.append(f"a step needs either `uses` or `run`: {step}")
        if "uses" in step and not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]):
            found.append(f"uses {step['uses']!r}, expected owner/action@vN")
        for path in str((step.get("with") or {}).get("cache-dependency-path", "")).split():
            if not (ROOT / path).exists():
                found.append(f"cache-dependency-path names {path}, which does not exist")
        if "run" in step:
            found += _script(step["run"])
    return found


def _script(script: str) -> list[str]:
    """Problems of a `run`: shell syntax, then every simple command."""
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    if checked.returncode:
        return [f"shell: {checked.stderr.strip()}"]
    found = []
    for line in script.splitlines():
        words = shlex.split(line.rstrip("; ").removesuffix("then").rstrip("; "), comments=True)
        while words and words[0] in ("if", "!"):
            words = words[1:]
        if words and words[0] not in SHELL:
            found += _command(words)
    return found


def _command(words: list[str]) -> list[str]:
    if words[0] != "python":
        path = ROOT / words[0]
        return [] if path.is_file() and os.access(path, os.X_OK) else [f"{words[0]} is no executable file here"]
    if words[1] == "-c":
        try:
            compile(words[2], "-c", "exec")
        except SyntaxError as error:
            return [f"python -c: {error}"]
        return []
    if words[1] != "-m":
        return [f"{' '.join(words[:2])}: expected python -m or python -c"]
    module, rest = words[2], words[3:]
    if importlib.util.find_spec(module) is None and module != "pip":
        return [f"python -m {module}: no such module"]
    if module in ("bench", "dustin"):
        return _click(module, rest)
    paths = [word for word in rest if "/" in word or word.endswith((".txt", ".py"))]
    return [f"{module}: {path} does not exist" for path in paths if not (ROOT / path).exists()]


def _click(module: str, rest: list[str]) -> list[str]:
    """A command of ours must exist and take these options."""
    if module == "bench":
        group = importlib.import_module("bench.__main__").cli
    else:
        group = importlib.import_module("dustin.cli").cli
    context = click.Context(group)
    command = group.get_command(context, rest[0])
    if command is None:
        return [f"{module} has no command {rest[0]!r}"]
    try:
        command.make_context(rest[0], rest[1:], parent=context)
    except click.ClickException as error:
        return [f"{module} {rest[0]}: {error.format_message()}"]
    return []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path: Path) -> None:
    assert problems(path.read_text()) == []


def test_linux_and_macos_are_covered() -> None:
    assert {"linux", "macos"} <= {path.stem for path in WORKFLOWS}
    macos = (FOLDER / "macos.yml").read_text()
    for wanted in ("dustin doctor", "tests/parity", "tests/metal", "bench apple", "--array-path", "metal.is_available()"):
        assert wanted in macos


def test_what_ci_runs_is_sound_shell() -> None:
    for name in (".ci/run", "test.sh", "run.sh", "setup.sh"):
        done = subprocess.run(["sh", "-n", str(ROOT / name)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert name == "setup.sh" or os.access(ROOT / name, os.X_OK)


GOOD = (FOLDER / "macos.yml").read_text() if (FOLDER / "macos.yml").exists() else ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("runs-on: macos-15", "runs-on: macos-9", "runs-on is 'macos-9'"),
        ("    timeout-minutes: 45\n", "", "no timeout-minutes"),
        ("actions/checkout@v4", "actions/checkout@main", "expected owner/action@vN"),
        ("tests/parity", "tests/parities", "tests/parities does not exist"),
        ("-m dustin doctor", "-m dustin physician", "dustin has no command 'physician'"),
        ("bench apple --only", "bench apple --just", "bench apple: No such option"),
        ("bench apple --array-path", "bench pear --array-path", "bench has no command 'pear'"),
        ("python -m pytest", "python -m pytset", "no such module"),
        ("import mlx.core as mx, sys;", "import mlx.core as mx sys;", "python -c"),
        ("          fi\n", "", "shell: "),
        ("constraints.txt -e", "constraint.txt -e", "constraint.txt does not exist"),
        ("            constraints.txt\n", "            none.txt\n", "none.txt, which does not exist"),
        ("run: python -m dustin", "runs: python -m dustin", "unknown step key 'runs'"),
        ("python-version: \"3.12\"", "python-version: ${{ matrix.python }}", "matrix.python is used and not defined"),
        ("jobs:", "job:", "unknown key 'job'"),
        ("on:\n  push:", "on: [\n  push:", "not YAML"),
    ],
)
def test_the_lint_finds(old: str, new: str, words: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    assert any(words in problem for problem in found), found
