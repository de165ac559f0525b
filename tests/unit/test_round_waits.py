"""A round on a CUDA device: the host waits for it once, sends values without waiting, and records no shape after the first text."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.unit.interpreted import interpreted, run_interpreted

pytest.importorskip("triton")
MODES = ("ar", "dense", "sparse", "rectified", "exact")
# What makes the host wait for a device, and what moves values there: only ops.host_values may, from pinned memory.
WAITS = {"tolist", "item", "nonzero", "cpu", "numpy", "masked_select", "unique", "__bool__", "__int__", "__float__", "__index__"}
SENDS = {"tensor", "as_tensor", "from_numpy"}


def test_under_the_interpreter():
    run_interpreted(__file__)


def make_session(mode: str, device: str, **changes: Any):
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.config import EngineOptions
    from dustin.generation import Session

    where = torch.device(device)
    sizes = (64, 96) if device == "cpu" else (512, 1024)
    models = []
    for seed, layers in ((1, 2), (2, 1)):
        config = qwen2_config(*sizes, layers, 4, 2, 50, context_length=1024)
        models.append(CudaModel(config, random_weights(config, torch.float32, where, seed), f"toy {seed}"))
    settings = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 4, "exact_block": 9, "num_draft_tokens": 3}
    options = EngineOptions(mode=mode, rectify_interval=6, drafter="none" if mode == "ar" else "draft", **settings | changes)
    return Session(CudaBackend(where), models[0], None, options, models[1])


def start(session: Any, lengths: tuple[int, ...], tokens: int):
    """The engine of a run, past its prompts."""
    from dustin.config import RequestOptions

    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
    run = session._start(prompts, [RequestOptions(max_tokens=tokens, ignore_eos=True)] * len(prompts))
    run.engine.start(run.rows, run.cache)
    return run.engine


def finish(session: Any, lengths: tuple[int, ...], tokens: int) -> None:
    """A whole run. Its pages are free again afterwards, so that the next one finds its pool, and the graphs over it."""
    engine = start(session, lengths, tokens)
    while engine.active:
        engine.step()
    del engine
    gc.collect()


def recorded(session: Any) -> int:
    """Shapes that both models have seen."""
    engines = [engine for model in (session.target, session.draft) for engine in model._engines]
    return sum(len(engine.graphs) + (len(engine.chain.graphs) if engine.chain else 0) for engine in engines)


def round_shapes(session: Any) -> set[Any]:
    """Keys of what rounds have recorded: verifications, whose logits are those of all rows, and chains of draft steps."""
    found: set[Any] = set()
    for model in (session.target, session.draft):
        for engine in model._engines:
            found |= {key for key in engine.graphs if "all" in key} | set(engine.chain.graphs if engine.chain else ())
    return found


class Watch(TorchFunctionMode):
    """Counts what waits, and what sends but by host_values and on_device. Triton's interpreter, a device here, is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.sends: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, name = sys._getframe(1), getattr(func, "__name__", "")
        place = f"{name} in {Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"
        on_device = "/triton/" not in frame.f_code.co_filename and "/torch/" not in frame.f_code.co_filename
        masked = name == "__getitem__" and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if on_device and (name in WAITS or masked):
            self.waits[place] += 1
        if on_device and name in SENDS and frame.f_code.co_name not in ("host_values", "on_device"):
            self.sends[place] += 1
        return func(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize("mode", ("ar", "sparse", "exact"))
def test_a_round_reads_once_and_sends_without_waiting(mode, monkeypatch):
    from dustin import exact

    session = make_session(mode, "cpu")
    engine, rounds = start(session, (30, 27), 8), []
    propose = exact._propose
    monkeypatch.setattr(exact, "_propose", lambda *given: rounds.append(1) or propose(*given))
    engine.step()
    while engine.active:
        before, checks = engine.stats.rounds, engine.stats.dense_checks
        rounds.clear()
        with Watch() as watch:
            engine.step()
        reads = watch.waits.pop("tolist in sampling.py, read")
        assert not watch.waits and not watch.sends
        if engine.stats.dense_checks > checks:
            # A block: its sparse rounds and its check.
            assert reads == 1 + len(rounds)
        else:
            assert (reads, engine.stats.rounds - before) == (1, 1)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mode", ("dense", "sparse", "exact"))
def test_later_texts_need_no_new_shape(mode):
    session = make_session(mode, "cpu")
    for tokens in (16, 15):
        finish(session, (30, 27), tokens)
    known = recorded(session)
    for tokens in (14, 12):
        finish(session, (30, 27), tokens)
        assert recorded(session) == known


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mode", ("dense", "sparse"))
def test_after_warming_up_a_text_needs_no_new_shape(mode):
    """Its caches are gone by then, and their pages, with the graphs over them, are what the text's caches are made of."""
    session = make_session(mode, "cpu")
    session.warm_up(2, 96)
    known, pools = round_shapes(session), [engine.pool for model in (session.target, session.draft) for engine in model._engines]
    assert known
    for lengths in ((80, 27), (14, 9)):
        engine = start(session, lengths, 96 - max(lengths))
        for _ in range(3):
            engine.step()
        del engine
        gc.collect()
        assert round_shapes(session) - known == set()
    assert [engine.pool for model in (session.target, session.draft) for engine in model._engines] == pools


@interpreted
def test_more_steps_than_asked_for_are_not_kept():
    """At a text's end as many drafts are made as ever, and as few are verified as may follow."""
    session = make_session("dense", "cpu")
    engine = start(session, (40,), 3)
    counted = []
    while engine.active:
        drafts = engine.draft({0}, 3, False)
        counted.append((drafts.num_drafts, None if drafts.tokens is None else tuple(drafts.tokens.shape)))
        engine.drafter.commit([len(row.tokens) for row in engine.rows])
        engine.step()
    assert counted[0] == ((1,), (1, 3))
    assert engine.rows[0].committed == 43


@contextmanager
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_round_on_a_gpu_waits_once_and_records_nothing(mode, graphs, monkeypatch):
    from dustin.backends.torch_triton.cuda_backend import CudaBackend

    session = make_session(mode, "cuda")
    if not graphs:
        session.target.use_graphs = session.draft.use_graphs = session.backend._replays.enabled = False
    for tokens in (60, 59, 58):
        finish(session, (90, 77), tokens)
    reads = []

    def allowed(name: str):
        plain = getattr(CudaBackend, name)

        def waiting(*args: Any, **more: Any) -> Any:
            reads.append(name)
            torch.cuda.set_sync_debug_mode("default")
            try:
                return plain(*args, **more)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        monkeypatch.setattr(CudaBackend, name, waiting)

    engine = start(session, (90, 77), 60)
    engine.step()
    allowed("read")
    known = recorded(session), session.target.capture_seconds + session.draft.capture_seconds, session.backend._replays.seconds
    while engine.active:
        reads.clear()
        with syncs_are_errors():
            engine.step()
        if mode != "exact":
            assert reads == ["read"]
    now = recorded(session), session.target.capture_seconds + session.draft.capture_seconds, session.backend._replays.seconds
    assert now == known
