"""Planted tasks: statements lie inside the prefixes that are asked about, answers are scored, seeds repeat."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from bench import fidelity_documents, fidelity_tasks
from bench.fidelity_stats import quarters


class Letters:
    """A tokenizer of one token a character."""

    eos_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        return "".join(chr(t) for t in tokens)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def render_chat(self, messages, add_generation_prompt: bool = True) -> str:
        return "<user>" + messages[0]["content"] + "<end><assistant>"


@pytest.fixture(scope="module")
def documents():
    return fidelity_documents.make(Letters(), [4000, 9000], 3, 300, seed=5)


def test_every_asked_statement_lies_in_the_prefix(documents) -> None:
    for document in documents:
        assert len(document.tokens) == 9000 + 300
        for context in (4000, 9000):
            text = Letters().decode(document.prefix(context))
            asked = document.tasks(context, 99)
            assert len(asked) == len(fidelity_documents.PLANTED) * (1 if context == 4000 else 2)
            for task in asked:
                assert all(statement in text for statement in task.statements)
                # Numbers and names answer the question; a chain's later variables are only named in the text.
                assert all(answer in text for answer in task.answers)


def test_a_dozen_questions_hold_every_kind_from_every_region(documents) -> None:
    for turn, document in enumerate(documents):
        asked = document.tasks(9000, len(fidelity_documents.PLANTED), turn)
        assert Counter(task.kind for task in asked) == Counter(fidelity_documents.PLANTED)
        early = [task in document.planted[4000] for task in asked]
        assert sum(early) == len(early) // 2


def test_no_two_facts_of_a_document_are_about_one_thing(documents) -> None:
    for document in documents:
        asked = [task.question for task in document.tasks(9000, 99)]
        assert len(asked) == len(set(asked))
        facts = [task for task in document.tasks(9000, 99) if task.kind == "qa"]
        things = [thing for thing in fidelity_tasks._THINGS for task in facts if thing in task.question]
        assert len(things) == len(set(things)) == 8


def test_lists_of_words_keep_their_answer_when_cut() -> None:
    for document in fidelity_documents.word_lists(Letters(), 24_000, 2, seed=3):
        assert len(document.tokens) == 24_000
        (task,) = document.tasks(6000, 9)
        for context in (8000, 24_000):
            text = Letters().decode(document.prefix(context))
            counts = Counter(re.findall(r"\d+\. ([a-z -]+?)(?= \d+\.|$)", text))
            assert {word for word, _ in counts.most_common(3)} == set(task.answers)


def test_short_prefixes_are_not_asked_what_lies_beyond(documents) -> None:
    for document in documents:
        short = document.tasks(4000, 99)
        longer = document.tasks(9000, 99)
        assert set(short) < set(longer)
        text = Letters().decode(document.prefix(4000))
        assert not any(task.statements[0] in text for task in longer if task not in short)


def test_documents_repeat_by_seed(documents) -> None:
    again = fidelity_documents.make(Letters(), [4000, 9000], 3, 300, seed=5)
    other = fidelity_documents.make(Letters(), [4000, 9000], 3, 300, seed=6)
    assert [d.tokens for d in again] == [d.tokens for d in documents] != [d.tokens for d in other]


def test_a_text_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="sea novel has .* tokens, expected 5000300 or more"):
        fidelity_documents.make(Letters(), [5_000_000], 1, 300, seed=0)


@pytest.mark.parametrize("kind", fidelity_tasks.KINDS)
def test_answers_are_scored(kind: str) -> None:
    rng = random.Random(1)
    task = fidelity_tasks.make(kind, rng, fidelity_tasks.key_words(rng))
    assert task.score("It says: " + ", ".join(task.answers).upper()) == 1.0
    assert task.score("I do not know.") == 0.0
    if len(task.answers) == 3:
        assert task.score(task.answers[1]) == pytest.approx(1 / 3)
    if kind == "variables":
        assert task.statements[0].endswith(f"{task.question.split('value ')[1].split(' ')[0]}.")


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="kind is 'riddle', expected one of single"):
        fidelity_tasks.make("riddle", random.Random(0), [])


def test_common_words_are_the_most_frequent() -> None:
    text, task = fidelity_tasks.common_words(random.Random(2), 400)
    counts = Counter(re.findall(r"\d+\. ([a-z -]+?)(?= \d+\.|$)", text))
    assert {word for word, _ in counts.most_common(3)} == set(task.answers)
    assert counts.most_common(4)[2][1] > 2 * counts.most_common(4)[3][1]


def test_planting_moves_nothing_else() -> None:
    assert fidelity_tasks.planted([1, 2, 3, 4], [(3, [30]), (0, [10, 11]), (4, [40])]) == [10, 11, 1, 2, 3, 30, 4, 40]


def test_quarters_cover_all_rounds() -> None:
    import numpy as np

    from dustin.replay import Measured

    kl = np.arange(8.0)[:, None, None] * np.ones((8, 1, 2))
    same = np.ones((8, 1, 2), dtype=bool)
    got = quarters(Measured(kl, same, kl, kl, kl, np.ones((8, 1)), same, 1.0, 1.0, 1.0))
    assert [part["kl"] for part in got] == [0.5, 2.5, 4.5, 6.5]
