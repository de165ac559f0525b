"""One verification round of a whole model through the MLX backend: dense against sparse with its selection, random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.mlx_attention import RECENT, SINKS, interleaved
from dustin.interfaces import Tap

# config.json of the shapes measured: Qwen2.5-7B, and a tiny one that checks this script.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 65536,
        "rope_theta": 1000000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
}


def random_model(name: str, backend: Any, dtype: str) -> Any:
    """An MlxModel of that shape with the random weights that mlx-lm's definition starts from."""
    import mlx.core as mx
    from mlx_lm.models import qwen2

    from dustin.backends.common.config import config_from_hf
    from dustin.backends.mlx_metal.loading import arguments
    from dustin.backends.mlx_metal.model import MlxModel

    raw = SHAPES[name] | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    config = config_from_hf(raw | {"tie_word_embeddings": False})
    inner = qwen2.Model(qwen2.ModelArgs.from_dict(arguments(config, raw)))
    inner.set_dtype(getattr(mx, dtype))
    for layer in inner.layers:
        mx.eval(layer.parameters())
    mx.eval(inner.parameters())
    return MlxModel(inner.eval(), config, f"{name} (random weights)", backend.gate)


def filled_cache(model: Any, batch: int, context: int, spare: int) -> Any:
    """A cache of `context` random rows a sequence: what a prompt leaves, without the time to read one."""
    import mlx.core as mx

    cache = model.new_cache(batch, context + spare)
    for store in (cache.keys, cache.values):
        for layer, rows in enumerate(store):
            store[layer] = mx.random.normal(rows.shape, dtype=rows.dtype)
            mx.eval(store[layer])
    cache.advance([context] * batch)
    return cache


def measure_round(
    name: str,
    *,
    context: int,
    batch: int,
    rows: int,
    budgets: Sequence[int],
    dtype: str,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Milliseconds of a dense forward, of sparse ones (scores, selection and forward), and of plain decoding (T = 1)."""
    import mlx.core as mx

    from dustin.registry import create

    backend = create("mlx")
    model = random_model(name, backend, dtype)
    cache = filled_cache(model, batch, context, rows)
    lengths = [context] * batch
    layer = model.spec.num_layers // 2
    tap = Tap({layer: tuple(range(min(4, model.spec.num_heads // model.spec.num_kv_heads)))}, last_row_only=True)

    def forward(count: int, token_set: Any = None) -> Any:
        tokens = backend.tokens([[(7 * b + t) % model.spec.vocab_size for t in range(count)] for b in range(batch)])
        result = model.forward(tokens, [count] * batch, cache, token_set=token_set, tap=tap)
        cache.rollback(lengths)
        return result

    history = forward(1).queries

    def sparse(budget: int) -> Any:
        scores = backend.score(history, tap, model, cache, lengths)
        quota = {"budget": budget, "num_sink_tokens": SINKS, "num_recent_tokens": RECENT, "num_draft_selected": 0}
        return forward(rows, backend.select(scores, None, lengths, **quota)).logits

    calls: dict[str, Callable[[], Any]] = {"dense": lambda: forward(rows).logits, "plain decoding": lambda: forward(1).logits}
    calls |= {f"sparse {budget}": lambda k=budget: sparse(k) for budget in budgets}
    for label, call in calls.items():
        if not bool(mx.isfinite(call()).all()):
            raise ValueError(f"{label}: the logits are not finite, no speed is printed")
    times = {label: statistics.median(found) for label, found in interleaved(calls, repeats, clock).items()}
    return {
        "our_path": "array path" if backend.gate.chip is None else f"gate: {backend.gate.mode}",
        "model": model.spec.name,
        "layers": model.spec.num_layers,
        "shape": f"{model.spec.num_heads}/{model.spec.num_kv_heads}/{model.spec.head_dim}",
        "dtype": dtype,
        "context": context,
        "batch": batch,
        "query_rows": rows,
        "repeats": repeats,
        "ms_per_round": {label: round(ms, 3) for label, ms in times.items()},
        "ratio": {str(k): round(times["dense"] / times[f"sparse {k}"], 2) for k in budgets},
        "peak_memory_bytes": int(backend.peak_memory_bytes()),
    }
