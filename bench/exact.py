"""Mode `exact` on a real pair: greedy tokens of plain decoding, dense speculation and two-level speculation side by side.

Prompts are passages of real texts with a task, 8k tokens and more, all in one ragged batch; the target reads them once and every
mode decodes from a copy of that cache. Where a mode leaves plain decoding, the row gives the top-2 gap of plain decoding's logits
at that token. The yardstick for it is measured too: how far the same gaps move when the same tokens run through ONE dense pass of
many rows instead of one row at a time (`noise`), so a difference beyond that movement is a fault and is reported as one.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import rows, texts

OUT = rows.RESULTS / "exact.jsonl"


@dataclass
class Outcome:
    """One mode over the batch: tokens and steps (for exact: dense checks) of each row, `gaps` of plain decoding only."""

    tokens: list[list[int]]
    steps: list[int]
    gaps: list[list[float]]
    seconds: float
    stats: Any


def decode(
    session: Any, prompts: list[list[int]], caches: tuple[Any, Any], options: Any, tokens: int, gaps: bool = False
) -> Outcome:
    """Decode up to `tokens` tokens a row, greedily, from copies of the target's and draft's caches of all but the last tokens."""
    from dustin.config import RequestOptions
    from dustin.generation import Session

    request = RequestOptions(max_tokens=tokens, top_logprobs=2 if gaps else None)
    inner = Session(session.backend, session.target, session.tokenizer, options, session.draft)
    everything = range(len(prompts))
    run = inner._start(prompts, [request] * len(prompts), caches[0].take(everything))
    if options.drafter == "draft":
        run.engine.drafter.resume(caches[1].take(everything))
    found: list[list[float]] = [[] for _ in prompts]
    steps = [0] * len(prompts)

    def note(events: list[Any]) -> None:
        for event in events:
            if event.finish_reason == "error":
                raise click.ClickException(run.rows[event.row].error or "NaN logits")
            if event.logprobs is not None:
                first, second = event.logprobs.top_logprobs
                found[event.row].append(first - second)

    note(run.engine.start(run.rows, run.cache, None))
    began = time.perf_counter()
    while run.engine.active:
        events = run.engine.step()
        note(events)
        for row in {event.row for event in events}:
            steps[row] += 1
    seconds = time.perf_counter() - began
    return Outcome([list(row.generated) for row in run.rows], steps, found, seconds, run.stats)


def gap_noise(session: Any, prompts: list[list[int]], cache: Any, plain: Outcome) -> list[float]:
    """How far plain decoding's top-2 gaps move, in logits, when its own tokens run through one dense pass; sorted, all rows."""
    import torch

    fed = [[prompt[-1], *tokens[:-1]] for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
    out = session.target.forward(session.backend.tokens(fed), [len(row) for row in fed], cache, logits="all")
    moves: list[float] = []
    for b, gaps in enumerate(plain.gaps):
        logits = out.logits[b, : len(gaps)].float()
        best = logits.topk(2, -1)
        mine = torch.tensor(plain.tokens[b], device=logits.device)
        # The gap between what plain decoding chose and the best other token, negative where this pass prefers the other.
        other = torch.where(best.indices[:, 0] == mine, best.values[:, 1], best.values[:, 0])
        gap = logits.gather(-1, mine[:, None])[:, 0] - other
        moves += (gap - torch.tensor(gaps, device=logits.device)).abs().tolist()
    return sorted(moves)


def differences(outcome: Outcome, plain: Outcome) -> list[dict[str, Any]]:
    """First differing token of each row that differs, with plain decoding's top-2 gap there."""
    found = []
    for b, (mine, theirs) in enumerate(zip(outcome.tokens, plain.tokens, strict=True)):
        if mine != theirs:
            pairs = enumerate(itertools.zip_longest(mine, theirs))
            at = next(i for i, (a, c) in pairs if a != c)
            found.append({"prompt": b, "token": at, "top2_gap": round(plain.gaps[b][min(at, len(plain.gaps[b]) - 1)], 5)})
    return found


def report(
    name: str, outcome: Outcome, plain: Outcome, kinds: list[str], noise: list[float], base: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each kind of text and one for all."""
    drift = differences(outcome, plain)
    made = []
    for kind in (*dict.fromkeys(kinds), "all"):
        mine = [b for b, other in enumerate(kinds) if kind in (other, "all")]
        apart = [entry for entry in drift if entry["prompt"] in mine]
        generated = sum(len(outcome.tokens[b]) - 1 for b in mine)
        steps = sum(outcome.steps[b] for b in mine)
        row = base | {
            "mode": name, "kind": kind, "prompts": len(mine), "generated_tokens": generated,
            "identical": len(mine) - len(apart), "differences": apart,
            "noise_max": round(noise[-1], 5), "noise_p99": round(noise[int(0.99 * (len(noise) - 1))], 5),
            "near_ties_only": all(entry["top2_gap"] <= noise[-1] for entry in apart),
            "tokens_per_dense_read": round(generated / steps, 3) if steps else None,
        }  # fmt: skip
        if kind == "all":
            stats = outcome.stats
            row |= {
                "decode_s": round(outcome.seconds, 3), "tokens_per_s": round(generated / outcome.seconds, 1),
                "acceptance_length": round(stats.acceptance_length, 3), "kv_read_share": round(stats.kv_read_share, 4),
                "checked_tokens": stats.checked_tokens, "check_accepted_tokens": stats.check_accepted_tokens,
                "scoring": stats.scoring,
            }  # fmt: skip
        made.append(row)
        found = [(entry["prompt"], entry["token"], entry["top2_gap"]) for entry in apart]
        click.echo(
            f"{outcome.seconds:6.1f} s  {name:22s} {kind:10s} identical {row['identical']}/{len(mine)}, "
            f"tokens a dense read {row['tokens_per_dense_read']}, differences {found}"
        )
    return made


def recast(model: Any, dtype: str) -> Any:
    """The same model with its weights in another dtype (a GGUF file is dequantised once, not twice)."""
    import torch

    wanted = getattr(torch, dtype)
    if model.weights.embedding.dtype == wanted:
        return model
    seen: dict[int, Any] = {}

    def cast(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            # A tied head must stay the embedding itself.
            return seen.setdefault(id(item), item.to(wanted))
        if isinstance(item, tuple):
            return tuple(cast(part) for part in item)
        if dataclasses.is_dataclass(item):
            return type(item)(**{field.name: cast(getattr(item, field.name)) for field in dataclasses.fields(item)})
        return item

    made = type(model)(model.config, cast(model.weights), model.spec.name)
    made.limit_vocabulary(model.spec.vocab_size)
    return made


def load(opts: dict[str, Any], dtype: str) -> Any:
    """A session: the pair, or random weights of small Qwen2 shapes (`--random`, which tests the script, not the claim)."""
    import torch

    import dustin
    from dustin import registry
    from dustin.generation import Session

    if not opts["random"]:
        return dustin.load(opts["model"], opts["draft_model"] or None, device=opts["device"], dtype=dtype)
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.backends.torch_triton.model import TorchModel

    backend = registry.create("torch", opts["device"])
    device = torch.device(backend.device)
    kind: Any = TorchModel
    if backend.device == "cuda":
        from dustin.backends.torch_triton.cuda_model import CudaModel

        kind = CudaModel
    shape = qwen2_config(256, 512, 4, 4, 2, 2048)
    made = [kind(shape, random_weights(shape, getattr(torch, dtype), device, seed), f"random-{seed}") for seed in (0, 1)]
    from dustin.config import EngineOptions

    return Session(backend, made[0], None, EngineOptions(), made[1])


def make_prompts(session: Any, opts: dict[str, Any], count: int) -> tuple[list[list[int]], list[str]]:
    """Token ids and kinds, `count` prompts of each kind."""
    if opts["random"]:
        import numpy as np

        rng = np.random.default_rng(0)
        sizes = [opts["context"] + 97 * i for i in range(2 * count)]
        return [rng.integers(3, session.target.spec.vocab_size, n).tolist() for n in sizes], ["random"] * len(sizes)
    kinds = opts["kinds"].split(",") if opts["kinds"] else list(texts.KINDS)
    if unknown := [kind for kind in kinds if kind not in texts.KINDS]:
        raise click.UsageError(f"--kinds {unknown[0]!r}: expected some of {', '.join(texts.KINDS)}")
    made = {kind: texts.prompts(session.tokenizer, kind, count, opts["context"]) for kind in kinds}
    return [row for kind in kinds for row in made[kind]], [kind for kind in kinds for _ in range(count)]


def variants(opts: dict[str, Any], drafted: bool) -> dict[str, Any]:
    """Name -> EngineOptions of what is compared with plain decoding."""
    from dustin.config import EngineOptions

    drafter = "draft" if drafted else "none"
    common = {"num_draft_tokens": opts["gamma"]}
    own = {} if drafted else {"budget": max(64, opts["context"] // 8)}
    made = {"dense": EngineOptions(mode="dense", drafter="draft" if drafted else "self", **own, **common)}
    for block, budget in opts["exact"]:
        name = f"exact {block}, budget {budget}"
        made[name] = EngineOptions(mode="exact", drafter=drafter, exact_block=block, budget=budget, **common)
    return made


def compare(session: Any, prompts: list[list[int]], kinds: list[str], opts: dict[str, Any], append: bool) -> bool:
    """All variants on one session; rows are written as they come. False when a difference is no near tie."""
    from dustin.config import EngineOptions
    from dustin.prefill import prefill

    room = max(map(len, prompts)) + opts["tokens"] + opts["gamma"] + 2
    began = time.perf_counter()
    caches: list[Any] = []
    for model in (session.target, session.draft):
        if model is None:
            caches.append(None)
            continue
        # Two caches' worth of memory at once: on a GPU the copies then come from the same pool, and graphs are captured once.
        model.new_cache(2 * len(prompts), room)
        caches.append(model.new_cache(len(prompts), room))
        prefill(session.backend, model, caches[-1], [row[:-1] for row in prompts], opts["chunk"], None, logits=False)
    pair = (caches[0], caches[1])
    click.echo(f"{session.target.spec.dtype}: {sum(map(len, prompts))} prompt tokens read in {time.perf_counter() - began:.1f} s")
    plain = decode(session, prompts, pair, EngineOptions(mode="ar"), opts["tokens"], gaps=True)
    noise = gap_noise(session, prompts, pair[0].take(range(len(prompts))), plain)
    base = {
        "bench": "exact", "device": rows.processor() if session.backend.device == "cpu" else _gpu(),
        "model": session.target.spec.name, "draft": session.draft.spec.name if session.draft else None,
        "weights": "random" if opts["random"] else "real", "dtype": session.target.spec.dtype,
        "context": min(map(len, prompts)), "batch": len(prompts), "max_tokens": opts["tokens"], "gamma": opts["gamma"],
        "command": rows.command(), "commit": rows.commit(),
    }  # fmt: skip
    made = report("ar", plain, plain, kinds, noise, base)
    rows.write(opts["output"], made, append=append)
    fine = True
    for name, options in variants(opts, session.draft is not None).items():
        gc.collect()
        try:
            outcome = decode(session, prompts, pair, options, opts["tokens"])
        except Exception as error:  # One variant must not lose the others' rows.
            click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
            fine = False
            continue
        made = report(name, outcome, plain, kinds, noise, base)
        rows.write(opts["output"], made, append=True)
        fine = fine and all(row["near_ties_only"] for row in made)
    return fine


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def blocks(_: click.Context, __: click.Parameter, text: str) -> list[tuple[int, int]]:
    """(block, budget) of each pair. Raise BadParameter on anything else."""
    found = [re.fullmatch(r"(\d+):(\d+)", part) for part in text.split(",")]
    if not all(found):
        raise click.BadParameter(f"{text!r}, expected block:budget pairs with commas between them, as 32:1024,16:512")
    return [(int(match[1]), int(match[2])) for match in found if match]


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True, help="Empty: none.")
@click.option("--context", default=8192, show_default=True, help="Tokens of the shortest prompt of each kind.")
@click.option("--per-kind", default=5, show_default=True, help="Prompts of each kind.")
@click.option("--kinds", default="", help="Kinds of text, by commas. Default: all.")
@click.option("--tokens", default=192, show_default=True, help="Generated tokens a prompt at most.")
@click.option("--exact", default="32:1024,32:512,16:512", show_default=True, callback=blocks, help="block:budget pairs.")
@click.option("--gamma", default=5, show_default=True)
@click.option("--chunk", default=512, show_default=True, help="Prompt tokens read at a time.")
@click.option("--dtypes", default="bfloat16,float32", show_default=True)
@click.option("--fp32-per-kind", default=2, show_default=True, help="Prompts of each kind in float32.")
@click.option("--random", is_flag=True, help="Small random models: a test of this script.")
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=OUT, help="Where the rows go.")
@click.option("--append/--replace", default=False, help="Keep the rows that are there.")
def main(**opts: Any) -> None:
    """Identity of ar, dense and exact on real prompts, tokens a dense check; rows to bench/results/exact.jsonl."""
    import torch

    torch.set_num_threads(opts["threads"])
    dtypes = opts["dtypes"].split(",")
    # The widest dtype is read from disk, the others are cast from it.
    session = load(opts, "float32" if "float32" in dtypes else dtypes[0])
    wide = session.target, session.draft
    fine = True
    for i, dtype in enumerate(dtypes):
        session.target, session.draft = (recast(model, dtype) if model is not None else None for model in wide)
        count = min(opts["per_kind"], opts["fp32_per_kind"]) if dtype == "float32" else opts["per_kind"]
        prompts, kinds = make_prompts(session, opts, count)
        fine = compare(session, prompts, kinds, opts, append=opts["append"] or i > 0) and fine
    click.echo("every difference is a near tie" if fine else "FAULT: a difference beyond the noise, or a failed variant")
    if not fine:
        raise SystemExit(1)
