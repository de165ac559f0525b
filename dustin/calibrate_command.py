"""`dustin calibrate`: find a pair's scoring heads once, write its profile, use it from then on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from dustin.cli_options import CONTEXT, debug_option, loading_options
from dustin.errors import UsageError
from dustin.files import check_output
from dustin.help_pages import Sectioned
from dustin.models import cache_dir
from dustin.terminal import note

_COUNT = click.IntRange(1)


@click.command(cls=Sectioned, context_settings=CONTEXT)
@loading_options
@click.option("--context", type=click.IntRange(256), help="Tokens of a document. Default: 16384, or what the models hold.")
@click.option("--documents", type=_COUNT, default=12, show_default=True, help="Documents read.")
@click.option("--tokens", type=click.IntRange(16), default=192, show_default=True, help="Answer tokens measured on each.")
@click.option(
    "--allowance", type=click.IntRange(192), default=1536, show_default=True,
    help="Tokens whose keys and values a round may read in bytes, scoring included.",
)  # fmt: skip
@click.option("--num-draft-tokens", type=click.IntRange(1, 15), default=5, show_default=True, help="Tokens drafted a round.")
@click.option("--max-seconds", type=click.FloatRange(1), default=240.0, show_default=True, help="Search no longer than this.")
@click.option("--own-sets", is_flag=True, help="For sets that layers choose themselves: which layers, by which compact keys.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: the cache, by fingerprint.")
@debug_option
def calibrate(**values: Any) -> None:
    """Find which heads of --model and --draft-model choose best what sparse attention reads.

    Needs no data set and no network. The profile is used automatically for this pair from then on (with --own-sets: where
    --fidelity high is asked for); stdout is its path.
    """
    from dustin import calibration, profile_file
    from dustin.generation import load

    # The default's name comes of the models, its folder does not.
    target = (values["out"] or cache_dir() / "profiles" / "new.json").expanduser()
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
    check_output(target)
    session = load(
        values["model"], values["draft_model"], backend=values["backend"], device=values["device"], dtype=values["dtype"]
    )
    if session.tokenizer is None:
        raise UsageError("the model has no tokenizer: calibration makes its documents with it")
    specs = [session.target.spec, *([session.draft.spec] if session.draft else [])]
    longest = min(spec.context_length for spec in specs) - values["tokens"] - 8
    options = calibration.CalibrationOptions(
        context=values["context"] or min(16384, longest),
        documents=values["documents"],
        tokens=values["tokens"],
        allowance=values["allowance"],
        num_draft_tokens=values["num_draft_tokens"],
        seconds=values["max_seconds"],
        own_sets=values["own_sets"],
    )
    profile = calibration.calibrate(
        session.backend, session.target, session.draft, session.tokenizer, options, note  # type: ignore[arg-type]
    )
    path = target if values["out"] else profile_file.default_path(profile)
    profile_file.write(profile, path)
    chosen, heuristic = (profile.record[name] for name in ("chosen", "heuristic"))
    note(profile.scoring.describe(session.draft is not None))
    peak = session.backend.peak_memory_bytes() / 2**30
    note(f"KL {heuristic['kl']:.4f} -> {chosen['kl']:.4f} at equal bytes; peak memory {peak:.1f} GiB")
    click.echo(path)
