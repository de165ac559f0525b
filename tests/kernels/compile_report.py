"""Compile every shipped kernel configuration for sm_90 without a GPU and print registers, spills and shared memory.

`python -m tests.kernels.compile_report [NAME]` prints one JSON object a line. It replaces Triton's driver by one that only
names the target, and every launch by a compilation, so it must not share a process with real launches.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dustin.triton_kernels import attention_core, runtime

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _TargetOnly(DriverBase):
    """What compilation asks of a driver."""

    def __init__(self) -> None:
        pass

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable:
        raise NotImplementedError


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack bytes (spills live there) and shared bytes of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([TOOLS / "cuobjdump", "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {name.lower(): int(value) for name, value in found.items()}


def serialized(ptx: str, folder: Path) -> str:
    """What ptxas says when it runs a kernel's matrix instructions one by one, "" when it does not. Nothing else shows it: such
    a kernel has no more registers and no spill, and a loop that takes a quarter longer."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder / "again.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return " ".join(re.findall(r"\(C75\d\d\)[^\n]*", said.stdout + said.stderr))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, launch) of every shipped configuration, at the shapes of the benchmark and the smaller models."""
    from dustin.triton_kernels.accept import accept_greedy, accept_sampled
    from dustin.triton_kernels.append_kv import append_kv
    from dustin.triton_kernels.argmax_rows import argmax_rows
    from dustin.triton_kernels.dense_verify import dense_verify
    from dustin.triton_kernels.rope_append import rope_append
    from dustin.triton_kernels.score_heads import group_heads, score_heads
    from dustin.triton_kernels.select_tokens import select_tokens
    from dustin.triton_kernels.sparse_verify import sparse_verify
    from dustin.triton_kernels.translate_slots import translate_slots

    def ints(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        for batch, tokens, num_heads, num_kv_heads, dim in (
            (16, 6, 64, 8, 128), (32, 6, 64, 8, 128), (8, 6, 64, 8, 128), (1, 6, 64, 8, 128), (16, 6, 28, 4, 128),
            (32, 6, 28, 4, 128), (8, 1, 64, 8, 128), (8, 16, 14, 2, 64),
            (32, 12, 28, 4, 128), (1, 16, 64, 8, 128),
            (8, 32, 64, 8, 128), (8, 6, 16, 8, 256), (8, 32, 16, 4, 256), (8, 6, 32, 32, 96),
        ):  # fmt: skip
            if dtype != torch.bfloat16 and (batch, dim) != (16, 128):
                continue
            pool = torch.zeros(4, 64, num_kv_heads, dim, dtype=dtype)
            q = torch.zeros(batch, tokens, num_heads, dim, dtype=dtype)
            table, one = ints(batch, 512), ints(batch)
            name = f"{short} B={batch} T={tokens} {num_heads}/{num_kv_heads}/{dim}"
            args = (q, pool, pool, table, one, one)
            yield f"dense_verify {name}", lambda args=args: dense_verify(*args)
            if (batch, tokens, dtype) == (32, 12, torch.bfloat16):
                rows = {"out": q.flatten(0, 1), "starts": one}
                yield f"dense_verify packed {name}", lambda args=args, rows=rows: dense_verify(*args, **rows)
            if tokens <= 16:
                chosen = ints(batch, 512)
                given = {"slots": ints(batch, 512 + tokens), "slot_counts": one}
                yield f"sparse_verify {name}", lambda args=args, c=chosen, o=one: sparse_verify(*args, c, o)
                yield (
                    f"sparse_verify settled {name}",
                    lambda args=args, c=chosen, o=one, g=given: sparse_verify(*args, c, o, **g, settled=True),
                )
            if (batch, tokens) == (16, 6):
                capped = {"window": 4096, "softcap": 50.0}
                yield f"dense_verify window softcap {name}", lambda args=args, o=capped: dense_verify(*args, **o)
                cos = torch.zeros(128, dim // 2)
                kv = q[:, :, :num_kv_heads].contiguous()
                paging = (pool, pool, table, one, one)
                yield f"append_kv {name}", lambda kv=kv, p=paging: append_kv(kv, kv, *p)
                yield f"rope_append {name}", lambda q=q, kv=kv, p=paging, c=cos: rope_append(q, kv, kv, *p, c, c)
    table, one = ints(16, 512), ints(16)
    for rows, heads, num_heads, num_kv_heads, dim in (
        (1, 4, 64, 8, 128), (1, 64, 64, 8, 128), (5, 4, 14, 2, 64),
        # As CudaBackend pads the rows of several drafts.
        (4, 4, 14, 2, 64), (8, 4, 14, 2, 64), (16, 4, 14, 2, 64), (8, 4, 64, 8, 128), (16, 4, 12, 2, 128),
    ):  # fmt: skip
        for keep in (True, False):
            pool = torch.zeros(4, 64, num_kv_heads, dim, dtype=torch.bfloat16)
            q = torch.zeros(16, rows, heads, dim, dtype=torch.bfloat16)
            groups = group_heads(range(heads), num_heads, num_kv_heads, "cpu")
            scores = torch.zeros(16, 32762)
            yield (
                f"score_heads keep={keep} {rows}x{heads} {num_heads}/{num_kv_heads}/{dim}",
                lambda q=q, pool=pool, g=groups, s=scores, k=keep: score_heads(
                    q, pool, table, one, g, s, num_rows=one, keep_weights=k
                ),
            )
    yield from own_set_launches()
    quota = {"num_sink_tokens": 4, "num_recent_tokens": 32}
    for columns, budget in ((32762, 128), (32762, 512), (32762, 2048), (131072, 1024), (4096, 512)):
        scores = torch.zeros(16, columns)
        yield (
            f"select_tokens {columns} k={budget}",
            lambda s=scores, k=budget: select_tokens(s, s, one, budget=k, num_draft_selected=int(0.6 * (k - 36)), **quota),
        )
    yield "translate_slots", lambda: translate_slots(ints(16, 512), one, one, one, table, 64, 6)
    logits = torch.zeros(12, 1000, dtype=torch.bfloat16)
    yield "argmax_rows", lambda: argmax_rows(logits)
    flags = torch.zeros(2, 6, dtype=torch.bool)
    yield "accept_greedy", lambda: accept_greedy(ints(2, 5), ints(2), ints(2, 6), flags)
    p, u = torch.zeros(2, 6, 1000), torch.zeros(2, 5)
    q = p[:, :5].contiguous()
    yield "accept_sampled", lambda: accept_sampled(ints(2, 5), ints(2), q, p, u, u[:, 0].contiguous())
    yield "accept_sampled one-hot", lambda: accept_sampled(ints(2, 5), ints(2), None, p, u, u[:, 0].contiguous())


def own_set_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """What a layer launches whose kv heads choose sets of their own, by compact keys and whole ones."""
    from dustin.triton_kernels.packed_rows import packed_keys, packed_rows
    from dustin.triton_kernels.packed_scores import packed_scores
    from dustin.triton_kernels.score_heads import group_heads, score_heads
    from dustin.triton_kernels.select_tokens import select_tokens
    from dustin.triton_kernels.sparse_verify import sparse_verify
    from dustin.triton_kernels.translate_slots import translate_slots

    def ints(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32)

    for batch, rows, num_heads, num_kv_heads, rank in (
        (32, 4, 28, 4, 64),
        (1, 5, 28, 4, 64),
        (12, 6, 12, 2, 64),
        (1, 6, 12, 2, 32),
        (2, 16, 64, 8, 64),
    ):
        pool = torch.zeros(4, 64, num_kv_heads, 128, dtype=torch.bfloat16)
        q = torch.zeros(batch, rows, num_heads, 128, dtype=torch.bfloat16)
        table, one, sets = ints(batch, 512), ints(batch), ints(batch * num_kv_heads)
        codes = torch.zeros(256, num_kv_heads, rank // 2, dtype=torch.int8)
        mean, base = torch.zeros(num_kv_heads, 128), torch.zeros(num_kv_heads, 128, rank)
        name = f"B={batch} {rows}x{num_heads}/{num_kv_heads} rank {rank}"
        yield (
            f"packed_rows {name}",
            lambda q=q, p=pool, c=codes, t=table, o=one, m=mean, b=base, r=rows: packed_rows(q, p, c, t, o, m, b, b, num_rows=r),
        )
        yield (
            f"packed_keys {name}",
            lambda p=pool, c=codes, t=table, o=one, m=mean, b=base: packed_keys(p, c, t, o, o, m, b, most=30_000),
        )
        groups = group_heads(range(num_heads), num_heads, num_kv_heads, "cpu")
        scores = torch.zeros(batch * num_kv_heads, 32762)
        for half, keys in ((torch.float16, codes.unflatten(0, (4, 64))), (torch.bfloat16, pool)):
            asked = torch.zeros(batch, rows, num_heads, rank if half == torch.float16 else 128, dtype=half)
            yield (
                f"score_heads by kv head {half} {name}",
                lambda q=asked, k=keys, t=table, o=one, g=groups, s=scores: score_heads(
                    q, k, t, o, g, s, num_rows=o, by_group=True
                ),
            )
        for half, packed in ((torch.float16, codes.unflatten(0, (4, 64))), (torch.float32, codes.unflatten(0, (4, 64)))):
            asked = torch.zeros(batch, rows, num_heads, rank, dtype=half)
            yield (
                f"packed_scores {half} {name}",
                lambda q=asked, k=packed, t=table, o=one, s=scores: packed_scores(q, k, t, o, s, num_rows=o, scale=0.1),
            )
        yield (
            f"select_tokens by kv head {name}",
            lambda s=scores, n=sets: select_tokens(
                s, None, n, budget=1024, num_draft_selected=0, num_sink_tokens=4, num_recent_tokens=32
            ),
        )
        chosen = ints(batch * num_kv_heads, 1024)
        yield (
            f"translate_slots by kv head {name}",
            lambda c=chosen, n=sets, o=one, t=table, h=num_kv_heads, r=rows: translate_slots(c, n, o, o, t, 64, r, sets=h),
        )
        given = {"slots": ints(batch * num_kv_heads, 1024 + rows), "slot_counts": sets}
        yield (
            f"sparse_verify by kv head {name}",
            lambda q=q, p=pool, t=table, o=one, c=chosen, n=sets, g=given: sparse_verify(q, p, p, t, o, o, c, n, **g),
        )


def decode_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """The products of a decoding step at the shapes of a 0.5B and a 1.5B model, in the configurations that the model chooses."""
    from dustin.backends.torch_triton.cuda_decode import choose_config
    from dustin.backends.torch_triton.cuda_wide import CONFIGS
    from dustin.triton_kernels.decode_linear import LinearScratch, Stream
    from dustin.triton_kernels.head_argmax import head_argmax
    from dustin.triton_kernels.linear_add import linear_add
    from dustin.triton_kernels.norm_linear import norm_gate_up, norm_qkv
    from dustin.triton_kernels.stream_rows import capture_heads, embed_rows, last_norm
    from dustin.triton_kernels.wide_linear import wide_linear

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    shapes = {"qkv": (4608, 3584), "output": (3584, 3584), "gate_up": (2 * 18944, 3584), "down": (3584, 18944)}
    for rows in (1, 16, 32, 64):
        for product, chosen in CONFIGS[max(rows, 16)].items():
            size, depth = shapes[product]
            given = {"bias": half(size) if product == "qkv" else None, "gate": product == "gate_up", "config": chosen}
            yield f"wide_linear {product} {rows} rows", partial(wide_linear, half(rows, depth), half(size, depth), **given)
    scratch = LinearScratch(100_000, 10_000_000, 10_000, torch.device("cpu"))
    for hidden, inner, num_heads, num_kv_heads, dim in ((896, 4864, 14, 2, 64), (1536, 8960, 12, 2, 128)):
        for rows in (1, 8, 32, 64):
            name = f"{hidden}/{inner} {rows} rows"
            stream = Stream(half(rows, hidden), half(rows, hidden), scratch, 1)
            norm, pool = half(hidden), half(4, 64, num_kv_heads, dim)
            table, one = torch.ones(rows, 512, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
            angle = torch.zeros(128, dim // 2)
            size = (num_heads + 2 * num_kv_heads) * dim
            config = {p: choose_config(p, rows, hidden, dim // 2) for p in ("qkv", "gate_up")}
            paging = (pool, pool, table, one, one, angle, angle)
            weights = (half(size, hidden), half(size))
            yield f"norm_qkv {name}", partial(norm_qkv, stream, *weights, *paging, eps=1e-6, config=config["qkv"])
            up = half(2 * inner, hidden)
            yield f"norm_gate_up {name}", partial(norm_gate_up, stream, up, eps=1e-6, config=config["gate_up"])
            for product, depth in (("output", num_heads * dim), ("down", inner)):
                chosen = choose_config(product, rows, depth, dim // 2)
                down = half(rows, depth), half(hidden, depth)
                yield f"linear_add {product} {name}", partial(linear_add, *down, None, stream, norm, config=chosen)
            head = half(1000, hidden)
            yield f"head_argmax {name}", partial(head_argmax, stream.scaled, head, vocabulary=999)
            tokens = torch.zeros(rows, 1, dtype=torch.int64)
            yield f"embed_rows {name}", partial(embed_rows, tokens, head, norm, scratch)
            yield f"last_norm {name}", partial(last_norm, stream.residual, one, norm, 1e-6)
            q = half(rows, 1, num_heads, dim)
            yield f"capture_heads {name}", partial(capture_heads, q, torch.zeros(4, dtype=torch.int64), one, True)


def main() -> None:
    """Compile what matches the first argument (all by default)."""
    import tempfile

    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    driver.set_active(_TargetOnly())
    runtime.allow_cpu = True
    runtime.num_multiprocessors = attention_core.num_multiprocessors = lambda device: 132
    run, compiled = JITFunction.run, []

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, launch in itertools.chain(launches(), decode_launches()):
            if wanted not in name:
                continue
            compiled.clear()
            launch()
            for function, kernel in compiled:
                if kernel.hash in seen:
                    continue
                seen.add(kernel.hash)
                row = {"case": name, "kernel": function, "warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
                row |= {k: v for k, v in resources(kernel.asm["cubin"], Path(folder)).items() if k != "shared"}
                row["wgmma"] = "wgmma" in kernel.asm["ptx"]
                row["serialized"] = serialized(kernel.asm["ptx"], Path(folder)) if row["wgmma"] else ""
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
