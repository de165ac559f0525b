"""Tables of bench/results/fidelity.jsonl: rows replayed on the same traces, and tasks, context by context."""

from __future__ import annotations

from typing import Any

from bench import rows

OUT = rows.RESULTS / "fidelity.jsonl"
# What a row has that is not about its plain budget.
NARROWED = ("bytes_of_budget", "bytes_like", "top_mass", "lookahead_lag")


# Modes that read everything, by what their lines are called.
_DENSE = {"dense": "dense attention", "ar": "dense attention, one token at a time"}


def _number(row: dict[str, Any], name: str, percent: bool = False, digits: int = 3) -> str:
    value = row.get(name)
    if value is None:
        return ""
    return f"{100 * value:.1f}" if percent else f"{value:.{digits}f}"


def _label(row: dict[str, Any]) -> str:
    what = row["selector"] + ("" if row["selector"] in ("dense", "streaming", "oracle", "oracle by layer") else f", {row['heads']}")
    if same := row.get("bytes_of_budget") or row.get("bytes_like"):
        return f"{what}, bytes of {same}"
    extra = f", top mass {row['top_mass']}" if row.get("top_mass") else ", lag 1" if row.get("lookahead_lag") else ""
    extra += ", dense draft" if row.get("sparse_draft") is False else ""
    return f"{what}, k={row['budget']}{extra}"


def _cells(track: str, keep: Any) -> tuple[list[int], dict[str, dict[int, dict[str, Any]]]]:
    made = [row for row in rows.read(OUT) if row["track"] == track and "kl" in row and keep(row)]
    table: dict[str, dict[int, dict[str, Any]]] = {}
    for row in made:
        table.setdefault(_label(row), {})[row["context"]] = row
    return sorted({row["context"] for row in made}), table


def _grid(first: str, contexts: list[int], table: dict[str, dict[int, Any]], cell: Any) -> str:
    from bench.tables import markdown

    lines = [[label, *(cell(by[context]) if context in by else "" for context in contexts)] for label, by in table.items()]
    return markdown([first, *(str(context) for context in contexts)], lines)


def _note(text: str) -> str:
    made = rows.read(OUT)
    first = made[0]
    pair = first["model"] + (f" with {first['draft']} as draft" if first["draft"] else "")
    machine = f"{first['dtype']}, {first['card']}, {first['num_draft_tokens']} drafts"
    runs = "; ".join(f"`{command}` at {commit}" for command, commit in dict.fromkeys((r["command"], r["commit"]) for r in made))
    return f"{text} {pair}, {machine}; {runs}.".lstrip()


def _replayed(row: dict[str, Any]) -> str:
    return (
        f"{_number(row, 'agreement')} / {_number(row, 'hard_flips', True)} / {_number(row, 'kl')} / "
        f"{_number(row, 'perplexity_ratio', digits=2)} / {_number(row, 'share_of_dense_bytes', True)}"
    )


def fidelity() -> str:
    """The README's lines: the paper's selector at k = 1024 and, on questions, every selector at k = 512, by context."""
    from bench.tables import markdown

    made = rows.read(OUT)
    every = ("dustin", "lookahead", "history", "quest", "snapkv", "h2o", "streaming")
    names = [name for name in every if _points(made, name, None)]
    lines = []
    for context in sorted({row["context"] for row in made}):
        cells = [str(context)]
        for track in ("chat", "text"):
            row = _find(made, context, track, 1024)
            cells += [_number(row, "agreement"), _number(row, "hard_flips", True)] if track == "chat" else []
            cells += [_number(row, "perplexity_ratio", digits=2)]
        cells.append(_number(_find(made, context, "chat", 1024), "share_of_dense_bytes", True))
        lines.append([*cells, *(_points(made, name, context) for name in names)])
    header = ["context", "chat: same token", "hard flips %", "perplexity ratio", "text: perplexity ratio", "KV bytes read %"]
    return "\n\n".join([markdown([*header, *(f"answers: {name}" for name in names)], lines), _note(_README)])


_README = (
    "First columns: `sparse`, budget 1024, against dense attention on the same tokens. Answers: points on planted questions at "
    "budget 512, % of dense attention's (how many questions)."
)


def _find(made: list[dict[str, Any]], context: int, track: str, budget: int) -> dict[str, Any]:
    """The cell of `dustin` with the profile where there is one, else the heuristic."""
    for heads in ("profile", "heuristic"):
        for row in made:
            plain = "kl" in row and not any(row.get(name) for name in NARROWED)
            if plain and (row["context"], row["track"], row["selector"], row["heads"]) == (context, track, "dustin", heads):
                if row["budget"] == budget:
                    return row
    return {}


def _points(made: list[dict[str, Any]], selector: str, context: int | None) -> str:
    for row in made:
        if row["track"] == "tasks" and row["mode"] == "sparse" and row["selector"] == selector and row["budget"] in (512, 128):
            if context in (None, row["context"]):
                return f"{100 * row['accuracy_of_dense']:.0f} % ({row['questions']})"
    return ""


def tasks() -> str:
    """Accuracy on planted tasks, as a share of dense attention's on the same questions; first line: dense attention's own."""
    from bench.tables import markdown

    made = [row for row in rows.read(OUT) if row["track"] in ("needle", "tracking", "qa")]
    table: dict[str, dict[Any, str]] = {}
    for row in made:
        key, count = (row["track"], row["context"]), f"({row['questions']})"
        if row["mode"] == "dense":
            table.setdefault("dense attention, share of all points", {})[key] = f"{100 * row['accuracy']:.0f} % {count}"
        else:
            label = _DENSE.get(row["mode"]) or _label(row)
            table.setdefault(label, {})[key] = f"{100 * row['accuracy_of_dense']:.0f} % {count}"
    order = {"needle": 0, "tracking": 1, "qa": 2}
    keys = sorted({key for cells in table.values() for key in cells}, key=lambda key: (order[key[0]], key[1]))
    lines = [[label, *(cells.get(key, "") for key in keys)] for label, cells in table.items()]
    return markdown(["answers, % of dense (questions)", *(f"{track} {context}" for track, context in keys)], lines)


def kinds() -> str:
    """Points by kind of question, of dense attention and of the main selectors at k = 512."""
    from bench.tables import markdown

    made = [row for row in rows.read(OUT) if row["track"] in ("tasks", "words") and row.get("by_kind")]
    names = list(dict.fromkeys(kind for row in made for kind in row["by_kind"]))
    table: dict[tuple[int, str], dict[str, str]] = {}
    for row in made:
        shown = row["mode"] in _DENSE or row["budget"] == 512
        if shown and row["selector"] in ("dustin", "history", "lookahead", "snapkv", "oracle"):
            label = _DENSE.get(row["mode"]) or _label(row)
            cells = table.setdefault((row["context"], label), {})
            cells |= {kind: f"{points:.2f}" for kind, points in row["by_kind"].items()}
    by_context = sorted(table.items(), key=lambda item: item[0][0])
    lines = [[str(context), label, *(cells.get(kind, "") for kind in names)] for (context, label), cells in by_context]
    return markdown(["context", "points", *names], lines)


def chat() -> str:
    """All chat cells."""
    contexts, table = _cells("chat", lambda row: True)
    head = "chat: agreement / hard flips % / KL / perplexity ratio / bytes %"
    return _grid(head, contexts, table, _replayed) + "\n\n" + _note("")


def text() -> str:
    """All text cells."""
    contexts, table = _cells("text", lambda row: True)
    return _grid("text: agreement / hard flips % / KL / perplexity ratio / bytes %", contexts, table, _replayed)


def drift() -> str:
    """KL and agreement over a long answer, by quarters."""
    from bench.tables import markdown

    made = [row for row in rows.read(OUT) if row["track"] == "drift"]
    lines = []
    for row in made:
        how = f"rectified {row['rectify']}" if row.get("rectify") else "not rectified"
        quarters = [f"{part['agreement']:.3f} / {part['kl']:.3f}" for part in row["quarters"]]
        lines.append([f"{row['tokens'] - 1} tokens at {row['context']}, {how}", *quarters, f"{row['repeated_4grams']:.2f}"])
    return markdown(["agreement / KL", "1st quarter", "2nd", "3rd", "4th", "repeated 4-grams"], lines)


def acceptance() -> str:
    """Acceptance length of whole engines."""
    from bench.tables import markdown

    made = [row for row in rows.read(OUT) if row.get("what") == "acceptance"]
    by: dict[str, dict[int, str]] = {}
    for row in made:
        draft = "sparse" if row["sparse_draft"] else "dense"
        label = row["mode"] if row["mode"] == "dense" else f"sparse, k={row['budget']}, {draft} draft"
        by.setdefault(label, {})[row["context"]] = f"{row['acceptance_length']:.2f}"
    contexts = sorted({row["context"] for row in made})
    lines = [[label, *(cells.get(c, "") for c in contexts)] for label, cells in by.items()]
    return markdown(["tokens a round", *(str(c) for c in contexts)], lines)


def both_sides() -> str:
    """Speed over plain decoding with a dense and a sparse draft: rows of decode.jsonl alike in commit, acceptance and drafts."""
    from bench.tables import markdown

    wanted = ("dense", "sparse, dense draft", "sparse, sparse draft")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows.read(rows.RESULTS / "decode.jsonl"):
        if row["mode"] in wanted and row.get("acceptance_length"):
            key = (row["model"], row["context"], row["batch"], row["num_draft_tokens"], row["commit"], row["acceptance"])
            found.setdefault(key, {}).setdefault(row["mode"], row)
    lines = []
    for (model, context, batch, drafts, *_), modes in sorted(found.items(), key=lambda item: str(item[0][0]) + f"{item[0][2]:4}"):
        if all(mode in modes for mode in wanted):
            cells = [f"{modes[mode]['ratio']:.2f}x" for mode in wanted]
            lines.append([model, f"{context} x {batch}", str(drafts), *cells])
    head = ["model", "context x batch", "drafts", "dense speculation", "sparse, dense draft", "both sides sparse"]
    note = "Times plain decoding's tokens a second; random weights, acceptance drawn alike for all three (`decode.jsonl`)."
    return markdown(head, lines) + "\n\n" + note


def selectors() -> str:
    """Every selector on the same traces (`python -m bench selectors`)."""
    from bench.tables import markdown

    made = rows.read(rows.RESULTS / "selectors.jsonl")
    names = ("agreement", "kl", "perplexity_ratio", "recovery_mean", "recovery_p5")
    lines = []
    for row in made:
        cells = [_number(row, name) for name in names]
        flips, share = _number(row, "hard_flips", True), _number(row, "share_of_dense_bytes", True)
        lines.append([row["selector"], cells[0], flips, *cells[1:], share])
    head = ["selector", "agreement", "hard flips %", "KL", "perplexity ratio", "recovery", "its 5th percentile", "bytes %"]
    first = made[0]
    where = f"Chat at {first['context']}, k = {first['budget']}, {first['documents']} documents"
    note = f"{where}; `{first['command']}` at {first['commit']}."
    return markdown(head, lines) + "\n\n" + note
