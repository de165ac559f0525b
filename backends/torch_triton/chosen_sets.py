"""Which sets layers choose for themselves, outside a forward: for traces (see ChoosingModel)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dustin.backends.torch_triton import ops
from dustin.backends.torch_triton.compact_keys import CompactKeys
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.backends.torch_triton.reselection import Rechoice
from dustin.interfaces import TokenSet


class ChoosingOnDevice:
    """A model over paged caches that says which sets its layers choose, by the launches of a forward."""

    config: ModelConfig
    compact: CompactKeys | None

    @torch.inference_mode()
    def chosen_sets(
        self, queries: Mapping[int, torch.Tensor], num_tokens: Sequence[int], cache: PagedCache, token_set: TokenSet
    ) -> dict[int, list[TokenSet]]:
        """See ChoosingModel."""
        again = Rechoice.of(token_set.reselection, self.compact, cache)
        if again is None:
            return {}
        lengths, counts = ops.on_device([list(cache.lengths), list(num_tokens)], torch.int32, cache.page_table.device)
        sets = self.config.num_kv_heads if again.by_kv_head else 1
        each = lengths[:, None].repeat(1, sets).flatten()
        given = {*token_set.dense_layers, *token_set.by_layer}
        made = {}
        for layer, q in queries.items():
            if layer not in again.heads or layer in given or self.config.windows[layer]:
                continue
            keys, codes = cache.pool.keys[layer], None
            if again.compact is not None:
                codes = again.compact.store(cache, layer)
            indices, sizes = again.choose(q, keys, cache.page_table, lengths, counts, each, layer, self.config, codes)
            # Of several sets a sequence those of one kv head lie `sets` rows apart.
            made[layer] = [TokenSet(indices[kv::sets].contiguous(), sizes[kv::sets].contiguous()) for kv in range(sets)]
        return made
