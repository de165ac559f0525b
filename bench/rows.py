"""Result rows: one JSON object a line under bench/results, with command, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def commit() -> str:
    """BENCH_COMMIT, or the short hash of HEAD (`+` when tracked files differ from it); `unknown` outside a checkout."""
    if os.environ.get("BENCH_COMMIT"):
        return os.environ["BENCH_COMMIT"]
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    return head.stdout.strip() + ("+" if dirty else "")


def command() -> str:
    """The command line that made this row, as a user would type it; BENCH_COMMAND where a script knows better."""
    return os.environ.get("BENCH_COMMAND") or "python -m bench " + " ".join(sys.argv[1:])


class Commits:
    """Which commit each row of a table is of: that of most stands below the table, another has a letter there and at the row."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        """`rows` in the order of the table."""
        self._usual, *others = [commit for commit, _ in Counter(row["commit"] for row in rows).most_common()]
        order = dict.fromkeys(row["commit"] for row in rows if row["commit"] in others)
        self._letters = {commit: chr(ord("a") + i) for i, commit in enumerate(order)}

    def mark(self, row: dict[str, Any]) -> str:
        """What follows the row's text."""
        return f" [{self._letters[row['commit']]}]" if row["commit"] in self._letters else ""

    def __str__(self) -> str:
        return self._usual + "".join(f", [{letter}] at {commit}" for commit, letter in self._letters.items())


def processor() -> str:
    """Model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(path: Path, rows: list[dict[str, Any]], append: bool = False) -> None:
    """Write rows as JSON lines; `append` keeps what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, in order."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
