"""`dustin config`: the value of every option and where it comes from. `dustin completion`: scripts for the shell."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from dustin import config_file
from dustin.cli_options import CONTEXT, debug_option
from dustin.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_DUSTIN_COMPLETE"
_DEFAULT = "default"
# What newer versions of click put where there is no default.
_UNSET = getattr(click.core, "UNSET", None)


def effective(root: click.Context, path: tuple[str, ...]) -> list[dict[str, Any]]:
    """key, value and source of every option of a command, as a run without flags would have them."""
    command, ctx = root.command, root
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
        ctx = click.Context(command, parent=ctx, info_name=name, **command.context_settings)
    origins = root.obj["settings"].origins
    rows = []
    for option in command.params:
        if not isinstance(option, click.Option) or not option.expose_value:
            continue
        name = str(option.name)
        option.handle_parse_result(ctx, {}, [])
        source = {
            ParameterSource.ENVIRONMENT: f"environment {config_file.variable(option)}",
            ParameterSource.DEFAULT_MAP: f"file {origins.get((path, name))}",
        }.get(ctx.get_parameter_source(name) or ParameterSource.DEFAULT, _DEFAULT)
        value = None if ctx.params[name] is _UNSET else ctx.params[name]
        secret = "key" in name.split("_") and value is not None
        rows.append({"key": config_file.file_key(option), "value": "***" if secret else value, "source": source})
    return rows


@click.command(context_settings=CONTEXT)
@click.argument("command", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@debug_option
@click.pass_context
def config(ctx: click.Context, command: tuple[str, ...], as_json: bool) -> None:
    """Show every option's value and where it comes from.

    Of COMMAND, or of `generate` where none is named. The output is itself a valid configuration file. Precedence: flag,
    DUSTIN_* variable, ./dustin.toml, the user's file, default.
    """
    root = ctx.find_root()
    path = command or ("generate",)
    known = dict(config_file.walk(root.command))  # type: ignore[arg-type]
    if path not in known:
        every = ", ".join(" ".join(name) for name in known)
        raise UsageError(f"no command is called {' '.join(path)!r}, expected one of {every}")
    explicit = root.params.get("config")
    files = {str(file): file.is_file() for file in config_file.files(explicit)}
    rows = effective(root, path)
    strange = config_file.unknown_variables(root.command)  # type: ignore[arg-type]
    if as_json:
        found = {"command": " ".join(path), "files": files, "options": rows, "unknown_variables": strange}
        click.echo(json.dumps(found, default=str))
        return
    for file, present in reversed(files.items()):
        click.echo(f"# {file}: {'read' if present else 'not there'}")
    for name, hint in strange.items():
        click.echo(f"# {name} is set but means nothing{hint}")
    click.echo(f"[{'.'.join(path)}]")
    texts = [f"{row['key']} = {_toml(row['value'])}" if row["value"] is not None else f"# {row['key']} is not set" for row in rows]
    width = min(max((len(text) for text in texts), default=0), 40)
    for text, row in zip(texts, rows, strict=True):
        click.echo(f"{text:{width}}  # {row['source']}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)  # a TOML basic string


@click.command(context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes `dustin` in SHELL.

    bash: eval "$(dustin completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish: dustin completion
    fish > ~/.config/fish/completions/dustin.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise UsageError(f"no completion for shell {shell!r}, expected one of {', '.join(SHELLS)}")
    click.echo(made(ctx.find_root().command, {}, "dustin", COMPLETION_VARIABLE).source())
