"""Generation on MLX: mlx_lm's own loop against ours, one model, one prompt, the same greedy tokens asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import rows
from dustin.errors import ModelError

MODES = ("ar", "dense", "exact", "sparse", "auto")
_TEXT = rows.ROOT / "bench" / "data" / "northanger_abbey_chapter_1.txt"


def prompt_ids(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """`count` tokens of the novel's chapter, repeated as often as it takes."""
    ids = encode(_TEXT.read_text(encoding="utf-8"))
    return (ids * (count // len(ids) + 1))[:count]


def stock(folder: str, ids: Sequence[int], max_tokens: int, repeats: int) -> tuple[list[int], float]:
    """(tokens, median tokens per second) of mlx_lm.stream_generate, greedy, end tokens ignored as ours are."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    model, _ = mlx_lm.load(folder)
    speeds, tokens = [], []
    for _ in range(repeats):
        tokens, start = [], 0.0
        for token, _ in generate_step(mx.array(list(ids)), model, max_tokens=max_tokens):
            tokens.append(int(token))
            start = start or time.perf_counter()
        speeds.append((len(tokens) - 1) / max(time.perf_counter() - start, 1e-9))
    return tokens, statistics.median(speeds)


def generation(
    model: str, prompt_tokens: int, max_tokens: int, say: Callable[[str], None], modes: Sequence[str] = MODES, repeats: int = 3
) -> Iterator[dict[str, Any]]:
    """One row for mlx_lm and one a mode of ours: tokens per second after the first, ratio to mlx_lm, leading equal tokens."""
    import dustin
    from dustin.config import RequestOptions

    folder = _folder(model)
    session = dustin.load(str(folder), backend="mlx")
    if session.tokenizer is None:
        raise ModelError(f"{model} has no tokenizer.json, expected one: the prompt is a text")
    ids = prompt_ids(session.tokenizer.encode, prompt_tokens)
    common = {"model": model, "prompt_tokens": len(ids), "max_tokens": max_tokens, "batch": 1, "repeats": repeats}
    wanted, base = stock(str(folder), ids, max_tokens, repeats)
    say(f"{model}: mlx_lm {base:.1f} tokens/s")
    yield common | {"engine": "mlx_lm", "tokens_per_s": round(base, 2), "ratio": 1.0}
    request = RequestOptions(max_tokens=max_tokens, ignore_eos=True)
    for mode in modes:
        session.options = replace(session.options, mode=mode)
        runs = [session.batch_generate([ids], request)[0] for _ in range(repeats)]
        speed = statistics.median(run.stats.generation_tps for run in runs)
        same = next((i for i, (a, b) in enumerate(zip(runs[0].tokens, wanted, strict=False)) if a != b), len(wanted))
        row = {"engine": f"dustin {mode}", "tokens_per_s": round(speed, 2), "ratio": round(speed / base, 3)}
        stats = runs[0].stats
        row |= {"acceptance_length": round(stats.acceptance_length, 3), "kv_read_share": round(stats.kv_read_share, 4)}
        say(f"{model}: {mode} {speed:.1f} tokens/s ({speed / base:.2f}x)")
        yield common | row | {"leading_tokens_as_mlx_lm": same, "error": runs[0].error}


def _folder(model: str) -> Path:
    """Where the model's files lie; mlx_lm loads the same ones. Raise ModelError for what it cannot read."""
    from dustin.models import resolve

    folder = Path(resolve(model))
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder, expected one with config.json and *.safetensors: mlx_lm reads nothing else")
    return folder
