"""Real texts for the benches, by kind: novels, speeches, a manual, code. Nothing is fetched."""

from __future__ import annotations

import lzma
import sysconfig
from functools import cache
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
# A library module of any CPython, long enough for 32k tokens together.
_MODULES = ("argparse", "inspect", "typing", "subprocess", "tarfile", "zipfile", "doctest", "pdb", "ast", "dataclasses")


@cache
def book(name: str) -> str:
    """A text of bench/data (its file name without .txt.xz), hard line breaks joined into paragraphs."""
    text = lzma.open(DATA / f"{name}.txt.xz", "rt", encoding="utf-8").read()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


@cache
def manual() -> str:
    """The Python language reference, which comes with every CPython."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def code() -> str:
    """Modules of the Python standard library, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    # A module may be a package in another version of Python.
    files = {name: next(p for p in (folder / f"{name}.py", folder / name / "__init__.py") if p.is_file()) for name in _MODULES}
    return "\n\n".join(f"# {name}.py\n" + path.read_text(encoding="utf-8") for name, path in files.items())


KINDS = {
    "novel": lambda: book("pride_and_prejudice"),
    "sea novel": lambda: book("mobydick"),
    "speech": lambda: book("state_of_the_union_1981"),
    "manual": manual,
    "code": code,
}
TASKS = {
    "novel": "Summarise the passage above, naming the persons in it and what each of them wants.",
    "sea novel": "Retell the passage above in plain modern English, in order.",
    "speech": "List the measures that the speech above proposes, with the reason given for each.",
    "manual": "Explain the rules stated in the text above to a beginner, quoting the important sentences.",
    "code": "Copy the last complete function or class of the code above and add a docstring with an example.",
}


def prompts(tokenizer: object, kind: str, count: int, context: int, stagger: int = 97) -> list[list[int]]:
    """`count` chat prompts over consecutive passages of `kind`, of context, context + stagger, ... tokens (document and task)."""
    task = "\n\n" + TASKS[kind]
    ids = tokenizer.encode(KINDS[kind](), add_special_tokens=False)  # type: ignore[attr-defined]
    frame = len(tokenizer.apply_chat_template([{"role": "user", "content": task}]))  # type: ignore[attr-defined]
    longest = context + stagger * (count - 1)
    if len(ids) < longest:
        raise ValueError(f"{kind} has {len(ids)} tokens, expected {longest} or more: lower the context")
    step = min(longest, (len(ids) - longest) // max(count - 1, 1))
    made = []
    for i in range(count):
        body = tokenizer.decode(ids[i * step : i * step + context + i * stagger - frame])  # type: ignore[attr-defined]
        made.append(tokenizer.apply_chat_template([{"role": "user", "content": body + task}]))  # type: ignore[attr-defined]
    return [list(row) for row in made]
