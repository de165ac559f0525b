"""Mode exact: a block ends with drafts that the dense check alone judges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dustin import registry
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from tests.unit.engine_helpers import PATTERNS, VOCAB, ScriptedDrafter, greedy, make_engine, run

PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((61, 47, 53))]


def options(block: int, drafts: int) -> EngineOptions:
    return EngineOptions(
        mode="exact", budget=12, num_sink_tokens=2, num_recent_tokens=4, num_draft_tokens=drafts, exact_block=block, lookahead_lag=1
    )


def scripted(pattern: str) -> ScriptedDrafter:
    drafter = ScriptedDrafter(PATTERNS[pattern], 60)
    drafter.name = "draft"
    return drafter


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("block", "drafts"), [(1, 3), (3, 5), (8, 3), (16, 5)])
def test_tokens_are_those_of_plain_decoding(pattern: str, block: int, drafts: int) -> None:
    engine = make_engine(options(block, drafts), scripted(pattern))
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=30))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, 30) for prompt in PROMPTS]
    assert engine.stats.checked_tokens <= block * engine.stats.dense_checks


def test_one_sparse_round_fills_what_two_filled_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from dustin import exact

    rounds = []
    propose = exact._propose
    monkeypatch.setattr(exact, "_propose", lambda *given: rounds.append(1) or propose(*given))
    made = {}
    for name in ("draft", "lookup"):  # a drafter that may find nothing ends no block early
        rounds.clear()
        drafter = scripted("all")
        drafter.name = name
        engine = make_engine(options(6, 3), drafter)
        run(engine, PROMPTS[:1], RequestOptions(max_tokens=43))
        made[name] = len(rounds) / engine.stats.dense_checks
    assert made["draft"] < 0.6 * made["lookup"]


def test_a_greedy_block_ends_with_one_draft_more_than_a_round_has() -> None:
    """One sparse round of four tokens and four drafts fill a block of eight."""
    engine = make_engine(replace(options(8, 3), budget=200), scripted("all"))
    run(engine, PROMPTS[:2], RequestOptions(max_tokens=37))
    # After the prompt's token: four blocks of nine.
    assert engine.stats.dense_checks == 2 * 4 and engine.stats.checked_tokens == 8 * engine.stats.dense_checks
    assert set(engine.stats.acceptance_histogram) == {3, 4}


def test_an_end_of_sequence_among_the_last_drafts_ends_the_text() -> None:
    true = greedy(PROMPTS[0], 30)
    stop = next(token for i, token in enumerate(true) if i > 5 and token not in true[:i])
    rows, _ = run(make_engine(options(8, 3), scripted("all")), PROMPTS[:1], RequestOptions(max_tokens=30), frozenset({stop}))
    assert tuple(rows[0].generated) == true[: true.index(stop) + 1] and rows[0].finish_reason == "stop"


def test_a_sampled_batch_draws_what_single_runs_draw() -> None:
    requests = [RequestOptions(max_tokens=20, sampling=SamplingOptions(temperature=0.9, seed=i)) for i in range(len(PROMPTS))]
    batch, _ = run(make_engine(options(8, 3), "draft"), PROMPTS, requests)
    for prompt, request, row in zip(PROMPTS, requests, batch, strict=True):
        alone, _ = run(make_engine(options(8, 3), "draft"), [prompt], request)
        assert alone[0].generated == row.generated


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_last_drafts_follow_the_provisional_tokens(name: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    backend = registry.create(name, "cpu")
    tokens, parts = backend.tokens([[3, 1, 2, 9], [5], [4, 6]]), backend.tokens([[7, 8], [1, 2], [3, 4]])
    for starts, counts, expected in (
        ((2, 1, 2), (2, 2, 1), [[3, 1, 7, 8], [5, 1, 2, 0], [4, 6, 3, 0]]),
        ((4, 0, 3), (0, 1, 1), [[3, 1, 2, 9], [1, 0, 0, 0], [4, 6, 0, 3]]),
    ):
        assert backend.insert_tokens(tokens, starts, parts, counts).tolist() == expected
    assert tokens.tolist()[0] == [3, 1, 2, 9]
    joined = backend.concat_tokens([backend.tokens([[7], [8], [9]]), parts])
    assert joined.tolist() == [[7, 7, 8], [8, 1, 2], [9, 3, 4]]
    for starts, counts in (((3, 0, 0), (2, 0, 0)), ((0, 0, 0), (3, 0, 0)), ((0, -1, 0), (1, 1, 1)), ((0, 0), (1, 1))):
        with pytest.raises(ValueError, match=r"(starts|counts).*expected"):
            backend.insert_tokens(tokens, starts, parts, counts)
