"""Documents of the fidelity benches: one long text each with tasks planted region by region, so that its prefixes serve too.

A document is read once at the longest context. At every shorter one the caches are rolled back to that prefix: tasks planted
within it can be asked, and the text goes on after it. Calibration's text (the Python language reference) is none of these.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from bench import fidelity_tasks, texts
from dustin.retrieval_heads import chat_frame

# (kind of text, share of the documents): novels and the sea novel most, a speech and code some.
SOURCES = {
    "novel": lambda: texts.book("pride_and_prejudice"),
    "gothic novel": lambda: texts.book("northanger_abbey"),
    "sea novel": lambda: texts.book("mobydick"),
    "speech": lambda: texts.book("state_of_the_union_1981"),
    "code": texts.code,
}
ORDER = ("sea novel", "novel", "code", "gothic novel", "sea novel", "novel", "speech", "sea novel")
TASKS = {
    "novel": "Summarise the passage above, naming the persons in it and what each of them wants.",
    "gothic novel": "Describe what happens in the passage above, in order, in your own words.",
    "sea novel": "Retell the passage above in plain modern English, in order.",
    "speech": "List the measures that the speech above proposes, with the reason given for each.",
    "code": "Explain the last functions of the code above, one after the other, and add an example of each.",
}
# What each region has planted, by slot: as many facts as needles, so that a dozen documents ask four dozen questions of both.
PLANTED = (*fidelity_tasks.KINDS, "qa", "qa", "qa")
# Planted statements keep this many tokens away from where a region begins: the text track reads on there.
CLEAR = 320


@dataclass
class Document:
    """`tokens` from the chat frame's opening on; `planted` are the tasks of each region by where it ends, slot by slot."""

    kind: str
    tokens: list[int]
    planted: dict[int, list[fidelity_tasks.Task]] = field(default_factory=dict)

    def prefix(self, context: int) -> list[int]:
        """The first `context` tokens."""
        return self.tokens[:context]

    def tasks(self, context: int, count: int, turn: int = 0) -> list[fidelity_tasks.Task]:
        """`count` tasks planted within the prefix: one of every slot, then another of every slot, each time from another region,
        so that what is asked for lies at all depths. `turn` is the region that the first slot begins with."""
        regions = [tasks for end, tasks in self.planted.items() if end <= context]
        rounds = range(len(regions))
        order = [regions[(turn + slot + i) % len(regions)][slot] for i in rounds for slot in range(len(regions[0]))]
        return order[:count]


def make(tokenizer: Any, contexts: list[int], count: int, extra: int, seed: int) -> list[Document]:
    """`count` documents of the longest context and `extra` tokens more. Raise ValueError where a text is too short for one."""
    made = []
    longest = max(contexts) + extra
    ids = {kind: tokenizer.encode(SOURCES[kind](), add_special_tokens=False) for kind in dict.fromkeys(ORDER[:count])}
    used = dict.fromkeys(ids, 0)
    for number in range(count):
        kind = ORDER[number % len(ORDER)]
        rng = random.Random(f"{seed} {number} {kind}")
        source = ids[kind]
        if len(source) < longest:
            raise ValueError(f"{kind} has {len(source)} tokens, expected {longest} or more: lower the contexts")
        # Passages of one text do not overlap while it lasts.
        start = used[kind] % max(1, len(source) - longest)
        used[kind] += longest
        made.append(_document(tokenizer, kind, source[start : start + longest], sorted(contexts), longest, rng))
    return made


def _document(
    tokenizer: Any, kind: str, body: list[int], contexts: list[int], longest: int, rng: random.Random
) -> Document:
    """Region by region: a region is its statements and as much of the text as leaves it its length."""
    tokens, _ = chat_frame(tokenizer, "")
    words, things = fidelity_tasks.key_words(rng), fidelity_tasks.key_things(rng)
    planted: dict[int, list[fidelity_tasks.Task]] = {}
    used = 0
    for context in contexts:
        if len(words) < 6:
            words = fidelity_tasks.key_words(rng)
        tasks = [fidelity_tasks.make(name, rng, words, things) for name in PLANTED]
        said = [[tokenizer.encode(f" {line}\n", add_special_tokens=False) for line in task.statements] for task in tasks]
        room = context - len(tokens) - sum(len(line) for lines in said for line in lines)
        if room < 64:
            raise ValueError(f"context {context} adds {context - len(tokens)} tokens, too few for the tasks planted there")
        part = body[used : used + room]
        used += room
        items = []
        for lines in said:
            # Statements of one task keep their order.
            clear = min(CLEAR, room // 4)
            places = sorted(rng.sample(range(clear, room - clear), len(lines)))
            items += [(_sentence_end(tokenizer, part, at), line) for at, line in zip(places, lines, strict=True)]
        tokens = [*tokens, *fidelity_tasks.planted(part, items)]
        planted[context] = tasks
    tokens += body[used : used + longest - len(tokens)]
    return Document(kind, tokens, planted)


def word_lists(tokenizer: Any, context: int, count: int, seed: int) -> list[Document]:
    """`count` documents of `context` tokens that are numbered lists of words, each with the question for its common words."""
    made = []
    for number in range(count):
        # An entry has two tokens or more: its number and its word.
        text, task = fidelity_tasks.common_words(random.Random(f"{seed} {number} list"), context // 2)
        tokens = [*chat_frame(tokenizer, "")[0], *tokenizer.encode(text, add_special_tokens=False)]
        made.append(Document("list", tokens[:context], {0: [task]}))
    return made


def _sentence_end(tokenizer: Any, body: list[int], at: int) -> int:
    """The next place after a full stop or line break within 60 tokens of `at`, else `at`."""
    for i in range(at, min(at + 60, len(body))):
        if tokenizer.token_bytes(body[i]).rstrip(b" ").endswith((b".", b"\n")):
            return i + 1
    return at


def suffix(tokenizer: Any, question: str) -> list[int]:
    """What follows a document's prefix when `question` is asked about it."""
    return chat_frame(tokenizer, question)[1]
