"""Warming up: shapes are met before the first request, and nothing of it shows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("torch")

from dustin import warm_up as warm_up_module
from dustin.config import EngineOptions, RequestOptions
from dustin.errors import MemoryLimitError, UsageError
from dustin.generation import Session
from dustin.serving import scheduler as scheduler_module
from dustin.warm_up import plans_of
from tests import tiny_model
from tests.server.helpers import PacedModel, running, tiny_session, toy_session, until
from tests.unit.test_recorded_shapes import Chain

SMALL = {"budget": 40, "num_sink_tokens": 2, "num_recent_tokens": 8, "exact_block": 8, "num_draft_tokens": 5, "max_kv_size": 240}
BODY = {"max_tokens": 14, "ignore_eos": True}
MODES = ("ar", "dense", "sparse", "exact", "auto")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_model.write(folder / "target"), tiny_model.write(folder / "draft", seed=1, num_hidden_layers=1)


def session_of(folders: tuple[Path, Path], mode: str) -> Session:
    return tiny_session(folders[0], None if mode == "ar" else folders[1], mode=mode, **SMALL)


def answers(session: Session, **options: Any) -> tuple[list[Any], dict[str, float], list[str]]:
    """Texts of greedy and of sampled requests, all counts of the metrics, and what the server said."""
    said: list[str] = []
    with running(session, slots=3, prefill_tokens=32, **options) as server:
        server.scheduler.say = said.append
        until(lambda: server.scheduler.state == "ready", 60)
        before = server.metrics()
        texts = [
            server.complete("one " * n, temperature=heat, seed=4, **BODY).json()["choices"][0]["text"]
            for n, heat in ((3, 0.0), (30, 0.0), (9, 0.9))
        ]
        assert before["dustin_prompt_tokens_total"] == before["dustin_generation_tokens_total"] == 0
        assert not [name for name, value in before.items() if name.startswith("dustin_rounds_total") and value]
        clocks = ("seconds", "_created")
        found = {name: value for name, value in server.metrics().items() if not any(clock in name for clock in clocks)}
        found = {name: value for name, value in found.items() if name.startswith("dustin_")}
    return texts, found, said


@pytest.mark.parametrize("mode", MODES)
def test_no_trace_of_it_shows(folders: tuple[Path, Path], mode: str) -> None:
    cold, warm = session_of(folders, mode), session_of(folders, mode)
    expected, counts, _ = answers(cold)
    texts, found, _ = answers(warm, warmup=True)
    assert texts == expected
    if mode != "auto":  # which goes by the clock
        assert found == counts
    assert found["dustin_prompt_tokens_total"] == counts["dustin_prompt_tokens_total"]
    assert not warm._kept


def shapes(session: Session) -> set[Any]:
    """Notes, from now on, the shape of every call of the models."""
    seen: set[Any] = set()
    for name, model in (("target", session.target), ("draft", session.draft)):
        if model is not None:

            def forward(tokens: Any, *given: Any, name: str = name, plain: Any = model.forward, **more: Any) -> Any:
                batch, rows = tokens.shape
                if more.get("logits") in ("none", "last") and rows > 8 and sum(map(bool, given[0])) == 1:
                    # A piece of one prompt: its slot alone, padded.
                    batch, rows = 1, 1 << (rows - 1).bit_length()
                seen.add((name, batch, rows, more.get("logits"), more.get("token_set") is not None))
                return plain(tokens, *given, **more)

            model.forward = forward  # type: ignore[method-assign]
    if session.draft is not None:
        # As on a GPU: all steps of a draft in one call, as many at a text's end as in its middle.
        session.draft.__class__ = Chain
        session.draft.steps, session.draft.rows, plain_chain = [], [], session.draft.draft_greedy

        def chain(tokens: Any, num_tokens: Any, cache: Any, steps: int, **more: Any) -> Any:
            seen.add(("chain", len(tokens), steps, more.get("token_set") is not None))
            return plain_chain(tokens, num_tokens, cache, steps, **more)

        session.draft.draft_greedy = chain
    return seen


@pytest.mark.parametrize("recorded", [0, 128])
@pytest.mark.parametrize("mode", ["ar", "dense", "sparse", "exact"])
def test_requests_meet_no_new_shape(
    folders: tuple[Path, Path], mode: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(folders, mode)
    # As on a GPU, where the end of a text takes the shapes of its middle.
    monkeypatch.setattr(type(session.backend), "recorded_rows", 64, raising=False)
    monkeypatch.setattr(type(session.backend), "recorded_prompt_rows", recorded, raising=False)
    monkeypatch.setattr(type(session.backend), "scores_all", True, raising=False)
    seen = shapes(session)
    size = {} if recorded else {"prefill_tokens": 32}
    with running(session, slots=3, warmup=True, **size) as server, ThreadPoolExecutor(3) as pool:
        until(lambda: server.scheduler.state == "ready", 60)
        known = set(seen)
        replies = list(pool.map(lambda n: server.complete("word " * n, **BODY), (2, 5, 11, 20, 33)))
        replies += list(pool.map(lambda n: server.complete("w" * n, **BODY), (127, 40, 150, 129)))
        assert all(reply.status_code == 200 for reply in replies)
    # More rows of several sequences than 64 are not recorded, nor of one sequence where that is not.
    most = max(64, recorded)
    assert known and {shape for shape in seen - known if shape[2] <= (most if shape[1] == 1 else 64)} == set()


def test_health_and_requests_while_it_runs() -> None:
    model, gate = PacedModel(), threading.Event()
    session = toy_session(model)
    model.gate.clear()
    with running(lambda: session, warmup=True, slots=2) as server:
        until(lambda: server.scheduler.state == "warming")
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "warming"})
        refused = server.chat()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "warming"
        model.gate.set()
        until(lambda: server.client.get("/health").status_code == 200)
        assert server.chat(max_tokens=3).status_code == 200
    gate.set()


def test_a_signal_ends_it() -> None:
    model = PacedModel()
    model.pace = 0.2
    with running(lambda: toy_session(model), warmup=True, slots=2) as server:
        until(lambda: server.scheduler.state == "warming")
        server.scheduler.drain()
        server.scheduler.join(5)
        assert server.scheduler.state == "stopped" and server.scheduler.error is None


@pytest.mark.parametrize(("useful", "warmup", "runs"), [(False, None, 0), (True, None, 1), (True, False, 0), (False, True, 1)])
def test_when_it_runs_and_what_it_says(useful: bool, warmup: bool | None, runs: int) -> None:
    session, said, load = toy_session(), [], threading.Event()
    session.backend.warms_up = useful  # type: ignore[attr-defined]

    def loaded() -> Session:
        load.wait(10)
        return session

    with running(loaded, slots=2, warmup=warmup) as server:
        server.scheduler.say = said.append
        load.set()
        until(lambda: server.scheduler.state == "ready")
    assert len(said) == 2 * runs
    if runs:
        assert said[0].startswith("warming up 2 slots in mode dense") and "--no-warmup" in said[0]
        assert said[1].startswith("warmed up in ") and said[1].endswith(" s")
        assert ("neither compiles nor records" in said[0]) == (not useful)


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), MemoryLimitError("the KV cache asks for 9 bytes")])
def test_what_happens_where_it_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    load = threading.Event()

    def fails(*values: Any) -> float:
        raise error

    def loaded() -> Session:
        load.wait(10)
        return toy_session()

    monkeypatch.setattr(scheduler_module, "warm_up", fails)
    with running(loaded, slots=2, warmup=True) as server:
        server.scheduler.say = said.append
        load.set()
        if isinstance(error, MemoryLimitError):
            # The slots themselves would not fit either.
            until(lambda: server.scheduler.error is error)
            return
        until(lambda: server.scheduler.state == "ready")
        assert said[-1] == "warming up failed (RuntimeError: no such kernel): first requests will wait for what they need"
        assert server.complete("one two", **BODY).json()["choices"][0]["text"]


def test_what_auto_may_ask_for() -> None:
    options = EngineOptions(mode="auto", num_draft_tokens=8)
    asked = [[(o.mode, o.num_draft_tokens) for o in plans_of(options, "draft", greedy)] for greedy in (True, False)]
    assert asked == [[("ar", 8), ("dense", 2), ("dense", 4), ("dense", 7)], [("ar", 8), ("dense", 8)]]
    assert [o.mode for o in plans_of(options, "lookup", False)] == ["ar"]
    assert [o.mode for o in plans_of(EngineOptions(mode="sparse"), "draft", True)] == ["ar", "sparse"]
    assert plans_of(EngineOptions(mode="ar"), "none", True) == [EngineOptions(mode="ar")]


def test_from_python(folders: tuple[Path, Path]) -> None:
    cold, warm = session_of(folders, "dense"), session_of(folders, "dense")
    request = RequestOptions(max_tokens=9, ignore_eos=True)
    assert warm.warm_up(2, 100) > 0
    results = [each.batch_generate([[1, 2, 3], [4, 5]], request) for each in (cold, warm)]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
    first, second = results[0][0].stats, results[1][0].stats
    for name in ("rounds", "prompt_tokens", "generated_tokens"):
        assert getattr(first, name) == getattr(second, name)
    for bad in ({"batch": 0}, {"batch": "2"}, {"context": 1}, {"context": 10**6}, {"context": 9.5}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            warm.warm_up(**bad)


def test_longer_contexts_are_met_but_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int, int]] = []
    plain = warm_up_module._WarmUp.rounds

    def rounds(self: Any, plan: EngineOptions, length: int, count: int = 0) -> None:
        before = self._engine.stats.rounds
        plain(self, plan, length, count)
        reached = max(len(row.tokens) for row in self._engine.rows) // length
        made.append((plan.mode, length, reached, self._engine.stats.rounds - before))

    monkeypatch.setattr(warm_up_module._WarmUp, "rounds", rounds)
    session = toy_session(PacedModel(context_length=2048), budget=60)
    session.warm_up(2)
    greedy = [("ar", 16), ("dense", 16), ("ar", 136), ("dense", 136), ("dense", 272), ("dense", 544), ("dense", 1088)]
    assert [entry[:2] for entry in made] == [*greedy, *greedy[:4]]
    assert all(reached >= 1 for *_, reached, _ in made)
    few = max(ran for _, length, _, ran in made if length > 136)
    assert few < min(ran for _, length, _, ran in made if length == 136)


def test_while_a_person_types_until_the_session_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat's session warms up beside the first message, and is alone when that is answered."""
    from dustin import chat as chat_module

    inside, log = threading.Event(), []

    def warm_up(session: Any, options: Any, slots: int, context: int, chunks: Any, going: Any) -> float:
        log.append(("warm", slots, context))
        inside.set()
        while going():
            threading.Event().wait(0.01)
        log.append("stopped")
        raise MemoryLimitError("no room")

    monkeypatch.setattr(warm_up_module, "warm_up", warm_up)
    session = toy_session()
    monkeypatch.setattr(type(session.backend), "warms_up", True, raising=False)

    class Reader:
        lines = iter(["", "hello", "again"])

        def read(self) -> str:
            assert inside.wait(20)
            line = next(self.lines, None)
            if line is None:
                raise EOFError
            return line

    conversation = SimpleNamespace(session=session)
    loop = chat_module.Chat(conversation, Reader(), verbose=False)  # type: ignore[arg-type]
    loop.terminal = True
    loop.answer = log.append  # type: ignore[method-assign]
    loop.run()
    room = min(4000, warm_up_module.slot_context(session, session.resolve()))
    assert log == [("warm", 1, room), "stopped", "hello", "again"]
    # Ctrl-C while it is waited for: the session is not used before it has ended.
    del log[:]
    stops = []

    class Slow(warm_up_module.WhileWaiting):
        def stop(self, say: Any = None) -> None:
            stops.append(len(log))
            if len(stops) == 1:
                raise KeyboardInterrupt
            super().stop(say)

    monkeypatch.setattr(warm_up_module, "WhileWaiting", Slow)
    Reader.lines = iter(["lost", "kept"])
    inside.clear()
    loop.run()
    assert stops == [1, 1] and log == [("warm", 1, room), "stopped", "kept"]
    # In a pipe the first message is there already.
    del log[:]
    Reader.lines = iter(["hello"])
    loop.terminal = False
    loop.run()
    assert log == ["hello"]
