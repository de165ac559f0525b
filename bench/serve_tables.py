"""The tables of docs/serving.md from the rows of `bench serve` and `bench slots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import rows
from bench.decode_tables import markdown


def _ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}x" if name in row else ""


def serve() -> str:
    """Servers on the same machine: one client, several clients."""
    return _runs(rows.RESULTS / "serve.jsonl")


def serve_cuda() -> str:
    """The same on a GPU, with a real pair."""
    return _runs(rows.RESULTS / "serve_cuda.jsonl")


def _runs(path: Path) -> str:
    """A table for each command that made rows of the file."""
    made = rows.read(path)
    commands = dict.fromkeys(row["command"] for row in made)
    return "\n\n".join(_run([row for row in made if row["command"] == command]) for command in commands)


def _run(made: list[dict[str, Any]]) -> str:
    against = [name for name in ("transformers", "dustin ar") if any(f"ratio_to_{_key(name)}" in row for row in made)][:1]
    lines = [
        [
            f"`{row['side']}`, {row['clients']} client{'s' * (row['clients'] > 1)}" + _shared(row) + _whole(row),
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
            *(_ratio(row, f"ratio_to_{_key(name)}") for name in against),
            f"{row['ttft_ms_median']:.0f} ms",
            f"{row['gap_ms_worst']:.0f} ms",
        ]
        for row in made
    ]
    header = ["server", "tok/s", "against one by one", *(f"against {name.removeprefix('dustin ')}" for name in against)]
    header += ["first token, median", "longest gap"]
    first = made[0]
    extra = f" {first['note']}" if first["note"] else ""
    draft = f" with {first['draft']} as draft" if first.get("draft") else ""
    where = first["device"] if first.get("device", "cpu") != "cpu" else f"{first['processor']}, {first['threads']} threads"
    if first.get("warm_up_s"):
        ready, warm = ([row[name] for row in made] for name in ("ready_s", "warm_up_s"))
        spans = (f"{min(seconds):.0f} to {max(seconds):.0f} s" for seconds in (ready, warm))
        extra = " Ready after {}, {} of it warming up.".format(*spans) + extra
    together = max(row["requests"] for row in made)
    alone = "" if first["requests"] == together else f", {first['requests']} of them one by one,"
    note = (
        f"{together} chats of about {first['context']} prompt tokens{alone} and up to {first['max_tokens']} new ones, "
        f"greedy, {first['model']}{draft}, {first['dtype']}, {where}; "
        f"`{first['command'].split(' --note')[0]}` at {first['commit']}.{extra}"
    )
    return markdown(header, lines) + "\n\n" + note


def _shared(row: dict[str, Any]) -> str:
    return f", {row['per_passage']} chats about one passage" if row.get("per_passage", 1) > 1 else ""


def _whole(row: dict[str, Any]) -> str:
    return f", answers of {row['max_tokens']} tokens" if row.get("whole_answers") else ""


def _key(side: str) -> str:
    return side.replace(" ", "_")


def slots() -> str:
    """Continuous batching without HTTP."""
    made = rows.read(rows.RESULTS / "slots.jsonl")
    lines = [
        [
            f"`{row['mode']}`, {'all at once' if row['at_once'] > 1 else 'one by one'}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}x",
            f"{row['cpu_ratio']:.2f}x",
            f"{row['ratio_to_first_mode']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{row['ttft_ms_median']:.0f} ms",
        ]
        for row in made
    ]
    first = made[0]
    header = [
        "mode",
        "tok/s",
        "against one by one",
        "the same by CPU time",
        f"against `{first['mode']}`",
        "a round",
        "first token, median",
    ]
    draft = f" with {first['draft']} as draft" if first["draft"] else ""
    note = (
        f"{first['at_once']} requests of about {first['context']} prompt tokens and {first['max_tokens']} new ones over "
        f"{first['slots']} slots, {first['model']}{draft}, {first['dtype']}, {first['device']}; prompts are read within the time; "
        f"`{first['command'].split(' --note')[0]}` at {first['commit']}. {first['note']}".rstrip()
    )
    return markdown(header, lines) + "\n\n" + note
