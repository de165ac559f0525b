"""`dustin generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from dustin import prompt_cache
from dustin.cli_options import (
    CONTEXT,
    FILE,
    build_engine_options,
    build_request,
    debug_option,
    engine_options,
    loading_options,
    prompt_cache_option,
    refuse_useless,
    request_options,
)
from dustin.errors import UsageError
from dustin.help_pages import Sectioned
from dustin.terminal import note, prefill_bar, printable, read_prompt


@click.command(cls=Sectioned, context_settings=CONTEXT)
@click.argument("prompt", required=False)
@click.option("--prompt", "-p", "prompt_option", help="The prompt, in place of PROMPT; - is stdin.")
@click.option("--file", "-f", "files", type=FILE, multiple=True, help="Put this text file before the prompt; repeatable.")
@click.option("--system-prompt", help="What the model is told about its task.")
@click.option("--raw", is_flag=True, help="No chat template: go on with the text of the prompt.")
@loading_options
@prompt_cache_option
@request_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object with text, tokens and statistics.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--verbose", is_flag=True, help="More about model and options on stderr.")
@debug_option
@click.pass_context
def generate(ctx: click.Context, **values: Any) -> None:
    """Answer PROMPT, with the text of each --file before it.

    PROMPT may be -, which is stdin; in a pipe it may be left out.
    """
    options, request = build_engine_options(values), build_request(values)
    refuse_useless(ctx, values)
    if values["raw"] and values["system_prompt"] is not None:
        raise UsageError("--system-prompt needs the chat template, --raw leaves it out: drop one of them")
    if request.top_logprobs is not None and not values["as_json"]:
        raise UsageError("--logprobs needs --json: plain output has no place for them")
    text = read_prompt(values["prompt"], values["prompt_option"], values["files"])
    prompt: Any = text
    if not values["raw"]:
        system = values["system_prompt"]
        prompt = ([{"role": "system", "content": system}] if system is not None else []) + [{"role": "user", "content": text}]

    from dustin.generation import load

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    if sys.stderr.isatty():
        note(f"loading {values['model']} ...")
    session = load(values["model"], values["draft_model"], options=options, **loading)
    cache_file = values["prompt_cache_file"]
    if (taken := prompt_cache.take_up(session, cache_file)) is not None:
        note(taken)
    if values["verbose"]:
        note(f"model: {session.target.spec}")
        note(f"options: {options}")
        note(f"request: {request}")
    try:
        with prefill_bar() as progress:
            stream = session.stream_generate(prompt, request, progress=progress)
            if values["as_json"]:
                _print_json(stream, session.target.spec.name)
            else:
                _print_text(stream, whole=values["no_stream"])
    finally:
        # Also after Ctrl-C: what was read of a long document need not be read again.
        if cache_file is not None:
            session.save_kept(cache_file)


def _print_text(stream: Iterator[Any], whole: bool) -> None:
    """The answer on stdout, statistics on stderr (also of an answer that Ctrl-C ends)."""
    pieces: list[str] = []
    last = None
    try:
        with closing(stream):  # type: ignore[type-var]
            for response in stream:
                last = response
                pieces.append(response.text)
                if not whole and response.text:
                    sys.stdout.write(printable(response.text))
                    sys.stdout.flush()
    finally:
        text = "".join(pieces)
        if text and sys.exc_info()[0] is not BrokenPipeError:
            ending = "" if text.endswith("\n") else "\n"
            sys.stdout.write((printable(text) if whole else "") + ending)
            sys.stdout.flush()
        if last is not None and sys.exc_info()[0] is not BrokenPipeError:
            for line in last.stats.summary_lines():
                note(line)


def _print_json(stream: Iterator[Any], model: str) -> None:
    with closing(stream):  # type: ignore[type-var]
        responses = list(stream)
    last = responses[-1]
    result = {
        "model": model,
        "text": "".join(response.text for response in responses),
        "tokens": [response.token for response in responses],
        "finish_reason": last.finish_reason,
        "logprobs": [asdict(response.logprobs) for response in responses if response.logprobs is not None] or None,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "peak_memory": last.peak_memory,
        "stats": last.stats.as_dict(),
    }
    click.echo(json.dumps(result, ensure_ascii=False))
