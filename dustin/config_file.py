"""Configuration files: ./dustin.toml and the user's config.toml, checked key by key, as defaults of the command line."""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dustin.errors import UsageError
from dustin.models import user_path

LOCAL = Path("dustin.toml")
# Variables of ours that are no option of a command.
OTHER_VARIABLES = (
    "DUSTIN_CACHE", "DUSTIN_CONFIG", "DUSTIN_LAUNCHED", "DUSTIN_METAL_GATE", "DUSTIN_TP_SYMMETRIC", "DUSTIN_TP_TIMEOUT",
)  # fmt: skip


def config_path() -> Path:
    """Where the user's configuration file lies."""
    if sys.platform == "darwin":
        return user_path("~") / "Library" / "Application Support" / "dustin" / "config.toml"
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA", str(user_path("~")))) / "dustin" / "config.toml"
    return Path(os.environ.get("XDG_CONFIG_HOME") or user_path("~") / ".config") / "dustin" / "config.toml"


def files(explicit: Path | None) -> list[Path]:
    """The files that count, weakest first: the one that --config names, else the user's and then ./dustin.toml."""
    return [explicit] if explicit is not None else [config_path(), LOCAL]


@dataclass
class Settings:
    """`defaults` is click's default_map; `origins` tells the file of each value by (command path, parameter)."""

    defaults: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[tuple[str, ...], str], Path] = field(default_factory=dict)

    def put(self, command: tuple[str, ...], parameter: str, value: Any, path: Path) -> None:
        """Set a default; a later call wins."""
        table = self.defaults
        for name in command:
            table = table.setdefault(name, {})
        table[parameter] = value
        self.origins[command, parameter] = path


def read_config(group: click.Group, explicit: Path | None) -> Settings:
    """Defaults from the configuration files: keys at the top go to every command that has them, [generate] to one.

    Raise UsageError for a file that cannot be read, an unknown key (with the nearest valid ones) or a value of a wrong type.
    """
    settings = Settings()
    for path in files(explicit):
        if explicit is None and not path.is_file():
            continue
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}") from error
        _read(group, content, path, settings)
    return settings


def _read(group: click.Group, content: dict[str, Any], path: Path, settings: Settings) -> None:
    commands = dict(walk(group))
    names = {command: option_names(each) for command, each in commands.items()}
    every = {key for known in names.values() for key in known}
    shared = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key in shared:
        if _plain(key) not in every:
            raise UsageError(f"{path}: no command has an option {key!r}{_nearest(key, every)}")
    for command, known in names.items():
        _take(commands[command], command, {k: v for k, v in shared.items() if _plain(k) in known}, path, settings, top=True)

    def section(command: tuple[str, ...], table: dict[str, Any]) -> None:
        if command not in commands:
            siblings = {other[-1] for other in commands if other[:-1] == command[:-1]}
            raise UsageError(f"{path}: no command is called {' '.join(command)!r}{_nearest(command[-1], siblings)}")
        flat = {key: value for key, value in table.items() if not isinstance(value, dict)}
        for key in flat:
            if _plain(key) not in names[command]:
                near = _nearest(key, set(names[command]))
                raise UsageError(f"{path}: `dustin {' '.join(command)}` has no option {key!r}{near}")
        _take(commands[command], command, flat, path, settings)
        for key, value in table.items():
            if isinstance(value, dict):
                section((*command, key), value)

    for key, value in content.items():
        if isinstance(value, dict):
            section((key,), value)


def _take(
    command: click.Command, name: tuple[str, ...], table: dict[str, Any], path: Path, settings: Settings, top: bool = False
) -> None:
    """Put one table's values, each an option of the command. What stands at the `top` may lie outside the range of one command
    and be fine for another: click refuses it where the first is run."""
    known = option_names(command)
    seen: dict[str, str] = {}
    for key, value in table.items():
        option = known[_plain(key)]
        parameter = str(option.name)
        if parameter in seen:
            raise UsageError(f"{path}: {seen[parameter]!r} and {key!r} are one option: keep one of them")
        seen[parameter] = key
        ranged = isinstance(option.type, click.IntRange | click.FloatRange)
        settings.put(name, parameter, _checked(option, command, value, f"{path}: {key}", not (top and ranged)), path)


def walk(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group by its path, such as ("models", "fetch"); groups too."""
    for name, command in group.commands.items():
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*above, name))


def option_names(command: click.Command) -> dict[str, click.Option]:
    """Every spelling of a command's options (lower case, underscores, no dashes in front) -> the option."""
    names = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.name and option.name != "debug":
            for flag in [option.name, *option.opts]:
                if flag == option.name or flag.startswith("--"):
                    names[_plain(flag)] = option
    return names


def file_key(option: click.Option) -> str:
    """How files spell an option: its first long flag without the dashes."""
    return next(flag for flag in option.opts if flag.startswith("--"))[2:]


def variables(option: click.Option) -> list[str]:
    """The environment variables of an option: one for each long flag, and one for the name it has in the sources."""
    if option.envvar is not None:
        return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar)
    flags = [_plain(flag) for flag in option.opts if flag.startswith("--")]
    return [f"DUSTIN_{name.upper()}" for name in dict.fromkeys([*flags, str(option.name)])]


def variable(option: click.Option) -> str:
    """The environment variable of an option: that which is set, or else the first."""
    names = variables(option)
    return next((name for name in names if os.environ.get(name)), names[0])


def name_variables(group: click.Group) -> None:
    """Let every option of a group's commands read all of its variables: click knows the last of them alone."""
    for _, command in walk(group):
        for option in command.params:
            if isinstance(option, click.Option) and option.expose_value:
                option.envvar = variables(option)


def unknown_variables(group: click.Group) -> dict[str, str]:
    """DUSTIN_* variables of the environment that mean nothing -> a hint at the nearest ones."""
    options = (option for _, command in walk(group) for option in command.params if isinstance(option, click.Option))
    known = {name for option in options for name in variables(option)} | set(OTHER_VARIABLES)
    found = sorted(name for name in os.environ if name.startswith("DUSTIN_") and name not in known)
    return {name: _nearest(name, known, spell=str) for name in found}


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _nearest(key: str, known: set[str], spell: Any = lambda name: name.replace("_", "-")) -> str:
    """"; nearest: a, b", or where to find all of them."""
    close = difflib.get_close_matches(key if spell is str else _plain(key), sorted(known), n=3, cutoff=0.5)
    spelled = list(dict.fromkeys(spell(name) for name in close))
    return f"; nearest: {', '.join(spelled)}" if spelled else "; `dustin config` lists what there is"


_KINDS: tuple[tuple[type[click.ParamType], tuple[type, ...], str], ...] = (
    (click.types.IntParamType, (int,), "a whole number"),
    (click.types.FloatParamType, (int, float), "a number"),
    (click.types.BoolParamType, (bool,), "true or false"),
    (click.types.StringParamType, (str,), "text in quotes"),
    (click.Choice, (str,), "text in quotes"),
    (click.Path, (str,), "text in quotes"),
)


def _checked(option: click.Option, command: click.Command, value: Any, where: str, convert: bool) -> Any:
    """`value` as click wants it. Raise UsageError on a wrong type, where click would convert silently, and with `convert` for
    what click refuses."""
    if option.multiple:
        if not isinstance(value, list):
            raise UsageError(f"{where} is {value!r}, expected a list: [{value!r}]")
        return [_checked_one(option, command, each, where, convert) for each in value]
    return _checked_one(option, command, value, where, convert)


def _checked_one(option: click.Option, command: click.Command, value: Any, where: str, convert: bool) -> Any:
    # Types of our own (a list of layers) check for themselves.
    kinds, expected = next(((kinds, text) for kind, kinds, text in _KINDS if isinstance(option.type, kind)), ((object,), ""))
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
        raise UsageError(f"{where} is {value!r}, expected {expected}")
    try:
        if convert:
            option.type.convert(value, option, click.Context(command))
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message}") from error
    return value
