"""What `dustin doctor` makes of its report: what to install or change, and whether all is well. Pure functions of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# MLX's bundled BLAS on Linux reaches a twentieth of numpy's; a third is still worth a word.
_SLOW_SHARE = 1 / 3


def verdict(found: dict[str, Any]) -> bool:
    """True when a backend that runs models works and no check failed."""
    usable = any(found["backends"].get(name, {}).get("available") for name in ("torch", "mlx"))
    return usable and not failed(found)


def failed(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks that failed."""
    return [result for result in found["self_test"] if result["state"] == "failed"]


def advice(found: dict[str, Any]) -> list[str]:
    """Sentences, each with what is missing or slow and the command that changes it; empty when there is nothing to do."""
    return [*_torch(found), *_mlx(found), *_blas(found), *_checks(found), *_cache(found)]


def _torch(found: dict[str, Any]) -> Iterator[str]:
    torch, packages = found["backends"]["torch"], found["packages"]
    if not torch["available"]:
        if packages["torch"] is None:
            yield "torch is not installed: pip install -c constraints.txt torch"
        else:
            yield f"torch {packages['torch']} cannot be used ({torch['reason']}): install it again"
        return
    on_gpu = len(torch["devices"]) > 1
    if found["gpus"] and isinstance(found["gpus"], list) and not on_gpu:
        if torch.get("cuda_build"):
            yield (
                f"torch is built for CUDA {torch['cuda_build']} but finds no GPU, though the driver lists {found['gpus'][0]}: "
                "update the driver, or look at CUDA_VISIBLE_DEVICES"
            )
        else:
            yield f"torch {packages['torch']} is a CPU build, the driver lists {found['gpus'][0]}: install torch's CUDA build"
    if on_gpu and packages["triton"] is None:
        yield "the GPU needs triton: pip install triton"


def _mlx(found: dict[str, Any]) -> Iterator[str]:
    system, packages, mlx = found["system"], found["packages"], found["backends"]["mlx"]
    apple = system == ["Darwin", "arm64"]
    if packages["mlx"] is None:
        if apple:
            yield "MLX is not installed; on Apple silicon it drives the GPU: pip install mlx mlx-lm"
        return
    if system[0] == "Linux" and packages["mlx-cpu"] is None and "devices" not in mlx:
        yield f'mlx {packages["mlx"]} cannot be imported here without its CPU part: pip install "mlx[cpu]"'
    elif packages["mlx-lm"] is None:
        yield "the MLX backend takes its model definitions from mlx-lm: pip install mlx-lm"
    if apple and "devices" in mlx and not mlx.get("metal"):
        yield "MLX finds no Metal device: the array path serves instead of the kernels (virtual machines often have none)"


def _blas(found: dict[str, Any]) -> Iterator[str]:
    blas = found["backends"]["mlx"].get("blas")
    if not blas:
        return
    # A busy machine slows numpy's threads more than MLX's one; the reference library is known by its name too.
    reference = all(name.strip().startswith("libblas") for name in blas["library"].split(","))
    if reference or blas["mlx_gflops"] < _SLOW_SHARE * blas["numpy_gflops"]:
        yield (
            f"MLX's BLAS is slow on this CPU ({blas['mlx_gflops']:g} GFLOP/s, numpy's {blas['numpy_gflops']:g}): "
            "use --backend torch here. For MLX's sake install a fast one, which the backend loads before MLX's own: "
            "apt install libopenblas0-pthread"
        )


def _checks(found: dict[str, Any]) -> Iterator[str]:
    groups = list(dict.fromkeys(result["group"] for result in failed(found)))
    if groups:
        yield (
            f"checks of {', '.join(groups)} failed: do not trust its answers, choose another --backend or --device, "
            "and report the output of `dustin doctor --json`"
        )


def _cache(found: dict[str, Any]) -> Iterator[str]:
    cache = found["cache"]
    if isinstance(cache, dict) and not cache["writable"]:
        yield f"the cache {cache['path']} cannot be written: set DUSTIN_CACHE to another folder"
