"""`dustin serve`: an HTTP server for OpenAI clients."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import click

from dustin.cli_options import (
    CONTEXT,
    SAMPLING,
    build_engine_options,
    dataclass_options,
    debug_option,
    engine_options,
    loading_options,
    refuse_useless,
)
from dustin.config import SamplingOptions
from dustin.errors import UsageError
from dustin.help_pages import Sectioned
from dustin.serving.options import ServerOptions
from dustin.terminal import note

SERVER: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "host": (("--host",), "Address to listen on; other machines reach 0.0.0.0.", {}),
    "port": (("--port",), "Port to listen on; 0 takes a free one.", {}),
    "api_key": (
        ("--api-key",),
        "Clients must send this key (better by DUSTIN_API_KEY: flags show in process lists).",
        {"type": str},
    ),
    "slots": (("--slots",), "Requests that run at once; each has KV rows for a whole context (--max-kv-size).", {}),
    "max_queue": (("--max-queue",), "Requests that may wait; more get 429.", {}),
    "prefill_tokens": (
        ("--prefill-tokens",), "Prompt tokens read between two rounds. Default: 256, on an NVIDIA GPU 2048.", {},
    ),
    "share_prefixes": (
        ("--share-prefixes/--no-share-prefixes",),
        "Whether what prompts have in common is read once; clients can tell by usage and time.",
        {},
    ),
    "warmup": (
        ("--warmup/--no-warmup",),
        "Compile and record the shapes of rounds before the first request. Default: on an NVIDIA GPU.",
        {"type": bool},
    ),
    "max_tokens": (("--max-tokens", "-n"), "Tokens of a chat answer that names no limit. Default: what the context leaves.", {}),
    "max_body_bytes": (("--max-body-bytes",), "Largest request body.", {}),
    "request_timeout": (("--request-timeout",), "Seconds a request may take, waiting included; 0 is no limit.", {}),
    "drain_timeout": (("--drain-timeout",), "Seconds that running requests get after SIGTERM or Ctrl-C.", {}),
    "stall_timeout": (("--stall-timeout",), "Seconds without a finished step after which /health says 503.", {}),
    "keep_alive": (("--keep-alive",), "Seconds of silence in a stream before a comment is sent.", {}),
}
_NEEDED = ("starlette", "uvicorn", "prometheus_client")


def _options(command: Any) -> Any:
    return dataclass_options(dataclass_options(command, SamplingOptions, SAMPLING), ServerOptions, SERVER)


@click.command(cls=Sectioned, context_settings=CONTEXT)
@loading_options
@_options
@engine_options
@click.option("--served-name", "served_names", multiple=True, help="Name(s) that clients call the model by. Default: its own.")
@debug_option
@click.pass_context
def serve(ctx: click.Context, **values: Any) -> int:
    """Serve a model over HTTP to OpenAI clients; many requests share one speculating batch.

    Options of sampling are for requests that do not name their own. SIGTERM and Ctrl-C finish what runs; a second one does not.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        how = "in the checkout pip install -c constraints.txt '.[serve]', or ./run.sh serve"
        raise UsageError(f"dustin serve needs {', '.join(missing)}: {how}")
    options = ServerOptions(**{name: values[name] for name in SERVER})
    defaults = SamplingOptions(**{name: values[name] for name in SAMPLING})
    engine = build_engine_options(values)
    # Requests bring their own temperature: top_p and the like are never without use here.
    refuse_useless(ctx, values | {"temperature": None})

    from dustin.generation import load
    from dustin.serving import server
    from dustin.serving.app import LOOPBACK

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    if options.host not in LOOPBACK and options.api_key is None:
        note(f"warning: {options.host} is reachable from elsewhere and there is no --api-key")

    names = list(values["served_names"]) or [str(values["model"])]
    load_session = partial(load, values["model"], values["draft_model"], options=engine, **loading)
    prepared = server.prepare(load_session, names, options, defaults)
    return server.run(prepared, str(values["model"]), note)
