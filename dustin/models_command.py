"""`dustin models`: list, fetch and verify the known models."""

from __future__ import annotations

import json
from typing import Any

import click

from dustin import fetch as fetching
from dustin import models as names
from dustin.cli_options import CONTEXT, debug_option
from dustin.errors import ModelError


def _known(name: str) -> names.KnownModel:
    model = names.known(name)
    if model is None:
        raise ModelError(f"unknown model {name!r}: expected one of {', '.join(names.KNOWN)}")
    return model


def _rows() -> list[dict[str, Any]]:
    rows = []
    for model in names.KNOWN.values():
        path = fetching.pinned_path(model)
        here = {"path": str(path) if path.exists() else None, "cached": path.exists()}
        rows.append({"name": model.name, "megabytes": model.megabytes, "licence": model.licence, **here, "note": model.note})
    return rows


@click.group(context_settings=CONTEXT, invoke_without_command=True)
@debug_option
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, fetch and verify the models known by name."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models, as_json=False)


@models.command("list", context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_models(as_json: bool) -> None:
    """Known models and where they are."""
    rows = _rows()
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        state = row["path"] or "not fetched"
        click.echo(f"{row['name']}  {row['megabytes']} MB  {row['licence']}  {state}  {row['note']}".rstrip())


@models.command("fetch", context_settings=CONTEXT)
@click.argument("name", default=names.DEFAULT)
@click.option("--force", is_flag=True, help="Replace the pinned file even where it is there.")
@debug_option
def fetch(name: str, force: bool) -> None:
    """Fetch a known model, or a hub id, and print where it lies."""
    if force:
        click.echo(fetching.fetch_pinned(_known(name), force=True))
    else:
        click.echo(names.resolve(name))


@models.command("verify", context_settings=CONTEXT)
@click.argument("name", nargs=-1)
@debug_option
def verify(name: tuple[str, ...]) -> None:
    """Check the sha256 of fetched models (all of them without NAME)."""
    chosen = [_known(each) for each in name] or [m for m in names.KNOWN.values() if fetching.pinned_path(m).exists()]
    if not chosen:
        raise ModelError("no known model is in the cache: `dustin models fetch`")
    for model in chosen:
        click.echo(f"ok {model.name} {fetching.verify(model)}")
