"""The command `dustin`: its group, and one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from dustin import __version__
from dustin.cli_options import CONTEXT, debug_option
from dustin.config_file import name_variables, read_config, variable
from dustin.errors import DustinError, RankError, UsageError
from dustin.help_pages import Ordered
from dustin.launch import alone, as_rank, kind, needs_ranks, rank

INTERRUPTED = 130


@click.group(cls=Ordered, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="dustin")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file to read instead of the usual two.")
@debug_option
@click.pass_context
def cli(ctx: click.Context, config: Path | None) -> None:
    """Answers from language models over long documents: speculative decoding with sparse verification.

    stdout is the answer, stderr everything else. An option comes from its flag, else from its DUSTIN_* variable, else from
    ./dustin.toml or the user's configuration file, else from the defaults (`dustin config` shows which).
    """
    settings = read_config(cli, config)
    ctx.ensure_object(dict)["settings"] = settings
    ctx.default_map = settings.defaults


def _register() -> None:
    from dustin.bench_command import bench
    from dustin.calibrate_command import calibrate
    from dustin.chat import chat
    from dustin.config_command import completion, config
    from dustin.doctor import doctor
    from dustin.generate_command import generate
    from dustin.models_command import models
    from dustin.serve_command import serve
    from dustin.trace_command import trace

    for command in (generate, chat, serve, bench, calibrate, trace, doctor, models, config, completion):
        cli.add_command(command)
    name_variables(cli)


_register()


def run(args: list[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0, 1 (run time), 2 (usage), 130 (Ctrl-C)."""
    state: dict[str, Any] = {"debug": False, "args": args}
    try:
        ranks = kind()
        if ranks and not needs_ranks(cli, sys.argv[1:] if args is None else args):
            if rank():
                return 0
            alone()
            ranks = None
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if ranks:
        return as_rank(lambda: _run(args, state), lambda: bool(state["debug"]))
    return _run(args, state)


def _run(args: list[str] | None, state: dict[str, Any]) -> int:
    try:
        code = cli.main(args, prog_name="dustin", standalone_mode=False, obj=state)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as bare:
        print(bare.format_message(), file=sys.stderr)
        return bare.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except RankError:
        raise
    except Exception as error:
        if state["debug"]:
            traceback.print_exc()
        message, code = explain(error)
        print("error: " + " ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
        return code


def explain(error: Exception) -> tuple[str, int]:
    """What to tell the user, and the exit code."""
    if isinstance(error, click.ClickException):
        return error.format_message().rstrip(".") + _advice(error), error.exit_code
    if isinstance(error, DustinError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "not enough memory: lower --max-kv-size, shorten the prompt or choose a smaller model", 1
    if isinstance(error, OSError):
        return str(error), 1
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1


def _advice(error: click.ClickException) -> str:
    """Where a refused value came from unless the user just typed it, else where the right ones are told."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is None:
        return ""
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        source = ctx.get_parameter_source(str(error.param.name))
        if source is click.core.ParameterSource.DEFAULT_MAP:
            path = tuple(ctx.command_path.split()[1:])
            return f" (from {ctx.find_root().obj['settings'].origins.get((path, error.param.name), 'a configuration file')})"
        return f" (from the variable {variable(error.param)})" if source is click.core.ParameterSource.ENVIRONMENT else ""
    if "unexpected extra argument" in error.message and any(isinstance(param, click.Argument) for param in ctx.command.params):
        return ": put text with spaces in quotes"
    return "" if "Did you mean" in error.format_message() else f" (`{ctx.command_path} --help` lists what there is)"


def main() -> None:
    """Entry point of the `dustin` script."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as in `dustin ... >&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal of another encoding shows ?, and nothing fails
    sys.exit(run())
