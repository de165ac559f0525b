"""Every command and program in README and docs runs, links and paths exist, and docs/cli.md is what --help says.

A comment before a fenced block of sh, python or toml says how it is tried: `<!-- runs: tiny -->` with tiny models in place of those
it names, `<!-- runs: real -->` as it stands, `<!-- runs: config -->` for a configuration file, or `<!-- not run: WHY -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dustin import cli as command_line
from dustin.config_file import read_config
from tests.docs import cli_reference
from tests.docs.running import ROOT, run_python, run_shell

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"(?:<!-- (runs|not run): ([^\n]*?) -->\n)?```(\w*)\n(.*?)```", re.S)
_RUNNABLE = {"sh", "bash", "console", "python", "toml"}
# Pages with tests of their own beside this file.
_OWN_TESTS = ("apple.md", "kernels.md")
_HOW = {"tiny", "real", "config"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    how: str | None
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        verb, how, language, code = match.groups()
        line = text[: match.start(3)].count("\n") + 1
        yield Block(page, line, {"runs": how, "not run": "not run"}.get(verb or ""), language, code)


BLOCKS = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> str:
    """The commands of a block; of a console, the lines after `$ `."""
    if block.language != "console":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))


def place(folder: Path) -> Path:
    """The files that examples name."""
    (folder / "report.txt").write_text("The bridge was closed on Monday. It opens again on Friday.\n")
    (folder / "notes.txt").write_text("The bridge was painted green.\n")
    return folder


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_says_how_it_is_tried(block: Block) -> None:
    if block.language in _RUNNABLE and block.page.name not in _OWN_TESTS:
        hint = "put <!-- runs: tiny -->, or another of the comments at the top of this file, before it"
        assert block.how in _HOW or block.how == "not run", f"{block.name}: {hint}"
    assert block.language, f"{block.name}: name the language of the block (text, where it is none)"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how == "tiny"], ids=lambda block: block.name)
def test_it_runs_on_a_tiny_model(block: Block, tmp_path: Path) -> None:
    if block.language == "python":
        run_python(block.text, place(tmp_path))
    else:
        run_shell(commands(block), place(tmp_path))


@pytest.mark.real
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how == "real"], ids=lambda block: block.name)
def test_it_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    if block.language == "python":
        run_python(block.text, place(tmp_path), real=True)
    else:
        run_shell(commands(block), place(tmp_path), real=True)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how == "config"], ids=lambda block: block.name)
def test_it_is_a_configuration(block: Block, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(block.text)
    assert read_config(command_line.cli, tmp_path / "c.toml").defaults


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+?)\s*$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "mailto:")):
            continue
        assert not target.startswith("http:"), f"{target}: use https"
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists() and there.is_relative_to(ROOT), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {there.name} has no heading {anchor!r}"


_FOLDERS = "dustin|backends|triton_kernels|metal_kernels|bench|tests|docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{_FOLDERS})/[\w./*-]*)`", page.read_text())
    for name in named:
        if not re.search(r"[A-Z]{3,}(?!\.md)", Path(name).name):  # NAME stands for any name
            assert list(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"


def test_the_command_reference_is_what_help_says() -> None:
    shown, said = cli_reference.PAGE.read_text(), cli_reference.page()
    if f"click {cli_reference.CLICK} " not in shown:
        shown, said = cli_reference.words(shown), cli_reference.words(said)
    assert shown == said, "run `python -m tests.docs.cli_reference`"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]
    assert not missing


def test_the_checks_see_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- runs: tiny -->\n```sh\nfalse\n```\n\n```console\n$ true\nout\n```\n")
    first, second = blocks(page)
    assert (first.how, first.language, second.how, commands(second)) == ("tiny", "sh", None, "true")
    with pytest.raises(AssertionError, match="status 1"):
        run_shell(first.text, tmp_path)
    with pytest.raises(AssertionError, match="status 1"):
        run_python("raise SystemExit(1)", tmp_path)
