"""Which kernels a session would compile and which calls it would record on a GPU, found without one and without compiling.

Run as a program (the compiler's stand-ins stay for the life of a process): the CUDA backend on tensors of the CPU, where a launch
only notes what the kernel is specialised for, and a recording only notes its shape. What kernels would have computed is made up.

Prints a line for each plan that, after a warm-up, met something new: nothing is expected.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE = torch.device("cpu")


def kernels_only_noted() -> set[tuple[str, str]]:
    """From now on no kernel runs or compiles; returns the set that what they are specialised for is noted in."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from dustin.triton_kernels import runtime
    from tests.kernels.compile_report import _TargetOnly

    driver.set_active(_TargetOnly())
    runtime.allow_cpu = True
    for name, module in list(sys.modules.items()):
        if name.startswith("dustin.") and hasattr(module, "num_multiprocessors"):
            module.num_multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    noted: set[tuple[str, str]] = set()

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        options["debug"], options["instrumentation_mode"] = False, ""
        *_, binder = self.device_caches[0]
        _, specialization, chosen = binder(*given, **options)
        noted.add((self.__name__, str(specialization) + str(chosen)))

    JITFunction.run = run
    # Products of the library compile nothing, and are not needed.
    torch.nn.functional.linear = lambda x, w, b=None: x.new_empty(*x.shape[:-1], w.shape[0])
    torch.cuda.mem_get_info = lambda device=None: (1 << 40, 1 << 40)
    # What kernels would write may lead nowhere where it is an index.
    empty, empty_like = torch.empty, torch.empty_like

    def some(plain: Any, filled: Any) -> Any:
        def made(*given: Any, **more: Any) -> Any:
            found = plain(*given, **more)
            return found if found.is_floating_point() else filled(found)

        return made

    torch.empty, torch.empty_like = some(empty, torch.zeros_like), some(empty_like, torch.zeros_like)  # type: ignore[assignment]
    return noted


class Recorded:
    """Stands in for a CUDA graph: runs its function; `made` has the calling place of every recording."""

    made: list[str] = []

    def __init__(self, function: Callable[[], Any], device: Any, pool: Any = None, enabled: bool = True) -> None:
        self._function, self.seconds, self.bytes, self.pool = function, 0.0, 0, None
        if enabled:
            frame = sys._getframe(1)
            Recorded.made.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")
            function()

    def __call__(self) -> Any:
        return self._function()

    def drop(self) -> None:
        """Nothing is held."""


def session(mode: str, **options: Any) -> Any:
    """A pair of the real pair's shapes, of one layer each, with a small vocabulary."""
    from dustin.backends.torch_triton import cuda_backend, cuda_model
    from dustin.backends.torch_triton.cuda_random import QWEN2_0_5B, QWEN2_1_5B
    from dustin.backends.torch_triton.weights import Layer, Linear, Weights
    from dustin.config import EngineOptions
    from dustin.generation import Session
    from dustin.interfaces import HostVerdict

    stand_ins = {"Captured": Recorded, "graphs_enabled": lambda device: True}
    for module in [m for known, m in sys.modules.items() if known.startswith("dustin.backends.torch_triton.")]:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)

    def weights(c: Any) -> Any:
        def linear(rows: int, columns: int, bias: bool = False) -> Any:
            make: Any = torch.zeros
            return Linear(make(rows, columns, dtype=torch.bfloat16), make(rows, dtype=torch.bfloat16) if bias else None)

        norm, q, kv = torch.zeros(c.hidden_size, dtype=torch.bfloat16), c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        layer = Layer(
            input_norm=norm, qkv=linear(q + 2 * kv, c.hidden_size, True), q_norm=None, k_norm=None,
            output=linear(c.hidden_size, q), mlp_norm=norm, gate_up=linear(2 * c.intermediate_size, c.hidden_size),
            down=linear(c.hidden_size, c.intermediate_size),
        )  # fmt: skip
        embedding = torch.zeros(c.vocab_size, c.hidden_size, dtype=torch.bfloat16)
        return Weights(embedding, (layer,) * c.num_layers, norm, Linear(embedding, None))

    dice = random.Random(0)

    def read(self: Any, verdict: Any, logits: Any = None, top_logprobs: Any = None) -> HostVerdict:
        rows, width = verdict.tokens.shape
        kept = tuple(dice.randint(0, width - 1) for _ in range(rows))
        return HostVerdict(kept, tuple((7,) * width for _ in range(rows)), (True,) * rows)

    cuda_backend.CudaBackend.read = read  # type: ignore[method-assign]
    backend = cuda_backend.CudaBackend(DEVICE)
    cuda_backend.CudaBackend.warms_up = True  # type: ignore[assignment,method-assign]
    models = []
    for shape in (QWEN2_1_5B, QWEN2_0_5B):
        config = dataclasses.replace(shape, num_layers=1, windows=(None,), vocab_size=2048, context_length=32768)
        model = cuda_model.CudaModel(config, weights(config), "pair")
        model.limit_vocabulary(2000)
        models.append(model)
    return Session(backend, models[0], None, EngineOptions(mode=mode, **options), models[1])


def plans_after_warm_up(made: Any, slots: int, context: int) -> Iterator[tuple[Any, Any]]:
    """Warm up, then plan after plan of the menu on requests of several lengths: each with what it met."""
    from dustin.config import RequestOptions
    from dustin.sequence import Sequence
    from dustin.slots import SlotEngine
    from dustin.stats import Stats

    options = made.resolve()
    engine = made.make_engine(SlotEngine, options, Stats())
    engine.open(made.target.new_cache(slots, context), slots)
    planner, _ = engine._auto
    rng = random.Random(1)
    # Some prompts are left to be read by the draft when it is first asked.
    planner.drafts_soon = lambda *a: rng.random() < 0.5
    for place in range(6):
        # Scores over a power of two tokens are a case of their own.
        for length in (5, context // 3, *[8160] * (context > 8300), context - 120):
            for slot in engine.free[: 1 if place % 2 else slots]:
                prompt = [rng.randrange(2000) for _ in range(max(1, length - slot))]
                engine.admit(Sequence(slot, prompt, RequestOptions(max_tokens=100, ignore_eos=True), 100, frozenset(), None))
            while engine.reading:
                engine.read_chunk(1024)
            yield ("reading", length), None
            planner._costs = planner.prices.of("draft", [context] * slots, None)
            menu = [plan for plan in planner._plans([context] * slots) if planner._open(plan)]
            while engine.active:
                plan = rng.choice(menu)
                planner.choose = lambda *a, plan=plan, **k: planner.__dict__.update(_plan=plan) or plan
                planner.record = lambda *a, **k: None
                # As many plain rounds as leave a draft behind, few of the others.
                for _ in range(rng.choice((3, 30, 90)) if plan.mode == "ar" else 4):
                    if engine.active:
                        engine.step()
                yield plan, length


def main() -> int:
    """Print what was met after the warm-up."""
    slots, context = (int(n) for n in sys.argv[1].split("x"))
    noted = kernels_only_noted()
    with torch.inference_mode():
        made = session("auto", num_draft_tokens=int(sys.argv[2]) if len(sys.argv) > 2 else 8)
        made.warm_up(slots, context)
        met, recorded = set(noted), len(Recorded.made)
        print(f"warm-up: {len(met)} kernels, {recorded} recordings", file=sys.stderr)
        new = 0
        for plan, length in plans_after_warm_up(made, slots, context):
            # Graphs of scores and choices, which take a few milliseconds, are made for the contexts that come.
            fresh, again = noted - met, [place for place in Recorded.made[recorded:] if not place.startswith("cuda_replay")]
            if fresh or again:
                new += 1
                print(f"{plan} {length}: kernels {sorted(name for name, _ in fresh)}, recorded {again}")
                for name, key in sorted(fresh):
                    print("   ", name, key[:900])
            met |= fresh
            recorded = len(Recorded.made)
    return min(new, 1)


if __name__ == "__main__":
    sys.exit(main())
