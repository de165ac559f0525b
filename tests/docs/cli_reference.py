"""docs/cli.md from the command line's own help: `python -m tests.docs.cli_reference` writes it anew."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import click

from dustin.cli import cli
from dustin.config_file import walk

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
# Versions of click break lines and write defaults in their own ways.
CLICK = ".".join(importlib.metadata.version("click").split(".")[:2])
_WIDTH = 100
_HEAD = """# Commands and options

What `--help` prints. `python -m tests.docs.cli_reference` writes this page; a test fails when it is not what the commands say.
[configuration.md](configuration.md) tells how options are set by variables and files.
"""


def help_of(path: tuple[str, ...]) -> str:
    """The help text of a command by its path."""
    command: click.Command = cli
    ctx = _context(cli, "dustin", None)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
        ctx = _context(command, name, ctx)
    return command.get_help(ctx)


def words(text: str) -> set[str]:
    """Commands, sections and flags of a page, however it is laid out."""
    return set(re.findall(r"^#+ .+|(?<!\S)--?[a-z][a-z0-9-]*", text, re.M))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    return click.Context(command, parent=parent, info_name=name, **settings)


def page() -> str:
    """The whole page."""
    parts = [_HEAD, f"<!-- laid out by click {CLICK} -->\n"]
    for path in [(), *(path for path, _ in walk(cli))]:
        parts.append(f"## {' '.join(('dustin', *path))}\n\n```text\n{help_of(path)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
