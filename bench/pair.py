"""A real target and draft over one long document, end to end: acceptance measured, sparse against dense answers.

The document is a passage of Northanger Abbey with one invented fact in its middle; the question asks for it, so the answer
can be checked. Default: Qwen2.5-Coder 1.5B with 0.5B as its draft (evaluation copies, see `dustin models`).
"""

from __future__ import annotations

from typing import Any

import click

from bench import rows
from bench.cpu import TEXT, repetition
from dustin.bench_command import equal_share

OUT = rows.RESULTS / "pair.jsonl"
NEEDLE = " The name of the gardener's grey horse was Bartholomew, as everyone in the parish knew. "
QUESTION = (
    "According to the text, what was the name of the gardener's grey horse? Answer in one sentence, "
    "and then describe Catherine's visit in five sentences."
)
# name -> (mode, drafter)
MODES = {"ar": ("ar", "none"), "dense": ("dense", "draft"), "sparse": ("sparse", "draft"), "exact": ("exact", "draft")}


def document(session: Any, context: int) -> list[dict[str, str]]:
    """Chat messages whose prompt has about `context` tokens, the needle in the middle of the document."""
    import lzma

    text = lzma.open(TEXT, "rt").read()
    ids = session.tokenizer.encode(text, add_special_tokens=False)[2000:]
    room = context - len(session.encode([{"role": "user", "content": NEEDLE + QUESTION}])) - 8
    half = room // 2
    body = session.tokenizer.decode(ids[:half]) + NEEDLE + session.tokenizer.decode(ids[half:room])
    return [{"role": "user", "content": body + "\n\n" + QUESTION}]


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--context", default=4096, show_default=True, help="Prompt tokens.")
@click.option("--tokens", default=96, show_default=True)
@click.option("--budgets", default="512,1024", show_default=True, help="Budgets of the sparse modes, in tokens.")
@click.option("--gamma", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--append/--replace", default=False)
def main(**opts: Any) -> None:
    """A real pair over one document, all modes; rows to bench/results/pair.jsonl."""
    import torch

    import dustin
    from dustin.config import EngineOptions, RequestOptions
    from dustin.generation import Session

    torch.set_num_threads(opts["threads"])
    session = dustin.load(opts["model"], opts["draft_model"], device=opts["device"])
    prompt = session.encode(document(session, opts["context"]))
    request = RequestOptions(max_tokens=opts["tokens"])
    results: dict[str, Any] = {}
    made = []
    for name, (mode, drafter) in MODES.items():
        for budget in [int(b) for b in opts["budgets"].split(",")] if mode in ("sparse", "exact") else [1024]:
            options = EngineOptions(mode=mode, drafter=drafter, num_draft_tokens=opts["gamma"], budget=budget)
            run = Session(session.backend, session.target, session.tokenizer, options, session.draft)
            result = run.generate(prompt, request)
            results.setdefault(name, result)
            stats, dense = result.stats, results["ar"]
            row = {
                "bench": "pair", "processor": rows.processor(), "device": session.backend.device, "threads": opts["threads"],
                "model": session.target.spec.name, "draft": session.draft.spec.name if session.draft else None,
                "weights": "real", "dtype": session.target.spec.dtype, "context": len(prompt), "batch": 1, "mode": name,
                "budget": budget if mode in ("sparse", "exact") else None, "num_draft_tokens": opts["gamma"],
                "acceptance": "measured", "acceptance_length": round(stats.acceptance_length, 2),
                "acceptance_histogram": {str(k): v for k, v in sorted(stats.acceptance_histogram.items())},
                "tokens_per_dense_check": (stats.generated_tokens - 1) / stats.dense_checks if stats.dense_checks else None,
                "generated_tokens": stats.generated_tokens, "tokens_per_s": round(stats.generation_tps, 2),
                "baseline": "ar", "ratio": round(stats.generation_tps / dense.stats.generation_tps, 3),
                "kv_read_share": round(stats.kv_read_share, 3),
                "equal_leading_share_vs_ar": round(equal_share([result.tokens], [dense.tokens]), 3),
                "needle_answered": "Bartholomew" in result.text, "repeated_4grams": round(repetition(result.tokens), 2),
                "prefill_s": round(stats.prefill_seconds, 1), "peak_memory_bytes": stats.peak_memory_bytes,
                "scoring": stats.scoring, "command": rows.command(), "commit": rows.commit(),
            }  # fmt: skip
            click.echo(f"{name} k={budget}: {result.text!r}\n  " + "\n  ".join(stats.summary_lines()), err=True)
            made.append(_filled(row))
    rows.write(OUT, made, append=opts["append"])


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """The row without entries that do not apply."""
    return {key: value for key, value in row.items() if value is not None}
