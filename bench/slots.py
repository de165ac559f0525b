"""Continuous batching without HTTP: the server's scheduler over a loaded pair, requests all at once against one by one.

Works on every device, so it measures on machines where the server's libraries are not installed. Prompts are passages of a novel;
the warm-up runs the same shapes first, so that compilation and graph capture are not in the rates.
"""

from __future__ import annotations

import queue
import statistics
import time
from typing import Any

import click

from bench import rows
from bench.cpu import passages
from dustin.bench_command import equal_share

OUT = rows.RESULTS / "slots.jsonl"


def run(scheduler: Any, prompts: list[list[int]], tokens: int, at_once: int) -> dict[str, Any]:
    """All prompts through the scheduler, at most `at_once` of them submitted and unfinished; rates, latencies, tokens."""
    from dustin.config import RequestOptions
    from dustin.serving.scheduler import Job

    ended: queue.Queue[int] = queue.Queue()
    texts: list[list[int]] = [[] for _ in prompts]
    arrivals: list[list[float]] = [[] for _ in prompts]
    began, worked = time.perf_counter(), time.process_time()
    request = RequestOptions(max_tokens=tokens, ignore_eos=True)

    def deliverer(index: int) -> Any:
        def deliver(events: Any) -> None:
            if events is None:
                ended.put(index)
                return
            arrivals[index].append(time.perf_counter())
            texts[index] += [event.token for event in events]

        return deliver

    jobs = [Job(prompt, request, None, deliverer(index)) for index, prompt in enumerate(prompts)]
    left, open_jobs = list(jobs), 0
    submitted: list[float] = []
    while left or open_jobs:
        while left and open_jobs < at_once:
            submitted.append(time.perf_counter())
            scheduler.submit([left.pop(0)])
            open_jobs += 1
        index = ended.get(timeout=600)
        if jobs[index].failure is not None:
            raise click.ClickException(str(jobs[index].failure))
        open_jobs -= 1
    elapsed, worked = time.perf_counter() - began, time.process_time() - worked
    gaps = [b - a for times in arrivals for a, b in zip(times, times[1:], strict=False)]
    stats = [job.stats for job in jobs]
    steps, accepted = sum(s.spec_steps for s in stats), sum(s.accepted for s in stats)
    return {
        "at_once": at_once,
        "seconds": round(elapsed, 3),
        "tokens_per_s": round(sum(map(len, texts)) / elapsed, 2),
        "cpu_ms_per_token": round(1e3 * worked / sum(map(len, texts)), 2),
        "ttft_ms_median": round(1e3 * statistics.median(times[0] - at for times, at in zip(arrivals, submitted, strict=True)), 1),
        "gap_ms_median": round(1e3 * statistics.median(gaps), 2) if gaps else None,
        "gap_ms_worst": round(1e3 * max(gaps), 1) if gaps else None,
        "acceptance_length": round(1 + accepted / steps, 3) if steps else 1.0,
        "texts": texts,
    }


@click.command()
@click.option("--model", default="SmolLM2-135M-Instruct", show_default=True)
@click.option("--draft-model", default=None)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--modes", default="ar,dense+lookup,auto", show_default=True, help="Modes, with +DRAFTER where wanted.")
@click.option("--slots", default=8, show_default=True)
@click.option("--requests", default=16, show_default=True, help="Asked all at once; a quarter of them again one by one.")
@click.option("--context", default=1024, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--prefill-tokens", default=256, show_default=True)
@click.option("--note", default="", help="Kept in the rows: what else ran on the machine.")
@click.option("--append/--replace", default=False)
def main(**opts: Any) -> None:
    """Requests at once against one by one; rows to bench/results/slots.jsonl."""
    from dataclasses import replace

    import dustin
    from dustin.serving.options import ServerOptions
    from dustin.serving.scheduler import Scheduler

    session = dustin.load(opts["model"], opts["draft_model"], device=opts["device"], dtype=opts["dtype"])
    if session.tokenizer is None:
        raise click.UsageError("the model has no tokenizer")
    count, tokens = opts["requests"], opts["tokens"]
    # Ends differ, so that prompts are ragged; no prompt begins like another.
    prompts = [p[: len(p) - 7 * (i % 8)] for i, p in enumerate(passages(session.tokenizer, opts["context"], 2 * count + 2))]
    base = session.options
    server = ServerOptions(slots=opts["slots"], max_queue=2 * count, prefill_tokens=opts["prefill_tokens"])
    plain: dict[int, dict[str, Any]] = {}
    if not opts["append"]:
        OUT.unlink(missing_ok=True)
    for mode in opts["modes"].split(","):
        name, _, drafter = mode.partition("+")
        session.options = replace(base, mode=name, drafter=drafter or "auto", max_kv_size=opts["context"] + tokens + 16)
        scheduler = Scheduler(lambda: session, server)
        scheduler.start()
        while scheduler.state == "loading":
            time.sleep(0.01)
        if scheduler.error is not None:
            raise scheduler.error
        run(scheduler, prompts[-2:], min(tokens, 24), 2)
        made = [
            run(scheduler, prompts[:count], tokens, count),
            run(scheduler, prompts[count : count + max(1, count // 4)], tokens, 1),
        ]
        scheduler.drain()
        scheduler.join(60)
        for which, found in enumerate(made):
            first = plain.setdefault(which, found)
            row = {
                "bench": "slots", "device": session.backend.device, "processor": rows.processor(),
                "model": session.target.spec.name,
                "draft": session.draft.spec.name if session.draft else None, "dtype": session.target.spec.dtype, "mode": mode,
                "slots": opts["slots"], "context": opts["context"], "max_tokens": tokens, **found,
                "ratio": round(found["tokens_per_s"] / made[1]["tokens_per_s"], 3), "baseline": "one by one in the same mode",
                # On a machine that others use, what the work cost says more than how long it took.
                "cpu_ratio": round(made[1]["cpu_ms_per_token"] / found["cpu_ms_per_token"], 3),
                "ratio_to_first_mode": round(found["tokens_per_s"] / first["tokens_per_s"], 3),
                "equal_leading_share_to_first_mode": round(equal_share(found["texts"], first["texts"]), 3),
                "kv_read_share": round(scheduler.stats.kv_read_share, 3), "command": rows.command(), "commit": rows.commit(),
                "note": opts["note"],
            }  # fmt: skip
            del row["texts"]
            rows.write(OUT, [row], append=True)
            click.echo(
                f"{mode:14s} {found['at_once']:3d} at once  {found['tokens_per_s']:8.1f} tok/s  {row['ratio']:5.2f}x one by one, "
                f"{row['cpu_ratio']:5.2f}x by CPU time  {row['ratio_to_first_mode']:5.2f}x {opts['modes'].split(',')[0]}  "
                f"accepted {found['acceptance_length']}  gap {found['gap_ms_median']} ms"
            )
