"""What the launchers of dense and sparse verification share: checks, scratch, options, and the launch that merges splits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from .attention_core import AttentionConfig, AttentionWorkspace, Plan, merge_kernel
from .runtime import check_counts, check_pools, check_tensor, power_of_two


def check_query(q: torch.Tensor, k_pool: torch.Tensor, out: torch.Tensor | None, max_rows: int) -> None:
    """Check q [B, T, Hq, D] (any strides with a contiguous last axis) and out against the pool and the row limit."""
    check_tensor("q", q, (None, None, None, k_pool.shape[3]), (k_pool.dtype,), k_pool, contiguous=False)
    if not 1 <= q.shape[1] <= max_rows:
        raise ValueError(f"q: expected 1 to {max_rows} query rows (axis 1), got {q.shape[1]}")
    if q.shape[2] % k_pool.shape[2]:
        raise ValueError(f"q: expected a multiple of {k_pool.shape[2]} query heads (axis 2), got {q.shape[2]}")
    if out is not None:
        check_tensor("out", out, tuple(q.shape), (q.dtype,), q)


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor | None,
    max_rows: int,
    window: int,
    softcap: float,
    **counts: torch.Tensor,
) -> None:
    """Check what every attention launch takes; `counts` are its [B] int32 vectors. Raise ValueError naming the argument."""
    check_query(q, k_pool, out, max_rows)
    check_pools(k_pool, v_pool, page_table, q.shape[0])
    check_counts(q.shape[0], q, **counts)
    if window < 0 or softcap < 0:
        raise ValueError(f"window, softcap: expected 0 (off) or more, got {window}, {softcap}")


def scratch_for(
    q: torch.Tensor, launch: Plan, out: torch.Tensor | None, workspace: AttentionWorkspace | None
) -> tuple[torch.Tensor, AttentionWorkspace]:
    """The output and the scratch of a launch, made where they were not passed. Raise ValueError when the scratch is too small."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = AttentionWorkspace(launch.num_rows, q.shape[3], launch.num_counters, q.device, launch.num_handed)
    workspace.check(launch.num_rows, q.shape[3], launch.num_counters, q, launch.num_handed)
    return out, workspace


def launch_options(config: AttentionConfig, on_device: bool) -> dict[str, object]:
    """Keyword options of a Triton launch."""
    options: dict[str, object] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers and on_device:
        options["maxnreg"] = config.max_registers
    if config.dependent and on_device:
        options["launch_pdl"] = True
    return options


def merge_splits(
    out: torch.Tensor,
    workspace: AttentionWorkspace,
    lengths: torch.Tensor,
    num_tokens: torch.Tensor,
    slot_counts: torch.Tensor | None,
    window: int,
    launch: Plan,
    config: AttentionConfig,
    num_kv_heads: int,
    dependent: bool,
    shape: Sequence[int],
    starts: torch.Tensor | None = None,
) -> None:
    """Launch the second kernel of an unfused merge into out of `shape` [B, T, Hq, D] (see dense_verify for `starts`). `slot_counts`
    [B], or [B * Hkv] where kv heads have sets of their own, says it was a sparse launch."""
    if launch.splits == 1 or launch.fused:
        return
    batch, tokens, num_heads, dim = shape
    group = num_heads // num_kv_heads
    chunk = min(config.block_m, 4)
    extra = {"launch_pdl": True} if dependent else {}
    sets = 1 if slot_counts is None else len(slot_counts) // batch
    merge_kernel[(batch * num_kv_heads, triton.cdiv(min(config.block_m, tokens * group), chunk), launch.row_tiles)](
        out, workspace.outputs, workspace.stats, lengths, num_tokens, lengths if slot_counts is None else slot_counts,
        lengths if starts is None else starts, tokens, window, num_heads,
        HKV=num_kv_heads, G=group, D=dim, BLOCK_D=power_of_two(dim, 16), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_R=chunk, SPLITS=launch.splits, WINDOW=window > 0, SPARSE=slot_counts is not None, PDL=dependent, SETS=sets,
        PACKED=starts is not None, num_warps=4,
        **extra,
    )  # fmt: skip
