"""`dustin trace`: one generation, recorded as a page that shows which tokens every round read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dustin.cli_options import (
    CONTEXT,
    FILE,
    answer_options,
    build_engine_options,
    build_request,
    debug_option,
    engine_options,
    loading_options,
    refuse_useless,
)
from dustin.errors import UsageError
from dustin.files import check_output
from dustin.help_pages import Sectioned
from dustin.terminal import note, prefill_bar, printable, read_prompt

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=Sectioned, context_settings=CONTEXT)
@click.argument("prompt", required=False)
@click.option("--prompt", "-p", "prompt_option", help="The prompt, in place of PROMPT; - is stdin.")
@click.option("--file", "-f", "files", type=FILE, multiple=True, help="Put this text file before the prompt; repeatable.")
@click.option("--raw", is_flag=True, help="No chat template: go on with the text of the prompt.")
@click.option("--output", "-o", type=_FILE, default=Path("trace.html"), show_default=True, help="The page; it needs no network.")
@click.option("--png", type=_FILE, help="A picture too (needs matplotlib).")
@click.option("--json", "json_path", type=_FILE, envvar="DUSTIN_JSON_PATH", help="The raw trace too.")
@click.option(
    "--recovery-rounds", type=click.IntRange(0), default=32, show_default=True, help="Rounds whose attention is measured; 0: none."
)
@loading_options
@answer_options
@engine_options
@debug_option
@click.pass_context
def trace(ctx: click.Context, **values: Any) -> None:
    """Answer PROMPT and write a page that shows which tokens each round read, and what was accepted.

    The mode is sparse unless --mode says otherwise (rectified, exact, or dense with --drafter self). The answer goes to stdout.
    """
    if ctx.get_parameter_source("mode") == click.core.ParameterSource.DEFAULT:
        values["mode"] = "sparse"
    if values["mode"] in ("ar", "auto"):
        use = "use --mode sparse, rectified, exact, or dense with --drafter self"
        raise UsageError(f"mode {values['mode']!r} is not traced: {use}")
    options, request = build_engine_options(values), build_request(values)
    refuse_useless(ctx, values)
    for path in (values["output"], values["png"], values["json_path"]):
        if path is not None:
            check_output(path.expanduser())
    if values["png"] is not None:
        _need_matplotlib()
    text = read_prompt(values["prompt"], values["prompt_option"], values["files"])

    from dustin.generation import load
    from dustin.trace import Recorder
    from dustin.trace_page import draw, render

    session = load(
        values["model"], values["draft_model"], options=options, **{name: values[name] for name in ("backend", "device", "dtype")}
    )
    recorder = Recorder(session, text if values["raw"] else [{"role": "user", "content": text}], request)
    with prefill_bar() as progress:
        made = recorder.run(progress, _print)
    print(flush=True)
    if values["recovery_rounds"]:
        note("measuring attention ...")
        recorder.measure_recovery(made, values["recovery_rounds"])
    outputs = [(values["output"], lambda: render(made))]
    if values["json_path"] is not None:
        outputs.append((values["json_path"], lambda: json.dumps(made.as_dict(), ensure_ascii=False)))
    for path, content in outputs:
        path.expanduser().write_text(content(), encoding="utf-8")
    if values["png"] is not None:
        draw(made, values["png"].expanduser())
    for line in recorder.stats.summary_lines():
        note(line)
    for path in (values["output"], values["json_path"], values["png"]):
        if path is not None:
            note(f"wrote {path}")


def _print(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib, which is not installed: pip install matplotlib, or leave --png out")
