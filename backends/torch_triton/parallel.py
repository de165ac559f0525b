"""A model split over ranks: what rank 0 holds of it, and each rank's part of a forward, of a scoring and of loading.

Every rank scores with the heads it owns and the partial scores are summed; the set is chosen on
rank 0 and sent with the tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dustin.backends.common.mirror import (
    Problem,
    RankCache,
    SplitModel,
    attempt,
    check_same,
    forward_order,
    own_heads,
    own_reselection,
    raise_first,
)
from dustin.backends.torch_triton import loading
from dustin.backends.torch_triton.config import ModelConfig
from dustin.backends.torch_triton.ops import on_device
from dustin.backends.torch_triton.ranks import Ranks
from dustin.backends.torch_triton.sharding import Shard
from dustin.backends.torch_triton.weights import Weights, build
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet

# Of each weight file this much is compared between ranks.
_SAMPLES, _SAMPLE_BYTES = 64, 4096

Make = Callable[[ModelConfig, Weights, str, Ranks], Any]


class ParallelModel(SplitModel):
    """Model of dustin.interfaces on rank 0."""

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on. Raise ValueError on a size out of range."""
        self.local.limit_vocabulary(size)
        self._mailbox.append(("limit", self.number, size))
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def fit_compact_keys(self, tokens: Sequence[int], rank: int) -> None:
        """See CompactModel.fit_compact_keys: every rank fits those of its kv heads."""
        if self.local.compact is not None and self.local.compact.rank == rank:
            return
        with self.ranks.together():
            self.order("fit", {"tokens": tuple(int(token) for token in tokens), "rank": rank})
            problems = self.ranks.agree(fit_part(self.ranks, self.local, tokens, rank))
        raise_first(problems)

    def forward(
        self,
        tokens: torch.Tensor,
        num_tokens: Sequence[int],
        cache: RankCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward."""
        values, members = forward_order(cache, num_tokens, token_set, tap, logits)
        # Refused here, before any rank begins.
        own_reselection(token_set, 0, self.spec, self.ranks.size)
        self.order("forward", values, [tokens, *members])
        with self.ranks.together():
            return forward_part(self.ranks, self.spec, self.local, cache.local, tokens, token_set, values)


def forward_part(
    ranks: Ranks, spec: ModelSpec, local: Any, cache: Any, tokens: torch.Tensor, token_set: TokenSet | None, values: dict[str, Any]
) -> ForwardResult:
    """One rank's part of a forward; rank 0 gets the logits and the queries of all tapped heads."""
    tap: Tap | None = values["tap"]
    again = values["again"]
    ranks.variant = (
        None if tap is None else (tuple(sorted(tap.heads.items())), tap.last_row_only),
        None if again is None else tuple(sorted(again.heads.items())),
    )
    token_set = own_reselection(token_set, ranks.rank, spec, ranks.size)
    own = None if tap is None else Tap(own_heads(tap.heads, ranks.rank, spec.num_heads // ranks.size), tap.last_row_only)
    out = local.forward(tokens, values["num_tokens"], cache, token_set=token_set, tap=own, logits=values["logits"])
    if tap is None or not tap.heads:
        return out
    return ForwardResult(out.logits, _assemble(ranks, spec, tap, out.queries, tokens, local))


def fit_part(ranks: Ranks, local: Any, tokens: Sequence[int], rank: int) -> Problem:
    """Fit one rank's compact keys, in a forward of all of them; what went wrong."""
    ranks.variant = "fit"
    return attempt(lambda: local.fit_compact_keys(tokens, rank))[1]


def _assemble(
    ranks: Ranks, spec: ModelSpec, tap: Tap, own: Mapping[int, torch.Tensor], tokens: torch.Tensor, local: Any
) -> dict[int, torch.Tensor]:
    """layer -> [B, R, S, D] on rank 0 from every rank's heads."""
    batch, rows = tokens.shape[0], 1 if tap.last_row_only else tokens.shape[1]
    share = spec.num_heads // ranks.size
    held = [own_heads(tap.heads, rank, share) for rank in range(ranks.size)]
    # Every rank sends as many heads as the one with the most, layer after layer.
    most = max(sum(len(some) for some in heads.values()) for heads in held)
    sent = torch.zeros(batch, rows, most, spec.head_dim, dtype=local.dtype, device=local.device)
    if own:
        mine = torch.cat([own[layer] for layer in sorted(own)], 2)
        sent[:, :, : mine.shape[2]] = mine
    everyone = ranks.gather(sent)
    if ranks.rank:
        return {}
    places = {
        (layer, rank * share + head): (rank, at)
        for rank, heads in enumerate(held)
        for at, (layer, head) in enumerate((layer, head) for layer in sorted(heads) for head in heads[layer])
    }
    chosen = {layer: [places[layer, head] for head in some] for layer, some in tap.heads.items()}
    return {layer: torch.stack([everyone[rank, :, :, at] for rank, at in some], 2) for layer, some in chosen.items()}


def partial_scores(
    ranks: Ranks,
    spec: ModelSpec,
    score: Callable[..., torch.Tensor],
    local: Any,
    cache: Any,
    queries: Mapping[int, torch.Tensor],
    values: dict[str, Any],
    within: TokenSet | None = None,
) -> torch.Tensor:
    """[B, N] fp32 on rank 0: the mean attention mass of each token, every rank's heads in it.

    `score` is the backend's score or page_scores, with `values["more"]` as its last arguments.
    """
    heads: Mapping[int, tuple[int, ...]] = values["heads"]
    share = spec.num_heads // ranks.size
    own = own_heads(heads, ranks.rank, share)
    mine = {layer: queries[layer][:, :, [i for i, head in enumerate(heads[layer]) if head // share == ranks.rank]] for layer in own}
    lengths = values["lengths"]
    total = sum(q.shape[1] * q.shape[2] for q in queries.values())
    if mine:
        weight = sum(q.shape[1] * q.shape[2] for q in mine.values()) / total
        mass = score(mine, Tap(own), local, cache, lengths, *([within] if within is not None else values["more"]))
        outside = mass == float("-inf")
        mass = torch.where(outside, 0.0, mass * weight)
    else:
        mass = torch.zeros(len(lengths), values["columns"], device=ranks.device)
    summed = ranks.sum(mass)
    columns = summed.shape[1]
    if within is not None:
        used = torch.arange(within.indices.shape[1], device=summed.device)[None] < within.counts[:, None]
        # Unused entries go to a column of their own, which is cut off.
        at = torch.where(used, within.indices.long(), columns)
        outside = torch.ones(len(lengths), columns + 1, dtype=torch.bool, device=summed.device).scatter_(1, at, False)[:, :columns]
    else:
        at = torch.arange(columns, device=summed.device)[None]
        outside = at >= on_device(list(lengths), torch.long, summed.device)[:, None]
    return summed.masked_fill(outside, float("-inf"))


def load_shard(ranks: Ranks, make: Make, source: Path, dtype: str) -> tuple[Any, ModelSpec]:
    """This rank's model and the spec of the whole. Raise on every rank what any rank met, naming that rank."""

    def read() -> tuple[Any, ModelConfig, str, str]:
        config, fetch, name = loading.open_source(source)
        shard = Shard(ranks.rank, ranks.size)
        weights = build(config, fetch, loading.choose_dtype(dtype, ranks.device), ranks.device, shard)
        return make(shard.config(config), weights, name, ranks), config, name, _identity(config, source)

    found, problem = attempt(read)
    raise_first(ranks.agree(problem))
    local, config, name, digest = found
    check_same(ranks.agree((digest, str(local.dtype), str(source))), "model folder")
    held = sum(ranks.agree(local.weights.num_bytes))
    spec = dataclasses.replace(
        local.spec,
        name=name,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        bytes_per_kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * local.dtype.itemsize,
        weight_bytes=held,
        fingerprint=digest,
    )
    return local, spec


def _identity(config: ModelConfig, source: Path) -> str:
    """sha256 of the configuration, and of every weight file's size and some of its bytes."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode())
    for path in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
