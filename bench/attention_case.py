"""The memory and the launches of one attention case: pools, a round's tensors, and what one layer does."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dustin.triton_kernels import dense_verify as dense
from dustin.triton_kernels import sparse_verify as sparse
from dustin.triton_kernels.attention_core import AttentionConfig, AttentionWorkspace
from dustin.triton_kernels.runtime import INTERPRETED
from dustin.triton_kernels.score_heads import ScoreConfig, group_heads, score_layers, workspace_for
from dustin.triton_kernels.select_tokens import SelectWorkspace, select_tokens
from dustin.triton_kernels.translate_slots import translate_slots

TOKENS, LAYERS_HELD, PAGE = 6, 8, 64
SINKS, RECENT, DRAFT_SHARE = 4, 32, 0.6
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
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


@dataclass
class Memory:
    """K and V of LAYERS_HELD layers for `tokens` rows of the widest shape, and K of three draft layers, random."""

    device: str
    tokens: int
    layout: str = "separate"
    shuffled: bool = False  # pages in random order; else as the allocator of the CUDA backend hands them out, ascending
    buffers: list[torch.Tensor] = field(default_factory=list)
    draft_keys: list[torch.Tensor] = field(default_factory=list)
    workspace: AttentionWorkspace | None = None

    def __post_init__(self) -> None:
        def random(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=DTYPE, device=self.device).normal_()

        for _ in range(LAYERS_HELD):
            self.buffers.append(random(2 * self.tokens * LARGE.row_elements))
        self.draft_keys = [random(2 * self.tokens * DRAFT.row_elements) for _ in range(3)]
        self.workspace = AttentionWorkspace(132 * 8 * 128, 128, 1 << 16, self.device, 132 * 4 * 64)

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


@functools.cache
def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """What graphs are captured on, and what they fork to. Made together: torch hands out 32 streams in turn, so that one made later
    may be one made before, and a fork from a stream to itself is none."""
    return torch.cuda.Stream(), torch.cuda.Stream()


def time_us(launches: list[Launch], repeats: int = 9) -> float:
    """Median time of a graph replay of all launches, in microseconds."""
    if INTERPRETED:
        for launch in launches:
            launch()
        return math.nan
    stream = streams()[0]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
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


def copied_tb_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes read and written a second by a device copy. Launched, not replayed: a copy within a graph is slower."""
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * source.numel() * source.element_size() / statistics.median(times[1:]) / 1e6


def together(first: list[Launch], second: list[Launch], side: Any) -> Launch:
    """One launch that runs two lists on two streams and joins them (the branches of a graph)."""

    def launch() -> None:
        if INTERPRETED:
            for each in (*first, *second):
                each()
            return
        here = torch.cuda.current_stream()
        if side == here:
            raise RuntimeError(f"expected a stream to fork to, got {side}, the one that launches: its branch would not be one")
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for each in second:
                each()
        for each in first:
            each()
        here.wait_stream(side)

    return launch


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
        order = self.pages(total)[: slices * batch * pages]
        self.tables = list(order.reshape(slices, batch, pages).contiguous())
        self.draft_table = self.pages(memory.tokens // PAGE)[: batch * pages].reshape(batch, pages)
        self.q = [self.queries(TOKENS, self.shape.heads, self.shape.dim) for _ in range(LAYERS_HELD)]
        self.out = torch.empty_like(self.q[0])
        self.indices = torch.empty(batch, case.budget, dtype=torch.int32, device=device)
        self.counts = torch.empty(batch, dtype=torch.int32, device=device)
        width = case.budget + TOKENS
        self.slots = [torch.zeros(batch, width, dtype=torch.int32, device=device) for _ in range(slices)]
        self.slot_counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.by_draft = int(DRAFT_SHARE * (case.budget - SINKS - RECENT))
        # Whole pages of columns, as in the engine.
        self.columns = pages * PAGE
        self.target_scores, self.draft_scores = (torch.empty(batch, self.columns, device=device) for _ in range(2))
        self.history = self.queries(1, len(case.target_heads), self.shape.dim)
        self.lookahead = self.queries(TOKENS - 1, 4, DRAFT.dim)
        self.target_groups = group_heads(case.target_heads, self.shape.heads, self.shape.kv_heads, device)
        self.draft_groups = group_heads(range(4), DRAFT.heads, DRAFT.kv_heads, device)
        self.target_rows, self.draft_rows = self.ints(1), self.ints(TOKENS - 1)
        self.set_target_scoring(None, None)
        self.set_draft_scoring(None, None)
        self.select_scratch = SelectWorkspace(batch, self.columns, case.budget, self.by_draft, device)
        self.side = None if INTERPRETED else streams()[1]
        self.sparse_config: AttentionConfig | None = None
        self.dense_config: AttentionConfig | None = None

    def pages(self, count: int) -> torch.Tensor:
        """Page numbers in the order in which sequences take them."""
        make = torch.randperm if self.memory.shuffled else torch.arange
        return make(count, device=self.memory.device, dtype=torch.int32)

    def ints(self, value: int) -> torch.Tensor:
        return torch.full((self.case.batch,), value, dtype=torch.int32, device=self.memory.device)

    def queries(self, count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(self.case.batch, count, heads, dim, device=self.memory.device).to(DTYPE)

    def set_target_scoring(self, keep: bool | None, config: ScoreConfig | None) -> None:
        shape = (self.case.batch, 1, self.target_groups, self.columns, self.shape.dim, DTYPE)
        scratch = workspace_for(*shape, keep, config, self.case.target_layers)
        self.target_scoring: dict[str, Any] = {"keep_weights": keep, "config": config, "workspace": scratch}

    def set_draft_scoring(self, keep: bool | None, config: ScoreConfig | None) -> None:
        shape = (self.case.batch, TOKENS - 1, self.draft_groups, self.columns, DRAFT.dim, DTYPE)
        scratch = workspace_for(*shape, keep, config, 3)
        self.draft_scoring: dict[str, Any] = {"keep_weights": keep, "config": config, "workspace": scratch}

    def score_target(self) -> None:
        layers = self.case.target_layers
        score_layers(
            [self.history] * layers, [self.pools(layer)[0] for layer in range(layers)], self.tables[0], self.lengths,
            [self.target_groups] * layers, self.target_scores, num_rows=self.target_rows, weight=1 / layers, **self.target_scoring,
        )  # fmt: skip

    def score_draft(self) -> None:
        score_layers(
            [self.lookahead] * 3, [self.memory.draft_pool(layer) for layer in range(3)], self.draft_table, self.lengths,
            [self.draft_groups] * 3, self.draft_scores, num_rows=self.draft_rows, weight=1 / 3, **self.draft_scoring,
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

    def scoring(self, forked: bool = False) -> list[Launch]:
        """Target and draft scores, one after the other or as two branches of the graph."""
        return [together([self.score_draft], [self.score_target], self.side)] if forked else [self.score_target, self.score_draft]

    def selection(self, forked: bool = False) -> list[Launch]:
        return [*self.scoring(forked), self.choose, self.translate]

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
            workspace=self.memory.workspace, config=self.sparse_config, settled=layer > 0,
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


