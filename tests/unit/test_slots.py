"""Continuous batching on small random models: sequences that join and leave at any time equal their single runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin.acceptance import SpeculativeAcceptance
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.drafting import ModelDrafter, NoDrafter, SelfDrafter
from dustin.engine import Engine
from dustin.generation import Session
from dustin.interfaces import Drafter
from dustin.lookup import LookupDrafter
from dustin.selection import create_selector, draft_tap, target_tap
from dustin.sequence import Event
from dustin.sequence import Sequence as Row
from dustin.slots import SlotEngine
from dustin.stats import Stats
from tests.unit.engine_helpers import VOCAB, backend, draft, greedy, make_engine, run, target

PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((41, 9, 30, 17, 1, 36))]
SMALL = {"budget": 20, "num_sink_tokens": 2, "num_recent_tokens": 5, "prefill_chunk": 16, "num_draft_tokens": 3, "exact_block": 6}
COUNTS = (13, 6, 9, 1, 11, 4)
CAPACITY = 80


def options(mode: str, **more: object) -> EngineOptions:
    return EngineOptions(mode=mode, **(SMALL | more))  # type: ignore[arg-type]


def opened(opts: EngineOptions, drafter: str, num_slots: int = 2) -> SlotEngine:
    stats = Stats()
    made: dict[str, Drafter] = {
        "draft": ModelDrafter(backend, draft(), draft_tap(draft().spec), opts, stats),
        "self": SelfDrafter(backend, target(), opts, stats),
        "lookup": LookupDrafter(backend),
        "none": NoDrafter(),
    }
    engine = SlotEngine(
        backend, target(), made[drafter], create_selector(opts), SpeculativeAcceptance(), target_tap(target().spec), opts, stats
    )
    engine.open(target().new_cache(num_slots, CAPACITY), num_slots)
    return engine


def requests(temperature: float = 0.0, **more: float) -> list[RequestOptions]:
    return [
        RequestOptions(max_tokens=n, sampling=SamplingOptions(temperature=temperature, seed=i, **more))  # type: ignore[arg-type]
        for i, n in enumerate(COUNTS)
    ]


def serve(
    engine: SlotEngine, prompts: Sequence[Sequence[int]], asked: Sequence[RequestOptions], chunk: int = 7
) -> tuple[list[Row], list[Event]]:
    """First come, first served: each prompt takes a free slot as soon as there is one."""
    waiting = list(zip(prompts, asked, strict=True))
    rows: list[Row] = []
    events: list[Event] = []
    while waiting or engine.active or engine.reading:
        while waiting and engine.free:
            prompt, request = waiting.pop(0)
            row = Row(engine.free[0], prompt, request, request.max_tokens, frozenset(), None)
            engine.admit(row)
            rows.append(row)
        engine.begin_chunk(chunk)
        if engine.active:
            events += engine.step()
        events += engine.finish_chunk()
    return rows, events


def test_pools_of_scores_do_not_depend_on_who_joins() -> None:
    """A profile may keep scores within a pool for some rounds: sets in slots are those of all tokens' scores, whoever joins."""
    opts = options("sparse", drafter="lookup")
    session = Session(backend, target(), None, opts, None)
    session._scorings["auto", False] = replace(session._scoring(opts), refresh=5, pool=24)
    assert session.make_engine(Engine, opts, Stats()).selector._scoring.refresh == 5  # type: ignore[attr-defined]

    def answers(delays: tuple[int, ...]) -> list[int]:
        engine = session.make_engine(SlotEngine, opts, Stats())
        engine.open(target().new_cache(3, CAPACITY), 3)
        first = Row(0, PROMPTS[0], RequestOptions(max_tokens=24), 24, frozenset(), None)
        engine.admit(first)
        steps = 0
        while engine.active or engine.reading:
            for slot, delay in enumerate(delays, 1):
                if steps == delay:
                    engine.admit(Row(slot, PROMPTS[2 * slot], RequestOptions(max_tokens=4), 4, frozenset(), None))
            engine.read_chunk(50)
            engine.step()
            steps += 1
        return first.generated

    assert answers(()) == answers((3, 7)) == answers((1, 4))


def finish(engine: SlotEngine) -> None:
    while engine.active or engine.reading:
        engine.read_chunk(16)
        if engine.active:
            engine.step()


@pytest.mark.parametrize("recorded", [0, 16])
@pytest.mark.parametrize("drafter", ["draft", "self", "lookup", "none"])
@pytest.mark.parametrize("mode", ["auto", "ar", "dense", "exact"])
def test_lossless_modes_equal_plain_greedy(mode: str, drafter: str, recorded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(backend), "recorded_prompt_rows", recorded, raising=False)
    if (mode in ("ar", "exact")) and drafter == "self" or (mode in ("dense", "auto") and drafter == "none"):
        pytest.skip("refused by the session")
    rows, events = serve(opened(options(mode), drafter), PROMPTS, requests())
    assert [tuple(row.generated) for row in rows] == [greedy(p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("select", ["dustin", "history", "lookahead", "streaming"])
@pytest.mark.parametrize("mode", ["sparse", "rectified", "exact"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_joining_a_running_batch_changes_no_token(mode: str, select: str, temperature: float) -> None:
    opts = options(mode, selector=select, lookahead_lag=1 if mode == "exact" else 0, rectify_interval=6)
    rows, _ = serve(opened(opts, "draft"), PROMPTS, requests(temperature))
    for row, prompt, request in zip(rows, PROMPTS, requests(temperature), strict=True):
        alone, _ = run(make_engine(opts), [prompt], request)
        assert row.generated == alone[0].generated


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
@pytest.mark.parametrize("mode", ["ar", "dense"])
def test_penalties_and_sampling_are_each_rows_own(mode: str, drafter: str) -> None:
    asked = requests(0.8, repetition_penalty=1.3, presence_penalty=0.4)
    asked[::2] = requests()[::2]
    rows, _ = serve(opened(options(mode), drafter, 3), PROMPTS, asked)
    for row, prompt, request in zip(rows, PROMPTS, asked, strict=True):
        alone, _ = run(make_engine(options(mode), drafter), [prompt], request)
        assert row.generated == alone[0].generated


@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "rectified", "exact"])
def test_a_slot_keeps_what_the_next_prompt_begins_with(mode: str) -> None:
    opts = options(mode, rectify_interval=4)
    engine = opened(opts, "draft", 1)
    first = Row(0, PROMPTS[0], requests()[0], 13, frozenset(), None)
    engine.admit(first)
    assert engine.reused == [0]
    finish(engine)
    second = [*first.tokens, 5, 6, 7]
    again = Row(0, second, requests()[2], 9, frozenset(), None)
    engine.admit(again)
    assert engine.reused[0] >= len(PROMPTS[0]) and engine.stats.reused_prompt_tokens == engine.reused[0]
    finish(engine)
    alone, _ = run(make_engine(opts), [second], requests()[2])
    assert again.generated == alone[0].generated


def test_the_whole_prompt_again_reads_one_token() -> None:
    engine = opened(options("dense"), "draft", 1)
    for count in (0, len(PROMPTS[0]) - 1):
        row = Row(0, PROMPTS[0], requests()[0], 13, frozenset(), None)
        engine.admit(row)
        assert engine.reused == [count]
        finish(engine)
        assert tuple(row.generated) == greedy(PROMPTS[0], 13)


LONG = tuple(int(t) for t in np.random.default_rng(9).integers(0, VOCAB, 60))
ALIKE = [(*LONG[:50], 1, 2), (*LONG[:50], 3), LONG[:55], LONG[:40], (5, *LONG[:45]), LONG[:55]]


@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "rectified", "exact"])
def test_what_prompts_share_is_read_once(mode: str) -> None:
    opts = options(mode, rectify_interval=4)
    engine = opened(opts, "draft" if mode != "ar" else "none", 4)
    rows, _ = serve(engine, ALIKE, requests())
    for row, prompt, request in zip(rows, ALIKE, requests(), strict=True):
        alone, _ = run(make_engine(opts, "draft" if mode != "ar" else "none"), [prompt], request)
        assert row.generated == alone[0].generated
    # The first is read whole; the second and third copy 50 of its rows, the fourth 39; the last one finds 50 in its own slot.
    assert engine.stats.reused_prompt_tokens == 50 + 50 + 39 + 50


def test_who_follows_a_slot_that_is_released_reads_on_alone() -> None:
    engine = opened(options("dense"), "draft", 3)
    rows = [Row(slot, ALIKE[slot], requests()[0], 9, frozenset(), None) for slot in range(3)]
    for row in rows:
        engine.admit(row)
    engine.read_chunk(35)
    assert engine.cache.lengths == (35, 0, 0)  # type: ignore[union-attr]
    engine.release(0)
    engine.admit(Row(0, PROMPTS[1], requests()[1], 6, frozenset(), None))
    finish(engine)
    for row in rows[1:]:
        assert tuple(row.generated) == greedy(tuple(row.tokens[: row.prompt_length]), 9)


def test_a_released_slot_leaves_no_trace() -> None:
    engine = opened(options("dense"), "draft", 2)
    engine.admit(Row(0, PROMPTS[0], requests(0.9)[0], 13, frozenset(), None))
    engine.admit(Row(1, PROMPTS[2], requests()[2], 9, frozenset(), None))
    engine.read_chunk(16)
    engine.release(0)
    assert engine.free == [0] and engine.rows[0].finish_reason == "cancelled"
    while engine.reading:
        engine.read_chunk(16)
    engine.step()
    engine.release(1)
    assert not engine.active and not engine.reading
    rows, _ = serve(engine, PROMPTS[3:], requests()[3:])
    assert [tuple(row.generated) for row in rows] == [greedy(p, n) for p, n in zip(PROMPTS[3:], COUNTS[3:], strict=True)]


def test_a_draft_reads_everything_in_the_round_after_a_long_prompt_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustin.set_memory._FAR_BEHIND", {"exact": 15})
    seen: list[bool] = []
    engine = opened(options("exact"), "draft", 2)
    propose = engine.drafter.propose
    engine.drafter.propose = lambda state: (seen.append(state.draft_set is None), propose(state))[1]  # type: ignore[method-assign]
    rows, _ = serve(engine, PROMPTS, requests())
    assert [tuple(row.generated) for row in rows] == [greedy(p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    assert 1 < sum(seen) < len(seen) / 2


def test_a_long_prompt_is_read_beside_the_others_rounds() -> None:
    engine = opened(options("dense"), "lookup", 3)
    engine.admit(Row(0, PROMPTS[1], RequestOptions(max_tokens=40), 40, frozenset(), None))
    engine.read_chunk(16)
    engine.admit(Row(1, PROMPTS[0], requests()[0], 13, frozenset(), None))
    engine.admit(Row(2, PROMPTS[3], requests()[0], 13, frozenset(), None))
    rounds = 0
    while engine.reading:
        before = engine.cache.lengths  # type: ignore[union-attr]
        engine.read_chunk(8)
        read = [now - then for now, then in zip(engine.cache.lengths, before, strict=True)][1:]  # type: ignore[union-attr]
        assert sum(read) <= 8 and engine.rows[0].active
        rounds += len(engine.step()) > 0
    # 58 tokens, 8 a round; the short prompt got its share and joined first.
    assert rounds == 8
    assert len(engine.rows[2].generated) > len(engine.rows[1].generated)


def fed(engine: SlotEngine) -> list[list[int]]:
    """What the target's later forwards feed of each slot."""
    calls: list[list[int]] = []
    forward = engine.target.forward
    engine.target.forward = lambda tokens, counts, *a, **k: (calls.append(list(counts)), forward(tokens, counts, *a, **k))[1]  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("recorded", [0, 32])
def test_prompts_are_read_one_after_the_other(recorded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts as long as each other the first to come is answered first: none waits for all of them."""
    monkeypatch.setattr(type(backend), "recorded_prompt_rows", recorded, raising=False)
    engine = opened(options("ar"), "none", 3)
    prompts = [PROMPTS[0][i:] + PROMPTS[0][:i] for i in range(3)]
    for slot in (2, 0, 1):
        engine.admit(Row(slot, prompts[slot], requests()[0], 13, frozenset(), None))
    calls, first = fed(engine), []
    while engine.reading:
        first += [event.row for event in engine.read_chunk(16)]
    assert first == [2, 0, 1]
    if recorded:
        # Calls of one prompt each: powers of two, and the prompt's end at once.
        assert calls == [[n if b == slot else 0 for b in range(3)] for slot in (2, 0, 1) for n in (16, 16, 9)]
    else:
        assert calls[:3] == [[0, 0, 16], [0, 0, 16], [7, 0, 9]]
    finish(engine)
    assert [tuple(row.generated) for row in engine.rows] == [greedy(prompt, 13) for prompt in prompts]


def test_a_long_prompt_is_overtaken_but_not_for_ever() -> None:
    engine = opened(options("ar"), "none", 2)
    engine.admit(Row(0, PROMPTS[0] + PROMPTS[2], requests()[3], 1, frozenset(), None))
    done = 0
    while engine.rows[0].reading:
        if engine.free:
            engine.admit(Row(1, PROMPTS[1], requests()[3], 1, frozenset(), None))
        done += len(engine.read_chunk(9))
    # Eight pieces of its own, and others' before all but the first at most.
    assert 8 < done <= 8 * 5


def test_counts_of_a_request_are_its_own() -> None:
    engine = opened(options("dense"), "self", 3)
    rows, _ = serve(engine, PROMPTS, requests())
    assert sum(row.stats.drafted for row in rows) == engine.stats.drafted > 0
    assert sum(row.stats.accepted for row in rows) == engine.stats.accepted
    assert rows[3].stats.drafted == 0


def test_a_sampled_row_fixes_what_auto_does() -> None:
    engine = opened(options("auto"), "self")
    rows, _ = serve(engine, PROMPTS[:2], requests(0.7)[:2])
    for row, prompt, request in zip(rows, PROMPTS, requests(0.7), strict=False):
        alone, _ = run(make_engine(options("ar"), "none"), [prompt], request)
        assert row.generated == alone[0].generated


def test_layers_keep_their_sets_where_a_row_joins() -> None:
    """A selector of sets by layer, none of whose scores are the draft's: what a seed draws in a slot is what it draws alone."""
    opts = options("exact", selector="quest", num_draft_tokens=5, exact_block=1, lookahead_lag=1, drafter="draft")
    session = Session(backend, target(), None, opts, draft())
    engine = session.make_engine(SlotEngine, opts, Stats())
    engine.open(target().new_cache(2, CAPACITY), 2)
    asked = requests(1.0)
    rows, _ = serve(engine, PROMPTS, asked)
    alone = [session.generate(prompt, request).tokens for prompt, request in zip(PROMPTS, asked, strict=True)]
    assert [row.generated for row in rows] == alone


@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_log_probabilities_of_prompts(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustin.slots._SCORED", 7)
    engine = opened(options("dense" if drafter == "draft" else "ar"), drafter, 3)
    rows = [Row(slot, PROMPTS[n], requests()[n], COUNTS[n], frozenset(), None) for slot, n in enumerate((0, 1, 4))]
    for row, top in zip(rows, (2, None, 0), strict=True):
        engine.admit(row, top)
    finish(engine)
    for row, n in zip(rows, (0, 1, 4), strict=True):
        assert tuple(row.generated) == greedy(PROMPTS[n], COUNTS[n])
    assert set(engine.prompt_logprobs) == {0, 2} and engine.prompt_logprobs[2] == []
    prompt, found = PROMPTS[0], engine.prompt_logprobs[0]
    out = target().forward(backend.tokens([prompt]), [len(prompt)], target().new_cache(1, len(prompt)))
    logits = np.asarray(out.logits)[0, :-1]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert [entry.token for entry in found] == list(prompt[1:])
    np.testing.assert_allclose([e.logprob for e in found], [expected[i, t] for i, t in enumerate(prompt[1:])], atol=1e-9)
    assert [entry.top_tokens for entry in found] == [tuple(np.argsort(-row, kind="stable")[:2]) for row in expected]


def test_what_does_not_fit_is_refused() -> None:
    engine = opened(options("ar"), "none", 1)
    with pytest.raises(ValueError, match="needs 100 rows, the slot has 80"):
        engine.admit(Row(0, [1] * 90, RequestOptions(), 10, frozenset(), None))
    engine.admit(Row(0, [1] * 9, RequestOptions(), 10, frozenset(), None))
    with pytest.raises(ValueError, match="slot 0 is taken"):
        engine.admit(Row(0, [1] * 9, RequestOptions(), 10, frozenset(), None))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_schedules(data: st.DataObject) -> None:
    """Arrivals, cancellations and chunk sizes at random: who is left gets the tokens of plain decoding."""
    mode = data.draw(st.sampled_from(["dense", "exact", "ar"]))
    drafter = data.draw(st.sampled_from(["draft", "lookup"])) if mode != "ar" else "none"
    engine = opened(options(mode), drafter, data.draw(st.integers(1, 3)))
    done: list[Row] = []
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(st.sampled_from(["admit", "admit", "read", "begin", "step", "step", "end", "step", "release"]))
        if action == "admit" and engine.free:
            n = data.draw(st.integers(0, 5))
            prompt = data.draw(st.sampled_from([PROMPTS, ALIKE]))[n]
            row = Row(data.draw(st.sampled_from(engine.free)), prompt, requests()[n], COUNTS[n], frozenset(), None)
            engine.admit(row)
            done.append(row)
        elif action == "read":
            engine.read_chunk(data.draw(st.integers(1, 20)))
        elif action == "begin":
            engine.begin_chunk(data.draw(st.integers(1, 20)))
        elif action == "end":
            engine.finish_chunk()
        elif action == "step" and engine.active:
            engine.step()
        elif action == "release":
            engine.release(data.draw(st.integers(0, len(engine.rows) - 1)))
    finish(engine)
    for row in done:
        want = greedy(tuple(row.tokens[: row.prompt_length]), 13)
        assert tuple(row.generated) == want[: len(row.generated)]
        assert row.finish_reason == "cancelled" or len(row.generated) == row.limit
