"""Decode speed on a CPU: our modes and transformers' generate, same weights, dtype, threads, prompts and run.

Prompts are consecutive passages of a novel (Northanger Abbey), continued greedily. The prompt is read once by our model; every
mode, and transformers, starts from that KV cache, so rows compare decoding alone. Peak memory is measured apart, by
`--memory`, each side in a process of its own that also reads the prompt.
"""

from __future__ import annotations

import json
import lzma
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from bench import rows
from dustin.bench_command import equal_share

TEXT = Path(__file__).resolve().parent / "data" / "northanger_abbey.txt.xz"
OUT = rows.RESULTS / "cpu.jsonl"
# name -> (mode, drafter, options)
MODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ar": ("ar", "none", {}),
    "dense+self": ("dense", "self", {}),
    "dense+lookup": ("dense", "lookup", {}),
    "exact": ("exact", "none", {"exact_block": 6}),
    "sparse+lookup": ("sparse", "lookup", {}),
    "auto": ("auto", "auto", {}),
}
LOSSLESS = ("ar", "dense+self", "dense+lookup", "exact")
# transformers is slow enough that a few tokens measure it.
_TRANSFORMERS_TOKENS = 12


def passages(tokenizer: Any, context: int, batch: int) -> list[list[int]]:
    """`batch` consecutive passages of `context` tokens each."""
    ids = tokenizer.encode(lzma.open(TEXT, "rt").read())
    step = min(context, (len(ids) - context) // max(batch - 1, 1)) if batch > 1 else 0
    return [list(ids[i * step : i * step + context]) for i in range(batch)]


def repetition(tokens: list[int], size: int = 4) -> float:
    """Share of the 4-grams of a text that are repeats: greedy text of small models loops, which flatters lookup."""
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def run_ours(session: Any, cache: Any, prompts: list[list[int]], name: str, tokens: int, budget: int, gamma: int) -> dict[str, Any]:
    """Decode `tokens` tokens a row from the given prefilled cache; tokens/s, acceptance and the texts."""
    from dustin.config import EngineOptions, RequestOptions
    from dustin.generation import Session

    mode, drafter, extra = MODES[name]
    options = EngineOptions(mode=mode, drafter=drafter, budget=budget, num_draft_tokens=gamma, **extra)
    inner = Session(session.backend, session.target, session.tokenizer, options)
    requests = [RequestOptions(max_tokens=tokens, ignore_eos=True)] * len(prompts)
    run = inner._start(prompts, requests, cache)
    for _ in run.events(None):
        pass
    stats = run.stats
    return {
        "tokens_per_s": stats.generation_tps,
        "acceptance_length": stats.acceptance_length,
        "kv_read_share": stats.kv_read_share,
        "mode_rounds": dict(stats.mode_rounds),
        "texts": [row.generated for row in run.rows],
    }


def load_transformers(source: Path, dtype: str) -> Any:
    """The same dequantised weights in transformers (sdpa attention), so that both sides compute with the same numbers."""
    import torch
    import transformers

    from dustin.backends.torch_triton.gguf_loading import open_gguf

    config, fetch = open_gguf(source)
    if config.architecture not in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
        raise click.UsageError(f"{source.name} is a {config.architecture}, expected a Llama or Qwen2")
    kind = getattr(transformers, config.architecture)
    shape = kind.config_class(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.context_length, rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta, tie_word_embeddings=config.tied_embeddings, attn_implementation="sdpa",
    )  # fmt: skip
    shape.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
    model = kind(shape).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name == "lm_head.weight" and config.tied_embeddings:
                continue
            tensor = fetch(name)
            if tensor is None:
                raise click.ClickException(f"tensor {name} is missing in {source.name}")
            parameter.copy_(tensor)
    model.tie_weights()
    return model


def run_transformers(model: Any, cache: Any, prompts: list[list[int]], tokens: int, lookup: int | None) -> dict[str, Any]:
    """transformers' generate from a copy of our cache (all but the last prompt token); with `lookup`, its assisted generation."""
    import torch
    from transformers import DynamicCache

    past = DynamicCache()
    if cache is not None:
        have = len(prompts[0]) - 1
        for layer in range(model.config.num_hidden_layers):
            key, value = (store[layer][:, :have].transpose(1, 2).contiguous() for store in (cache.keys, cache.values))
            past.update(key.to(model.dtype), value.to(model.dtype), layer)
    extra = {"prompt_lookup_num_tokens": lookup} if lookup else {}
    ids = torch.tensor(prompts)
    times: list[float] = []

    class Clock:
        """A streamer that notes when tokens arrive, so that the first token (part of the prefill) is left out of the rate."""

        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            times.append(time.perf_counter())

    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, past_key_values=past, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, streamer=Clock() if len(prompts) == 1 else None, attention_mask=torch.ones_like(ids), **extra,
        )  # fmt: skip
    ended = time.perf_counter()
    made = [row[len(prompt) :].tolist() for row, prompt in zip(out, prompts, strict=True)]
    if len(prompts) == 1 and len(times) > 2:
        began = times[1]
        return {"tokens_per_s": (len(made[0]) - 1) / (ended - began), "texts": made}
    return {"tokens_per_s": sum(map(len, made)) / (ended - began), "texts": made}


def measure(
    session: Any, hf: Any, source: Path, context: int, full: Any, prompts: list[list[int]], opts: dict[str, Any]
) -> list[dict[str, Any]]:
    """All modes at one context and batch, interleaved `repeats` times; medians."""
    batch = len(prompts)
    # transformers on this machine may be faster in fp32 than in bf16, so both stand beside ours.
    sides: dict[str, tuple[Any, int | None]] = {f"transformers-{dtype}": (model, None) for dtype, model in hf.items()}
    if batch == 1:
        sides |= {f"transformers-{dtype}+lookup": (model, opts["gamma"]) for dtype, model in hf.items()}
    speeds: dict[str, list[float]] = {name: [] for name in (*MODES, *sides)}
    last: dict[str, dict[str, Any]] = {}
    for _ in range(opts["repeats"]):
        for name in MODES:
            cache = full.take(range(batch), capacity=context + opts["tokens"] + 40)
            last[name] = run_ours(session, cache, prompts, name, opts["tokens"], opts["budget"], opts["gamma"])
            speeds[name].append(last[name]["tokens_per_s"])
    for name, (model, lookup) in sides.items():
        last[name] = run_transformers(model, full.take(range(batch)), prompts, _TRANSFORMERS_TOKENS, lookup)
        speeds[name].append(last[name]["tokens_per_s"])
    ar = statistics.median(speeds["ar"])
    result = []
    for name in speeds:
        speed = statistics.median(speeds[name])
        row = {
            "bench": "cpu", "processor": rows.processor(), "threads": opts["threads"], "model": source.name, "weights": "real",
            "dtype": name.split("-")[1].split("+")[0] if name in sides else opts["dtype"], "context": context, "batch": batch,
            "mode": name,
            "lossless": name in LOSSLESS or name == "auto",
            "generated_tokens": _TRANSFORMERS_TOKENS if name in sides else opts["tokens"],
            "tokens_per_s": round(speed, 2), "baseline": "ar",
            "baseline_tokens_per_s": round(ar, 2),
            "ratio": round(speed / ar, 3), "spread": round(max(speeds[name]) / min(speeds[name]), 2),
            "acceptance_length": round(last[name].get("acceptance_length", 1.0), 2),
            "kv_read_share": round(last[name].get("kv_read_share", 1.0), 3), "mode_rounds": last[name].get("mode_rounds"),
            "equal_leading_share_vs_ar": round(equal_share(last[name]["texts"], last["ar"]["texts"]), 3),
            "repeated_4grams": round(statistics.mean(repetition(text) for text in last[name]["texts"]), 2),
            "budget": opts["budget"], "num_draft_tokens": opts["gamma"], "command": rows.command(), "commit": rows.commit(),
        }  # fmt: skip
        line = f"{context:6d} x{batch}  {name:20s} {speed:8.2f} tok/s  {row['ratio']:.2f}x ar  {row['acceptance_length']:.2f}/round"
        click.echo(line, err=True)
        result.append(row)
    return result


def peak_bytes() -> int:
    """High-water mark of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.command()
@click.option("--model", default="SmolLM2-135M-Instruct", show_default=True, help="A known model or a .gguf file.")
@click.option("--contexts", default="2048,4096,8000", show_default=True, help="Prompt lengths in tokens (SmolLM2 ends at 8,192).")
@click.option("--batches", default="1,4,8", show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Generated tokens a row.")
@click.option("--repeats", default=2, show_default=True)
@click.option("--budget", default=512, show_default=True)
@click.option("--gamma", default=5, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--no-transformers", is_flag=True)
@click.option("--memory", is_flag=True, help="Measure peak memory of both sides (prompt and 16 tokens) instead of speed.")
@click.option("--side", type=click.Choice(["ours", "transformers"]), hidden=True)
@click.option("--append/--replace", default=False, help="Keep the rows that are there.")
def main(**opts: Any) -> None:
    """Our modes and transformers on this CPU; rows to bench/results/cpu.jsonl."""
    import torch

    torch.set_num_threads(opts["threads"])
    contexts = [int(x) for x in opts["contexts"].split(",")]
    batches = [int(x) for x in opts["batches"].split(",")]
    if opts["side"]:
        return _memory_of_one_side(opts, contexts[0], batches[0])
    if opts["memory"]:
        return _memory(opts, contexts, batches)
    import dustin
    from dustin import models
    from dustin.prefill import prefill

    source = models.resolve(opts["model"])
    session = dustin.load(str(source), dtype=opts["dtype"])
    opts["dtype"] = session.target.spec.dtype
    dtypes = [] if opts["no_transformers"] else sorted({opts["dtype"], "float32"})
    hf = {dtype: load_transformers(source, dtype) for dtype in dtypes}
    if not opts["append"]:
        OUT.unlink(missing_ok=True)
    for context in contexts:
        prompts = passages(session.tokenizer, context, max(batches))
        full = session.target.new_cache(len(prompts), context + opts["tokens"] + 40)
        prefill(session.backend, session.target, full, [p[:-1] for p in prompts], 512, None, logits=False)
        for batch in batches:
            rows.write(OUT, measure(session, hf, source, context, full, prompts[:batch], opts), append=True)
    return None


def _memory(opts: dict[str, Any], contexts: list[int], batches: list[int]) -> None:
    for context in contexts:
        for batch in batches:
            peaks = {}
            for side in ("ours", "transformers"):
                call = [sys.executable, "-m", "bench", "cpu", "--side", side, "--contexts", str(context), "--batches", str(batch)]
                call += ["--model", opts["model"], "--dtype", opts["dtype"], "--threads", str(opts["threads"])]
                done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=rows.ROOT)
                peaks[side] = json.loads(done.stdout.splitlines()[-1])
            row = {
                "bench": "cpu-memory", "processor": rows.processor(), "context": context, "batch": batch, "mode": "ar",
                "dtype": peaks["ours"]["dtype"], "peak_memory_bytes": peaks["ours"]["peak_memory_bytes"],
                "baseline": "transformers",
                "baseline_peak_memory_bytes": peaks["transformers"]["peak_memory_bytes"],
                "ratio": round(peaks["ours"]["peak_memory_bytes"] / peaks["transformers"]["peak_memory_bytes"], 3),
                "command": rows.command(), "commit": rows.commit(),
            }  # fmt: skip
            click.echo(json.dumps(row), err=True)
            rows.write(OUT, [row], append=True)


def _memory_of_one_side(opts: dict[str, Any], context: int, batch: int) -> None:
    import dustin
    from dustin import models
    from dustin.config import EngineOptions, RequestOptions

    source = models.resolve(opts["model"])
    if opts["side"] == "ours":
        session = dustin.load(str(source), dtype=opts["dtype"], options=EngineOptions(mode="ar"))
        prompts: Any = passages(session.tokenizer, context, batch)
        session.batch_generate(prompts, RequestOptions(max_tokens=16, ignore_eos=True))
        dtype = session.target.spec.dtype
    else:
        from dustin.text import Tokenizer

        prompts = passages(Tokenizer.load(source), context, batch)
        dtype = opts["dtype"] if opts["dtype"] != "auto" else _auto_dtype()
        run_transformers(load_transformers(source, dtype), None, prompts, 16, None)
    click.echo(json.dumps({"peak_memory_bytes": peak_bytes(), "dtype": dtype}))


def _auto_dtype() -> str:
    import torch

    from dustin.backends.torch_triton.loading import choose_dtype

    return str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
