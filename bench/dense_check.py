"""The dense check of `exact`: a few dozen rows of every sequence over its whole cache, beside torch's fused calls.

Ours reads the paged cache. torch's flash and cuDNN kernels get the same rows packed into one (head, row) axis, keys and
values contiguous and no mask, so a little less work, on a layout that a paged cache would first have to be copied into.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import rows
from bench.attention import relative_rms
from bench.attention_case import LARGE, PAGE, SMALL, Shape, copied_tb_per_s, time_us
from dustin.triton_kernels.attention_core import AttentionWorkspace
from dustin.triton_kernels.dense_verify import choose_config, dense_verify, plan

CASES = [(shape, batch, tokens) for shape, batch in ((LARGE, 8), (SMALL, 32)) for tokens in (6, 9, 17, 32, 33)]
CONTEXT = 32768
TOLERANCE = 1e-2


def reference(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, b: int, head: int, length: int
) -> torch.Tensor:
    """Float32 attention [T, g, D] of one sequence and kv head, causal among the in-flight rows."""
    tokens, group = q.shape[1], q.shape[2] // k_pool.shape[2]
    positions = torch.arange(length + tokens, device=q.device)
    pages = table[b][positions // PAGE].long()
    k, v = (pool[pages, positions % PAGE, head].float() for pool in (k_pool, v_pool))
    rows_of_head = q[b, :, head * group : (head + 1) * group].float()
    logits = torch.einsum("tgd,nd->tgn", rows_of_head, k) / math.sqrt(q.shape[3])
    hidden = positions[None, :] > length + torch.arange(tokens, device=q.device)[:, None]
    return torch.einsum("tgn,nd->tgd", logits.masked_fill(hidden[:, None, :], -math.inf).softmax(-1), v)


def packed_us(shape: Shape, batch: int, tokens: int, backend: SDPBackend) -> float | None:
    """Microseconds of torch's call; None when the backend refuses the shape."""
    k, v = (torch.empty(batch, shape.kv_heads, CONTEXT, shape.dim, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    q = torch.randn(batch, shape.kv_heads, tokens * shape.heads // shape.kv_heads, shape.dim, device="cuda").bfloat16()
    try:
        with sdpa_kernel(backend):
            return round(time_us([lambda: F.scaled_dot_product_attention(q, k, v)] * 2, 5) / 2, 1)
    except RuntimeError:
        return None


def copy_tb_per_s() -> float:
    """Bytes read and written a second by a device copy of 2 GiB."""
    source = torch.empty(1 << 30, dtype=torch.int16, device="cuda").random_()
    return copied_tb_per_s(source, torch.empty_like(source))


def measure(shape: Shape, batch: int, tokens: int, copy_rate: float) -> dict[str, Any]:
    """One row, or ClickException when the result is off its reference."""
    torch.manual_seed(0)
    length, size = CONTEXT - tokens, (batch * CONTEXT // PAGE, PAGE, shape.kv_heads, shape.dim)
    pools = [torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)]
    table = torch.randperm(size[0], device="cuda").int().reshape(batch, -1)
    lengths, fed = (torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (length, tokens))
    q = torch.randn(batch, tokens, shape.heads, shape.dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    launch = plan(q, shape.kv_heads, CONTEXT)
    workspace = AttentionWorkspace(launch.num_rows, shape.dim, launch.num_counters, q.device)

    def check() -> None:
        dense_verify(q, *pools, table, lengths, fed, out=out, workspace=workspace)

    check()
    group, error = shape.heads // shape.kv_heads, 0.0
    for b, head in ((0, 0), (batch - 1, shape.kv_heads - 1)):
        want = reference(q, *pools, table, b, head, length)
        error = max(error, relative_rms(out[b, :, head * group : (head + 1) * group], want))
    if not error <= TOLERANCE:
        raise click.ClickException(f"parity gate is red for {shape.name}, B={batch}, {tokens} rows: {error}, allowed {TOLERANCE}")
    ours = time_us([check] * 2, 5) / 2
    pools.clear()
    packed = {backend.name.lower(): packed_us(shape, batch, tokens, backend) for backend in BACKENDS}
    best = min(value for value in packed.values() if value is not None)
    floating = 4 * tokens * shape.heads * CONTEXT * shape.dim * batch
    config = choose_config(tokens * group, shape.dim, torch.bfloat16)
    return {
        "bench": "dense_check",
        "card": torch.cuda.get_device_name(),
        "shape": shape.name,
        "weights": "random",
        "context": CONTEXT,
        "batch": batch,
        "query_rows": tokens,
        "our_dense_us_per_layer": round(ours, 1),
        "tflop_per_s": round(floating / ours / 1e6, 1),
        "over_copy_floor": round(ours * copy_rate / (batch * CONTEXT * 4 * shape.row_elements / 1e6), 2),
        "torch_flash_packed_us_per_layer": packed["flash_attention"],
        "torch_cudnn_packed_us_per_layer": packed["cudnn_attention"],
        "ratio_to_best_torch": round(best / ours, 2),
        "relative_rms": error,
        "config": f"tile {config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages",
        "command": rows.command(),
        "commit": rows.commit(),
    }


BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=rows.RESULTS / "dense_check.jsonl", show_default=True)
def main(output: Path) -> None:
    """Many rows a sequence over the whole cache (the check of `exact`) on one GPU, beside torch's fused attention."""
    if not torch.cuda.is_available():
        raise click.ClickException("needs an NVIDIA GPU")
    copy_rate = copy_tb_per_s()
    done: list[dict[str, Any]] = []
    for shape, batch, tokens in CASES:
        done.append(row := measure(shape, batch, tokens, copy_rate))
        rows.write(output, done)
        click.echo(
            f"{row['shape']:9} B {batch:2} rows {tokens:2}  ours {row['our_dense_us_per_layer']} us ({row['tflop_per_s']} TFLOP/s, "
            f"{row['over_copy_floor']} of the copy floor)  flash {row['torch_flash_packed_us_per_layer']}  "
            f"cudnn {row['torch_cudnn_packed_us_per_layer']}  rms {row['relative_rms']:.1e}  [{row['config']}]"
        )
