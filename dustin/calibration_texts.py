"""What calibration reads: prompts with a task each, and passages that go on; from texts that come with every CPython."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dustin.retrieval_heads import chat_frame
from dustin.text import Tokenizer

TASKS = (
    "Summarise the rules stated in the text above, in order, with the name of each construct.",
    "Explain the text above to a beginner. Quote the sentences that matter most.",
    "Write ten questions that the text above answers, each with its answer.",
    "List every function, class and exception that the text above names, and say what each is for.",
)
MODULES = (
    "difflib", "pickle", "optparse", "_pydecimal", "configparser", "statistics", "random", "threading", "shutil", "mailbox",
    "pickletools", "turtle", "textwrap", "queue",
)  # fmt: skip
# One document of this many goes on as its text does, the others with the target's answer: sets must serve both.
TEXT_EVERY = 4
# Characters that a text's tokens have on average at most, by far.
_LONGEST_TOKENS = 20


@dataclass(frozen=True)
class Document:
    """A chat prompt, and where it is not answered the tokens that its text goes on with."""

    prompt: list[int]
    following: list[int] | None = None


def documents(tokenizer: Tokenizer, count: int, context: int, tokens: int, tasks: Sequence[str] = TASKS) -> list[Document]:
    """`count` prompts of `context` tokens, two thirds prose and a third code; passages overlap where a text is too short.

    Every TEXT_EVERY-th is a passage alone, with `tokens` tokens after it, where its text has so many.
    """
    kinds = [2 if i % 3 == 2 else 1 for i in range(count)]
    texts = {1: reference_text(tokenizer)} | ({2: library_text(tokenizer)} if 2 in kinds else {})
    made = []
    for i, kind in enumerate(kinds):
        opening, closing = chat_frame(tokenizer, tasks[i % len(tasks)])
        ids, rank, of = texts[kind], kinds[:i].count(kind), kinds.count(kind)
        room = context - len(opening)
        if i % TEXT_EVERY == TEXT_EVERY - 1 and len(ids) > room + tokens:
            start = rank * max(1, len(ids) - room - tokens) // of
            passage = ids[start : start + room + tokens]
            made.append(Document([*opening, *passage[:room]], passage[room:]))
            continue
        room -= len(closing)
        start = rank * max(1, len(ids) - room) // of
        made.append(Document([*opening, *ids[start : start + room], *closing]))
    return made


def reference_text(tokenizer: Tokenizer, most: int | None = None) -> list[int]:
    """Tokens of the language reference: the first `most`, or all."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    # Somebody waits for few of them: what lies far beyond is not looked at.
    text = text if most is None else text[: _LONGEST_TOKENS * most]
    return tokenizer.encode(text, add_special_tokens=False)[:most]


def library_text(tokenizer: Tokenizer) -> list[int]:
    """Tokens of library modules, where their sources are installed; of the reference where they are not."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path.read_text(encoding="utf-8") for name in MODULES if (path := folder / f"{name}.py").is_file()]
    return tokenizer.encode("\n\n".join(found), add_special_tokens=False) if found else reference_text(tokenizer)
