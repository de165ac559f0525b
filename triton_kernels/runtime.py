"""What every launcher needs: argument checks, device facts, and the interpreter's repairs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

# CPU tensors are allowed where nothing is launched on a device: under the interpreter, and in compile-only checks.
allow_cpu = INTERPRETED

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


def _repair_interpreter() -> None:
    """numpy 2.4 refuses int() of a one-element array, which Triton 3.6's interpreter uses for loop bounds."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED:
    _repair_interpreter()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 4 for the CPU (interpreter), so that small tests still split."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and `least`."""
    return max(least, triton.next_power_of_2(value))


def precision_of(dtype: torch.dtype) -> str:
    """Dot precision: three tf32 passes keep fp32 inputs at fp32 accuracy; 16-bit inputs have exact products anyway."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """Raise ValueError naming the tensor, what was expected and what came. `None` in `shape` matches any extent.

    `contiguous=False` still requires a last axis of stride 1. `like` fixes the device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {tensor.device}")
    if tensor.device.type != "cuda" and not allow_cpu:
        raise ValueError(f"{name}: expected a CUDA device, got {tensor.device} (set TRITON_INTERPRET=1 to run on the CPU)")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a last axis of stride 1, got strides {tensor.stride()}")


def check_pools(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    page_table: torch.Tensor,
    batch: int,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> None:
    """Check a paged cache: pools [pages, page_size, Hkv, D], page_table [B, max_pages] int32.

    A pool may be a view of one buffer that holds K and V side by side: rows and heads may be strided, pages may not.
    """
    check_tensor("k_pool", k_pool, (None, None, None, None), dtypes, contiguous=False)
    if k_pool.stride(0) != k_pool.shape[1] * k_pool.stride(1) or k_pool.stride(1) < k_pool.shape[2] * k_pool.stride(2):
        raise ValueError(f"k_pool: expected rows of equal distance, heads inside them, got strides {k_pool.stride()}")
    page_size, head_dim = k_pool.shape[1], k_pool.shape[3]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"k_pool: expected a page size that is a power of two, got {page_size}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"k_pool: expected head_dim in {HEAD_DIMS}, got {head_dim}")
    if v_pool is not None:
        check_tensor("v_pool", v_pool, tuple(k_pool.shape), (k_pool.dtype,), k_pool, contiguous=False)
        if v_pool.stride() != k_pool.stride():
            raise ValueError(f"v_pool: expected the strides of k_pool {k_pool.stride()}, got {v_pool.stride()}")
    check_tensor("page_table", page_table, (batch, None), (torch.int32,), k_pool, contiguous=False)


def check_counts(batch: int, like: torch.Tensor, **counts: torch.Tensor) -> None:
    """Check [B] int32 vectors."""
    for name, tensor in counts.items():
        check_tensor(name, tensor, (batch,), (torch.int32,), like)


def prefetch_instruction(num_bytes: int) -> str:
    """PTX that asks the L2 for `num_bytes` (a multiple of 16) at a pointer: a hint that needs no register, no shared memory."""
    return f"cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0;"


@triton.jit
def prefetch_rows(pointers, INSTRUCTION: tl.constexpr):
    """Run a prefetch instruction for each pointer of a tile. On a GPU only."""
    tl.inline_asm_elementwise(INSTRUCTION, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """Wait for the kernel before this one, then let the next one start its launch."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
