"""Runs the Metal kernels on an NVIDIA GPU and compares them with the emulator.

    python -m tests.metal.cuda_check build FOLDER    # needs mlx, g++ and nvcc: emulator results and sm_90 cubins
    python tests/metal/cuda_check.py run FOLDER      # needs numpy and an NVIDIA driver only; prints one JSON row a kernel

`run` exits 1 when a float output differs by more than its tolerance (relative RMS) or an integer output at all. Compute
capability 9.0 (H200). This is a check of the text's arithmetic; the speed of these builds means nothing for Apple hardware.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


class Recorder:
    """Stores every dispatch: kernel.cubin (shared by equal sources), its buffers before, and the emulator's after."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.built, self.case = folder, [], {}, ""

    def __call__(self, kernel, inputs, report) -> None:
        from tests.metal.emulator.cuda import build_cuda
        from tests.metal.emulator.launch import bind, declared_unwritten

        if kernel.source not in self.built:
            self.built[kernel.source] = f"kernel{len(self.built)}.cubin"
            build_cuda(kernel, self.folder / self.built[kernel.source])
        held = bind(kernel, inputs)
        count = len(held) - len(kernel.outputs)
        scratch = declared_unwritten(kernel.source)
        results = dict(zip((h.name for h in held[count:]), report.outputs, strict=True)) | report.mutated
        kinds = [d for _, d in kernel.outputs]
        dtypes = dict(zip((h.name for h in held[count:]), kinds, strict=True))
        dtypes |= {n: kernel.inputs[0][1] for n in report.mutated}
        name = f"launch{len(self.rows)}"
        arrays = {f"buffer{i}": h.array for i, h in enumerate(held)}
        np.savez_compressed(self.folder / f"{name}.npz", **arrays, **{f"want_{n}": a for n, a in results.items()})
        compared = {h.name: [i, dtypes[h.name], h.name in scratch] for i, h in enumerate(held) if h.name in results}
        groups = [-(-g // t) for g, t in zip(kernel.grid, kernel.group, strict=True)]
        row = {
            "name": name,
            "case": self.case,
            "cubin": self.built[kernel.source],
            "groups": groups,
            "group": list(kernel.group),
        }
        self.rows.append(row | {"buffers": len(held), "compared": compared})


def build(folder: Path) -> int:
    """Emulate and record all kernels; returns the number of dispatches."""
    import mlx.core as mx

    from dustin.metal_kernels.append_kv import append_kv
    from dustin.metal_kernels.score_heads import score_heads
    from dustin.metal_kernels.select_tokens import select_tokens
    from tests.metal.emulator.dropin import installed
    from tests.metal.helpers import call, to_mlx
    from tests.metal.reference import Case

    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder)
    rng = np.random.default_rng(0)
    with installed(check=False, observe=recorder):
        for dtype in TOLERANCE:
            for form in ("dense", "sparse", "blocks"):
                for dim, group, rows, splits in ((128, 8, 6, 1), (64, 7, 16, 5), (96, 5, 3, 1), (256, 6, 4, 3)):
                    recorder.case = f"{form} {dtype} D={dim} g={group} T={rows} splits={splits}"
                    tokens = (rows, max(1, rows - 1), 0)
                    call(Case((130, 5, 30), tokens, rows, 2 * group, 2, dim, dtype, 150, 70, seed=dim), form, splits)
            n = mx.array([131, 40], mx.int32)
            q, k = rng.normal(size=(2, 3, 4, 128)), rng.normal(size=(2, 150, 2, 128))
            recorder.case = f"score {dtype}"
            scores = score_heads(to_mlx(q, dtype), to_mlx(k, dtype), (0, 4, 1, 2), 6, n, 128**-0.5, splits=4)
            recorder.case = f"select {dtype}"
            quota = {"budget": 32, "num_sink_tokens": 2, "num_recent_tokens": 4, "num_draft_selected": 9}
            select_tokens(scores, mx.array(rng.integers(0, 9, size=(2, 150)).astype(np.float32)), n, **quota)
            recorder.case = f"append {dtype}"
            cache, new = (
                [mx.zeros((2, 20, 2, 64), getattr(mx, dtype)) for _ in "kv"],
                to_mlx(rng.normal(size=(2, 4, 2, 64)), dtype),
            )
            append_kv(*cache, new, new, mx.array([3, 17], mx.int32), mx.array([2, 4], mx.int32))
    (folder / "launches.json").write_text(json.dumps(recorder.rows))
    return len(recorder.rows)


class Driver:
    """The few calls of the CUDA driver API that a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check(self.cuda.cuInit(0))
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device))
        self.check(self.cuda.cuCtxSetCurrent(self.context))
        name = ctypes.create_string_buffer(100)
        self.check(self.cuda.cuDeviceGetName(name, 100, device))
        self.device_name = name.value.decode()

    @staticmethod
    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA driver: expected status 0, got {status}")

    def launch(self, cubin: bytes, groups: list[int], group: list[int], arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Copy arrays up, run emu_entry once, copy all of them down again."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), cubin))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, b"emu_entry"))
        table = (ctypes.c_uint64 * 40)()
        for i, a in enumerate(arrays):
            pointer = ctypes.c_uint64()
            self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(a.nbytes, 16))))
            self.check(self.cuda.cuMemcpyHtoD_v2(pointer, ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.nbytes)))
            table[i] = pointer.value
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        self.check(self.cuda.cuLaunchKernel(function, *groups, *group, 0, None, parameters, None))
        self.check(self.cuda.cuCtxSynchronize())
        out = []
        for i, a in enumerate(arrays):
            back = np.empty_like(a)
            self.check(
                self.cuda.cuMemcpyDtoH_v2(
                    ctypes.c_void_p(back.ctypes.data), ctypes.c_uint64(table[i]), ctypes.c_size_t(a.nbytes)
                )
            )
            self.check(self.cuda.cuMemFree_v2(ctypes.c_uint64(table[i])))
            out.append(back)
        self.check(self.cuda.cuModuleUnload(module))
        return out


def difference(got: np.ndarray, want: np.ndarray, dtype: str, scratch: bool) -> float:
    """Relative RMS of a float output (scratch: where the emulator wrote), count of unequal elements of an integer one."""
    if dtype in ("int32", "uint32"):
        same = got == want
        return 0.0 if scratch else float((~same).sum())
    if dtype == "bfloat16":
        got, want = ((x.astype(np.uint32) << 16).view(np.float32) for x in (got, want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    infinite = np.isinf(want)
    if not np.array_equal(infinite, np.isinf(got)):
        return float("inf")
    use = np.isfinite(want) if scratch else ~infinite
    if not use.any():
        return 0.0
    if not np.isfinite(got[use]).all():
        return float("inf")
    return float(np.sqrt(np.mean((got[use] - want[use]) ** 2)) / max(np.sqrt(np.mean(want[use] ** 2)), 1e-30))


def run(folder: Path) -> int:
    """Launch everything recorded; number of launches that disagree."""
    driver, failed = Driver(), 0
    for row in json.loads((folder / "launches.json").read_text()):
        data = np.load(folder / f"{row['name']}.npz")
        arrays = [np.ascontiguousarray(data[f"buffer{i}"]) for i in range(row["buffers"])]
        got = driver.launch((folder / row["cubin"]).read_bytes(), row["groups"], row["group"], arrays)
        errors = {}
        for name, (index, dtype, scratch) in row["compared"].items():
            errors[name] = difference(
                got[index].reshape(data[f"want_{name}"].shape), data[f"want_{name}"], dtype, scratch
            )
            failed += not errors[name] <= TOLERANCE.get(dtype, 0.0)
        print(
            json.dumps({"device": driver.device_name, "case": row["case"], "cubin": row["cubin"], "difference": errors})
        )
    print(json.dumps({"device": driver.device_name, "failed": failed}))
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("build", "run"):
        sys.exit(__doc__)
    if sys.argv[1] == "build":
        print(f"{build(Path(sys.argv[2]))} launches recorded")
    else:
        sys.exit(1 if run(Path(sys.argv[2])) else 0)
