"""docs/kernels.md and docs/apple.md: every command they show exists, the quick ones run, every path they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.running import run_shell
from tests.test_workflows import _click, _command

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("kernels", "apple")
# Prepared for the commands that read a file of the user's.
_FILES = {"report.txt": "The north wing was painted in May.\n"}


def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def commands(page: str) -> list[str]:
    """The lines of all `sh` blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text(page), re.S)
    lines = [shlex.join(shlex.split(line, comments=True)) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


EVERY = [(page, line) for page in PAGES for line in commands(page)]


def problems(line: str) -> list[str]:
    """What does not exist of a command line."""
    words = shlex.split(line)
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "dustin":
        return _click("dustin", words[1:])
    if words[0] == "pip":
        return _command(["python", "-m", *words])
    if words[0] == "python" and words[1].endswith(".py"):
        return [] if (ROOT / words[1]).is_file() else [f"{words[1]} does not exist"]
    return _command(words)


@pytest.mark.parametrize(("page", "line"), EVERY, ids=[line for _, line in EVERY])
def test_what_a_command_names_exists(page: str, line: str) -> None:
    assert problems(line) == []


def test_there_are_commands_and_the_lint_finds_wrong_ones() -> None:
    assert len(EVERY) >= 12
    wrong = ["dustin docter", "dustin doctor --fast", "python -m bench pear", "python -m pytest tests/none", "python tests/none.py"]
    assert [line for line in wrong if not problems(line)] == []


@pytest.mark.parametrize("line", sorted({line for _, line in EVERY if line.startswith("dustin ") or "self_test" in line}))
def test_quick_commands_run(line: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, content in _FILES.items():
        (tmp_path / name).write_text(content)
    assert run_shell(line, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    named = set(re.findall(r"`([\w*./-]+/[\w*./-]*|[\w-]+\.md)`", text(page)))
    assert named
    for name in named:
        if name.startswith(("mlx-community/", "~")) or "NAME" in name:
            continue
        folder = ROOT / "docs" if name.endswith(".md") and "/" not in name else ROOT
        assert list(folder.glob(name.rstrip("/"))), f"{page}.md names {name}"


def test_kernels_in_the_table_exist() -> None:
    rows = [line.split("|") for line in text("kernels").splitlines() if line.startswith("| ")]
    for _, _, triton, metal, *_ in rows[1:]:
        for folder, cell in (("triton_kernels", triton), ("metal_kernels", metal)):
            sources = "".join(path.read_text() for path in (ROOT / folder).glob("*.py"))
            for name in re.findall(r"`(\w+)`", cell):
                assert f"def {name}(" in sources or (ROOT / folder / f"{name}.py").exists(), name
