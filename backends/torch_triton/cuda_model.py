"""The Model of dustin.interfaces on a CUDA device: paged cache, Triton attention, one CUDA graph for each shape of call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dustin.backends.torch_triton import compact_keys, rope
from dustin.backends.torch_triton.cache import check_forward
from dustin.backends.torch_triton.chosen_sets import ChoosingOnDevice
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_cache import PagedCache, PagePool
from dustin.backends.torch_triton.cuda_call import MAX_GRAPH_ROWS, Call, PoolEngine
from dustin.backends.torch_triton.cuda_draft import BegunSteps, DraftChain
from dustin.backends.torch_triton.cuda_forward import DeviceForward
from dustin.backends.torch_triton.cuda_graphs import graphs_enabled
from dustin.backends.torch_triton.cuda_memory import named_shortage
from dustin.backends.torch_triton.cuda_packing import packed_size
from dustin.backends.torch_triton.cuda_part import BegunCall, CachePart
from dustin.backends.torch_triton.cuda_recent import Recent
from dustin.backends.torch_triton.model import Peers
from dustin.backends.torch_triton.ops import on_device
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.backends.torch_triton.weights import Linear, Weights, spec_of
from dustin.interfaces import ForwardResult, Tap, TokenSet, Verdict
from dustin.triton_kernels.runtime import power_of_two

# Calls of more than MAX_GRAPH_ROWS run eager, but for those of one prompt alone, which a server reads between the rounds of others:
# up to so many rows, rounded up to a power of two, are recorded when they come again. Launching them takes 20 ms of the host, as
# much as a 1.5B model takes for 4,096 rows on an H200, and longer where the host has streams to serve.
PROMPT_ROWS = 4096
# Row counts above the first are rounded up to the second where a graph may serve them: the dense checks of mode exact have
# any number of rows up to the block's, and a graph for each would take longer to make than to use.
EXACT_ROWS, ROW_MULTIPLE = 8, 4


class CudaModel(ChoosingOnDevice):
    """Model of dustin.interfaces. `device` "cpu" works under TRITON_INTERPRET=1 (tests), without graphs."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, peers: Peers | None = None) -> None:
        """With `peers` this is one rank's shard (see TorchModel)."""
        self.peers = peers
        self.config = config
        self.weights = weights
        self.scale = config.head_dim**-0.5
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self.use_graphs = graphs_enabled(self.device)
        self._head: Linear = weights.head
        inverse, amplitude = rope.frequencies(config.rope_theta, config.head_dim, config.rope_scaling, config.context_length)
        # rope_append wants one row a position: [context, D/2].
        angle = torch.arange(config.context_length, dtype=torch.float64)[:, None] * inverse
        self._inverse = inverse
        self.compact: compact_keys.CompactKeys | None = None
        self._fitted: dict[int, compact_keys.CompactKeys] = {}
        self._cos, self._sin = ((f(angle) * amplitude).float().to(self.device) for f in (torch.cos, torch.sin))
        self._engines: list[PoolEngine] = []
        # Shapes of single prompts' pieces that came before, and whether they are recorded (None: they came once).
        self._prompts: dict[tuple[Any, ...], bool | None] = {}
        self.spec = spec_of(config, weights, name)

    @property
    def capture_seconds(self) -> float:
        """Seconds that recording graphs took, of calls and of chains of draft steps."""
        return sum(e.capture_seconds + (e.chain.seconds if e.chain else 0.0) for e in self._engines)

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError on a size out of range."""
        if not 1 <= size <= self.config.vocab_size:
            raise ValueError(f"size is {size}, expected 1 to {self.config.vocab_size}")
        if self.peers is None:
            self._head = Linear(self.weights.head.weight[:size], None)
        self.spec = dataclasses.replace(self.spec, vocab_size=size)
        for engine in self._engines:
            engine.forward.head, engine.forward.vocab_size = self._head, size
            engine.graphs.clear()
            engine.memory = engine.chain = None

    def fit_compact_keys(self, tokens: Sequence[int], rank: int) -> None:
        """See CompactModel.fit_compact_keys."""
        if rank not in self._fitted:
            self._fitted[rank] = compact_keys.fit_model(self, tokens, rank, self._inverse)
        self.compact = self._fitted[rank]

    def new_cache(self, batch: int, capacity: int) -> PagedCache:
        """An empty cache: see Model.new_cache. Pages come from a pool of this model, which lives on for later caches."""
        if capacity > self.config.context_length:
            raise ValueError(f"capacity is {capacity}, expected at most the context of {self.config.context_length} tokens")
        c = self.config
        for engine in self._engines:
            if engine.pool.allocator.num_free >= batch * -(-capacity // engine.pool.page_size):
                return PagedCache(engine.pool, batch, capacity)
        # A pool that nobody uses is too small for this call: its memory serves better here.
        self._engines = [e for e in self._engines if e.pool.allocator.num_free < e.pool.allocator.num_pages]
        pages = batch * -(-capacity // PagePool.default_page_size)
        pool = PagePool(c.num_layers, pages, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)
        self._engine(pool)
        return PagedCache(pool, batch, capacity)

    def device_forward(self, cache: PagedCache) -> DeviceForward:
        """The launches behind `forward` over a cache's pool, for callers that capture more than one call in a graph."""
        return self._engine(cache.pool).forward

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        num_tokens: Sequence[int],
        cache: PagedCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward. Raise ValueError on a bad count, tap or cache; token ids are not read back to be checked."""
        batch, rows = tokens.shape
        counts, heads = check_forward(self.config.num_layers, tokens, num_tokens, cache, tap, logits)
        if not any(counts):
            return self._nothing(batch, rows, heads, tap, logits)
        # The end of a prompt may be short.
        least = EXACT_ROWS if logits != "all" and sum(map(bool, counts)) == 1 else MAX_GRAPH_ROWS
        if rows > least and token_set is None and not all(counts):
            return self._forward_some(tokens, counts, cache, tap, logits)
        graph = self.use_graphs and rows <= MAX_GRAPH_ROWS
        last_row_only = bool(tap and tap.last_row_only)
        if isinstance(cache, CachePart) and batch == 1 and rows <= PROMPT_ROWS and self.use_graphs and self.peers is None:
            wide = power_of_two(rows)
            tokens, graph = F.pad(tokens, (0, wide - rows)), graph or self._comes_again((wide, logits, last_row_only, *heads))
        elif EXACT_ROWS < rows <= MAX_GRAPH_ROWS:
            tokens = F.pad(tokens, (0, -rows % ROW_MULTIPLE))
        variant = None if self.peers is None else self.peers.variant
        again = Rechoice.of(token_set.reselection, self.compact, cache) if token_set is not None else None
        call = Call(self._engine(cache.pool), cache, token_set, heads, last_row_only, logits, variant, again)
        if EXACT_ROWS < rows <= MAX_GRAPH_ROWS and token_set is None and logits == "all" and self.peers is None:
            call.packed = packed_size(counts, tokens.shape[1], self.config.hidden_size)
        what = f"{self.spec.name}, a step of {batch} x {tokens.shape[1]} tokens"
        with named_shortage(what, "lower --prefill-chunk, or --max-kv-size, or send fewer prompts at once"):
            out, queries = call.run(tokens, cache.lengths, counts, graph)
        cache.advance(counts)
        if tokens.shape[1] > rows:
            out = out[:, :rows] if out is not None and logits == "all" else out
            queries = queries if last_row_only else {layer: q[:, :rows] for layer, q in queries.items()}
        return ForwardResult(out, queries)

    def _comes_again(self, shape: tuple[Any, ...]) -> bool:
        """Whether a piece of a single prompt of this shape, its rows first, came before and its recording, which keeps memory of
        its own for what is between its kernels, fits."""
        if shape not in self._prompts:
            self._prompts[shape] = None
            return False
        if self._prompts[shape] is None:
            c, size = self.config, self.weights.embedding.element_size()
            between = shape[0] * (3 * c.intermediate_size + 8 * c.hidden_size) * size
            self._prompts[shape] = torch.cuda.mem_get_info(self.device)[0] > 2 * between
        return bool(self._prompts[shape])

    def _forward_some(
        self, tokens: torch.Tensor, counts: Sequence[int], cache: PagedCache, tap: Tap | None, logits: str
    ) -> ForwardResult:
        """`forward` of many rows, of which sequences that feed nothing have none: beside the prompt that one slot of a server
        reads, the rows of the others would be most of the work. Their outputs are zero."""
        fed = [b for b, count in enumerate(counts) if count]
        where = on_device(fed, torch.long, self.device)
        part = CachePart(cache, fed, cache.page_table[where])
        some = self.forward(tokens[where], [counts[b] for b in fed], part, tap=tap, logits=logits)  # type: ignore[arg-type]

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(len(counts), *x.shape[1:]).index_copy_(0, where, x)

        out = None if some.logits is None else spread(some.logits)
        return ForwardResult(out, {layer: spread(q) for layer, q in some.queries.items()})

    @torch.inference_mode()
    def draft_greedy(
        self,
        tokens: torch.Tensor,
        num_tokens: Sequence[int],
        cache: PagedCache,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]] | None:
        """See GreedyChain.draft_greedy. None where the steps must be taken one by one."""
        simple = token_set is None or not (token_set.by_layer or token_set.dense_layers)
        if self.peers is not None or not simple or not any(num_tokens):
            return None
        counts, heads = check_forward(self.config.num_layers, tokens, num_tokens, cache, tap, "last")
        cache.check_room([n + steps - 1 if n else 0 for n in counts])
        if tokens.shape[1] > 2:
            tokens, counts = self._catch_up(tokens, counts, cache)
        if tokens.shape[1] == 1:
            # A round feeds one or two tokens first: one graph serves both.
            tokens = F.pad(tokens, (0, 1))
        engine = self._engine(cache.pool)
        if engine.chain is None:
            engine.chain = DraftChain(engine.forward, Recent(self.device))
        what = f"{self.spec.name}, {steps} draft steps of {len(counts)} rows"
        with named_shortage(what, "lower --max-kv-size, or send fewer prompts at once"):
            drafts, queries, memory = engine.chain.run(
                tokens, counts, cache, steps, token_set, set_lengths, heads, self.use_graphs, engine.memory
            )
        engine.memory = engine.memory or memory
        cache.advance([n + steps - 1 if n else 0 for n in counts])
        return drafts, queries

    @torch.inference_mode()
    def forward_ahead(
        self, tokens: torch.Tensor, num_tokens: Sequence[int], cache: PagedCache, *, tap: Tap | None = None
    ) -> BegunCall | None:
        """See ForwardAhead.forward_ahead. None where ranks would have to be told, or a sequence is full."""
        full = any(n and have + n > cache.capacity for n, have in zip(num_tokens, cache.lengths, strict=True))
        if self.peers is not None or full or not any(num_tokens):
            return None
        counts, heads = check_forward(self.config.num_layers, tokens, num_tokens, cache, tap, "all")
        call = Call(self._engine(cache.pool), cache, None, heads, bool(tap and tap.last_row_only), "all")
        return BegunCall(ForwardResult(*call.run(tokens, cache.lengths, counts, self.use_graphs)), cache)

    def _catch_up(
        self, tokens: torch.Tensor, counts: Sequence[int], cache: PagedCache
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Read all but the last token of each sequence as prompts are read, whose shapes are recorded; what is left to feed.

        Only after rounds that drafted nothing is so much left: a chain for each number of rows would be recorded for its sake.
        """
        before = [max(0, n - 1) for n in counts]
        last = on_device([[n] for n in before], torch.long, self.device)
        self.forward(F.pad(tokens, (0, power_of_two(max(before)) - tokens.shape[1])), before, cache, logits="none")
        return tokens.gather(1, last), tuple(int(n > 0) for n in counts)

    @torch.inference_mode()
    def draft_ahead(
        self,
        verdict: Verdict,
        known: Sequence[int],
        active: Sequence[bool],
        cache: PagedCache,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> BegunSteps | None:
        """See GreedyAhead.draft_ahead. None where that was never recorded, or a sequence has no room for it."""
        chain, judged = self._engine(cache.pool).chain, verdict.tokens.shape[1] - 1
        # The rows that a draft holds of a sequence, and those that it would feed, end within this.
        fits = all(n + judged + steps <= cache.capacity for n, on in zip(known, active, strict=True) if on)
        if chain is None or not steps or not fits or not any(active):
            return None
        _, heads = check_forward(self.config.num_layers, verdict.tokens, [0] * len(known), cache, tap, "last")
        return chain.ahead(verdict, known, active, cache, steps, token_set, set_lengths, heads, self.use_graphs)

    def _nothing(self, batch: int, rows: int, heads: Mapping[int, tuple[int, ...]], tap: Tap | None, logits: str) -> ForwardResult:
        """The result where no row takes part."""
        kept = 1 if tap is not None and tap.last_row_only else rows
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        queries = {i: torch.zeros(batch, kept, len(h), self.config.head_dim, **options) for i, h in heads.items()}
        height = {"all": rows, "last": 1}.get(logits)
        return ForwardResult(None if height is None else torch.zeros(batch, height, self.spec.vocab_size, **options), queries)

    def _engine(self, pool: PagePool) -> PoolEngine:
        for engine in self._engines:
            if engine.pool is pool:
                return engine
        forward = DeviceForward(self.config, self.weights, pool, self._cos, self._sin, self.peers)
        forward.head, forward.vocab_size = self._head, self.spec.vocab_size
        self._engines.append(PoolEngine(pool, forward, Recent(self.device)))
        return self._engines[-1]
