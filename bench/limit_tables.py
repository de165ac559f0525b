"""Tables of bench/results/limits.jsonl and own_sets.jsonl: what sharing, predicting and the budget lose, and what own sets win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import rows
from dustin.cli_options import LayerList

LIMITS, OWN = rows.RESULTS / "limits.jsonl", rows.RESULTS / "own_sets.jsonl"
SPEED = rows.RESULTS / "own_sets_speed.jsonl"
# Tracks of questions, all of them first.
TRACKS = ("tasks", "needle", "tracking", "qa", "words")
RULES = {
    "heuristic": "`dustin`: one predicted set",
    "oracle": "one set, by the window's own attention",
    "oracle by layer": "one a layer, by the window's own attention",
    "own by layer": "one a layer, chosen by its own rows in the forward",
    "own by kv head": "one a kv head, so chosen",
    "own by head": "one a query head, so chosen",
    "own by head, as much read": "one a query head, together no larger than one of a kv head",
    "own by kv head, .8 of the mass": "one a kv head, the fewest keys that hold .8 of the mass, 4,096 at most",
    "own by kv head, .9 of the mass": "the same with .9",
    "own by kv head, first row": "one a kv head, chosen by the first row alone",
}


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['agreement']:.3f} / {100 * row['hard_flips']:.1f} / {row['kl']:.3f} / {row['perplexity_ratio']:.2f}"


def _with_read(row: dict[str, Any] | None) -> str:
    """The numbers with what was read of keys and values, where the row has it."""
    return _shown(row) + (f" / {100 * row['kv_read']:.1f}" if row is not None and "kv_read" in row else "")


def limits() -> str:
    """Rule by rule, context by context."""
    from bench.tables import markdown

    made = rows.read(LIMITS)
    columns = [(track, n) for track in ("chat", "text") for n in sorted({r["context"] for r in made if r["track"] == track})]
    found = {(r["rule"], r["track"], r["context"]): r for r in made}
    used = [rule for rule in RULES if any(key[0] == rule for key in found)]
    lines = [[RULES[rule], *(_with_read(found.get((rule, *column))) for column in columns)] for rule in used]
    read = " / KV read %, choosing not counted" if any("kv_read" in row for row in made) else ""
    head = [f"agreement / hard flips % / KL / perplexity ratio{read}", *(f"{track} {n}" for track, n in columns)]
    first = made[0]
    noise = {r["context"]: r["dense_self_agreement"] for r in made if r["track"] == "chat"}
    ran = "; ".join(dict.fromkeys(f"`{row['command']}` at {row['commit']}" for row in made))
    said = ", ".join(f"{value:.4f} at {context}" for context, value in sorted(noise.items()))
    note = (
        f"Budget {first['budget']} for every set. {first['model']} with {first['draft']} as draft, {first['dtype']}, "
        f"{first['card']}; {ran}. Dense attention one token at a time agrees with itself in rounds of "
        f"{first['num_draft_tokens'] + 1} rows in {said} of the rows: the noise of bf16."
    )
    return markdown(head, lines) + "\n\n" + note


def _label(row: dict[str, Any]) -> str:
    heads = row["heads"]
    if row["selector"] != "dustin":
        what = row["selector"]
    elif "+every" in heads or "+at" in heads:
        what = "own sets" + (" by kv head" if heads.endswith("kv") else "")
        which, _, rank = heads.partition("+every" if "+every" in heads else "+at")[2].removesuffix("kv").partition("c")
        rank, _, some = rank.partition("r")
        what += (f", compact keys of {rank}" if rank else ", whole keys") + (f", by the first {some} rows" if some else "")
        what += " in every 2nd layer, `dustin`'s in the others" if "+every2" in heads else ""
        if "+at" in heads:
            what += f", {len(LayerList().convert(which, None, None))} layers choose for all"
    else:
        what = f"`dustin`, {heads}"
    if heads.startswith("ahead+"):
        what += ", the draft's set by its own scores"
    if row.get("bytes_of_budget"):
        return f"{what}, bytes of {row['bytes_of_budget']}"
    return f"{what}, k={row['budget']}"


def _by_column(
    title: str, made: list[dict[str, Any]], columns: list[tuple[str, int]], cell: Callable[[dict[str, Any]], str]
) -> str:
    """A line for each label, a column for each track and context."""
    from bench.tables import markdown

    table: dict[str, dict[tuple[str, int], str]] = {}
    for row in made:
        table.setdefault(_label(row), {})[row["track"], row["context"]] = cell(row)
    lines = [[label, *(by.get(column, "") for column in columns)] for label, by in table.items()]
    return markdown([title, *(f"{track} {n}" for track, n in columns)], lines)


def own_sets() -> str:
    """Cells of the product's own path, context by context; bytes beside them."""
    made = [row for row in rows.read(OWN) if row["track"] in ("chat", "text") and "kl" in row]
    columns = [(track, n) for track in ("chat", "text") for n in sorted({r["context"] for r in made if r["track"] == track})]
    table = _by_column(
        "agreement / hard flips % / KL / perplexity ratio / bytes %", made, columns,
        lambda row: f"{_shown(row)} / {100 * row['share_of_dense_bytes']:.1f}",
    )  # fmt: skip
    return table + "\n\n" + _note(made)


def _note(made: list[dict[str, Any]]) -> str:
    """Models, card and commands of some rows."""
    first = made[0]
    ran = "; ".join(dict.fromkeys(f"`{row['command']}` at {row['commit']}" for row in made))
    pair = f"{first['model']} with {first['draft']} as draft, {first['dtype']}, {first['card']}"
    return f"{pair}, {first['num_draft_tokens']} drafts; {ran}."


def own_sets_questions() -> str:
    """Questions answered by whole engines."""
    made = [row for row in rows.read(OWN) if "accuracy_of_dense" in row and row["mode"] == "sparse"]
    columns = sorted({(row["track"], row["context"]) for row in made}, key=lambda c: (TRACKS.index(c[0]), c[1]))
    table = _by_column(
        "answers, % of dense attention's (questions)", made, columns,
        lambda row: f"{100 * row['accuracy_of_dense']:.0f} % ({row['questions']})",
    )  # fmt: skip
    return table + "\n\n" + _note(made)


def own_sets_acceptance() -> str:
    """Tokens a round of whole engines, against dense speculation."""
    from bench.tables import markdown

    made = [row for row in rows.read(OWN) if row.get("what") == "acceptance"]
    contexts = sorted({row["context"] for row in made})
    table: dict[str, dict[int, str]] = {}
    for row in made:
        label = "dense speculation" if row["mode"] == "dense" else _label(row) + ("" if row["sparse_draft"] else ", dense draft")
        table.setdefault(label, {})[row["context"]] = f"{row['acceptance_length']:.2f}"
    lines = [[label, *(by.get(context, "") for context in contexts)] for label, by in table.items()]
    return markdown(["tokens a round", *map(str, contexts)], lines) + "\n\n" + _note(made)


def own_sets_speed() -> str:
    """Whole rounds with sets of the layers' own beside the shared set, random weights."""
    from bench.tables import markdown

    made = [row for row in rows.read(SPEED) if row.get("ratio") is not None and row["weights"] == "random"]
    batches = sorted({row["batch"] for row in made})
    table: dict[tuple[str, str], dict[int, str]] = {}
    for row in made:
        name = row["model"].partition(" ")[0]
        budget = f", k={row['budget']}" if row.get("budget") else ""
        chosen = f", choosing and reading {row['verify_attention_us'] / 1e3:.1f} ms" if row["mode"].startswith("own") else ""
        cell = f"{row['tokens_per_second']:.0f} ({row['ratio']:.2f}x{chosen})"
        table.setdefault((name, row["mode"] + budget), {})[row["batch"]] = cell
    lines = [[f"{name}: {mode}", *(by.get(batch, "") for batch in batches)] for (name, mode), by in table.items()]
    first, commits = made[0], ", ".join(dict.fromkeys(row["commit"] for row in made))
    kept = next((row["acceptance"] for row in made if row.get("acceptance")), "not replayed")
    note = (
        f"Tokens a second of the whole batch (ratio to our own decoding with CUDA graphs). {first['card']}, random weights of "
        f"these shapes with a 0.5B draft, {first['dtype']}, context {first['context']}; acceptance {kept}, the same for all; the "
        f"commands stand in the rows (`{SPEED.name}`), commits {commits}."
    )
    return markdown(["tok/s", *(f"batch {batch}" for batch in batches)], lines) + "\n\n" + note


def own_sets_engine() -> str:
    """The real pair through the engine, one shared set and own sets beside plain decoding."""
    from bench.tables import markdown

    made = [row for row in rows.read(SPEED) if row.get("ratio") is not None and row["weights"] != "random"]
    places = list(dict.fromkeys((row["text"], row["context"], row["batch"]) for row in made))
    table: dict[str, dict[tuple[str, int, int], str]] = {}
    for row in made:
        kept = f", {row['acceptance_length']:.2f} a round" if row.get("acceptance_length") else ""
        cell = f"{row['tokens_per_second']:.0f} ({row['ratio']:.2f}x{kept})"
        table.setdefault(row["mode"], {})[row["text"], row["context"], row["batch"]] = cell
    lines = [[mode, *(by.get(place, "") for place in places)] for mode, by in table.items()]
    first = made[0]
    note = f"{first['model']}, {first['card']}, {first['dtype']}; `{first['command']}` at {first['commit']}."
    return markdown(["tok/s", *(f"{text}, {context} x {batch}" for text, context, batch in places)], lines) + "\n\n" + note
