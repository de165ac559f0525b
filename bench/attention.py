"""Attention of one verification round, selection included, against tuned dense attention in the same run.

A round is one CUDA graph: score the target's and the draft's heads, select, translate, then one sparse kernel a layer.
Every layer reads other memory (8 pools, and other sequences in them for small batches), far past the L2. The baseline is
the better of our dense kernel, torch's fused call with the query heads packed into its row axis (no in-flight mask, so a
little less work), and FlashInfer when it can be imported. A case prints no speed when a result is off its reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import rows
from dustin.triton_kernels import dense_verify as dense
from dustin.triton_kernels import sparse_verify as sparse
from dustin.triton_kernels.attention_core import AttentionConfig, AttentionWorkspace
from dustin.triton_kernels.runtime import INTERPRETED
from dustin.triton_kernels.score_heads import ScoreConfig, group_heads, score_heads, workspace_for
from dustin.triton_kernels.select_tokens import SelectWorkspace, select_tokens
from dustin.triton_kernels.translate_slots import translate_slots

TOKENS, LAYERS_HELD, PAGE = 6, 8, 64
SINKS, RECENT, DRAFT_SHARE = 4, 32, 0.6
TOLERANCE = {"attention": 1e-2, "scores": 1e-3}
Launch = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """Query heads, kv heads, head dim, layers; the first three are also those of a draft."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    layers: int

    @property
    def row_elements(self) -> int:
        return self.kv_heads * self.dim


LARGE, SMALL = Shape("64/8/128", 64, 8, 128, 80), Shape("28/4/128", 28, 4, 128, 28)
DRAFT = Shape("14/2/64", 14, 2, 64, 24)


@dataclass(frozen=True)
class Case:
    """One row of the table. `target_heads` score in each of `target_layers`; `dense_layers` ignore the set."""

    shape: Shape
    context: int
    batch: int
    budget: int
    target_layers: int = 1
    target_heads: tuple[int, ...] = (0, 1, 2, 3)
    dense_layers: int = 0
    aim: str = ""

    @property
    def scoring(self) -> str:
        kv = len({head // (self.shape.heads // self.shape.kv_heads) for head in self.target_heads})
        return (
            f"{self.target_layers} target layers x {len(self.target_heads)} heads of {kv} kv heads"
            " + 3 draft layers x 4 heads of 1 kv head, every round"
        )


def table() -> list[Case]:
    """The cases of the benchmark; the aims are the paper's figure and our own."""
    base = Case(LARGE, 32768, 16, 512, aim="27.85 (the paper), 40")
    every = tuple(range(LARGE.heads))
    return [
        base,
        replace(base, batch=32, aim="36, 45"),
        Case(LARGE, 131072, 8, 1024, aim="50, 75"),
        Case(SMALL, 32768, 32, 512, aim="20, 30"),
        *(replace(base, budget=k, aim="") for k in (128, 256, 1024, 2048)),
        *(replace(base, batch=b, aim="") for b in (1, 2, 4, 8)),
        replace(base, target_heads=(0, 8, 16, 24), aim=""),
        replace(base, target_layers=2, target_heads=every, aim=""),
        replace(base, target_layers=3, target_heads=every, aim=""),
        replace(base, dense_layers=1, aim=""),
    ]


@dataclass
class Memory:
    """K and V of LAYERS_HELD layers for `tokens` rows of the widest shape, and K of three draft layers, random."""

    device: str
    tokens: int
    layout: str = "interleaved"
    buffers: list[torch.Tensor] = field(default_factory=list)
    draft_keys: list[torch.Tensor] = field(default_factory=list)
    workspace: AttentionWorkspace | None = None

    def __post_init__(self) -> None:
        def random(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=DTYPE, device=self.device).normal_()

        for _ in range(LAYERS_HELD):
            self.buffers.append(random(2 * self.tokens * LARGE.row_elements))
        self.draft_keys = [random(2 * self.tokens * DRAFT.row_elements) for _ in range(3)]
        self.workspace = AttentionWorkspace(132 * 8 * 128, 128, 1 << 16, self.device)

    def pools(self, layer: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as pages [pages, PAGE, Hkv, D]: two halves of a buffer, or side by side for each head."""
        if self.layout == "interleaved":
            both = self.buffers[layer].view(-1, PAGE, shape.kv_heads, 2, shape.dim)
            return both[:, :, :, 0], both[:, :, :, 1]
        both = self.buffers[layer].view(2, -1, PAGE, shape.kv_heads, shape.dim)
        return both[0], both[1]

    def draft_pool(self, layer: int) -> torch.Tensor:
        """K of a draft layer; half of its buffer's rows when K and V are interleaved."""
        if self.layout == "interleaved":
            return self.draft_keys[layer].view(-1, PAGE, DRAFT.kv_heads, 2, DRAFT.dim)[:, :, :, 0]
        return self.draft_keys[layer].view(2, -1, PAGE, DRAFT.kv_heads, DRAFT.dim)[0]


DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def time_us(launches: list[Launch], repeats: int = 9) -> float:
    """Median time of a graph replay of all launches, in microseconds."""
    if INTERPRETED:
        for launch in launches:
            launch()
        return math.nan
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    graph.replay()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def together(first: list[Launch], second: list[Launch], side: Any) -> Launch:
    """One launch that runs two lists on two streams and joins them (the branches of a graph)."""

    def launch() -> None:
        if INTERPRETED:
            for each in (*first, *second):
                each()
            return
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for each in second:
                each()
        for each in first:
            each()
        here.wait_stream(side)

    return launch


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64; infinite when not finite."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if math.isfinite(error) else math.inf


class Round:
    """All tensors of one case, allocated once: nothing is allocated while a graph is captured."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.case, self.memory, self.shape = case, memory, case.shape
        batch, device = case.batch, memory.device
        self.length = case.context - TOKENS
        torch.manual_seed(0)
        self.lengths = self.ints(self.length)
        self.fed = self.ints(TOKENS)
        pages = -(-case.context // PAGE)
        total = memory.tokens * LARGE.row_elements // self.shape.row_elements // PAGE
        slices = max(1, min(total // (batch * pages), 10))
        order = torch.randperm(total, device=device, dtype=torch.int32)[: slices * batch * pages]
        self.tables = list(order.reshape(slices, batch, pages).contiguous())
        order = torch.randperm(memory.tokens // PAGE, device=device, dtype=torch.int32)[: batch * pages]
        self.draft_table = order.reshape(batch, pages)
        self.q = [self.queries(TOKENS, self.shape.heads, self.shape.dim) for _ in range(LAYERS_HELD)]
        self.out = torch.empty_like(self.q[0])
        self.indices = torch.empty(batch, case.budget, dtype=torch.int32, device=device)
        self.counts = torch.empty(batch, dtype=torch.int32, device=device)
        width = case.budget + TOKENS
        self.slots = [torch.zeros(batch, width, dtype=torch.int32, device=device) for _ in range(slices)]
        self.slot_counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.by_draft = int(DRAFT_SHARE * (case.budget - SINKS - RECENT))
        self.target_scores, self.draft_scores = (torch.empty(batch, self.length, device=device) for _ in range(2))
        self.history = self.queries(1, len(case.target_heads), self.shape.dim)
        self.lookahead = self.queries(TOKENS - 1, 4, DRAFT.dim)
        self.target_groups = group_heads(case.target_heads, self.shape.heads, self.shape.kv_heads, device)
        self.draft_groups = group_heads(range(4), DRAFT.heads, DRAFT.kv_heads, device)
        self.target_rows, self.draft_rows = self.ints(1), self.ints(TOKENS - 1)
        self.set_target_scoring(None, None)
        self.set_draft_scoring(None, None)
        self.select_scratch = SelectWorkspace(batch, self.length, case.budget, self.by_draft, device)
        self.side = None if INTERPRETED else torch.cuda.Stream()
        self.sparse_config: AttentionConfig | None = None
        self.dense_config: AttentionConfig | None = None

    def ints(self, value: int) -> torch.Tensor:
        return torch.full((self.case.batch,), value, dtype=torch.int32, device=self.memory.device)

    def queries(self, count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(self.case.batch, count, heads, dim, device=self.memory.device).to(DTYPE)

    def set_target_scoring(self, keep: bool | None, config: ScoreConfig | None) -> None:
        shape = (self.case.batch, 1, self.target_groups, self.length, self.shape.dim, DTYPE)
        scratch = workspace_for(*shape, keep, config)
        self.target_scoring: dict[str, Any] = {"keep_weights": keep, "config": config, "workspace": scratch}

    def set_draft_scoring(self, keep: bool | None, config: ScoreConfig | None) -> None:
        shape = (self.case.batch, TOKENS - 1, self.draft_groups, self.length, DRAFT.dim, DTYPE)
        scratch = workspace_for(*shape, keep, config)
        self.draft_scoring: dict[str, Any] = {"keep_weights": keep, "config": config, "workspace": scratch}

    def score_target(self, layer: int) -> None:
        score_heads(
            self.history, self.pools(layer)[0], self.tables[0], self.lengths, self.target_groups,
            self.target_scores, num_rows=self.target_rows, weight=1 / self.case.target_layers, add=layer > 0, **self.target_scoring,
        )  # fmt: skip

    def score_draft(self, layer: int) -> None:
        score_heads(
            self.lookahead, self.memory.draft_pool(layer), self.draft_table, self.lengths, self.draft_groups,
            self.draft_scores, num_rows=self.draft_rows, weight=1 / 3,
            add=layer > 0, **self.draft_scoring,
        )  # fmt: skip

    def choose(self) -> None:
        select_tokens(
            self.target_scores, self.draft_scores, self.lengths, budget=self.case.budget, num_sink_tokens=SINKS,
            num_recent_tokens=RECENT, num_draft_selected=self.by_draft, indices=self.indices, counts=self.counts,
            workspace=self.select_scratch,
        )  # fmt: skip

    def translate(self, part: int = 0) -> None:
        translate_slots(
            self.indices, self.counts, self.lengths, self.fed, self.tables[part], PAGE, TOKENS,
            slots=self.slots[part], slot_counts=self.slot_counts,
        )  # fmt: skip

    def scoring(self) -> list[Launch]:
        """Target and draft scores, two branches of the graph."""
        target = [lambda i=i: self.score_target(i) for i in range(self.case.target_layers)]
        return [together([lambda i=i: self.score_draft(i) for i in range(3)], target, self.side)]

    def selection(self) -> list[Launch]:
        return [*self.scoring(), self.choose, self.translate]

    def start(self) -> None:
        """Choose a set once and translate it for every slice of the memory."""
        for launch in self.selection():
            launch()
        for part in range(len(self.tables)):
            self.translate(part)

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory.pools(layer % LAYERS_HELD, self.shape)

    def sparse_layer(self, layer: int) -> None:
        part = (layer // LAYERS_HELD) % len(self.tables)
        sparse.sparse_verify(
            self.q[layer % LAYERS_HELD], *self.pools(layer), self.tables[part], self.lengths, self.fed, self.indices,
            self.counts, slots=self.slots[part], slot_counts=self.slot_counts, out=self.out,
            workspace=self.memory.workspace, config=self.sparse_config,
        )  # fmt: skip

    def dense_layer(self, layer: int) -> None:
        dense.dense_verify(
            self.q[layer % LAYERS_HELD], *self.pools(layer), self.tables[(layer // LAYERS_HELD) % len(self.tables)],
            self.lengths, self.fed, out=self.out, workspace=self.memory.workspace, config=self.dense_config,
        )  # fmt: skip

    def layers(self) -> list[Launch]:
        """Attention of every layer of a round."""
        kept = self.case.dense_layers
        return [
            (lambda i=i: self.dense_layer(i)) if i < kept else (lambda i=i: self.sparse_layer(i)) for i in range(self.shape.layers)
        ]

    def packed_layer(self, layer: int) -> None:
        """torch's call over contiguous [B, Hkv, S, D] keys, g * T rows a kv head."""
        batch, shape = self.case.batch, self.shape
        held, size = layer % LAYERS_HELD, batch * shape.kv_heads * self.case.context * shape.dim
        k, v = (half[:size].view(batch, shape.kv_heads, -1, shape.dim) for half in self.memory.buffers[held].chunk(2))
        q = self.q[held].view(batch, shape.kv_heads, -1, shape.dim)
        F.scaled_dot_product_attention(q, k, v)


def reference(run: Round, queries: torch.Tensor, b: int, head: int, keys: torch.Tensor, layer: int) -> torch.Tensor:
    """Float64 attention [T, g, D] of one sequence and kv head over committed `keys` and the in-flight rows."""
    k_pool, v_pool = run.pools(layer)
    flying = torch.arange(run.length, run.length + TOKENS, device=keys.device)
    positions = torch.cat([keys.long(), flying])
    pages = run.tables[0][b][positions // PAGE].long()
    k, v = (pool[pages, positions % PAGE, head].double() for pool in (k_pool, v_pool))
    group = run.shape.heads // run.shape.kv_heads
    q = queries[b, :, head * group : (head + 1) * group].double()
    logits = torch.einsum("tgd,nd->tgn", q, k) / math.sqrt(run.shape.dim)
    hidden = flying[None, :] > run.length + torch.arange(TOKENS, device=keys.device)[:, None]
    logits[:, :, len(keys) :].masked_fill_(hidden[:, None, :], -math.inf)
    return torch.einsum("tgn,nd->tgd", logits.softmax(-1), v)


def gate(run: Round, kind: str) -> float:
    """Worst relative RMS of a layer's output on the corner sequences and heads."""
    launch = run.sparse_layer if kind == "sparse" else run.dense_layer
    run.out.fill_(math.nan)
    launch(0)
    if not torch.isfinite(run.out).all():
        return math.inf
    group, worst = run.shape.heads // run.shape.kv_heads, 0.0
    for b in {0, run.case.batch - 1}:
        everything = torch.arange(run.length, device=run.memory.device)
        keys = run.indices[b, : int(run.counts[b])] if kind == "sparse" else everything
        for head in {0, run.shape.kv_heads - 1}:
            want = reference(run, run.q[0], b, head, keys, 0)
            worst = max(worst, relative_rms(run.out[b, :, head * group : (head + 1) * group], want))
    return worst


def gate_selection(run: Round) -> float:
    """Relative RMS of the target's scores of the last sequence; infinite when a chosen set differs from sorting."""
    b, group = run.case.batch - 1, run.shape.heads // run.shape.kv_heads
    positions = torch.arange(run.length, device=run.memory.device)
    want = torch.zeros(run.length, dtype=torch.float64, device=run.memory.device)
    for layer in range(run.case.target_layers):
        k_pool = run.pools(layer)[0]
        pages = run.tables[0][b][positions // PAGE].long()
        for s, head in enumerate(run.case.target_heads):
            k = k_pool[pages, positions % PAGE, head // group].double()
            logits = k @ run.history[b, 0, s].double() / math.sqrt(run.shape.dim)
            want += logits.softmax(0) / (len(run.case.target_heads) * run.case.target_layers)
    for row in range(run.case.batch):
        chosen = torch.zeros(run.length, dtype=torch.bool, device=run.memory.device)
        chosen[:SINKS] = chosen[run.length - RECENT :] = True
        for scores, quota in ((run.draft_scores, run.by_draft), (run.target_scores, run.case.budget)):
            quota = min(quota, run.case.budget - int(chosen.sum()))
            ranked = scores[row].masked_fill(chosen, -math.inf).sort(descending=True, stable=True).indices
            chosen[ranked[:quota]] = True
        if not torch.equal(chosen.nonzero()[:, 0].int(), run.indices[row]):
            return math.inf
    return relative_rms(run.target_scores[b], want)


def candidates(case: Case, kind: str) -> list[AttentionConfig]:
    """What `--tune` tries."""
    group = case.batch * case.shape.kv_heads
    near = [2**i for i in range(6) if 64 <= 2**i * group <= 528 or (group == 8 and 8 <= 2**i <= 16)]
    if kind == "dense":
        counts = [*near[:1], 33] if group == 8 else near[:2]
        return [AttentionConfig(64, 64, 4, 5, waves=(n * group + 0.01) / 132, fused_splits=8) for n in counts]
    found = []
    for block_n, stages in ((64, 5), (64, 7), (32, 7), (32, 9), (32, 5)):
        for splits in near[:2]:
            for fused in (8, 0) if splits > 1 and group <= 64 else (8,):
                for early in (0, 6 << 20, 12 << 20, 24 << 20):
                    waves = (splits * group + 0.01) / 132
                    found.append(AttentionConfig(64, block_n, 4, stages, waves, fused, prefetch_bytes=early))
    return found


def tune(run: Round, kind: str) -> AttentionConfig:
    """The fastest candidate on this case."""
    best, config = math.inf, None
    for candidate in candidates(run.case, kind):
        if kind == "dense":
            run.dense_config = candidate
            launches = [lambda i=i: run.dense_layer(i) for i in range(4)]
        else:
            run.sparse_config = candidate
            launches = [lambda i=i: run.sparse_layer(i) for i in range(16)]
        elapsed = time_us(launches, 3 if kind == "dense" else 9) / len(launches)
        if elapsed < best:
            best, config = elapsed, candidate
    if config is None:
        raise click.ClickException(f"no {kind} candidate ran")
    return config


SCORE_CANDIDATES = [
    (keep, ScoreConfig(block_n, mass_n, tiles, chunk, stages, warps))
    for block_n, mass_n, tiles, chunk, stages, warps in (
        (64, 64, 1, 1024, 5, 2), (64, 64, 4, 512, 3, 1), (64, 64, 8, 1024, 5, 2), (64, 64, 4, 1024, 5, 1),
        (128, 128, 2, 2048, 5, 4), (64, 64, 16, 2048, 7, 2), (32, 32, 8, 1024, 5, 1),
    )
    for keep in (True, False)
]  # fmt: skip


def tune_scoring(run: Round) -> str:
    """Keep the fastest scoring launch for the target and for the draft; say which."""
    said = []
    for name, setter, launch in (
        ("target", run.set_target_scoring, run.score_target),
        ("draft", run.set_draft_scoring, run.score_draft),
    ):
        timed = []
        for keep, config in SCORE_CANDIDATES:
            setter(keep, config)
            timed.append((time_us([lambda launch=launch, i=i: launch(i) for i in range(3)], 5) / 3, keep, config))
        elapsed, keep, config = min(timed, key=lambda entry: entry[0])
        setter(keep, config)
        logits = "kept" if keep else "recomputed"
        sizes = f"{config.block_n}/{config.mass_n}x{config.mass_tiles}/{config.chunk}"
        said.append(f"{name} {elapsed:.1f} us ({logits}, {sizes}, {config.num_stages} stages, {config.num_warps} warps)")
    return ", ".join(said)


def describe(config: AttentionConfig) -> str:
    """A configuration in a few words."""
    merge = "fused" if config.fused_splits else "separate"
    return (
        f"tile {config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages, "
        f"waves {config.waves:.2f}, {merge} merge, {config.prefetch_bytes >> 20} MiB early"
    )


def packed_us(run: Round) -> tuple[float, str]:
    """The better of torch's flash and cuDNN kernels with packed query heads."""
    best = (math.inf, "none")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                elapsed = time_us([lambda i=i: run.packed_layer(i) for i in range(4)], 3) / 4
        except RuntimeError:
            continue
        best = min(best, (elapsed, f"torch packed ({backend.name.lower()})"))
    return best


def flashinfer_us(run: Round) -> tuple[float, str]:
    """FlashInfer's paged prefill kernel, when installed."""
    try:
        import flashinfer
    except ImportError:
        return math.inf, "FlashInfer"
    batch, shape, device = run.case.batch, run.shape, run.memory.device
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
    each = run.tables[0].shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        steps * TOKENS, steps * each, run.tables[0].flatten(), run.ints((run.case.context - 1) % PAGE + 1),
        shape.heads, shape.kv_heads, shape.dim, PAGE, causal=True, q_data_type=DTYPE,
    )  # fmt: skip
    flat = [q.view(-1, shape.heads, shape.dim) for q in run.q]
    return time_us([lambda i=i: wrapper.run(flat[i], run.pools(i)) for i in range(4)], 3) / 4, "FlashInfer"


def measure(case: Case, memory: Memory, copy_rate: float, baselines: dict[Any, Any], tuned: bool) -> dict[str, Any]:
    """One row, or ClickException when a result is off its reference."""
    run = Round(case, memory)
    run.start()
    key, scored = (case.shape, case.context, case.batch), baselines.setdefault("scoring", {})
    scoring_config = "shipped"
    if tuned:
        if key not in scored:
            scored[key] = tune_scoring(run), run.target_scoring, run.draft_scoring
        scoring_config, target, draft = scored[key]
        run.set_target_scoring(target["keep_weights"], target["config"])
        run.set_draft_scoring(draft["keep_weights"], draft["config"])
        run.start()
        run.sparse_config = tune(run, "sparse")
        run.dense_config = baselines[key]["config"] if key in baselines else tune(run, "dense")
    errors = {"sparse": gate(run, "sparse"), "dense": gate(run, "dense"), "scores": gate_selection(run)}
    allowed = {name: TOLERANCE["scores" if name == "scores" else "attention"] for name in errors}
    if any(not errors[name] <= allowed[name] for name in errors):
        raise click.ClickException(f"parity gate is red for {case}: {errors}, allowed {allowed}: no speed is printed")
    if key not in baselines:
        ours = time_us([lambda i=i: run.dense_layer(i) for i in range(LAYERS_HELD)], 5) / LAYERS_HELD
        packed, library = packed_us(run), flashinfer_us(run)
        best = min((ours, "our dense kernel"), packed, library)
        baselines[key] = {"ours": ours, "packed": packed[0], "library": library[0], "best": best, "config": run.dense_config}
    base = baselines[key]
    attention = time_us([lambda i=i: run.sparse_layer(i) for i in range(case.shape.layers)]) / case.shape.layers
    scoring, selection = time_us(run.scoring()), time_us(run.selection())
    whole = time_us([*run.selection(), *run.layers()])
    dense_total = base["best"][0] * case.shape.layers
    row_bytes = 4 * case.shape.row_elements
    group = case.shape.heads // case.shape.kv_heads
    shipped = sparse.choose_config(TOKENS * group, case.shape.dim, DTYPE)
    return {
        "bench": "attention",
        "card": torch.cuda.get_device_name() if not INTERPRETED else "interpreter",
        "shape": f"{case.shape.name}, {case.shape.layers} layers",
        "weights": "random",
        "kv_layout": memory.layout,
        "context": case.context,
        "batch": case.batch,
        "query_rows": TOKENS,
        "budget": case.budget,
        "scoring": case.scoring,
        "dense_layers": case.dense_layers,
        "round_us": round(whole, 1),
        "per_layer_us": round(whole / case.shape.layers, 2),
        "sparse_attention_us_per_layer": round(attention, 2),
        "scoring_us_per_round": round(scoring, 1),
        "selection_us_per_round": round(selection, 1),
        "selection_percent_of_dense": round(100 * selection / dense_total, 2),
        "our_dense_us_per_layer": round(base["ours"], 1),
        "torch_packed_us_per_layer": round(base["packed"], 1) if math.isfinite(base["packed"]) else None,
        "flashinfer_us_per_layer": round(base["library"], 1) if math.isfinite(base["library"]) else None,
        "copy_tb_per_s": round(copy_rate, 2),
        "dense_over_copy_floor": round(base["ours"] * copy_rate / (case.batch * case.context * row_bytes / 1e6), 3),
        "sparse_byte_floor_us": round(case.batch * (case.budget + TOKENS) * row_bytes / copy_rate / 1e6, 2),
        "baseline": base["best"][1],
        "ratio": round(dense_total / whole, 2),
        "ratio_attention_only": round(base["best"][0] / attention, 2),
        "aim": case.aim,
        "relative_rms": max(errors["sparse"], errors["dense"]),
        "relative_rms_scores": errors["scores"],
        "config": describe(run.sparse_config or shipped),
        "scoring_config": scoring_config,
        "command": rows.command(),
        "commit": rows.commit(),
    }


def copy_tb_per_s(memory: Memory) -> float:
    """Bytes read and written a second by a device copy of one pool."""
    source, target = memory.buffers[0], memory.buffers[1]
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * source.numel() * source.element_size() / statistics.median(times[1:]) / 1e6


@click.command()
@click.option("--only", default="", help="Run the cases whose 'shape context batch budget' contains this text.")
@click.option("--tune/--no-tune", "tuned", default=False, help="Try several launch configurations for each case and keep the best.")
@click.option("--layout", type=click.Choice(["interleaved", "separate"]), default="interleaved", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=rows.RESULTS / "attention.jsonl", show_default=True)
def main(only: str, tuned: bool, layout: str, output: Path) -> None:
    """Sparse verification attention, selection included, against tuned dense attention on one GPU."""
    if not torch.cuda.is_available() and not INTERPRETED:
        raise click.ClickException("needs an NVIDIA GPU")
    memory = Memory("cuda", 32 * 32768, layout)
    copy_rate = copy_tb_per_s(memory)
    click.echo(f"copy {copy_rate:.2f} TB/s", err=True)
    done: list[dict[str, Any]] = []
    baselines: dict = {}
    for case in table():
        if only not in f"{case.shape.name} {case.context} {case.batch} {case.budget}":
            continue
        row = measure(case, memory, copy_rate, baselines, tuned)
        done.append(row)
        rows.write(output, done)
        click.echo(
            f"{row['shape']:20} ctx {row['context']:6} B {row['batch']:2} k {row['budget']:4}  {row['ratio']:6.2f}x "
            f"(attention only {row['ratio_attention_only']:.2f}x)  layer {row['per_layer_us']:.2f} us  "
            f"sparse {row['sparse_attention_us_per_layer']:.2f}  select {row['selection_us_per_round']:.0f} us/round "
            f"({row['selection_percent_of_dense']:.2f} %)  dense {row['our_dense_us_per_layer']:.1f} "
            f"packed {row['torch_packed_us_per_layer']}  floor x{row['dense_over_copy_floor']:.3f}  rms {row['relative_rms']:.1e}  "
            f"[{row['config']}]  {'aim ' + row['aim'] if row['aim'] else row['scoring']}"
        )
