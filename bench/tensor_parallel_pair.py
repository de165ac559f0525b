"""A real pair over several ranks against the same pair on one device: greedy tokens must be equal, mode by mode.

Start it with `torchrun --nproc-per-node 2 -m bench tensor_parallel_pair --model T --draft-model D`. Sums over ranks round
differently, so equality is asked in fp32; in bf16 a difference is expected at near ties only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

import dustin
from bench import rows as result_rows
from bench import texts
from dustin import models, registry
from dustin.config import EngineOptions, RequestOptions
from dustin.generation import Session


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Where two token lists differ first; None when they are equal."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return at if at is not None or len(one) == len(other) else min(len(one), len(other))


@dataclass
class Outcome:
    """Tokens of each prompt, the top-2 gaps of each token's log-probabilities, decoding speed over all, mean tokens a round."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    rate: float
    acceptance: float


def run(session: Session, prompts: list[list[int]], mode: str, tokens: int) -> Outcome:
    """All prompts in one batch, greedily."""
    session.options = EngineOptions(mode=mode)
    results = session.batch_generate(prompts, RequestOptions(max_tokens=tokens, ignore_eos=True, top_logprobs=2))
    stats = results[0].stats
    gaps = [[entry.top_logprobs[0] - entry.top_logprobs[1] for entry in result.logprobs] for result in results]
    rate = sum(len(result.tokens) - 1 for result in results) / stats.decode_seconds
    return Outcome([result.tokens for result in results], gaps, rate, stats.acceptance_length if mode != "ar" else 1.0)


@click.command()
@click.option("--model", required=True, help="The target.")
@click.option("--draft-model", required=True, help="Its draft.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--context", default=8192, show_default=True, help="Tokens of each document.")
@click.option("--prompts", "count", default=2, show_default=True, help="Documents of one kind, in one batch.")
@click.option("--tokens", default=64, show_default=True, help="Tokens to generate.")
@click.option("--modes", default="ar,dense,sparse,exact", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=result_rows.RESULTS / "tensor_parallel.jsonl", show_default=True)
def main(
    model: str, draft_model: str, device: str, dtype: str, context: int, count: int, tokens: int, modes: str, output: Path
) -> None:
    """Tokens of a real pair over torchrun's ranks against one device."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        raise click.UsageError("one rank is running, expected two or more: start it with torchrun")
    began = time.perf_counter()
    split = dustin.load(model, draft_model, backend="torch", device=device, dtype=dtype)
    # Loaded as a draft is, whole on rank 0.
    whole = split.backend.load(models.resolve(model), dtype=dtype, role="draft")
    whole.limit_vocabulary(split.target.spec.vocab_size)
    alone = Session(split.backend, whole, split.tokenizer, EngineOptions(), split.draft)
    prompts = texts.prompts(split.tokenizer, "novel", count, context)
    click.echo(f"loaded in {time.perf_counter() - began:.0f} s, {sum(map(len, prompts))} prompt tokens", err=True)
    found: list[dict[str, Any]] = []
    for mode in modes.split(","):
        # Once for what is compiled and captured, then for the rates.
        ours, theirs = ([run(session, prompts, mode, tokens) for _ in range(2)][-1] for session in (split, alone))
        differences = [first_difference(a, b) for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
        ties = [round(theirs.gaps[b][at], 5) for b, at in enumerate(differences) if at is not None and at < len(theirs.gaps[b])]
        row = {
            "bench": "tensor_parallel_pair",
            "ranks": ranks,
            "device": split.backend.device,
            "model": split.target.spec.name,
            "draft": split.draft.spec.name if split.draft else None,
            "weights": "real",
            "dtype": split.target.spec.dtype,
            "context": context,
            "batch": count,
            "mode": mode,
            "tokens": tokens,
            "identical": sum(at is None for at in differences),
            "first_differences": differences,
            "top2_gaps_there": ties,
            "smallest_top2_gap": round(min(min(gaps) for gaps in theirs.gaps), 5),
            "acceptance_length": round(ours.acceptance, 3),
            "tokens_per_second": round(ours.rate, 1),
            "tokens_per_second_on_one": round(theirs.rate, 1),
            "ratio_to_one": round(ours.rate / theirs.rate, 3),
            "command": result_rows.command(),
            "commit": result_rows.commit(),
        }
        row["card"] = f"{ranks} x {torch.cuda.get_device_name()}" if split.backend.device == "cuda" else result_rows.processor()
        found.append(row)
        click.echo(
            f"{mode:9s} identical {row['identical']} of {count} {differences} gaps {ties}, {row['tokens_per_second']} tok/s, "
            f"x{row['ratio_to_one']} of one",
            err=True,
        )
        result_rows.write(output, found)
    registry.leave_ranks()


if __name__ == "__main__":
    main()
