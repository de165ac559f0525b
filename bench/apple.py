"""Stock MLX against our Metal kernels on this Mac, and one JSON line to send back. Its author had no Apple hardware.

    python -m bench apple                                   # attention: a few minutes
    python -m bench apple --model mlx-community/...-4bit    # generation as well: mlx_lm against ours
    python -m bench apple --array-path                      # anywhere: checks the script, measures nothing of Metal

stdout is the JSON line, stderr the progress. Every case is checked against float64 first: a red case prints no speed.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from bench import rows
from bench.mlx_attention import Operations, Problem, array_operations, describe_device, kernel_operations, measure, show
from dustin.errors import DustinError

METAL = "Metal kernels and the array path against stock MLX on the GPU of this Mac"
ARRAYS = "array path only, reduced shapes, no Metal: a check of this script, not a measurement of Apple hardware"
# Share of the machine's memory that a case may take.
_MEMORY_SHARE = 0.4


def table() -> list[Problem]:
    """The shapes of Qwen3-8B, Qwen2.5-72B, 14B and 7B at 32k: T = 1, 4, 6, 8 for the first, T = 6 for all, batch 1 and 8."""
    common: dict[str, Any] = {"context": 32768, "budgets": (512, 2048)}
    first = {"heads": 32, "kv_heads": 8, "head_dim": 128} | common
    others = [(64, 8), (40, 8), (28, 4)]
    return [
        *(Problem(batch=1, rows=rows_, **first) for rows_ in (6, 1, 4, 8)),
        *(Problem(heads, kv_heads, 128, batch=1, rows=6, **common) for heads, kv_heads in others),
        *(Problem(heads, kv_heads, 128, batch=8, rows=6, held=2, **common) for heads, kv_heads in [(32, 8), (64, 8)]),
        Problem(32, 8, 128, context=8192, batch=1, rows=6, budgets=(512,)),
    ]


def reduced() -> list[Problem]:
    """The same layers, small enough for a CPU."""
    common: dict[str, Any] = {"context": 1024, "batch": 1, "budgets": (64, 256), "held": 2, "dtype": "float32"}
    return [Problem(8, 2, 64, rows=6, **common), Problem(8, 2, 64, rows=1, **common)]


def machine() -> dict[str, Any]:
    """Chip, memory, system and versions: what a row needs to be of use to others."""
    info = describe_device()
    chip = _line("sysctl", "-n", "machdep.cpu.brand_string") or rows.processor()
    power = _line("pmset", "-g")
    return {
        "chip": chip,
        "gpu": info["device"],
        "memory_gib": round(int(info["memory_bytes"] or 0) / 2**30, 1) or None,
        "macos": platform.mac_ver()[0] or None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": info["mlx"],
        "low_power_mode": next((line.split()[-1] == "1" for line in power.splitlines() if "lowpowermode" in line), None),
    }


def _line(*command: str) -> str:
    """Output of a command, empty where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def measured(
    problems: Sequence[Problem], paths: Sequence[Operations], repeats: int, limit_bytes: float, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each case and path; cases too large for the machine and red ones are said and left out."""
    for problem in problems:
        label = f"{problem.name} ctx {problem.context} B {problem.batch} T {problem.rows}"
        if problem.memory_bytes > limit_bytes:
            say(f"{label}: left out, it takes {problem.memory_bytes / 2**30:.1f} GiB of at most {limit_bytes / 2**30:.1f}")
            continue
        for operations in paths:
            try:
                row = measure(problem, operations, repeats)
            except (ValueError, RuntimeError) as error:
                say(f"{label}, {operations.name}: {str(error).strip().splitlines()[-1]}")
                yield {"shape": problem.name, "our_path": operations.name, "query_rows": problem.rows, "error": str(error)[:300]}
                continue
            say(show(row))
            yield row
            forget()


def at_hand(limit_bytes: float) -> str | None:
    """Hub id of the largest mlx-community model in the hub's cache that we can run within the limit; None without one."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from dustin.backends.mlx_metal.loading import DEFINITIONS

    try:
        repos = [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_id.startswith("mlx-community/")]
    except CacheNotFound:
        return None
    for repo in sorted(repos, key=lambda repo: -repo.size_on_disk):
        files = {file.file_name: file.file_path for revision in repo.revisions for file in revision.files}
        whole = "config.json" in files and any(name.endswith(".safetensors") for name in files)
        if whole and repo.size_on_disk <= limit_bytes:
            names = json.loads(files["config.json"].read_text()).get("architectures") or [None]
            if names[0] in DEFINITIONS:
                return repo.repo_id
    return None


def generated(model: str, prompt_tokens: int, max_tokens: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Generation rows of a model; what went wrong is a row too, so that the attention rows are not lost."""
    from bench.mlx_generation import generation

    found: list[dict[str, Any]] = []
    try:
        for row in generation(model, prompt_tokens, max_tokens, say):
            found.append(row)
    except (DustinError, ImportError, ValueError, RuntimeError, OSError) as error:
        say(f"{model}: {error}")
        found.append({"model": model, "error": str(error)[:300]})
    return found


def forget() -> None:
    """Give the memory of the last case back before the next one is made."""
    import mlx.core as mx

    mx.clear_cache()


def metal_here() -> bool:
    """Whether MLX can run Metal kernels; ClickException where MLX itself is missing."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise click.ClickException(f"MLX cannot be imported ({error}): pip install mlx mlx-lm") from error
    return bool(mx.metal.is_available())


@click.command()
@click.option("--array-path", is_flag=True, help="Reduced shapes through MLX arrays alone, anywhere: a check of the script.")
@click.option("--model", "models", multiple=True, help="mlx folder or hub id to generate with. Default: one that is in the cache.")
@click.option("--prompt-tokens", type=click.IntRange(64), default=8192, show_default=True, help="Prompt length with --model.")
@click.option("--max-tokens", type=click.IntRange(8), default=128, show_default=True, help="Tokens generated with --model.")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed passes of each path.")
@click.option("--only", default="", help="Only the cases whose 'Hq/Hkv/D context batch rows' contains this text.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Also append the line to this file.")
def main(array_path: bool, models: tuple[str, ...], repeats: int, only: str, output: Path | None, **opts: Any) -> None:
    """Our Metal kernels against stock MLX on this Mac; prints one JSON line to send back."""
    metal = metal_here()
    if not metal and not array_path:
        where = f"{platform.system()} {platform.machine()}"
        raise click.ClickException(
            f"Metal is not available here ({where}), so there is nothing of Apple hardware to measure. Run this on a Mac with "
            "Apple silicon; --array-path runs reduced shapes without Metal to check the script"
        )
    say = lambda text: click.echo(text, err=True)  # noqa: E731
    problems = reduced() if array_path else table()
    chosen = [p for p in problems if only in f"{p.name} {p.context} {p.batch} {p.rows}"]
    if not chosen:
        first = f"{problems[0].name} {problems[0].context} {problems[0].batch} {problems[0].rows}"
        raise click.ClickException(f"--only {only!r} leaves no case; the first is {first!r}")
    paths = [array_operations()] if array_path else [kernel_operations(), array_operations()]
    facts = machine()
    limit = _MEMORY_SHARE * (facts["memory_gib"] or 16) * 2**30
    found = list(measured(chosen, paths, repeats, limit, say))
    line: dict[str, Any] = {"bench": "apple", "what": ARRAYS if array_path else METAL} | facts | {"cases": found}
    if not models and metal and not array_path:
        found_model = at_hand(limit)
        say(f"generation: {found_model or 'no mlx-community model is in the cache; --model names one'}")
        models = (found_model,) if found_model else ()
    if models:
        line["generation"] = [row for model in models for row in generated(model, opts["prompt_tokens"], opts["max_tokens"], say)]
    line |= {"command": rows.command(), "commit": rows.commit()}
    click.echo(json.dumps(line))
    if output:
        rows.write(output, [line], append=True)
    if not any("error" not in row for row in found):
        raise click.ClickException("no case could be measured; the reasons are above")
    if not array_path:
        say("Thank you: please send the line above back, in an issue titled `bench apple`.")
