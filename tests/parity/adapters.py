"""A Backend of dustin.interfaces as implementations for the harness, and whole-model checks against the numpy backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dustin.backends.numpy_reference.backend import NumpyBackend
from dustin.interfaces import Backend, Tap, TokenSet, Verdict, WarpBatch
from tests.parity.harness import Implementation, Inputs, ParityError, relative_rms

ToArray = Callable[[np.ndarray], Any]
ToNumpy = Callable[[Any], np.ndarray]


def implementations(backend: Backend, to_array: ToArray, to_numpy: ToNumpy) -> dict[str, Implementation]:
    """The operations that every Backend has as methods, by the harness's names. `to_array` keeps the numpy dtype."""

    def optional(x: np.ndarray | None) -> Any:
        return None if x is None else to_array(x)

    def tokens(x: np.ndarray) -> Any:
        return backend.tokens(x.tolist())

    def unpack(verdict: Verdict) -> dict[str, Any]:
        names = ("num_accepted", "tokens", "finite")
        return {name: to_numpy(getattr(verdict, name)) for name in names}

    def select(i: Inputs) -> dict[str, Any]:
        names = ("budget", "num_sink_tokens", "num_recent_tokens", "num_draft_selected")
        chosen = backend.select(optional(i["target"]), optional(i["draft"]), i["lengths"], **{name: i[name] for name in names})
        return {"indices": to_numpy(chosen.indices), "counts": to_numpy(chosen.counts)}

    def the_set(i: Inputs) -> TokenSet:
        return TokenSet(to_array(i["indices"]), to_array(i["counts"]))

    def accumulate(i: Inputs) -> dict[str, Any]:
        return {"scores": to_numpy(backend.accumulate(to_array(i["old"]), to_array(i["new"]), i["decay"]))}

    def smooth(i: Inputs) -> dict[str, Any]:
        return {"scores": to_numpy(backend.smooth(to_array(i["scores"]), i["width"]))}

    def keep_mass(i: Inputs) -> dict[str, Any]:
        options = {name: i[name] for name in ("mass", "num_sink_tokens", "num_recent_tokens")}
        chosen = backend.keep_mass(the_set(i), to_array(i["scores"]), i["lengths"], **options)
        return {"indices": to_numpy(chosen.indices), "counts": to_numpy(chosen.counts)}

    def measures(i: Inputs) -> dict[str, Any]:
        rows = backend.compare_logits(to_array(i["reference"]), to_array(i["logits"]), tokens(i["tokens"]))  # type: ignore[attr-defined]
        return vars(rows) | {"mass": backend.set_mass(the_set(i), to_array(i["scores"]))}  # type: ignore[attr-defined]

    def accept_greedy(i: Inputs) -> dict[str, Any]:
        return unpack(backend.accept_greedy(tokens(i["drafts"]), i["num_drafts"], to_array(i["logits"])))

    def accept_sampled(i: Inputs) -> dict[str, Any]:
        arrays = (optional(i["q"]), to_array(i["p"]), to_array(i["logits"]))
        uniforms = (i["accept_uniforms"], i["next_uniforms"])
        return unpack(backend.accept_sampled(tokens(i["drafts"]), i["num_drafts"], *arrays, *uniforms))

    def probabilities(i: Inputs) -> dict[str, Any]:
        inflight = None if i["inflight"] is None else tokens(i["inflight"])
        return {"probabilities": to_numpy(backend.probabilities(to_array(i["logits"]), i["warp"], i["context"], inflight))}

    def favour(i: Inputs) -> dict[str, Any]:
        drafts = tokens(i["drafts"])
        steps = [to_array(np.ascontiguousarray(i["logits"][:, t : t + 1])) for t in range(i["drafts"].shape[1])]
        # One step from distributions, the others from logits: drafters have either.
        parts = [backend.confidence(step, None) for step in steps]
        neutral = WarpBatch(*([value] * len(i["logits"]) for value in (1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0)))  # type: ignore[arg-type]
        parts[0] = backend.confidence(steps[0], backend.probabilities(steps[0], neutral, None, None))
        sure = backend.concat_tokens(parts)
        made = backend.favour(to_array(i["logits"]), drafts, i["num_drafts"], sure, i["threshold"])
        return {"logits": to_numpy(made), "sure": to_numpy(sure)}

    return {
        "favour": favour,
        "select": select,
        "accumulate": accumulate,
        "smooth": smooth,
        "keep_mass": keep_mass,
        "measures": measures,
        "accept_greedy": accept_greedy,
        "accept_sampled": accept_sampled,
        "probabilities": probabilities,
    }


_BASE = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# One config.json for each family and switch.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3": _BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": _LLAMA3},
    "llama-bias": _BASE
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 6}
    | {"attention_bias": True, "mlp_bias": True},
    "mistral": _BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6},
    "qwen2": _BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn": _BASE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3": _BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1},
}


def write_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A folder with config.json and random fp32 weights in two safetensors shards; returns it."""
    from safetensors.numpy import save_file

    from dustin.backends.numpy_reference.loading import config_from_hf
    from dustin.backends.numpy_reference.model import random_model

    weights = {name: w.astype(np.float32) for name, w in random_model(config_from_hf(config), seed).weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    names = sorted(weights)
    index: dict[str, str] = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{shard:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


class ModelCheck:
    """One schedule of forwards, run on a backend and on the numpy backend side by side; the first difference raises."""

    def __init__(self, backend: Backend, to_numpy: ToNumpy, folder: Path, dtype: str, tolerance: float) -> None:
        self.backend, self.to_numpy, self.tolerance = backend, to_numpy, tolerance
        self.oracle = NumpyBackend()
        self.model, self.reference = backend.load(folder, dtype=dtype), self.oracle.load(folder)
        self.rng = np.random.default_rng(3)

    def run(self) -> None:
        """Ragged prefill, scores, dense and sparse verification, rollback, take, the last row's logits."""
        heads = (0, self.model.spec.num_heads - 1)
        layers = [i for i in range(self.model.spec.num_layers) if i not in self.model.spec.sliding_layers]
        tap = Tap({layer: heads for layer in layers}, last_row_only=True)
        mine, its = self.model.new_cache(3, 40), self.reference.new_cache(3, 40)
        queries = self.step("prefill", mine, its, [17, 0, 12], tap=Tap(tap.heads))
        queries = self.step("second chunk", mine, its, [3, 1, 7], tap=tap)
        if layers:
            lengths = its.lengths
            got = self.to_numpy(self.backend.score(queries[0], tap, self.model, mine, lengths))
            want = self.oracle.score(queries[1], tap, self.reference, its, lengths)
            for b, length in enumerate(lengths):
                self.close(f"scores of row {b}", got[b, :length], want[b, :length])
        quota = {"budget": 9, "num_sink_tokens": 2, "num_recent_tokens": 3, "num_draft_selected": 4}
        sets = [side.select(None, None, its.lengths, **quota) for side in (self.backend, self.oracle)]
        self.step("sparse verify", mine, its, [4, 2, 0], sets=sets, tap=tap)
        self.rollback(mine, its, [22, 1, 15])
        self.step("dense verify after rollback", mine, its, [1, 4, 3])
        taken = mine.take([2, 0, 2]), its.take([2, 0, 2])
        self.step("taken rows", *taken, [2, 1, 4], logits="last")
        self.step("the original after take", mine, its, [1, 1, 1])
        for cache in (mine, its):
            cache.copy_row(2, 0, 9)
        self.step("a row that begins as another one does", mine, its, [3, 1, 2])
        self.rollback(mine, its, [0, 3, 18])
        sets = [side.select(None, None, its.lengths, **quota) for side in (self.backend, self.oracle)]
        self.step("sparse after an empty row", mine, its, [3, 1, 2], sets=sets)

    def step(
        self,
        name: str,
        mine: Any,
        its: Any,
        counts: Sequence[int],
        sets: Sequence[TokenSet | None] = (None, None),
        tap: Tap | None = None,
        logits: str = "all",
    ) -> tuple[Any, Any]:
        """One forward on both sides; compares logits, queries and lengths of the valid rows. Returns both queries."""
        rows = [self.rng.integers(0, self.model.spec.vocab_size, max(counts)).tolist() for _ in counts]
        results = [
            model.forward(side.tokens(rows), counts, cache, token_set=chosen, tap=tap, logits=logits)
            for side, model, cache, chosen in (
                (self.backend, self.model, mine, sets[0]),
                (self.oracle, self.reference, its, sets[1]),
            )
        ]
        if tuple(mine.lengths) != its.lengths:
            raise ParityError(f"{name}: lengths are {mine.lengths}, expected {its.lengths}")
        got, want = results
        tensors: list[tuple[str, Any, Any]] = [("logits", got.logits, want.logits)]
        tensors += [(f"queries of layer {layer}", got.queries[layer], want.queries[layer]) for layer in (tap.heads if tap else ())]
        for label, here, there in tensors:
            here = self.to_numpy(here)
            if here.shape != there.shape:
                raise ParityError(f"{name}: {label} have shape {here.shape}, expected {there.shape}")
            for b, count in enumerate(counts):
                valid = min(count, there.shape[1])
                if not np.isfinite(here[b]).all():
                    raise ParityError(f"{name}: {label} of row {b} are not finite")
                if valid:
                    self.close(f"{name}: {label} of row {b}", here[b, :valid], there[b, :valid])
        return got.queries, want.queries

    def rollback(self, mine: Any, its: Any, lengths: Sequence[int]) -> None:
        """Both caches drop the same rows and say so."""
        got, want = tuple(mine.rollback(lengths)), its.rollback(lengths)
        if got != want or tuple(mine.lengths) != its.lengths:
            raise ParityError(f"rollback to {lengths} dropped {got} and left {mine.lengths}, expected {want} and {its.lengths}")

    def close(self, name: str, got: np.ndarray, want: np.ndarray) -> None:
        """Relative RMS within the tolerance."""
        error = relative_rms(got, want)
        if not error <= self.tolerance:
            raise ParityError(f"{name} differ by {error:.3g} relative RMS, expected at most {self.tolerance}")
