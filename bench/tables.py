"""Tables of README and docs from bench/results: each `<!-- table:NAME -->` ... `<!-- end -->` block is written anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from bench import (
    decode_tables,
    exact_table,
    fidelity_required,
    fidelity_tables,
    limit_tables,
    regime_tables,
    rows,
    serve_tables,
    variants,
)
from bench.decode_tables import markdown

PAGES = (rows.ROOT / "README.md", *sorted((rows.ROOT / "docs").glob("*.md")))


def cpu() -> str:
    """Tokens per second over contexts and batches: ours, and transformers beside it."""
    all_rows = rows.read(rows.RESULTS / "cpu.jsonl")
    # Runs at another dtype than the default stay in the rows.
    speeds = [row for row in all_rows if row["bench"] == "cpu" and "--dtype" not in row["command"]]
    # transformers' assisted generation runs at batch 1 only and was slower than its plain one: it stays in the rows.
    modes = list(dict.fromkeys(m for m in (row["mode"] for row in speeds) if not (m.startswith("transf") and "+" in m)))
    lines = []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in speeds):
        cell = {row["mode"]: row for row in speeds if (row["context"], row["batch"]) == (context, batch)}
        shown = [f"{cell[m]['tokens_per_s']:.1f} ({cell[m]['ratio']:.2f}x)" if m in cell else "" for m in modes]
        lines.append([f"{context} x {batch}", *shown])
    first = speeds[0]
    text = markdown(["context x batch", *modes], lines)
    note = (
        f"Tokens per second, all rows of the batch together (ratio to our own `ar`). {first['model']}, {first['dtype']} on our "
        f"side, {first['processor']}, {first['threads']} threads; `{first['command']}` at {first['commit']}."
    )
    memory = [
        f"At {row['context']} x {row['batch']} the whole run (prompt and 16 tokens) peaks at "
        f"{row['peak_memory_bytes'] / 2**30:.2f} GiB, transformers at {row['baseline_peak_memory_bytes'] / 2**30:.2f} GiB."
        for row in all_rows
        if row["bench"] == "cpu-memory"
    ]
    return "\n\n".join([text, note, *memory])


def pair() -> str:
    """A real pair over one document."""
    made = rows.read(rows.RESULTS / "pair.jsonl")
    lines = [
        [
            row["mode"] + (f", budget {row['budget']}" if "budget" in row else ""),
            f"{row['tokens_per_s']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_dense_check']:.1f}" if "tokens_per_dense_check" in row else "",
            f"{100 * row['kv_read_share']:.0f} %",
            f"{100 * row['equal_leading_share_vs_ar']:.0f} %",
            "yes" if row["needle_answered"] else "no",
        ]
        for row in made
    ]
    header = ["mode", "tok/s", "ratio", "a round", "a dense check", "target KV read", "leading tokens equal to ar", "fact found"]
    first = made[0]
    note = (
        f"{first['model']} with {first['draft']} as draft, {first['dtype']}, {first['context']} prompt tokens, batch 1, "
        f"{first['processor']}, {first['threads']} threads; `{first['command']}` at {first['commit']}."
    )
    return markdown(header, lines) + "\n\n" + note


def attention() -> str:
    """Attention ratios on the GPU, the round's selection included."""
    made = rows.read(rows.RESULTS / "attention.jsonl")
    commits = rows.Commits(made)
    lines = [
        [
            row["shape"],
            str(row["context"]),
            str(row["batch"]),
            str(row["budget"]),
            row["scoring"].split(" + ")[0] + (f", {row['dense_layers']} layer dense" if row["dense_layers"] else ""),
            f"{row['ratio']:.1f}x" + commits.mark(row),
            f"{row['ratio_attention_only']:.1f}x",
            f"{row['sparse_attention_us_per_layer']:.1f}",
            f"{row['selection_us_per_round']:.0f}",
            f"{row['selection_percent_of_dense']:.2f} %",
            f"{row['our_dense_us_per_layer']:.0f}",
            f"{row['dense_over_copy_floor']:.2f}",
            row["baseline"],
        ]
        for row in made
    ]
    header = ["Hq/Hkv/D", "context", "batch", "budget", "scoring by the target", "ratio", "without selection", "sparse, us a layer"]
    header += ["selection, us a round", "selection / dense", "our dense, us a layer", "our dense / copy floor", "baseline"]
    first = made[0]
    note = (
        f"{first['card']}, six query rows, random weights; scoring besides: 3 draft layers x 4 heads of 1 kv head, every round; "
        f"`{first['command']}` at {commits}."
    )
    return markdown(header, lines) + "\n\n" + note


def summary() -> str:
    """The README's few lines: one of each kind, at the largest context and batch measured."""
    everything = rows.read(rows.RESULTS / "cpu.jsonl")
    speeds = [row for row in everything if row["bench"] == "cpu" and "--dtype" not in row["command"]]
    largest = max((row["context"], row["batch"]) for row in speeds)
    cell = {row["mode"]: row for row in speeds if (row["context"], row["batch"]) == largest}
    peer = max((row for mode, row in cell.items() if mode.startswith("transf")), key=lambda row: row["tokens_per_s"])
    where = f"{cell['ar']['threads']} cores of a CPU, SmolLM2-135M, {largest[0]} tokens x {largest[1]}"
    lines = [
        [f"{where}: `{mode}`", f"{cell[mode]['tokens_per_s']:.0f} tok/s", f"{cell[mode]['ratio']:.2f}x", same]
        for mode, same in (("auto", "same output"), ("sparse+lookup", "approximate"))
    ]
    lines.append([f"the same in transformers ({peer['mode'].partition('-')[2]})", f"{peer['tokens_per_s']:.0f} tok/s",
                  f"{peer['ratio']:.2f}x", "same output"])  # fmt: skip
    # The cautious ones: acceptance fixed, scoring heads anywhere where that was measured.
    decoded = [row for row in decode_tables.whole_rounds() if "measured on" not in (row.get("acceptance") or "")]
    most = max(row["batch"] for row in decoded)
    for kind, same in (("exact", "same output"), ("rectified", "approximate"), ("sparse", "approximate")):
        own = [row for row in decoded if row["batch"] == most and row["mode"].startswith(kind)]
        cautious = [row for row in own if "one kv head" not in row.get("scoring", "")]
        best = max(cautious or own, key=lambda row: row["ratio"])
        where = f"one {best['card'].removeprefix('NVIDIA ')}, Qwen2.5-7B + 0.5B shapes, {best['context']} tokens x {most}: `{kind}`"
        same += "; random weights, acceptance fixed"
        lines.append([where, f"{best['tokens_per_second']:.0f} tok/s", f"{best['ratio']:.2f}x", same])
    lines += regime_tables.real_summary()
    attended = next(
        row for row in rows.read(rows.RESULTS / "attention.jsonl")
        if (row["shape"], row["context"], row["batch"], row["budget"]) == ("64/8/128, 80 layers", 32768, 16, 512)
    )  # fmt: skip
    where = f"one {attended['card'].removeprefix('NVIDIA ')}, attention alone, Qwen2.5-72B's shape, 32768 tokens x 16, budget 512"
    lines.append([where, f"{attended['round_us'] / 1000:.1f} ms a round", f"{attended['ratio']:.1f}x", "random weights"])
    return markdown(["", "speed", "against our own plain decoding", "output"], lines)


def mlx_cuda() -> str:
    """MLX's array path on an NVIDIA GPU, and the Triton kernels' row of the same shape."""
    made = rows.read(rows.RESULTS / "mlx_cuda.jsonl")
    lines = []
    for row in made:
        where = f"{row['shape']}, {row['layers']} layers" if row["kind"] == "attention" else row["model"]
        times = row["ms_per_layer"] if row["kind"] == "attention" else row["ms_per_round"]
        what = "attention, ms a layer" if row["kind"] == "attention" else "whole round, ms"
        dense = min((name for name in times if not name.startswith(("sparse", "plain"))), key=times.__getitem__)
        sparse = ", ".join(f"{ms:.3g} (k={name.split()[1]})" for name, ms in times.items() if name.startswith("sparse"))
        ratio = ", ".join(f"{x:.2f}x (k={k})" for k, x in row["ratio"].items())
        cells = [where, f"{row['context']} x {row['batch']}", str(row["query_rows"]), what, f"{times[dense]:.3g} ({dense})"]
        lines.append([*cells, sparse, ratio])
    header = ["model or Hq/Hkv/D", "context x batch", "rows", "what", "best dense", "sparse", "ratio, selection included"]
    first = made[0]
    note = (
        f"{first['what']}. {first['card']}, MLX {first['mlx']}, random weights and caches, {first['dtype']}; "
        f"`{first['command']}` at {first['commit']}."
    )
    same = next(
        row for row in rows.read(rows.RESULTS / "attention.jsonl")
        if row["shape"].startswith(first["shape"]) and (row["context"], row["batch"], row["budget"]) == (first["context"], 4, 512)
    )  # fmt: skip
    beside = (
        "The Triton kernels at the first row's shape (`attention.jsonl`, batch 4, budget 512): "
        f"{same['our_dense_us_per_layer']:.0f} us a layer dense, {same['sparse_attention_us_per_layer']:.1f} us sparse."
    )
    return "\n\n".join([markdown(header, lines), note, beside])


TABLES: dict[str, Callable[[], str]] = {
    "serve": serve_tables.serve,
    "serve_cuda": serve_tables.serve_cuda,
    "slots": serve_tables.slots,
    "mlx_cuda": mlx_cuda,
    "summary": summary,
    "cpu": cpu,
    "pair": pair,
    "decode": decode_tables.decode,
    "decode_parts": decode_tables.parts,
    "regimes_7b": partial(regime_tables.regimes, "Qwen2.5-7B"),
    "regimes_1_5b": partial(regime_tables.regimes, "Qwen2.5-1.5B"),
    "auto": regime_tables.auto,
    "real": regime_tables.real,
    "several_cards": decode_tables.several_cards,
    "attention": attention,
    "exact": exact_table.exact,
    "fidelity": fidelity_tables.fidelity,
    "fidelity_required": fidelity_required.required,
    "fidelity_unmet": fidelity_required.unmet,
    "fidelity_budgets": fidelity_required.budgets,
    "fidelity_chat": fidelity_tables.chat,
    "fidelity_text": fidelity_tables.text,
    "fidelity_tasks": fidelity_tables.tasks,
    "fidelity_kinds": fidelity_tables.kinds,
    "fidelity_drift": fidelity_tables.drift,
    "fidelity_acceptance": fidelity_tables.acceptance,
    "fidelity_both_sides": fidelity_tables.both_sides,
    "selectors": fidelity_tables.selectors,
    "limits": limit_tables.limits,
    "variants": variants.table,
    "few_own_sets": variants.few_own_sets,
    "own_sets": limit_tables.own_sets,
    "own_sets_questions": limit_tables.own_sets_questions,
    "own_sets_acceptance": limit_tables.own_sets_acceptance,
    "own_sets_speed": limit_tables.own_sets_speed,
    "own_sets_engine": limit_tables.own_sets_engine,
}


def regenerate(text: str) -> str:
    """A page's text with every table block written anew. Raise ClickException on an unknown name."""

    def block(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise click.ClickException(f"a page has a table {name!r}, expected one of {', '.join(TABLES)}")
        return f"<!-- table:{name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table:(\w+) -->.*?<!-- end -->", block, text, flags=re.S)


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when a page is not what the rows say.")
def main(**opts: Any) -> None:
    """Write the tables of README and docs from bench/results."""
    for page in PAGES:
        old = page.read_text()
        new = regenerate(old)
        if opts["check"] and new != old:
            raise click.ClickException(f"tables of {page.name} are not what bench/results say: run `python -m bench tables`")
        if new != old:
            page.write_text(new)
