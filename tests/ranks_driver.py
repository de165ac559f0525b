"""One rank of a test run: rank 0 generates in several modes and prints JSON, the others follow. Not a test by itself.

DRIVER_DEVICE and DRIVER_BACKEND choose where; DRIVER_ALONE makes a single process a group of one rank.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch

import dustin
from dustin import launch, registry
from dustin.config import EngineOptions, RequestOptions, SamplingOptions

PROMPTS = ["the quick brown fox jumps over the lazy dog, and the quick brown fox jumps over it again. " * 2, "to be or not to be"]
SPARSE = {"budget": 40, "num_sink_tokens": 4, "num_recent_tokens": 8, "num_draft_tokens": 3}
CASES: dict[str, dict] = {
    "ar": {"mode": "ar"},
    "dense": {"mode": "dense", "drafter": "draft"},
    "self": {"mode": "dense", "drafter": "self", **SPARSE},
    "sparse": {"mode": "sparse", **SPARSE},
    "rectified": {"mode": "rectified", "rectify_interval": 8, **SPARSE},
    "exact": {"mode": "exact", "exact_block": 8, **SPARSE},
    "quest": {"mode": "sparse", "selector": "quest", **SPARSE},
    "pool": {"mode": "sparse", **SPARSE},
    "own-sets": {"mode": "sparse", "reselection_layers": (1,), "reselection_by_kv_head": True, **SPARSE},
    "compact": {"mode": "sparse", "reselection_layers": (1,), "reselection_by_kv_head": True, "reselection_rank": 32, **SPARSE},
}


def perturb() -> None:
    """Make this rank's share of the logits noisy."""
    from dustin.backends.torch_triton import model

    plain = model.linear

    def noisy(x: torch.Tensor, layer: model.Linear) -> torch.Tensor:
        out = plain(x, layer)
        return out + torch.randn_like(out) if layer.weight.shape[0] == noisy.rows else out

    noisy.rows = int(os.environ["PERTURB_ROWS"])  # type: ignore[attr-defined]
    model.linear = noisy


class FakeSymmetric:
    """Stands for SymmetricSum on a CPU: one buffer that every sum overwrites."""

    def __init__(self) -> None:
        self.buffer, self.used = torch.full((1 << 16,), float("nan")), 0

    def room(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], without what was there."""
        self.used += 1
        return self.buffer.fill_(float("nan"))[: rows * columns].view(rows, columns).to(dtype)

    def sum(self, x: torch.Tensor) -> None:
        """The sum over ranks, in place."""
        torch.distributed.all_reduce(x)


def main() -> None:
    """Arguments: the target's folder, the draft's, the cases."""
    target, draft, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if os.environ.get("PERTURB_RANK") == os.environ.get("RANK", "0"):
        perturb()
    if fake := "DRIVER_SYMMETRIC" in os.environ:
        from dustin.backends.torch_triton.ranks import Ranks

        Ranks.symmetric = FakeSymmetric()  # type: ignore[assignment]
    found = {}
    short = "TRITON_INTERPRET" in os.environ
    prompts, tokens = ([PROMPTS[0][:60]], 6) if short else (PROMPTS, 24)
    if os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("WORLD_SIZE", "1") == "1":
        from dustin.backends.torch_triton.cuda_backend import CudaBackend

        registry.create = lambda *_: CudaBackend(torch.device("cpu"))  # type: ignore[assignment]
    if alone := "DRIVER_ALONE" in os.environ:
        from dustin.backends.torch_triton import parallel_run

        registry.create = lambda _, device: parallel_run.create(device)  # type: ignore[assignment]
    device, backend = os.environ.get("DRIVER_DEVICE", "cpu"), os.environ.get("DRIVER_BACKEND", "torch")
    session = dustin.load(target, draft, dtype="float32", device=device, backend=backend)
    for name in names:
        sampling = SamplingOptions(temperature=1.0, seed=5) if name.endswith("sampled") else SamplingOptions()
        session.options = EngineOptions(**CASES[name.removesuffix("-sampled")])
        if name == "pool":
            # Scores within a pool between refreshes, as a profile may ask for.
            key = ("auto", True)
            session._scorings[key] = replace(session._scoring(session.resolve()), refresh=3, pool=80)
        results = session.batch_generate(prompts, RequestOptions(max_tokens=tokens, ignore_eos=True, sampling=sampling))
        found[name] = [result.tokens for result in results]
    if fake and not Ranks.symmetric.used:  # type: ignore[union-attr]
        raise RuntimeError("nothing was summed in shared memory")
    print(json.dumps(found), flush=True)
    if launch.kind() or alone:
        registry.leave_ranks()


if __name__ == "__main__":
    main()
