"""`dustin bench`: a quick table of modes on one model, each against plain decoding of the same prompts in the same run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from dustin.cli_options import CONTEXT, build_engine_options, debug_option, engine_options, loading_options, refuse_useless
from dustin.config import MODES, RequestOptions
from dustin.errors import UsageError
from dustin.terminal import note, read_file

_COUNT = click.IntRange(1)


def _text(files: tuple[str, ...]) -> str:
    """The files, or the language reference that comes with every CPython: real English at hand anywhere."""
    if files:
        return "\n\n".join(read_file(name) for name in files)
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _prompts(ids: list[int], context: int, batch: int) -> list[list[int]]:
    if len(ids) < context:
        raise UsageError(f"the text has {len(ids)} tokens, expected at least --context {context}: give a longer --file")
    step = (len(ids) - context) // batch
    return [ids[row * step : row * step + context] for row in range(batch)]


def _measure(session: Any, prompts: list[list[int]], request: RequestOptions, mode: str) -> tuple[dict[str, Any], list[list[int]]]:
    session.options = replace(session.options, mode=mode)
    results = session.batch_generate(prompts, request)
    failed = next((result.error for result in results if result.error), None)
    if failed:
        raise UsageError(f"mode {mode}: {failed}")
    stats = results[0].stats
    row = {
        "context": len(prompts[0]),
        "batch": len(prompts),
        "mode": mode,
        "drafter": stats.drafter,
        "tokens_per_s": round(stats.generation_tps, 2),
        "acceptance_length": round(stats.acceptance_length, 3),
        "kv_read_share": round(stats.kv_read_share, 4),
        "peak_memory_bytes": stats.peak_memory_bytes,
    }
    return row, [result.tokens for result in results]


@click.command(context_settings=CONTEXT)
@loading_options
@engine_options
@click.option("--context", "contexts", multiple=True, type=_COUNT, default=(512, 2048), show_default=True, help="Prompt tokens.")
@click.option("--batch", "batches", multiple=True, type=_COUNT, default=(1,), show_default=True, help="Prompts at once.")
@click.option("--modes", default="dense,exact,sparse,auto", show_default=True, help="Modes to compare with ar, by commas.")
@click.option("--max-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens generated a prompt.")
@click.option("--file", "-f", "files", multiple=True, help="Text for the prompts. Default: Python's language reference.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@debug_option
@click.pass_context
def bench(ctx: click.Context, **values: Any) -> None:
    """Measure tokens per second of each mode; `ratio` is against plain decoding (ar) of the same prompts in the same run."""
    modes = [name.strip() for name in values["modes"].split(",") if name.strip()]
    for name in modes:
        if name not in MODES:
            raise UsageError(f"--modes has {name!r}, expected {', '.join(MODES)}")
    if ctx.get_parameter_source("mode") == click.core.ParameterSource.COMMANDLINE:
        raise UsageError("bench compares modes: name them by --modes, not --mode")
    options = build_engine_options(values)
    if values["draft_model"]:
        refuse_useless(ctx, values | {"mode": "dense"})

    from dustin.generation import load

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    session = load(values["model"], values["draft_model"], options=options, **loading)
    if session.tokenizer is None:
        raise UsageError("bench needs a tokenizer")
    ids = session.tokenizer.encode(_text(values["files"]))
    request = RequestOptions(max_tokens=values["max_tokens"], ignore_eos=True)
    rows: list[dict[str, Any]] = []
    if not values["as_json"]:
        click.echo(f"{session.target.spec.name}, {values['max_tokens']} tokens a prompt, greedy")
        click.echo("context  batch  mode       drafter   tok/s   ratio  accepted  KV read  same as ar")
    for context in values["contexts"]:
        for batch in values["batches"]:
            prompts = _prompts(ids, context, batch)
            base: dict[str, Any] = {}
            plain: list[list[int]] = []
            for mode in ["ar", *(name for name in modes if name != "ar")]:
                note(f"context {context}, batch {batch}, mode {mode} ...")
                row, tokens = _measure(session, prompts, request, mode)
                if mode == "ar":
                    base, plain = row, tokens
                row |= {"ratio": round(row["tokens_per_s"] / base["tokens_per_s"], 3), "same_as_ar": tokens == plain}
                rows.append({"model": session.target.spec.name} | row)
                if not values["as_json"]:
                    _print(row)
    if values["as_json"]:
        click.echo(json.dumps(rows))


def _print(row: dict[str, Any]) -> None:
    left = f"{row['context']:7}  {row['batch']:5}  {row['mode']:9}  {row['drafter']:8}  {row['tokens_per_s']:6.1f}"
    right = f"{row['acceptance_length']:8.2f}  {100 * row['kv_read_share']:6.1f}%  {'yes' if row['same_as_ar'] else 'no'}"
    click.echo(f"{left}  {row['ratio']:5.2f}x  {right}")
