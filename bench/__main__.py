"""`python -m bench NAME`: each benchmark is the click command `main` of bench/NAME.py, imported when asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (path.stem for path in HERE.glob("*.py"))
        return sorted(name for name in names if not name.startswith("_") and "def main(" in (HERE / f"{name}.py").read_text())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"bench.{name}").main


cli = _Lazy(name="bench", help="Benchmarks. Rows go to bench/results/NAME.jsonl.")

if __name__ == "__main__":
    cli(prog_name="python -m bench")
