"""Semantic retrieval heads (METHOD 3.1): which heads look at a needle while its words are being said."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dustin.errors import UsageError
from dustin.interfaces import Measures, Model, Tap, TokenSet
from dustin.prefill import prefill
from dustin.scoring import all_heads, full_layers
from dustin.text import Tokenizer

NEEDLE_WORDS = 5
# Share of the needle's words that must be the model's own greedy choice for a run to count (ROUGE-1 recall).
ANSWERED = 0.5
HEADS_A_LAYER = 4
_HALF = math.log(0.5)


@dataclass(frozen=True)
class NeedlePrompt:
    """`tokens` end where the needle's words are asked for; `answer` are those words, which lie at `span` in the prompt."""

    tokens: list[int]
    answer: list[int]
    span: tuple[int, int]


def plain_words(tokenizer: Tokenizer, count: int, rng: random.Random) -> list[int]:
    """`count` different tokens that are a space and a lower-case word of four letters or more; where the vocabulary has too few
    (bytes, characters), any lower-case pieces, repeated as needed. Raise UsageError where it has none of those either.
    """
    ids = list(range(tokenizer.vocab_size))
    rng.shuffle(ids)
    for pattern in (rb" [a-z]{4,}", rb" ?[a-z]+"):
        found = [token for token in ids if re.fullmatch(pattern, tokenizer.token_bytes(token))]
        if len(found) >= count:
            return found[:count]
    if not found:
        raise UsageError("the vocabulary has no lower-case letters to make needles of: calibration needs a text model's tokenizer")
    return [rng.choice(found) for _ in range(count)]


def needle_prompts(
    tokenizer: Tokenizer, haystack: Sequence[int], lengths: Sequence[int], depths: Sequence[float], seed: int
) -> list[NeedlePrompt]:
    """One prompt for each (length, depth): a passage of the haystack with a needle in it, and the question for it."""
    rng = random.Random(seed)
    words = plain_words(tokenizer, (NEEDLE_WORDS + 1) * len(lengths), rng)
    plain = tokenizer.encode
    made = []
    for i, (length, depth) in enumerate(zip(lengths, depths, strict=True)):
        key, *answer = words[i * (NEEDLE_WORDS + 1) : (i + 1) * (NEEDLE_WORDS + 1)]
        name = tokenizer.decode([key]).strip()
        statement = plain(f"\n\nThe pass phrase of the {name} is", add_special_tokens=False)
        question = f"What is the pass phrase of the {name}? Answer with the phrase alone."
        opening, closing = chat_frame(tokenizer, question)
        closing = [*closing, *plain(f"The pass phrase of the {name} is", add_special_tokens=False)]
        room = max(0, length - len(opening) - len(closing) - len(statement) - len(answer) - 1)
        start = rng.randrange(max(1, len(haystack) - room))
        body = list(haystack[start : start + room])
        at = round(depth * len(body))
        before = [*opening, *body[:at], *statement]
        dot = plain(".\n\n", add_special_tokens=False)
        tokens = [*before, *answer, *dot, *body[at:], *closing]
        made.append(NeedlePrompt(tokens, answer, (len(before), len(before) + len(answer))))
    return made


def chat_frame(tokenizer: Tokenizer, question: str) -> tuple[list[int], list[int]]:
    """What stands before and after a document in a chat prompt that ends with `question` (plain text without a template)."""
    mark = "DOCUMENT"
    try:
        text = tokenizer.render_chat([{"role": "user", "content": f"{mark}\n\n{question}"}])
    except UsageError:
        text = f"{mark}\n\n{question}\nAnswer:"
    before, after = text.split(mark, 1)
    first = tokenizer.encode(before, add_special_tokens=False) if before else []
    return list(first), list(tokenizer.encode(after, add_special_tokens=False))


def find_retrieval_heads(
    backend: Measures, model: Model, prompts: Sequence[NeedlePrompt], chunk: int
) -> tuple[dict[int, list[tuple[float, int]]], int]:
    """Layer -> (mean attention mass on the needle, head), best first; and how many of the prompts were answered.

    Masses are means over the rows whose emitted token is a needle's; unanswered prompts count nowhere (all count where the
    model answers none, so that there is a ranking).
    """
    tap = all_heads(model.spec, full_layers(model.spec))
    batch = len(prompts)
    cache = model.new_cache(batch, max(len(p.tokens) for p in prompts) + NEEDLE_WORDS)
    # The last prompt row and all answer rows but the last emit the answer's words.
    prefill(backend, model, cache, [p.tokens[:-1] for p in prompts], chunk, None, logits=False)
    lengths = cache.lengths
    fed = backend.tokens([[p.tokens[-1], *p.answer[:-1]] for p in prompts])
    out = model.forward(fed, [len(p.answer) for p in prompts], cache, tap=tap, logits="all")
    rows = backend.compare_logits(out.logits, out.logits, backend.tokens([p.answer for p in prompts]))
    # A word of probability over one half is the greedy choice.
    answered = [sum(float(p) > _HALF for p in row) > ANSWERED * len(row) for row in rows.logprob]
    counted = answered if any(answered) else [True] * batch
    span = spans(backend, [p.span for p in prompts])
    ranking: dict[int, list[tuple[float, int]]] = {}
    for layer, heads in tap.heads.items():
        masses = []
        for head in heads:
            one = Tap({layer: (head,)})
            scores = backend.score(backend.narrow_queries(out.queries, tap, one), one, model, cache, lengths)
            mass = [m for m, taken in zip(backend.set_mass(span, scores), counted, strict=True) if taken]
            masses.append((sum(mass) / len(mass), head))
        ranking[layer] = sorted(masses, reverse=True)
    return ranking, sum(answered)


def spans(backend: Measures, ranges: Sequence[tuple[int, int]]) -> TokenSet:
    """The set start..stop-1 of each sequence."""
    nothing = backend.select(
        None, None, [0] * len(ranges), budget=1, num_sink_tokens=0, num_recent_tokens=0, num_draft_selected=0
    )
    return backend.extend(nothing, [start for start, _ in ranges], [stop for _, stop in ranges])


def best_heads(ranking: dict[int, list[tuple[float, int]]], layer: int) -> tuple[int, ...]:
    """The layer's HEADS_A_LAYER best heads, in ascending order."""
    return tuple(sorted(head for _, head in ranking[layer][:HEADS_A_LAYER]))


def rank_heads(
    backend: Measures, models: Mapping[str, Model], prompts: Sequence[NeedlePrompt], chunk: int, say: Callable[[str], None]
) -> tuple[list[dict[int, list[tuple[float, int]]]], dict[str, str]]:
    """`find_retrieval_heads` of each model, and how many needles each answered; a line of progress each."""
    rankings, answered = [], {}
    for kind, model in models.items():
        ranking, right = find_retrieval_heads(backend, model, prompts, chunk)
        top = sorted(((mass, layer, head) for layer, row in ranking.items() for mass, head in row), reverse=True)[:8]
        best = ", ".join(f"{layer}.{head}" for _, layer, head in top)
        say(f"{kind} answered {right} of {len(prompts)} needles; best heads {best}")
        rankings.append(ranking)
        answered[kind] = f"{right} of {len(prompts)}"
    return rankings, answered


def ranked_layers(ranking: dict[int, list[tuple[float, int]]]) -> list[list[int]]:
    """[layer, its best heads...] of the six layers whose best heads look most at needles."""
    mass = {layer: sum(m for m, _ in row[:HEADS_A_LAYER]) for layer, row in ranking.items()}
    return [[layer, *best_heads(ranking, layer)] for layer in sorted(mass, key=lambda layer: -mass[layer])[:6]]
