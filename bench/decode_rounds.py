"""Whole speculative rounds on the device, for bench/decode.py: draft, score, select, verify, accept, commit without a host read.

Acceptance is replayed: the round computes its own verdict, then keeps as many drafts as a table says, because random
weights agree on nothing. Everything else (lengths, the draft's lag, last round's set, histories) moves as in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.backends.torch_triton.cuda_forward import DeviceForward, Inputs, Packed, Slots, make_slots
from dustin.backends.torch_triton.cuda_fused import extend_set
from dustin.backends.torch_triton.cuda_model import CudaModel
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.interfaces import Tap
from dustin.triton_kernels.accept import accept_greedy
from dustin.triton_kernels.argmax_rows import argmax_rows
from dustin.triton_kernels.score_heads import group_heads, score_layers
from dustin.triton_kernels.select_tokens import select_tokens

Queries = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class RoundOptions:
    """One variant: `sparse` verification, `sparse_draft` (either needs a set each round), and METHOD's numbers (tokens)."""

    sparse: bool
    sparse_draft: bool
    num_draft_tokens: int = 5
    budget: int = 512
    num_sink_tokens: int = 4
    num_recent_tokens: int = 32
    lookahead_share: float = 0.6
    last_drafts: int = 0  # mode exact: drafts that the dense check judges with a block, after the last set was chosen
    again: Rechoice | None = None  # mode own: the target's layers choose sets of their own in the forward

    @property
    def chooses(self) -> bool:
        """Whether rounds choose a set."""
        return self.sparse or self.sparse_draft


class Side:
    """A model with its cache and scoring heads."""

    def __init__(self, model: CudaModel, cache: PagedCache, tap: Tap) -> None:
        self.cache = cache
        self.forward: DeviceForward = model.device_forward(cache)
        self.page_size = cache.pool.page_size
        self.heads = {layer: tuple(heads) for layer, heads in tap.heads.items()}
        spec = model.spec
        self.groups = {i: group_heads(h, spec.num_heads, spec.num_kv_heads, model.device) for i, h in self.heads.items()}

    def run(
        self, tokens: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, slots: Slots | None, tapped: bool, logits: str,
        again: Rechoice | None = None, packed: Packed | None = None,
    ) -> tuple[torch.Tensor | None, Queries]:  # fmt: skip
        """One forward; captured queries are those of the last row unless all logits are asked for."""
        inputs = Inputs(tokens, lengths, counts, self.cache.page_table, slots, again=again, packed=packed)
        return self.forward.run(inputs, self.heads if tapped else {}, logits != "all", logits)

    def score(self, queries: Queries, lengths: torch.Tensor, num_rows: torch.Tensor, columns: int) -> torch.Tensor:
        """[B, columns] fp32 mean mass over layers, rows and heads."""
        scores = torch.empty(len(lengths), columns, dtype=torch.float32, device=lengths.device)
        keys = [self.cache.pool.keys[layer] for layer in queries]
        score_layers(
            list(queries.values()), keys, self.cache.page_table, lengths, [self.groups[layer] for layer in queries], scores,
            num_rows=num_rows, weight=1 / len(queries),
        )  # fmt: skip
        return scores


class Reads:
    """The one small read of each call, a call behind: while the host looks at the tokens of one, the device makes the next.

    No call depends on what the host reads; that a sequence has ended is seen one call later.
    """

    def __init__(self, source: torch.Tensor) -> None:
        """`source` is what every call leaves, in place."""
        self._source, self._asked = source, 0
        self._pinned = [torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if source.is_cuda else []

    def ask(self) -> list[Any]:
        """Ask for what the call just launched leaves; what was asked for before, empty the first time."""
        turn = self._asked % 2
        self._pinned[turn].copy_(self._source, non_blocking=True)
        if self._arrived:
            self._arrived[turn].record()
        self._asked += 1
        return self._wait(1 - turn) if self._asked > 1 else []

    def last(self) -> list[Any]:
        """What was asked for last."""
        return self._wait((self._asked - 1) % 2)

    def _wait(self, turn: int) -> list[Any]:
        if self._arrived:
            self._arrived[turn].synchronize()
        return self._pinned[turn].tolist()


class Rounds:
    """Static state of B sequences at `context` tokens and the phases of a round over it (each can be captured alone)."""

    def __init__(self, target: Side, draft: Side, options: RoundOptions, context: int, accepted: torch.Tensor) -> None:
        """`accepted` [n, B] int32: how many drafts each replayed round keeps."""
        self.target, self.draft, self.options, self.context = target, draft, options, context
        device = accepted.device
        batch, gamma = accepted.shape[1], options.num_draft_tokens
        self.batch = batch
        self.accepted = accepted

        def full(value: int) -> torch.Tensor:
            return torch.full((batch,), value, dtype=torch.int32, device=device)

        # N, M and the length at which the last set was chosen.
        self.target_lengths, self.draft_lengths, self.set_lengths = full(context), full(context), full(context - 4)
        self.pending, self.unseen = full(1), full(2)
        self.indices = torch.arange(options.budget, dtype=torch.int32, device=device).repeat(batch, 1)
        self.counts = full(options.budget)
        self.one, self.fed, self.drafted = full(1), full(gamma + 1), full(gamma)
        most = max(gamma, options.last_drafts)
        self.room = full(most + 2)
        self.steps = torch.arange(1, most + 1, dtype=torch.int32, device=device)[:, None]
        self.columns = torch.arange(gamma + 1, device=device)[None]
        self.num_columns = target.cache.page_table.shape[1] * target.page_size
        self.round = torch.zeros(1, dtype=torch.long, device=device)
        self.verdict = torch.zeros(batch, gamma + 2, dtype=torch.int32, device=device)
        config = target.forward.config
        self.history = {
            layer: torch.randn(batch, 1, len(heads), config.head_dim, device=device).to(target.cache.pool.keys[0].dtype)
            for layer, heads in target.heads.items()
        }

    def reset(self) -> None:
        """Back to `context` tokens a sequence."""
        self.target_lengths.fill_(self.context)
        self.draft_lengths.fill_(self.context)
        self.set_lengths.fill_(self.context - 4)
        self.round.zero_()

    def propose(self, last: bool = False) -> tuple[torch.Tensor, Queries]:
        """Drafts [B, n] int32 and lookahead queries [B, n, S, D] a layer: those of a round, or the last of a block, whose queries
        nothing looks at."""
        options, side = self.options, self.draft
        count, most = options.last_drafts if last else options.num_draft_tokens, len(self.steps)
        lag = self.target_lengths + 1 - self.draft_lengths
        first = torch.where(lag == 2, self.unseen, self.pending)
        tokens = torch.stack([first, self.pending], 1)
        lengths = self.target_lengths[None] + self.steps
        slots = None
        if options.sparse_draft:
            width = options.budget + options.num_draft_tokens + 2 + options.last_drafts
            indices, counts = extend_set(self.indices, self.counts, self.set_lengths, self.draft_lengths, width)
            slots = make_slots(indices, counts, self.draft_lengths, self.room, side.cache.page_table, side.page_size, most + 2)
            slots.indices = slots.slots
            stepped = counts[None] + lengths - self.draft_lengths[None]
        at, fed = self.draft_lengths, lag
        drafts, queries = [], []
        for step in range(count):
            inputs = Inputs(tokens, at, fed, side.cache.page_table, slots)
            token, captured = side.forward.run_greedy(inputs, side.heads if options.chooses and not last else {})
            drafts.append(token)
            queries.append(captured)
            tokens, at, fed = token[:, None], lengths[step], self.one
            if slots is not None:
                slots = Slots(slots.indices, slots.slots, stepped[step])
        joined = {layer: torch.cat([q[layer] for q in queries], 1) for layer in queries[0]}
        return torch.stack(drafts, 1), joined

    def score(self, lookahead: Queries) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Target and draft scores [B, capacity]; None where no head of the target scores."""
        by_target = None
        if self.history:
            by_target = self.target.score(self.history, self.target_lengths, self.one, self.num_columns)
        return by_target, self.draft.score(lookahead, self.target_lengths, self.drafted, self.num_columns)

    def select(self, by_target: torch.Tensor | None, by_draft: torch.Tensor) -> None:
        """The new set, in place."""
        o = self.options
        rest = o.budget - o.num_sink_tokens - o.num_recent_tokens
        select_tokens(
            by_target, by_draft, self.target_lengths, budget=o.budget, num_sink_tokens=o.num_sink_tokens,
            num_recent_tokens=o.num_recent_tokens, num_draft_selected=round(o.lookahead_share * rest),
            indices=self.indices, counts=self.counts,
        )  # fmt: skip
        self.set_lengths.copy_(self.target_lengths)

    def verify(self, drafts: torch.Tensor) -> tuple[torch.Tensor, Queries]:
        """Logits [B, gamma + 1, V] and the target's captured queries."""
        tokens = torch.cat([self.pending[:, None], drafts], 1)
        slots = None
        if self.options.sparse:
            side = self.target
            slots = make_slots(
                self.indices, self.counts, self.target_lengths, self.fed, side.cache.page_table, side.page_size, tokens.shape[1]
            )
        options = self.options
        logits, queries = self.target.run(
            tokens, self.target_lengths, self.fed, slots, options.chooses, "all", options.again
        )
        if logits is None:
            raise RuntimeError("the verification gave no logits")
        return logits, queries

    def accept(self, drafts: torch.Tensor, logits: torch.Tensor, queries: Queries) -> None:
        """The round's own verdict, the replayed one in its place, and the commit."""
        gamma = self.options.num_draft_tokens
        best, finite = argmax_rows(logits.flatten(0, 1))
        best = best.view(self.batch, gamma + 1)
        accept_greedy(drafts, self.drafted, best, finite.view(self.batch, gamma + 1))
        kept = self.accepted.index_select(0, self.round)[0]
        at = kept.long()[:, None]
        following = best.gather(1, at)
        padded = torch.cat([drafts, following], 1)
        self.verdict[:, 1:] = torch.where(self.columns < at, padded, best)
        self.verdict[:, 0] = kept
        for layer, q in queries.items():
            self.history[layer].copy_(q.gather(1, at[:, :, None, None].expand(-1, 1, *q.shape[2:])))
        torch.add(self.target_lengths + 1, kept.clamp(max=gamma - 1), out=self.draft_lengths)
        self.target_lengths.add_(kept + 1)
        self.pending.copy_(following[:, 0])
        self.unseen.copy_(drafts[:, gamma - 1])
        self.round.add_(1).remainder_(len(self.accepted))

    def attend(self, rows: int, sparse: bool) -> None:
        """The target's attention alone, all layers, over `rows` rows a sequence: of the set, or of everything."""
        side, slots = self.target, None
        config, table = side.forward.config, side.cache.page_table
        fed = self.one * rows
        if sparse:
            slots = make_slots(self.indices, self.counts, self.target_lengths, fed, table, side.page_size, rows)
        shape = (self.batch, rows, config.num_heads, config.head_dim)
        q = torch.randn(shape, device=fed.device).to(side.cache.pool.keys[0].dtype)
        inputs = Inputs(q[:, :, 0, 0], self.target_lengths, fed, table, slots, again=self.options.again if sparse else None)
        for layer in range(config.num_layers):
            side.forward._attend(q, inputs, layer)

    def whole(self) -> None:
        """One round. Scoring history beside the draft, on a stream of its own, was measured 4 % slower than after it."""
        drafts, lookahead = self.propose()
        if self.options.chooses:
            self.select(*self.score(lookahead))
        logits, queries = self.verify(drafts)
        self.accept(drafts, logits, queries)

    def plain_step(self) -> None:
        """One step of dense autoregressive decoding."""
        logits, _ = self.target.run(self.pending[:, None], self.target_lengths, self.one, None, False, "last")
        token, _ = argmax_rows(logits[:, 0])
        self.pending.copy_(token)
        self.verdict[:, 1].copy_(token)
        self.target_lengths.add_(1)

    def dense_pass(
        self, tokens: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, logits: str, packed: Packed | None = None
    ) -> tuple[torch.Tensor | None, Queries]:
        """tokens [B, T] densely from `starts` on, counts[b] of them: a rectification chunk or the check of `exact`."""
        return self.target.run(tokens, starts, counts, None, True, logits, packed=packed)
