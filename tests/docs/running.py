"""Running what the documentation shows: the models that it names are replaced by tiny ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]

# Long enough for any example; a byte is a token here.
_CONTEXT = 4096
_TIMEOUT_SECONDS = 240

# Every model becomes the tiny target, every draft the tiny draft; the rest of a call stays as the documentation has it.
_PRELUDE = """
import os, sys
import dustin, dustin.generation
_load = dustin.generation.load
def load(model=None, draft_model=None, **rest):
    draft = os.environ["DOCS_DRAFT"] if draft_model else None
    return _load(os.environ["DOCS_MODEL"], draft, **{"backend": "numpy"} | rest)
dustin.generation.load = load
"""
_PROGRAM = """#!{python}
import os, sys
words, swapped = sys.argv[1:], []
flags = {{"-m": "DOCS_MODEL", "--model": "DOCS_MODEL", "--draft-model": "DOCS_DRAFT"}}
for at, word in enumerate(words):
    before = words[at - 1] if at else ""
    swapped.append(os.environ[flags[before]] if before in flags else word)
from dustin.cli import main
sys.argv[1:] = swapped
main()
"""


def environment(folder: Path) -> dict[str, str]:
    """A place of its own: no user configuration, no cache, no network, the tiny models as defaults."""
    models = folder / ".models"
    if not models.exists():
        tiny_model.write(models / "target", max_position_embeddings=_CONTEXT)
        tiny_model.write(models / "draft", max_position_embeddings=_CONTEXT, seed=3, num_hidden_layers=1)
        program = folder / ".bin" / "dustin"
        program.parent.mkdir()
        program.write_text(_PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DUSTIN_", "HF_"))}
    mine = {
        "DOCS_MODEL": str(models / "target"),
        "DOCS_DRAFT": str(models / "draft"),
        "DUSTIN_MODEL": str(models / "target"),
        "DUSTIN_BACKEND": "numpy",
        "DUSTIN_CACHE": str(folder / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "XDG_STATE_HOME": str(folder / ".state"),
        "PATH": f"{folder / '.bin'}:{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }
    return kept | mine


def _run(command: list[str], folder: Path, cwd: Path, variables: dict[str, str], stdin: str = "") -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, errors="replace", check=False, cwd=cwd, env=variables,
        timeout=_TIMEOUT_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def run_python(code: str, folder: Path, real: bool = False) -> str:
    """stdout of a program. Raise AssertionError with its output where it fails."""
    program = folder / "example.py"
    program.write_text(code if real else _PRELUDE + code)
    variables = os.environ | {"PYTHONPATH": str(ROOT)} if real else environment(folder)
    return _run([sys.executable, str(program)], folder, folder, variables)


def run_shell(script: str, folder: Path, real: bool = False, cwd: Path | None = None) -> str:
    """stdout of shell commands, each of which must succeed."""
    variables = environment(folder)
    if real:
        # The real default model from the real cache.
        variables = {name: value for name, value in variables.items() if not name.startswith(("DUSTIN_", "HF_", "DOCS_", "XDG_"))}
        variables["HOME"] = os.environ.get("HOME", str(folder))
        (folder / ".bin" / "dustin").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dustin "$@"\n')
    return _run(["bash", "-euo", "pipefail", "-c", script], folder, cwd or folder, variables)
