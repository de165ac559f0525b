"""The engine on small random models: every mode, drafter and acceptance pattern against plain greedy decoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from tests.unit.engine_helpers import PATTERNS, VOCAB, ScriptedDrafter, backend, draft, greedy, make_engine, run, target

PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((61, 23, 47))]
SMALL = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "prefill_chunk": 16, "num_draft_tokens": 4}
COUNT = 21


def options(mode: str, **more: object) -> EngineOptions:
    return EngineOptions(mode=mode, **(SMALL | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mode", ["ar", "dense", "exact", "auto"])
def test_lossless_modes_equal_plain_greedy_under_any_acceptance(mode: str, pattern: str) -> None:
    engine = make_engine(options(mode, exact_block=7), ScriptedDrafter(PATTERNS[pattern], 60))
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, COUNT) for prompt in PROMPTS]
    assert {row.finish_reason for row in rows} == {"length"}


@pytest.mark.parametrize("drafter", ["draft", "self", "lookup"])
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_lossless_modes_equal_plain_greedy_with_every_drafter(mode: str, drafter: str) -> None:
    engine = make_engine(options(mode, exact_block=9), "none" if (mode, drafter) == ("exact", "self") else drafter)
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["sparse", "rectified"])
@pytest.mark.parametrize("drafter", ["draft", "lookup", "none"])
def test_budget_that_holds_everything_equals_dense(mode: str, drafter: str) -> None:
    engine = make_engine(options(mode, budget=400, rectify_interval=8), drafter)
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, COUNT) for prompt in PROMPTS]


def test_a_heavy_draft_reads_a_set_in_dense_rounds_too_and_tokens_stay_those_of_plain_decoding() -> None:
    prompts = [[(7 * i + row) % VOCAB for i in range(90)] for row in range(2)]
    read = {}
    for sparse_draft in (True, False):
        engine = make_engine(options("dense", sparse_draft=sparse_draft))
        rows, _ = run(engine, prompts, RequestOptions(max_tokens=12, ignore_eos=True))
        assert [tuple(row.generated) for row in rows] == [greedy(tuple(prompt), 12) for prompt in prompts]
        assert engine.stats.kv_bytes_read >= engine.stats.kv_bytes_dense / 4
        read[sparse_draft] = engine.stats.draft_kv_bytes_read
    assert read[True] < read[False]


def test_a_small_budget_really_is_sparse() -> None:
    engine = make_engine(options("sparse", budget=12), "none")
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT))
    assert [tuple(row.generated) for row in rows] != [greedy(prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("select", ["dustin", "history", "lookahead", "streaming"])
@pytest.mark.parametrize("mode", ["sparse", "rectified", "exact"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_equals_its_singles(mode: str, select: str, temperature: float) -> None:
    opts = options(mode, selector=select, lookahead_lag=1 if mode == "exact" else 0, rectify_interval=6, exact_block=8)
    requests = [
        RequestOptions(max_tokens=n, sampling=SamplingOptions(temperature=temperature, seed=i))
        for i, n in enumerate((COUNT, 7, 13))
    ]
    together, _ = run(make_engine(opts), PROMPTS, requests)
    for i, prompt in enumerate(PROMPTS):
        alone, _ = run(make_engine(opts), [prompt], [requests[i]])
        assert together[i].generated == alone[0].generated


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_end_of_sequence_inside_an_accepted_run(mode: str, pattern: str) -> None:
    eos = frozenset({greedy(PROMPTS[0], 60)[5], greedy(PROMPTS[1], 60)[3]})
    engine = make_engine(options(mode), ScriptedDrafter(PATTERNS[pattern], 60))
    rows, events = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT), eos)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        plain = greedy(prompt, COUNT)
        end = next((i + 1 for i, token in enumerate(plain) if token in eos), COUNT)
        assert tuple(row.generated) == plain[:end]
        assert row.finish_reason == ("stop" if plain[end - 1] in eos else "length")
    assert len(events) == sum(len(row.generated) for row in rows)


@pytest.mark.parametrize("limit", [1, 2, 5, 6])
@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "exact"])
def test_never_more_than_max_tokens(mode: str, limit: int) -> None:
    rows, events = run(make_engine(options(mode), ScriptedDrafter(PATTERNS["all"], 60)), PROMPTS, RequestOptions(max_tokens=limit))
    assert [len(row.generated) for row in rows] == [limit] * 3
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"] * 3


class CharacterSink:
    """Token t is the character chr(97 + t % 26); stops at a given string, whose text is withheld."""

    def __init__(self, stop: str) -> None:
        self.stop, self.held, self.stopped = stop, "", False

    def add(self, token: int) -> str:
        self.held += chr(97 + token % 26)
        if self.stop in self.held:
            self.stopped = True
            text, self.held = self.held.split(self.stop)[0], ""
            return text
        cut = max(0, len(self.held) - len(self.stop) + 1)
        text, self.held = self.held[:cut], self.held[cut:]
        return text

    def finish(self) -> str:
        return self.held


@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_a_stop_string_inside_an_accepted_run_ends_the_text_before_it(mode: str) -> None:
    text = "".join(chr(97 + t % 26) for t in greedy(PROMPTS[0], 60))
    stop = text[6:9]
    engine = make_engine(options(mode), ScriptedDrafter(PATTERNS["all"], 60))
    rows, events = run(engine, PROMPTS[:1], RequestOptions(max_tokens=40, stop=(stop,)), sinks=[CharacterSink(stop)])
    assert rows[0].finish_reason == "stop"
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert len(rows[0].generated) == text.index(stop) + 3


def test_rollback_by_length_leaves_the_cache_of_a_fresh_run() -> None:
    engine = make_engine(options("dense"), ScriptedDrafter(PATTERNS["half"], 60))
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=9))
    for b, row in enumerate(rows):
        fresh = target().new_cache(1, 128)
        known = row.tokens[:-1]
        target().forward(backend.tokens([known]), [len(known)], fresh, logits="none")
        for layer in range(3):
            for mine, theirs in zip(engine.cache.rows(b, layer), fresh.rows(0, layer), strict=True):  # type: ignore[union-attr]
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_rectified_rows_equal_a_dense_prefill(drafter: str) -> None:
    engine = make_engine(options("rectified", rectify_interval=5, budget=12), drafter)
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=18))
    assert engine.stats.rectify_passes
    for b, row in enumerate(rows):
        assert row.committed - 1 - row.dense_rows < 5 + engine.options.num_draft_tokens + 1
        fresh = target().new_cache(1, 128)
        target().forward(backend.tokens([row.tokens[: row.dense_rows]]), [row.dense_rows], fresh, logits="none")
        for layer in range(3):
            for mine, theirs in zip(engine.cache.rows(b, layer), fresh.rows(0, layer), strict=True):  # type: ignore[union-attr]
                np.testing.assert_allclose(mine[: row.dense_rows], theirs, rtol=0, atol=1e-12)
                assert row.dense_rows > row.prompt_length


def test_without_rectification_the_rows_do_drift() -> None:
    engine = make_engine(options("sparse", budget=12), "none")
    rows, _ = run(engine, PROMPTS[:1], RequestOptions(max_tokens=18))
    fresh = target().new_cache(1, 128)
    known = rows[0].tokens[:-1]
    target().forward(backend.tokens([known]), [len(known)], fresh, logits="none")
    mine, theirs = engine.cache.rows(0, 2)[0], fresh.rows(0, 2)[0]  # type: ignore[union-attr]
    assert np.abs(mine[: len(known)] - theirs).max() > 1e-3


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_schedules_stay_lossless(data: st.DataObject) -> None:
    wrong = data.draw(st.lists(st.booleans(), min_size=60, max_size=60))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    limits = data.draw(st.lists(st.integers(1, 15), min_size=3, max_size=3))
    mode = data.draw(st.sampled_from(["dense", "exact"]))
    gamma, block = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
    prompts = [PROMPTS[0][:n] for n in lengths]
    engine = make_engine(
        options(mode, num_draft_tokens=gamma, exact_block=block), ScriptedDrafter(lambda row, at: wrong[(at + 7 * row) % 60], 40)
    )
    rows, _ = run(engine, prompts, [RequestOptions(max_tokens=n) for n in limits[: len(prompts)]])
    for row, prompt, limit in zip(rows, prompts, limits, strict=False):
        assert tuple(row.generated) == greedy(prompt, 40)[:limit]


def test_the_draft_never_reads_past_what_was_accepted() -> None:
    engine = make_engine(options("dense", sparse_draft=False), "draft")
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=12))
    assert engine.drafter.cache is not None
    for row, seen in zip(rows, engine.drafter.cache.lengths, strict=True):
        assert seen <= len(row.tokens) - 1
    # What it kept is what a fresh read of the same tokens gives: no rejected row is left in it.
    for b, row in enumerate(rows):
        seen = engine.drafter.cache.lengths[b]
        fresh = draft().new_cache(1, 128)
        draft().forward(backend.tokens([row.tokens[:seen]]), [seen], fresh, logits="none")
        np.testing.assert_allclose(engine.drafter.cache.rows(b, 1)[0], fresh.rows(0, 1)[0], rtol=0, atol=1e-12)  # type: ignore[attr-defined]


def test_penalties_forget_rejected_drafts() -> None:
    request = RequestOptions(max_tokens=16, sampling=SamplingOptions(repetition_penalty=1.7, frequency_penalty=0.4))
    plain, _ = run(make_engine(options("ar"), "none"), PROMPTS, request)
    for drafter in ("draft", ScriptedDrafter(PATTERNS["half"], 60), "lookup", "self"):
        rows, _ = run(make_engine(options("dense"), drafter), PROMPTS, request)
        assert [row.generated for row in rows] == [row.generated for row in plain]
    rows, _ = run(make_engine(options("exact", exact_block=6), "draft"), PROMPTS, request)
    assert [row.generated for row in rows] == [row.generated for row in plain]
    assert plain[0].generated != list(greedy(PROMPTS[0], 16))


def test_logprobs_are_those_of_the_verified_distribution() -> None:
    request = RequestOptions(max_tokens=8, top_logprobs=3)
    _, plain = run(make_engine(options("ar"), "none"), PROMPTS, request)
    for mode, drafter in (("dense", "draft"), ("exact", "lookup")):
        _, events = run(make_engine(options(mode), drafter), PROMPTS, request)
        want = {(e.row, i): e.logprobs for i, e in enumerate(sorted(plain, key=lambda e: e.row))}
        for i, event in enumerate(sorted(events, key=lambda e: e.row)):
            expected = want[(event.row, i)]
            assert event.logprobs is not None and expected is not None
            assert event.logprobs.token == event.token == expected.token
            assert event.logprobs.top_tokens == expected.top_tokens
            assert abs(event.logprobs.logprob - expected.logprob) < 1e-9


def test_statistics_are_consistent() -> None:
    engine = make_engine(options("sparse"), "draft")
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=COUNT))
    stats = engine.stats
    assert stats.generated_tokens == sum(len(row.generated) for row in rows) == 3 * COUNT
    assert sum(stats.acceptance_histogram.values()) == stats.spec_steps <= stats.verified_rows
    assert stats.accepted == sum(n * count for n, count in stats.acceptance_histogram.items()) <= stats.drafted
    assert 0 < stats.kv_read_share < 1


def test_nan_logits_end_the_sequence_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    plain = model.forward

    def broken(*args: object, **kwargs: object) -> object:
        out = plain(*args, **kwargs)  # type: ignore[arg-type]
        if out.logits is not None:
            out.logits[0] = np.nan
        return out

    monkeypatch.setattr(model, "forward", broken)
    rows, events = run(make_engine(options("dense"), "lookup"), PROMPTS[:2], RequestOptions(max_tokens=5))
    assert rows[0].finish_reason == "error" and rows[0].error and "NaN" in rows[0].error
    assert rows[1].finish_reason == "length"
    assert sum(event.finish_reason == "error" for event in events) == 1


def test_after_a_cut_the_draft_still_sees_the_recent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = backend.extend

    def watched(token_set: object, starts: object, stops: object) -> object:
        made = plain(token_set, starts, stops)  # type: ignore[arg-type]
        for b, stop in enumerate(stops):  # type: ignore[arg-type, var-annotated]
            seen.append(set(range(max(0, stop - 6), stop)) <= set(made.indices[b, : made.counts[b]].tolist()))
        return made

    monkeypatch.setattr(backend, "extend", watched)
    run(make_engine(options("exact", exact_block=12), "draft"), PROMPTS[:1], RequestOptions(max_tokens=40))
    assert seen and all(seen)
