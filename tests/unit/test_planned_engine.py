"""The engine under a planner: any sequence of plans gives plain greedy tokens, and what it reports is what happened."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from dustin import engine as engine_module
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.planning import AutoPlanner, Look, Plan
from dustin.sequence import Sequence as Row
from tests.unit.engine_helpers import PATTERNS, VOCAB, ScriptedDrafter, greedy, make_engine, run, target
from tests.unit.test_slots import opened, serve

PROMPTS = [tuple(int(t) for t in np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((61, 23, 47))]
OPTIONS = EngineOptions(mode="auto", budget=12, num_sink_tokens=2, num_recent_tokens=4, num_draft_tokens=5, exact_block=16)
PLANS = (
    Plan("ar"), Plan("dense", 1), Plan("dense", 5), Plan("exact", 0, 8, 12), Plan("exact", 3, 16, 24), Plan("exact", 5, 8, 9),
)  # fmt: skip


class RandomPlanner(AutoPlanner):
    """Any plan, any round; keeps what it is told."""

    def __init__(self, drafter: str, seed: int) -> None:
        super().__init__(target().spec, drafter, OPTIONS.budget, OPTIONS.num_draft_tokens, OPTIONS.exact_block)
        self._rng = np.random.default_rng(seed)
        self.told: list[tuple[Plan, list[Look]]] = []

    def choose(self, lengths: Sequence[int], idle: int = 0, left: int | None = None, unread: int = 0) -> Plan:
        self._plan = PLANS[self._rng.integers(len(PLANS))]
        return self._plan

    def record(self, looks: Sequence[Look], seconds: float, recording: float = 0.0) -> None:
        self.told.append((self._plan, list(looks)))
        super().record(looks, seconds, recording)


@pytest.mark.parametrize("drafter", ["draft", "lookup", *PATTERNS])
@pytest.mark.parametrize("seed", range(3))
def test_any_plans_give_plain_greedy_tokens(drafter: str, seed: int) -> None:
    engine = make_engine(OPTIONS, ScriptedDrafter(PATTERNS[drafter], 80) if drafter in PATTERNS else drafter)
    engine.planner = planner = RandomPlanner(engine.drafter.name, seed)
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=60))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, 60) for prompt in PROMPTS]
    for plan, looks in planner.told:
        kinds = [look.kind for look in looks]
        if plan.mode == "exact":
            assert set(kinds) <= {"sparse", "check", "last"} and kinds.count("check") <= 1
        else:
            assert set(kinds) <= {"plain" if plan.mode == "ar" else "dense"} and len(kinds) <= 1
        for look in looks:
            assert look.seconds > 0
            if look.kind == "check":
                assert all(kept <= offered <= plan.exact_block for kept, offered in zip(look.accepted, look.offered, strict=True))
            else:
                assert look.planned == plan.num_draft_tokens and all(kept <= look.planned for kept in look.accepted)
    if drafter == "all":
        full = [look for _, looks in planner.told for look in looks if look.kind == "dense"]
        assert full and all(kept == look.planned for look in full for kept in look.accepted)


def test_the_decision_and_its_numbers_are_in_the_stats() -> None:
    engine = make_engine(OPTIONS, "draft")
    run(engine, PROMPTS, RequestOptions(max_tokens=40))
    plan = engine.stats.plan
    assert plan["plan"] and plan["round_ms"]["plain"]["0"] > 0
    assert any(line.startswith("auto: last plan") for line in engine.stats.summary_lines())
    assert set(engine.stats.mode_rounds) <= {"ar", "dense", "exact"}


def test_samples_of_a_seed_repeat_in_mode_auto() -> None:
    request = RequestOptions(max_tokens=25, sampling=SamplingOptions(temperature=0.9, seed=4))
    texts = set()
    for _ in range(2):
        engine = make_engine(OPTIONS, "draft")
        rows, _ = run(engine, PROMPTS, request)
        assert engine.planner is None
        texts.add(tuple(tuple(row.generated) for row in rows))
    assert len(texts) == 1


@pytest.mark.parametrize(("drafts", "block"), [(1, 1), (1, 32), (15, 3), (2, 128)])
def test_narrow_bounds_leave_plans_and_plain_tokens(drafts: int, block: int) -> None:
    options = EngineOptions(
        mode="auto", budget=12, num_sink_tokens=2, num_recent_tokens=4, num_draft_tokens=drafts, exact_block=block
    )
    engine = make_engine(options, "draft")
    rows, _ = run(engine, PROMPTS, RequestOptions(max_tokens=40))
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, 40) for prompt in PROMPTS]
    assert engine.planner is not None
    plans = engine.planner._plans([1000])
    assert {plan.num_draft_tokens for plan in plans} <= set(range(drafts + 1))
    assert {plan.exact_block for plan in plans if plan.mode == "exact"} <= set(range(1, block + 1))


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
@pytest.mark.parametrize("seed", range(4))
def test_any_plans_in_slots_give_plain_greedy_tokens(drafter: str, seed: int) -> None:
    prompts = [tuple(int(t) for t in np.random.default_rng(10 + i).integers(0, VOCAB, n)) for i, n in enumerate((50, 9, 31, 18, 2))]
    counts = (20, 7, 14, 5, 17)
    options = EngineOptions(**{**vars(OPTIONS), "prefill_chunk": 16})
    engine = opened(options, drafter)
    engine._auto = RandomPlanner(drafter, seed), options
    rows, _ = serve(engine, prompts, [RequestOptions(max_tokens=n) for n in counts])
    assert [tuple(row.generated) for row in rows] == [greedy(prompt, n) for prompt, n in zip(prompts, counts, strict=True)]
    assert len(engine.stats.mode_rounds) > 1


def test_a_plain_round_that_waits_for_steps_begun_for_another_is_not_timed() -> None:
    engine = make_engine(OPTIONS, "draft")
    engine.planner = planner = RandomPlanner("draft", 0)
    dropped: list[bool] = []

    def drop() -> bool:
        dropped.append(len(dropped) % 2 == 0)
        return dropped[-1]

    engine.drafter.drop = drop
    run(engine, PROMPTS, RequestOptions(max_tokens=60))
    plain = [looks for plan, looks in planner.told if plan.mode == "ar"]
    assert [not looks for looks in plain[: len(dropped)]] == dropped and len(dropped) == len(plain) > 1


def test_rounds_beside_which_prompts_are_read_are_not_timed() -> None:
    engine = opened(OPTIONS, "draft", 2)
    planner = RandomPlanner("draft", 0)
    engine._auto = planner, engine.options
    prompts = PROMPTS[2], PROMPTS[0][:47]
    long, late = (Row(slot, prompts[slot], RequestOptions(max_tokens=30), 30, frozenset(), None) for slot in (0, 1))
    engine.admit(long)
    while engine.reading:
        engine.read_chunk(16)
    quiet = []
    while engine.active:
        if len(planner.told) == 3:
            engine.admit(late)
        reading = bool(engine.reading)
        if reading:
            engine.read_chunk(4)
        engine.step()
        # The first round comes right after the first prompt.
        quiet.append(not reading and len(planner.told) > 1)
    assert quiet.count(False) > 3 and quiet.count(True) > 3
    for calm, (_, looks) in zip(quiet, planner.told, strict=True):
        assert calm or not looks
    assert any(looks for calm, (_, looks) in zip(quiet, planner.told, strict=True) if calm)


def test_rounds_are_timed_without_what_was_recorded_in_them() -> None:
    engine = make_engine(OPTIONS, "draft")
    engine.planner = planner = RandomPlanner(engine.drafter.name, 1)
    told, spent = [], []
    plain, note = engine.target.forward, planner.record

    def recording_forward(*given, **named):
        spent.append(1000.0)
        engine.backend.capture_seconds = sum(spent)
        return plain(*given, **named)

    def record(looks, seconds, recording=0.0):
        told.append((seconds, recording, [look.seconds for look in looks]))
        note(looks, seconds, recording)

    # A clock of the host that runs on while shapes are recorded.
    engine.target.forward, planner.record = recording_forward, record
    plain_clock, engine_time = engine_module.time.perf_counter, SimpleNamespace()
    engine_time.perf_counter = lambda: plain_clock() + sum(spent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "time", engine_time)
        run(engine, PROMPTS, RequestOptions(max_tokens=20))
    assert told and all(0 < seconds < 500 and recording >= 1000 for seconds, recording, _ in told)
    assert all(0 < seconds < 500 for *_, looks in told for seconds in looks)


def test_a_set_far_behind_is_not_widened_for_the_draft_of_a_lossless_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """After plain rounds a draft reads everything, once: a set widened by all that came since would be a shape of its own."""
    monkeypatch.setattr("dustin.set_memory._FAR_BEHIND", {"dense": 8})
    monkeypatch.setattr("dustin.set_memory._SPARSE_DRAFT_SHARE", 0.0)

    class Planner(AutoPlanner):
        def choose(self, lengths: Sequence[int], idle: int = 0, left: int | None = None, unread: int = 0) -> Plan:
            self.rounds = getattr(self, "rounds", 0) + 1
            # Two dense rounds, which choose a set, then plain ones, then dense ones again.
            self._plan = Plan("ar") if 2 < self.rounds < 15 else Plan("dense", 3)
            return self._plan

    engine = make_engine(OPTIONS, "draft")
    engine.planner = planner = Planner(target().spec, "draft", OPTIONS.budget, OPTIONS.num_draft_tokens, OPTIONS.exact_block)
    seen: list[tuple[int, bool]] = []
    propose = engine.drafter.propose

    def noted(state: object) -> object:
        seen.append((planner.rounds, state.draft_set is None))  # type: ignore[attr-defined]
        return propose(state)  # type: ignore[arg-type]

    engine.drafter.propose = noted  # type: ignore[method-assign,assignment]
    rows, _ = run(engine, PROMPTS[:1], RequestOptions(max_tokens=60))
    assert tuple(rows[0].generated) == greedy(PROMPTS[0], 60)
    assert seen[:4] == [(1, True), (2, False), (15, True), (16, False)]


def test_a_draft_reads_no_prompt_that_plain_rounds_are_expected_for() -> None:
    options = EngineOptions(**{**vars(OPTIONS), "prefill_chunk": 16})
    engine = opened(options, "draft")
    planner = RandomPlanner("draft", 0)
    engine._auto = planner, options
    reads: list[int] = []
    read = engine.drafter.read  # type: ignore[attr-defined]

    def noted(prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[int]:
        reads.append(sum(map(len, prompts)))
        return read(prompts, most)

    engine.drafter.read = noted  # type: ignore[attr-defined]
    prompts = [tuple(int(t) for t in np.random.default_rng(20 + i).integers(0, VOCAB, n)) for i, n in enumerate((50, 40, 45))]
    expected = [greedy(prompt, 12) for prompt in prompts]

    def answer(which: int, plan: Plan, heat: float = 0.0) -> None:
        planner.choose = lambda *a, **k: planner.__dict__.update(_plan=plan, _home=plan) or plan  # type: ignore[method-assign]
        reads.clear()
        request = RequestOptions(max_tokens=12, sampling=SamplingOptions(temperature=heat, seed=1))
        rows, _ = serve(engine, [prompts[which]], [request])
        if not heat:
            assert tuple(rows[0].generated) == expected[which]

    # Nothing is known: the draft reads along.
    answer(0, Plan("dense", 3))
    assert sum(reads) > 0
    # Texts that accept nothing, in plain rounds: it does not, but where something is drawn.
    for _ in range(30):
        planner.habits.dense.observe([0], 5)
    answer(1, Plan("ar"))
    answer(1, Plan("ar"))
    assert sum(reads) == 0 and engine.drafter.cache.lengths[0] < 40  # type: ignore[union-attr]
    answer(2, Plan("ar"), 0.8)
    assert sum(reads) > 0
    # A round with drafts after all reads what was missed.
    planner.drafts_soon = lambda *a: False  # type: ignore[method-assign]
    answer(2, Plan("dense", 3))
    assert sum(reads) == 0 and max(engine.drafter.cache.lengths) > 45  # type: ignore[union-attr]


def test_a_draft_that_has_a_prompt_to_read_must_earn_it() -> None:
    """The same gain is worth reading a prompt for where much of the answer is to come, and not at its end."""
    planner = AutoPlanner(target().spec, "draft", OPTIONS.budget, 5, 16)
    for _ in range(12):
        planner.choose([3000], left=2000)
        planner.record([Look("plain", 0, [0], 0.010)], 0.010)
    for size in (1, 3, 5):
        for _ in range(3):
            planner.costs.observe("dense", size, 0.010 + 0.002 * size)
    for _ in range(40):
        planner.habits.dense.observe([3], 5)
    planner._home = planner._plan = Plan("ar")
    planner.prices.reading["draft"] = 1e-4
    assert planner.drafts_soon([3000], 0, 2000, 3000)
    assert not planner.drafts_soon([3000], 0, 20, 3000)
    assert planner.drafts_soon([3000], 0, 20, 3)
    # Answers of this session are short, whatever they may be.
    for _ in range(5):
        planner.prices.note_answer(20)
    assert not planner.drafts_soon([3000], 0, 2000, 3000)
