"""Sets chosen in the middle of a forward on a CUDA device, by the queries of the rows in flight: launches alone, no host read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dustin.backends.torch_triton import ops
from dustin.backends.torch_triton.compact_keys import FRESH_ROWS, CompactKeys, needed
from dustin.backends.torch_triton.config import ModelConfig
from dustin.interfaces import Reselection
from dustin.triton_kernels.score_heads import group_heads, score_heads
from dustin.triton_kernels.select_tokens import select_tokens

# Larger sets are chosen by torch's own operations: the kernel sorts what it chooses in registers.
MAX_SELECTED = 2048
# Rows times heads of a kv head that score_heads takes at once.
SCORE_ROWS = 128


@dataclass(frozen=True)
class Rechoice:
    """A Reselection as a captured graph needs it: hashable, the same for every replay. `compact` where it has a rank."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]
    budget: int
    num_sink_tokens: int
    num_recent_tokens: int
    max_rows: int
    compact: CompactKeys | None = None
    by_kv_head: bool = False

    @classmethod
    def of(cls, again: Reselection | None, compact: CompactKeys | None, cache: Any) -> Rechoice | None:
        """The same without mappings; None where there is none. Compact keys of the cache are brought up to date."""
        if again is None or not again.heads:
            return None
        if again.rank:
            needed(compact, again.rank).catch_up(cache)
        layers = tuple(sorted((layer, tuple(heads)) for layer, heads in again.heads.items()))
        windows = (again.num_sink_tokens, again.num_recent_tokens)
        return cls(layers, again.budget, *windows, again.max_rows, compact if again.rank else None, again.by_kv_head)

    @property
    def heads(self) -> dict[int, tuple[int, ...]]:
        """Scoring heads of each layer that chooses."""
        return dict(self.layers)

    def choose(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: torch.Tensor,
        layer: int,
        config: ModelConfig,
        codes: torch.Tensor | None = None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """indices [B, budget] int32 and counts [B] int32 by the queries q [B, T, Hq, D] of `layer` over its keys [pages, page
        size, Hkv, D], or their `codes` [pages * page size, Hkv, rank / 2]: one pair for all kv heads, or one for each.

        Raise ValueError on heads that the layer lacks, and on a kv head without one.
        """
        heads = self.heads[layer]
        group = config.num_heads // config.num_kv_heads
        rows = max(1, min(q.shape[1], self.max_rows, SCORE_ROWS // group))
        chosen = q[:, :rows]
        if self.compact is not None and codes is not None:
            self._refresh(keys, codes, page_table, lengths, layer)
            chosen, keys = self.compact.queries(layer, chosen), codes.unflatten(0, keys.shape[:2])
        parts = [heads]
        if self.by_kv_head:
            parts = [tuple(head for head in heads if head // group == kv) for kv in range(config.num_kv_heads)]
        rest = (keys, page_table, lengths, num_tokens.clamp(max=rows))
        return [self._choose(chosen, part, *rest, config) for part in parts]

    def _choose(
        self,
        q: torch.Tensor,
        heads: tuple[int, ...],
        keys: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        num_rows: torch.Tensor,
        config: ModelConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What some heads choose; q [B, R, Hq, D or rank]."""
        groups, chosen = group_heads(heads, config.num_heads, config.num_kv_heads, q.device), q
        if heads != tuple(range(q.shape[2])):
            first, last = heads[0], heads[-1] + 1
            # Neighbours are a view; others are copied together, head by head: an index would have to come from the host.
            together = heads == tuple(range(first, last))
            chosen = chosen[:, :, first:last] if together else torch.stack([chosen[:, :, head] for head in heads], 2)
        scores = torch.empty(len(q), page_table.shape[1] * keys.shape[1], dtype=torch.float32, device=q.device)
        scale = config.head_dim**-0.5
        score_heads(chosen, keys, page_table, lengths, groups, scores, num_rows=num_rows, scale=scale)
        if self.budget > MAX_SELECTED:
            return ops.choose(scores, lengths, self.budget, self.num_sink_tokens, self.num_recent_tokens)
        return select_tokens(
            scores, None, lengths, budget=self.budget, num_sink_tokens=self.num_sink_tokens,
            num_recent_tokens=self.num_recent_tokens, num_draft_selected=0,
        )  # fmt: skip

    def _refresh(
        self, keys: torch.Tensor, codes: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, layer: int
    ) -> None:
        """Encode each sequence's last committed rows, which may be newer than their codes."""
        at = (lengths.long()[:, None] + torch.arange(-FRESH_ROWS, 0, device=lengths.device)).clamp_(min=0)
        size = keys.shape[1]
        places = page_table.long().gather(1, at // size) * size + at % size
        if self.compact is not None:
            self.compact.encode_rows(layer, keys.flatten(0, 1), codes, places)
