"""MLX's array path on an NVIDIA GPU: dense against sparse attention of a layer stack, the selection included.

This runs the code that serves where Metal is absent: take() and mx.fast.scaled_dot_product_attention. It says nothing about
Metal kernels or Apple hardware, and on such a GPU the torch backend with its Triton kernels is the one to use.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench import rows
from bench.mlx_attention import Problem, array_operations, describe_device, measure, show
from bench.mlx_round import measure_round
from dustin.errors import MemoryLimitError

WHAT = "MLX array path (take and mx.fast attention) on CUDA; no Metal kernel runs here"


def table(quick: bool) -> list[Problem]:
    """The cases: T = 6 rows of verification and T = 1 of plain decoding at 32k; `quick` shrinks them for a CPU."""
    if quick:
        return [Problem(8, 2, 64, 512, 2, rows, (64,), held=2, layers=2, dtype="float32") for rows in (6, 1)]
    common: dict[str, Any] = {"context": 32768, "budgets": (512, 1024), "held": 8}
    large: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128, "layers": 80} | common
    return [
        Problem(batch=4, rows=6, **large),
        Problem(batch=4, rows=1, **large),
        Problem(heads=28, kv_heads=4, head_dim=128, layers=28, batch=4, rows=6, **common),
        Problem(batch=16, rows=6, **large | {"held": 4}),
        Problem(batch=1, rows=6, **large),
        Problem(heads=32, kv_heads=8, head_dim=128, layers=36, batch=4, rows=6, **common),
    ]


def card() -> str:
    """Name of the GPU, as the driver gives it; `unknown` without the tool."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


@click.command()
@click.option("--cpu-check", is_flag=True, help="Tiny shapes on MLX's CPU device: checks this script, measures nothing of use.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed passes of each path.")
@click.option("--output", type=click.Path(path_type=Path), default=rows.RESULTS / "mlx_cuda.jsonl", show_default=True)
def main(cpu_check: bool, repeats: int, output: Path) -> None:
    """Dense and sparse attention through MLX arrays on CUDA."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise click.ClickException(f'MLX cannot be imported ({error}): pip install "mlx[cuda13]"') from error
    if not cpu_check and not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        raise click.ClickException('this MLX has no CUDA device, expected one: pip install "mlx[cuda13]" on a machine with a GPU')
    done: list[dict[str, Any]] = []
    common = {"bench": "mlx_cuda", "what": WHAT, "card": "none (--cpu-check)" if cpu_check else card()} | describe_device()

    def keep(kind: str, label: str, run: Callable[[], dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
        try:
            row = run()
        except (ValueError, RuntimeError, MemoryLimitError) as error:
            click.echo(f"{label}: {error}", err=True)
            return
        done.append(common | {"kind": kind} | row | {"command": rows.command(), "commit": rows.commit()})
        rows.write(output, done)
        click.echo(text(row))
        mx.clear_cache()

    for number, problem in enumerate(table(cpu_check)):
        label = f"{problem.name} B {problem.batch} T {problem.rows}"
        keep("attention", label, lambda problem=problem: measure(problem, array_operations(), repeats), show)
        if number == 0:
            # The whole model second: it matters more than further shapes.
            keep("model round", "model round", lambda: measure_round(**whole(cpu_check), repeats=repeats), show_round)
    if not done:
        raise click.ClickException("no case could be measured")


def whole(quick: bool) -> dict[str, Any]:
    """The model round."""
    if quick:
        return {"name": "tiny", "context": 600, "batch": 2, "rows": 6, "budgets": (64,), "dtype": "float32"}
    return {"name": "Qwen2.5-7B", "context": 32768, "batch": 4, "rows": 6, "budgets": (512, 1024), "dtype": "bfloat16"}


def show_round(row: dict[str, Any]) -> str:
    """A model round as a line for people."""
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in row["ms_per_round"].items())
    ratios = ", ".join(f"k={k} {ratio:.2f}x" for k, ratio in row["ratio"].items())
    head = f"{row['model']} ctx {row['context']} B {row['batch']} T {row['query_rows']}"
    return f"{head}: ms a round: {times}; sparse over dense: {ratios}"
