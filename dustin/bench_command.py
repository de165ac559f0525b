"""`dustin bench`: prompt lengths, batch sizes and modes in one table, each against plain decoding of the same prompts."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from dustin import __version__
from dustin.cli_options import CONTEXT, FILE, build_engine_options, debug_option, engine_options, loading_options, useless
from dustin.config import MODES, EngineOptions, RequestOptions
from dustin.errors import ContextLengthError, NumericsError, UsageError
from dustin.help_pages import Sectioned
from dustin.terminal import note, prefill_bar, read_file

BASELINE = "ar"
# Modes whose output is that of plain decoding (METHOD section 5); in bf16 near-ties may fall the other way.
LOSSLESS = ("ar", "dense", "exact", "auto")
Row = dict[str, Any]


class Counts(click.ParamType):
    """Whole numbers of 1 or more, separated by commas."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, each once; a click error names the one that is none."""
        if isinstance(value, tuple):
            return value
        numbers = []
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)  # a configuration file has lists
        for part in text.split(","):
            if not part.strip().isascii() or not part.strip().isdigit() or int(part) < 1:
                self.fail(f"{part.strip()!r} is no whole number of 1 or more, expected for example 512,2048", param, ctx)
            numbers.append(int(part))
        return tuple(dict.fromkeys(numbers))


COUNTS = Counts()


@dataclass
class Prompts:
    """The prompts of all cases and one cache that holds what has been read of them: nothing is read twice.

    `unread` last tokens of a prompt are left to each run, which needs their logits (and, for some selectors, queries).
    """

    session: Any
    rows: list[list[int]]
    capacity: int
    unread: int

    def __post_init__(self) -> None:
        self.cache = self.session.target.new_cache(len(self.rows), self.capacity)

    def read(self, context: int) -> float:
        """Read on to `context` tokens of each prompt; the speed in tokens per second, 0 where nothing was left to read."""
        from time import perf_counter

        from dustin.prefill import chunk_of, prefill

        session, have = self.session, self.cache.lengths[0]
        parts = [row[have : max(have, context - self.unread)] for row in self.rows]
        if not parts[0]:
            return 0.0
        start = perf_counter()
        with prefill_bar() as progress:
            chunk = chunk_of(session.options.prefill_chunk, session.backend, len(self.rows))
            prefill(session.backend, session.target, self.cache, parts, chunk, None, progress, logits=False)
        return sum(map(len, parts)) / (perf_counter() - start)

    def case(self, context: int, batch: int, tokens: int) -> tuple[list[list[int]], Any]:
        """Prompts of one case and a cache of its own that holds all but their last tokens."""
        capacity = max(context + tokens, max(self.cache.lengths)) + self.session.options.exact_block
        return [row[:context] for row in self.rows[:batch]], self.cache.take(range(batch), capacity)


def _text(files: Sequence[str]) -> str:
    """The files, or the language reference that comes with every CPython: real English at hand anywhere."""
    if files:
        return "\n\n".join(read_file(name) for name in files)
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _passages(ids: list[int], context: int, batch: int) -> list[list[int]]:
    """`batch` passages of `context` tokens, evenly spread. Raise UsageError when the text is too short for different ones."""
    if len(ids) < context + batch - 1:
        raise UsageError(
            f"the text has {len(ids)} tokens, expected at least {context + batch - 1} for {batch} passages of --context {context}: "
            "give a longer --file"
        )
    step = (len(ids) - context) // max(batch - 1, 1)
    return [ids[row * step : row * step + context] for row in range(batch)]


def _run(session: Any, prompts: list[list[int]], cache: Any, request: RequestOptions) -> tuple[Any, list[list[int]]]:
    """(stats, tokens of each row) of one run from a cache that holds the prompts. Raise NumericsError on NaN."""
    run = session._start(prompts, [request] * len(prompts), cache)
    for _ in run.events(None):
        pass
    broken = next((row.error for row in run.rows if row.error), None)
    if broken:
        raise NumericsError(broken)
    return run.stats, [row.generated for row in run.rows]


def equal_share(texts: list[list[int]], reference: list[list[int]]) -> float:
    """Mean share of leading tokens that equal the reference's."""
    shares = []
    for text, other in zip(texts, reference, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
        shares.append(same / max(len(other), 1))
    return statistics.mean(shares)


def measure_case(
    session: Any, prompts: Prompts, context: int, batch: int, modes: Sequence[str], request: RequestOptions, repeats: int
) -> Iterator[Row]:
    """One row a mode, plain decoding first: the median of `repeats` runs, which take turns between the modes."""
    options = session.options
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    last: dict[str, tuple[Any, list[list[int]]]] = {}
    if session.backend.device != "cpu":
        # A first run on a GPU compiles kernels and records graphs.
        for mode in modes:
            note(f"context {context}, batch {batch}, mode {mode}: warming up")
            session.options = options_of(options, mode)
            _run(session, *prompts.case(context, batch, request.max_tokens), request)
    for turn in range(repeats):
        for mode in modes:
            note(f"context {context}, batch {batch}, mode {mode}" + (f", run {turn + 1} of {repeats}" if repeats > 1 else ""))
            session.options = options_of(options, mode)
            last[mode] = _run(session, *prompts.case(context, batch, request.max_tokens), request)
            speeds[mode].append(last[mode][0].generation_tps)
            if turn == repeats - 1:
                yield _row(context, batch, mode, speeds, last)
    session.options = options


def options_of(options: EngineOptions, mode: str) -> EngineOptions:
    """The options of one mode: what trades exactness away stays out of the modes that promise it."""
    if mode in LOSSLESS:
        return replace(options, mode=mode, relaxed_weight=0.0, route_confidence=0.0)
    return replace(options, mode=mode)


def _row(context: int, batch: int, mode: str, speeds: dict[str, list[float]], last: dict[str, Any]) -> Row:
    (stats, tokens), (_, plain) = last[mode], last[BASELINE]
    speed, base = statistics.median(speeds[mode]), statistics.median(speeds[BASELINE])
    return {
        "context": context,
        "batch": batch,
        "mode": mode,
        "drafter": stats.drafter,
        "lossless": mode in LOSSLESS,
        "tokens_per_s": round(speed, 2),
        "ratio": round(speed / base, 3) if base else None,
        "spread": round(max(speeds[mode]) / max(min(speeds[mode]), 1e-9), 2),
        "acceptance_length": round(stats.acceptance_length, 3),
        "kv_read_share": round(stats.kv_read_share, 4),
        "peak_memory_bytes": stats.peak_memory_bytes,
        "equal_leading_share": round(equal_share(tokens, plain), 3),
        "same_as_ar": tokens == plain,
    }


def _refuse_useless(ctx: click.Context, values: dict[str, Any], modes: Sequence[str]) -> None:
    """Raise UsageError for a flag that has no effect in any of the modes beside plain decoding."""
    found = [useless(ctx, values | {"mode": mode}) for mode in modes if mode != BASELINE or len(modes) == 1]
    for name, why in found[0].items():
        if all(name in other for other in found):
            raise UsageError(why if len(found) == 1 else f"{why}, and no mode of --modes has use for it")


def _modes(text: str) -> list[str]:
    """Plain decoding and the named modes, each once. Raise UsageError on an unknown one, and where none is named."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODES:
            raise UsageError(f"--modes has {name!r}, expected {', '.join(MODES)}")
    if not names:
        raise UsageError(f"--modes is {text!r}, expected some of {', '.join(MODES)}, with commas between")
    return list(dict.fromkeys([BASELINE, *names]))


@click.command(cls=Sectioned, context_settings=CONTEXT)
@loading_options
@engine_options
@click.option("--context", "contexts", type=COUNTS, multiple=True, default=("512,2048",), show_default=True, help="Prompt tokens.")
@click.option("--batch", "batches", type=COUNTS, multiple=True, default=("1,4",), show_default=True, help="Prompts at once.")
@click.option("--modes", default="dense,exact,sparse,auto", show_default=True, help="Modes to compare with ar, by commas.")
@click.option("--max-tokens", "-n", type=click.IntRange(2), default=24, show_default=True, help="Tokens generated a prompt.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Runs of each mode; the median counts.")
@click.option("--file", "-f", "files", type=FILE, multiple=True, help="Text for the prompts. Default: Python's language reference.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of the table.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV with a header instead of the table.")
@debug_option
@click.pass_context
def bench(ctx: click.Context, contexts: tuple[tuple[int, ...], ...], batches: tuple[tuple[int, ...], ...], **values: Any) -> None:
    """Tokens per second of each mode at each prompt length and batch size; `ratio` is against plain decoding (ar).

    Prompts are read once and every run starts from a copy of their KV cache; only decoding is timed. As it stands it takes
    about a minute with the default model on two CPU cores. Give --context and --batch as lists: --context 1024,4096 --batch 1,8.
    """
    modes = _modes(values["modes"])
    if ctx.get_parameter_source("mode") == click.core.ParameterSource.COMMANDLINE:
        raise UsageError("bench compares modes: name them by --modes, not --mode")
    if values["as_json"] and values["as_csv"]:
        raise UsageError("--json and --csv are two formats: give one of them")
    if values["files"].count("-") > 1:
        raise UsageError("stdin (-) can be read only once")
    options = build_engine_options(values | {"mode": "sparse"})
    if values["draft_model"] and values["drafter"] not in ("auto", "draft"):
        raise UsageError(f"--draft-model has no use with --drafter {values['drafter']}: drop one of them")
    _refuse_useless(ctx, values, modes)
    lengths = sorted({length for group in contexts for length in group})
    sizes = sorted({size for group in batches for size in group})

    from dustin.generation import load

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    session = load(values["model"], values["draft_model"], options=options, **loading)
    if session.tokenizer is None:
        raise UsageError("bench needs a tokenizer, and this model has none")
    request = RequestOptions(max_tokens=values["max_tokens"], ignore_eos=True)
    unread = _checked(session, modes, request, lengths[-1])
    rows = _passages(session.tokenizer.encode(_text(values["files"])), lengths[-1], sizes[-1])
    prompts = Prompts(session, rows, lengths[-1] + 1, unread)
    common = _common(session, values)
    printed = _Printer("json" if values["as_json"] else "csv" if values["as_csv"] else "table", common)
    for context in lengths:
        speed = prompts.read(context)
        if speed:
            note(f"context {context}: {sizes[-1]} prompts read at {speed:.0f} tokens/s")
        for batch in sizes:
            for row in measure_case(session, prompts, context, batch, modes, request, values["repeats"]):
                printed.add(row)
    printed.end()


def _checked(session: Any, modes: Sequence[str], request: RequestOptions, context: int) -> int:
    """Raise UsageError before anything is measured: modes that cannot run, contexts too long. Returns the rows runs must read."""
    from dustin.engine import Engine
    from dustin.stats import Stats

    for model in (session.target, session.draft):
        room = model.spec.context_length - request.max_tokens if model is not None else context
        if context > room:
            raise ContextLengthError(
                f"--context {context} and {request.max_tokens} new tokens exceed the {model.spec.context_length} tokens of "
                f"{model.spec.name}: use --context {max(room, 1)} or less"
            )
    unread, options = 1, session.options
    for mode in modes:
        session.options = options_of(options, mode)
        engine = session.make_engine(Engine, session.resolve(request), Stats())
        unread = max(unread, engine.selector.prompt_rows)
    session.options = options
    return min(unread, context)


def _common(session: Any, values: dict[str, Any]) -> Row:
    """What all rows share."""
    spec = session.target.spec
    return {
        "model": spec.name,
        "draft": session.draft.spec.name if session.draft else None,
        "backend": session.backend.name,
        "device": session.backend.device,
        "dtype": spec.dtype,
        "max_tokens": values["max_tokens"],
        "repeats": values["repeats"],
        "budget": values["budget"],
        "num_draft_tokens": values["num_draft_tokens"],
        "dustin": __version__,
    }


class _Printer:
    """Rows as they come: a table or CSV line by line, JSON at the end."""

    def __init__(self, form: str, common: Row) -> None:
        self.form, self.common = form, common
        self.rows: list[Row] = []
        if form == "table":
            draft = f" with draft {common['draft']}" if common["draft"] else ""
            how = f"{common['backend']} on {common['device']}, {common['dtype']}"
            click.echo(f"{common['model']}{draft}, {how}, {common['max_tokens']} tokens a prompt, greedy")
            click.echo("context  batch  mode       drafter     tok/s   ratio  accepted  KV read  memory GiB  equal to ar")

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(self.common | row)
        if self.form == "csv":
            writer = csv.DictWriter(sys.stdout, [*self.common, *row], lineterminator="\n")
            if len(self.rows) == 1:
                writer.writeheader()
            writer.writerow(self.rows[-1])
            sys.stdout.flush()
        elif self.form == "table":
            click.echo(_line(row))

    def end(self) -> None:
        """What is printed last."""
        if self.form == "json":
            click.echo(json.dumps(self.rows))
        elif self.form == "table":
            click.echo("tok/s: of the whole batch; accepted: tokens a verification; sparse and rectified are approximate")
            dtype = self.common["dtype"]
            if dtype in ("bfloat16", "float16") and any(row["lossless"] and not row["same_as_ar"] for row in self.rows):
                click.echo(f"in {dtype} near-ties may fall either way in any mode; with --dtype float32 the tokens are equal")


def _line(row: Row) -> str:
    left = f"{row['context']:7}  {row['batch']:5}  {row['mode']:9}  {row['drafter']:8}  {row['tokens_per_s']:7.1f}"
    ratio = f"{row['ratio']:5.2f}x" if row["ratio"] is not None else "     -"
    right = f"{row['acceptance_length']:8.2f}  {100 * row['kv_read_share']:6.1f}%  {row['peak_memory_bytes'] / 2**30:10.2f}"
    return f"{left}  {ratio}  {right}  {100 * row['equal_leading_share']:9.0f} %"
