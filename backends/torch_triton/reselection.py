"""Sets chosen in the middle of a forward on a CUDA device, by the queries of the rows in flight: launches alone, no host read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin.backends.torch_triton import ops
from dustin.backends.torch_triton.compact_keys import FRESH_ROWS, CompactKeys, needed
from dustin.backends.torch_triton.config import ModelConfig
from dustin.interfaces import Reselection
from dustin.triton_kernels.packed_rows import packed_keys, packed_rows
from dustin.triton_kernels.packed_scores import packed_scores
from dustin.triton_kernels.score_heads import group_heads, score_heads
from dustin.triton_kernels.select_tokens import select_tokens

# Larger sets are chosen by torch's own operations: the kernel sorts what it chooses in registers.
MAX_SELECTED = 2048
# Rows times heads of a kv head that score_heads takes at once.
SCORE_ROWS = 128


@torch.inference_mode()
def encode_written(compact: CompactKeys, cache: Any, layers: Sequence[int]) -> None:
    """Codes of the committed rows that were written since the last call for these `layers`, those that choose: a launch a layer.
    A sequence of which those are no more than FRESH_ROWS is left to the forward, which encodes its last ones itself."""
    owner, ends = (compact, tuple(layers)), cache.lengths
    known = cache.encoded_by(owner)
    begins = [have if n - have > FRESH_ROWS else n for have, n in zip(known, ends, strict=True)]
    most = max(n - begin for begin, n in zip(begins, ends, strict=True))
    codes = {layer: compact.store(cache, layer) for layer in layers}
    if most:
        table = cache.page_table
        between = ops.on_device([begins, list(ends)], torch.int32, table.device)
        for layer in layers:
            bases = compact.mean[layer], compact.encode[layer]
            packed_keys(cache.pool.keys[layer], codes[layer], table, between[0], between[1], *bases, most=most)
    cache.mark_encoded(owner)


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
    reuse: bool = False

    @classmethod
    def of(cls, again: Reselection | None, compact: CompactKeys | None, cache: Any) -> Rechoice | None:
        """The same without mappings; None where there is none. Compact keys of the cache are brought up to date in those layers."""
        if again is None or not again.heads:
            return None
        if again.rank:
            # Of the other layers nobody reads the codes: a check of mode exact writes more rows than a forward encodes itself.
            encode_written(needed(compact, again.rank), cache, sorted(again.heads))
        layers = tuple(sorted((layer, tuple(heads)) for layer, heads in again.heads.items()))
        windows = (again.num_sink_tokens, again.num_recent_tokens)
        return cls(layers, again.budget, *windows, again.max_rows, compact if again.rank else None, again.by_kv_head, again.reuse)

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
        set_lengths: torch.Tensor,
        layer: int,
        config: ModelConfig,
        codes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """indices [S, budget] int32 and counts [S] int32 by the queries q [B, T, Hq, D] of `layer` over its keys [pages, page
        size, Hkv, D], or their `codes` [pages * page size, Hkv, rank / 2]: S is B, or B * Hkv with a set for each kv head.
        `set_lengths` [S] are the sequences' lengths, set by set.

        Raise ValueError on heads that the layer lacks, and on a kv head without one.
        """
        heads = self.heads[layer]
        rows = max(1, min(q.shape[1], self.max_rows, SCORE_ROWS // (config.num_heads // config.num_kv_heads)))
        groups = group_heads(heads, config.num_heads, config.num_kv_heads, q.device)
        sets = len(set_lengths) // len(lengths)
        if sets > 1 and len(groups.kv_heads) < sets:
            raise ValueError(f"reselection by kv head has heads {list(heads)} in layer {layer}, expected one or more of each")
        chosen = q[:, :rows]
        if self.compact is not None and codes is not None:
            bases = (part[layer] for part in (self.compact.mean, self.compact.encode, self.compact.decode))
            chosen = packed_rows(q, keys, codes, page_table, lengths, *bases, num_rows=rows, fresh=FRESH_ROWS)
            keys = codes.unflatten(0, keys.shape[:2])
        if heads != tuple(range(q.shape[2])):
            first, last = heads[0], heads[-1] + 1
            # Neighbours are a view; others are copied together, head by head: an index would have to come from the host.
            together = heads == tuple(range(first, last))
            chosen = chosen[:, :, first:last] if together else torch.stack([chosen[:, :, head] for head in heads], 2)
        scores = torch.empty(len(set_lengths), page_table.shape[1] * keys.shape[1], dtype=torch.float32, device=q.device)
        scale = config.head_dim**-0.5
        if keys.dtype == torch.int8 and sets == config.num_kv_heads and chosen.shape[2] == config.num_heads:
            packed_scores(chosen, keys, page_table, lengths, scores, num_rows=num_tokens, scale=scale)
        else:
            score_heads(
                chosen, keys, page_table, lengths, groups, scores, num_rows=num_tokens.clamp(max=rows), scale=scale,
                by_group=sets > 1,
            )  # fmt: skip
        windows = {"num_sink_tokens": self.num_sink_tokens, "num_recent_tokens": self.num_recent_tokens}
        if self.budget > MAX_SELECTED:
            return ops.choose(scores, set_lengths, self.budget, **windows)
        return select_tokens(scores, None, set_lengths, budget=self.budget, num_draft_selected=0, **windows)
