"""Generators of long-context tasks with checkable answers, in the manner of RULER: planted in our own texts, seeds fixed.

Kinds: `single` (one needle), `multikey` (four needles of one form, one asked for), `multivalue` (three values of one key),
`variables` (a chain of assignments), `qa` (an invented fact, asked for in other words), and, as documents of their own,
`common words` (lists that fill the context). None of these is LongBench or RULER; numbers made with them carry no such name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("single", "multikey", "multivalue", "variables", "qa")
_NOUNS = (
    "lantern", "orchard", "violin", "compass", "walrus", "teapot", "glacier", "saddle", "pepper", "canyon", "thistle", "ferry",
    "marble", "parrot", "anvil", "basket", "comet", "drummer", "falcon", "geyser", "hammock", "icicle", "jacket", "kettle",
    "ladder", "meadow", "needle", "oyster", "pillow", "quarry", "ribbon", "shovel", "tunnel", "umbrella", "velvet", "whistle",
)  # fmt: skip
_NAMES = ("Aldous", "Brigitte", "Cosmo", "Delphine", "Ezra", "Fenella", "Gideon", "Henrike", "Ignatius", "Juno", "Kasimir")
_PLACES = (
    "Aarhus", "Bergen", "Cremona", "Dundee", "Esztergom", "Funchal", "Ghent", "Hobart", "Innsbruck", "Jaipur", "Leiden", "Malaga",
    "Novara", "Odessa", "Porto", "Quimper", "Rostock", "Split", "Tartu", "Utrecht",
)  # fmt: skip
_THINGS = (
    "astrolabe", "stamp album", "cello", "beehive", "telescope", "chess set", "weathervane", "sleigh", "harpsichord", "sundial",
    "music box", "rowing boat", "spinning wheel", "greenhouse", "barometer", "saddlebag", "printing press", "rocking horse",
)  # fmt: skip
# A common word occurs this many times as often as another of its list.
OFTEN = 10
# (statement, question); `{place}` is the answer.
_FACTS = (
    (
        "{name}, who had kept the lighthouse for thirty years, left the {thing} to a cousin who lived in {place}.",
        "In which town did the person live who inherited the lighthouse keeper's {thing}?",
    ),
    (
        "It was in {place} that {name} finally sold the old {thing}, after three winters of trying.",
        "Where did {name} find a buyer for the {thing}?",
    ),
    (
        "The {thing} had been built by {name} in a cellar in {place}, and nobody there ever knew of it.",
        "In which town was {name}'s {thing} made?",
    ),
    (
        "{name} took the night train to {place} with nothing but a {thing} wrapped in a blanket.",
        "Which town did {name} travel to with the {thing}?",
    ),
)


@dataclass(frozen=True)
class Task:
    """Statements to plant, each on its own, and a question whose answer holds all of `answers`."""

    kind: str
    statements: tuple[str, ...]
    question: str
    answers: tuple[str, ...]

    def score(self, text: str) -> float:
        """Share of the answers that the text holds."""
        low = text.lower()
        return sum(answer.lower() in low for answer in self.answers) / len(self.answers)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def make(kind: str, rng: random.Random, words: list[str], things: list[str] | None = None) -> Task:
    """A task of the kind; it takes its key words out of `words` and the thing of its fact out of `things`, so that no two tasks
    of a document share one (without `things` any)."""
    if kind in ("single", "multikey"):
        keys = [words.pop() for _ in range(4 if kind == "multikey" else 1)]
        numbers = [_number(rng) for _ in keys]
        said = tuple(f"The secret number of the {key} is {number}." for key, number in zip(keys, numbers, strict=True))
        pick = rng.randrange(len(keys))
        asked = f"What is the secret number of the {keys[pick]}? Answer with the number alone."
        return Task(kind, said, asked, (numbers[pick],))
    if kind == "multivalue":
        key = words.pop()
        values = tuple(_number(rng) for _ in range(3))
        said = tuple(f"One of the lucky numbers of the {key} is {value}." for value in values)
        return Task(kind, said, f"Which three lucky numbers of the {key} does the text give? List all three.", values)
    if kind == "variables":
        names = tuple("".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3)) + str(rng.randrange(10, 100)) for _ in range(3))
        value = str(rng.randrange(10_000, 100_000))
        said = (f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:], strict=False)))
        asked = f"Which variables are assigned the value {value} in the text, directly or through another variable? List them all."
        return Task(kind, said, asked, names)
    if kind == "qa":
        statement, question = rng.choice(_FACTS)
        thing = things.pop() if things else rng.choice(_THINGS)
        slots = {"name": rng.choice(_NAMES), "thing": thing, "place": rng.choice(_PLACES)}
        asked = question.format(**slots) + " Answer in one short sentence."
        return Task(kind, (statement.format(**slots),), asked, (slots["place"],))
    raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")


def key_words(rng: random.Random) -> list[str]:
    """All key words in random order."""
    return rng.sample(_NOUNS, len(_NOUNS))


def key_things(rng: random.Random) -> list[str]:
    """All things that facts are about, in random order."""
    return rng.sample(_THINGS, len(_THINGS))


def common_words(rng: random.Random, size: int, count: int = 3) -> tuple[str, Task]:
    """A numbered list of `size` words in which each of `count` occurs OFTEN times as often as any other; the question asks for
    them. Common words are spread evenly, so a leading part of the list has the same answer."""
    pool = key_words(rng)
    often, rare = pool[:count], pool[count:]
    entries: list[str] = []
    while len(entries) < size:
        part = [*rare, *(word for word in often for _ in range(OFTEN))]
        rng.shuffle(part)
        entries += part
    text = " ".join(f"{i + 1}. {word}" for i, word in enumerate(entries[:size]))
    asked = f"Which {count} words occur most often in the list above? Answer with the {count} words alone."
    return text, Task("common words", (), asked, tuple(often))


def planted(body: Sequence[int], items: Sequence[tuple[int, list[int]]]) -> list[int]:
    """`body` with each item's tokens before its position (positions of the body as given)."""
    out: list[int] = []
    done = 0
    for at, tokens in sorted(items, key=lambda item: item[0]):
        out += [*body[done:at], *tokens]
        done = at
    return [*out, *body[done:]]
