"""Attention of MLX at one shape, shared by the Apple and the CUDA benchmark: data, stock calls, our paths, numerics, timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SINKS, RECENT, SCORING_HEADS, BLOCK = 4, 32, 4, 16
# Relative RMS against float64, as in tests/parity: one wrong index among a thousand fails.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Problem:
    """One case: T `rows` of queries a sequence, `context` committed tokens, `held` layers that each read other memory."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    rows: int
    budgets: tuple[int, ...]
    held: int = 4
    layers: int = 0
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that make no case."""
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of the {self.kv_heads} kv heads, got {self.heads}")
        least = SINKS + RECENT
        for budget in self.budgets:
            if not least <= budget <= self.context:
                raise ValueError(f"budget: expected {least} to the context of {self.context} tokens, got {budget}")

    @property
    def name(self) -> str:
        """Hq/Hkv/D."""
        return f"{self.heads}/{self.kv_heads}/{self.head_dim}"

    @property
    def stack(self) -> int:
        """Layers of a timed pass; `held` of them read distinct memory."""
        return self.layers or self.held

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """What the data takes: each cache in our layout and in mlx-lm's."""
        return 2 * self.held * self.batch * (self.context + self.rows) * self.row_bytes


@dataclass
class Data:
    """Random inputs. A layer's `keys`, `values` are ours [B, Nmax, Hkv, D], its `stock` mlx-lm's: K and V [B, Hkv, N+T, D]."""

    problem: Problem
    q: Any = None
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    stock: list[tuple[Any, Any]] = field(default_factory=list)
    sets: dict[int, Any] = field(default_factory=dict)
    blocks: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import mlx.core as mx

        p = self.problem
        mx.random.seed(p.seed)
        dtype = getattr(mx, p.dtype)
        shape = (p.batch, p.context + p.rows, p.kv_heads, p.head_dim)
        self.q = mx.random.normal((p.batch, p.rows, p.heads, p.head_dim)).astype(dtype)
        for _ in range(p.held):
            k, v = (mx.random.normal(shape, dtype=dtype) for _ in "kv")
            pair = tuple(mx.contiguous(x.transpose(0, 2, 1, 3)) for x in (k, v))
            mx.eval(k, v, pair)
            self.keys.append(k)
            self.values.append(v)
            self.stock.append(pair)
        self.lengths = mx.array([p.context] * p.batch, mx.int32)
        self.num_tokens = mx.array([p.rows] * p.batch, mx.int32)
        rng = np.random.default_rng(p.seed)
        for budget in p.budgets:
            chosen = [np.sort(rng.choice(p.context, budget, replace=False)) for _ in range(p.batch)]
            self.sets[budget] = mx.array(np.stack(chosen).astype(np.int32))
            whole = p.context // BLOCK
            chosen = [np.sort(rng.choice(whole, min(budget // BLOCK, whole), replace=False)) for _ in range(p.batch)]
            self.blocks[budget] = mx.array(np.stack(chosen).astype(np.int32))
        mx.eval(self.q, self.lengths, self.num_tokens, list(self.sets.values()), list(self.blocks.values()))

    def committed(self, name: str) -> np.ndarray:
        """The committed tokens that path `name` reads of the last sequence."""
        kind, _, budget = name.partition(" ")
        if kind == "sparse":
            return np.array(self.sets[int(budget)])[-1]
        if kind == "blocks":
            return (np.array(self.blocks[int(budget)])[-1][:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return np.arange(self.problem.context)


@dataclass(frozen=True)
class Operations:
    """Our side of a comparison. `dense_plan`, `sparse_plan` make once a pass what all layers share (None: nothing)."""

    name: str
    dense: Callable[..., Any]
    sparse: Callable[..., Any]
    score: Callable[..., Any]
    select: Callable[..., Any]
    blocks: Callable[..., Any] | None = None
    dense_plan: Callable[..., Any] | None = None
    sparse_plan: Callable[..., Any] | None = None


def array_operations() -> Operations:
    """The array path: take() and mx.fast.scaled_dot_product_attention, wherever MLX runs."""
    from dustin.metal_kernels import fallback as f

    verify = (f.dense_verify, f.sparse_verify, f.score_heads, f.select_tokens)
    return Operations("array path", *verify, dense_plan=f.dense_plan, sparse_plan=f.sparse_plan)


def kernel_operations() -> Operations:
    """The Metal kernels."""
    from dustin.metal_kernels.dense_verify import dense_verify
    from dustin.metal_kernels.score_heads import score_heads
    from dustin.metal_kernels.select_tokens import select_tokens
    from dustin.metal_kernels.sparse_verify import sparse_verify, sparse_verify_blocks

    return Operations("Metal kernels", dense_verify, sparse_verify, score_heads, select_tokens, sparse_verify_blocks)


def stock_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """What mlx-lm calls: q [B, Hq, T, D] over k, v [B, Hkv, N+T, D], causal from the lower right corner."""
    import mlx.core as mx

    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if q.shape[2] > 1 else None)


def packed_mask(problem: Problem) -> Any:
    """[g*T, N+T] bool: row i is query head i // T of its group at in-flight row i % T."""
    import mlx.core as mx

    group = problem.heads // problem.kv_heads
    last = problem.context + mx.arange(group * problem.rows) % problem.rows
    return mx.arange(problem.context + problem.rows)[None] <= last[:, None]


def packed_attention(q: Any, k: Any, v: Any, scale: float, mask: Any) -> Any:
    """The stock call with the heads of a group as rows, so that K and V need not be read once a query head."""
    import mlx.core as mx

    batch, heads, rows, dim = q.shape
    packed = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    return mx.fast.scaled_dot_product_attention(packed, k, v, scale=scale, mask=mask).reshape(q.shape)


Path = Callable[[Any, int], Any]


def paths(data: Data, operations: Operations) -> dict[str, Callable[[], Path]]:
    """name -> f() -> attend(q [B, T, Hq, D], layer) -> [B, T, Hq, D]: every way that is compared. f runs once a pass."""
    p, turn = data.problem, (0, 2, 1, 3)
    scale, mask = p.head_dim**-0.5, packed_mask(p)
    rows, shape = (data.lengths, data.num_tokens), (p.batch, p.rows, p.context + p.rows)

    def stock() -> Path:
        return lambda q, layer: stock_attention(q.transpose(turn), *data.stock[layer], scale).transpose(turn)

    def packed() -> Path:
        return lambda q, layer: packed_attention(q.transpose(turn), *data.stock[layer], scale, mask).transpose(turn)

    def ours() -> Path:
        plan = {"plan": operations.dense_plan(*rows, *shape)} if operations.dense_plan else {}
        return lambda q, layer: operations.dense(q, data.keys[layer], data.values[layer], *rows, scale, **plan)

    def chosen(operation: Callable[..., Any], sets: Any, make_plan: Callable[..., Any] | None) -> Callable[[], Path]:
        import mlx.core as mx

        given = (sets, mx.array([sets.shape[1]] * p.batch, mx.int32), *rows)

        def make() -> Path:
            plan = {"plan": make_plan(*given, *shape)} if make_plan else {}
            return lambda q, layer: operation(q, data.keys[layer], data.values[layer], *given, scale, **plan)

        return make

    ways: dict[str, Callable[[], Path]] = {"stock": stock, "stock packed": packed, "our dense": ours}
    for budget in p.budgets:
        ways[f"sparse {budget}"] = chosen(operations.sparse, data.sets[budget], operations.sparse_plan)
        if operations.blocks:
            ways[f"blocks {budget}"] = chosen(operations.blocks, data.blocks[budget], None)
    return ways


def selection(data: Data, operations: Operations, budget: int) -> tuple[Any, Any]:
    """(indices, counts): scores of one layer and the quota rule, as a round does them."""
    p = data.problem
    heads = tuple(range(min(SCORING_HEADS, p.heads // p.kv_heads)))
    scores = operations.score(data.q[:, -1:, : len(heads)], data.keys[0], heads, p.heads, data.lengths, p.head_dim**-0.5)
    quota = {"budget": budget, "num_sink_tokens": SINKS, "num_recent_tokens": RECENT, "num_draft_selected": 0}
    return operations.select(scores, None, data.lengths, **quota)


def exact(data: Data, committed: np.ndarray) -> np.ndarray:
    """Float64 attention [T, g, D] of the last sequence and kv head in layer 0, over `committed` and the in-flight rows."""
    import mlx.core as mx

    p = data.problem
    group = p.heads // p.kv_heads
    k, v = (np.array(x[-1, :, -1].astype(mx.float32)).astype(np.float64) for x in (data.keys[0], data.values[0]))
    q = np.array(data.q[-1, :, -group:].astype(mx.float32)).astype(np.float64)
    out = np.zeros(q.shape)
    for t in range(p.rows):
        seen = np.concatenate([committed, np.arange(p.context, p.context + t + 1)])
        logits = q[t] @ k[seen].T * p.head_dim**-0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out[t] = weights / weights.sum(1, keepdims=True) @ v[seen]
    return out


def errors(data: Data, ways: dict[str, Callable[[], Path]]) -> dict[str, float]:
    """Relative RMS of every path against float64; inf where something is not finite."""
    import mlx.core as mx

    p, found = data.problem, {}
    for name, make in ways.items():
        want = exact(data, data.committed(name))
        got = np.array(make()(data.q, 0)[-1, :, -want.shape[1] :].astype(mx.float32)).astype(np.float64)
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        found[name] = float(error) if np.isfinite(error) else float("inf")
    if any(error > TOLERANCE[p.dtype] for error in found.values()):
        shown = ", ".join(f"{name} {error:.2g}" for name, error in found.items())
        raise ValueError(f"numbers differ from float64 ({shown}), allowed {TOLERANCE[p.dtype]}: no speed is printed")
    return found


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of each call, one after the other in every repeat, so that a drifting clock hits all alike."""
    import mlx.core as mx

    for call in (*calls.values(), *calls.values()):
        mx.eval(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            mx.synchronize()
            start = clock()
            mx.eval(call())
            mx.synchronize()
            times[name].append((clock() - start) * 1e3)
    return times


def measure(
    problem: Problem, operations: Operations, repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """One row: milliseconds a layer of every path, a round's selection, bytes, ratios. ValueError when the numbers are off.

    The output of a layer is the next one's query, so layers run one after the other as in a model.
    """
    data = Data(problem)
    ways = paths(data, operations)
    off = errors(data, ways)

    def stacked(make: Callable[[], Path]) -> Callable[[], Any]:
        def run() -> Any:
            q, attend = data.q, make()
            for layer in range(problem.stack):
                q = attend(q, layer % problem.held)
            return q

        return run

    calls = {name: stacked(make) for name, make in ways.items()}
    calls |= {f"selection {budget}": lambda k=budget: selection(data, operations, k) for budget in problem.budgets}
    times = {name: statistics.median(found) for name, found in interleaved(calls, repeats, clock).items()}
    a_layer = {name: times[name] / problem.stack for name in ways}
    dense = {name: ms for name, ms in a_layer.items() if not name.startswith(("sparse", "blocks"))}
    baseline = min(dense, key=dense.__getitem__)
    return _row(problem, operations.name, repeats, a_layer, times, baseline, off)


def _row(
    p: Problem,
    path: str,
    repeats: int,
    a_layer: dict[str, float],
    times: dict[str, float],
    baseline: str,
    off: dict[str, float],
) -> dict[str, Any]:
    whole = {k: a_layer[f"sparse {k}"] * p.stack + times[f"selection {k}"] for k in p.budgets}
    dense_bytes = p.batch * (p.context + p.rows) * p.row_bytes
    return {
        "our_path": path,
        "shape": p.name,
        "layers": p.stack,
        "layers_held": p.held,
        "weights": "random",
        "dtype": p.dtype,
        "context": p.context,
        "batch": p.batch,
        "query_rows": p.rows,
        "repeats": repeats,
        "ms_per_layer": {name: round(ms, 4) for name, ms in a_layer.items()},
        "selection_ms_per_round": {str(k): round(times[f"selection {k}"], 3) for k in p.budgets},
        "dense_bytes_per_layer": dense_bytes,
        "dense_gb_per_s": round(dense_bytes / a_layer[baseline] / 1e6, 1),
        "sparse_bytes_per_layer": {str(k): p.batch * (k + p.rows) * p.row_bytes for k in p.budgets},
        "baseline": baseline,
        "ratio_our_dense_to_stock": round(a_layer["stock"] / a_layer["our dense"], 2),
        "ratio_attention_only": {str(k): round(a_layer[baseline] / a_layer[f"sparse {k}"], 2) for k in p.budgets},
        "ratio": {str(k): round(a_layer[baseline] * p.stack / whole[k], 2) for k in p.budgets},
        "relative_rms": {name: float(f"{error:.2g}") for name, error in off.items()},
    }


def show(row: dict[str, Any]) -> str:
    """A row as a line for people."""
    times = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms_per_layer"].items())
    ratios = ", ".join(f"k={k} {ratio:.2f}x" for k, ratio in row["ratio"].items())
    head = f"{row['shape']} ctx {row['context']} B {row['batch']} T {row['query_rows']}, {row['our_path']}"
    return f"{head}: ms a layer: {times}; sparse with selection over {row['baseline']}: {ratios}"


def describe_device() -> dict[str, Any]:
    """MLX version and the device that it computes on."""
    import mlx.core as mx

    info = mx.device_info() if hasattr(mx, "device_info") else {}
    return {"mlx": mx.__version__, "device": str(info.get("device_name", "unknown")), "memory_bytes": info.get("memory_size")}
