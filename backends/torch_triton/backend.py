"""The torch backend: Backend of dustin.interfaces on the CPU; `create` gives the CUDA one where there is a GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dustin.backends.common.checks import check_inserted
from dustin.backends.torch_triton import loading, ops, sampling, set_ops
from dustin.backends.torch_triton.cache import TorchCache, check_lengths
from dustin.backends.torch_triton.model import TorchModel
from dustin.errors import UsageError
from dustin.interfaces import HostVerdict, RowComparison, Tap, TokenSet, Verdict, WarpBatch


def create(device: str = "auto") -> TorchBackend:
    """The backend on `device` (auto, cpu or cuda; auto takes a GPU where there is one). Raise UsageError with the reason."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {device!r}, expected auto, cpu or cuda")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return TorchBackend(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise UsageError("device is 'cuda', but torch finds no NVIDIA GPU here: use --device cpu")
    try:
        from dustin.backends.torch_triton.cuda_backend import CudaBackend
    except ImportError as error:
        raise UsageError(f"device 'cuda' needs triton: {error}. Install it, or use --device cpu") from error
    return CudaBackend(torch.device("cuda"))


class TorchBackend:
    """Backend of dustin.interfaces, whose docstrings are the contract. Arrays are torch tensors; tokens are int64."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = device.type

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> TorchModel:
        """A model from a folder of safetensors or a .gguf file. Raise ModelError with the reason, UsageError on a bad dtype."""
        config, weights, name = loading.load(Path(source), loading.choose_dtype(dtype, self._device), self._device)
        return TorchModel(config, weights, name)

    def tokens(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B, T] int64, short rows padded with 0."""
        width = max((len(row) for row in rows), default=0)
        host = np.zeros((len(rows), width), np.int64)
        # One prompt beside many empty rows: lists of zeros for those would take milliseconds.
        for into, row in zip(host, rows, strict=True):
            into[: len(row)] = row
        return ops.sent(torch.from_numpy(host), self._device)

    def concat_tokens(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join [B, T_i] along T."""
        return torch.cat(list(parts), 1)

    def insert_tokens(
        self, tokens: torch.Tensor, starts: Sequence[int], parts: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """See Backend.insert_tokens; waits for nothing."""
        check_inserted(tokens.shape, starts, parts.shape, counts)
        control = ops.on_device([list(starts), list(counts)], torch.long, self._device)
        at = torch.arange(tokens.shape[1], device=self._device) - control[0][:, None]
        inside = (at >= 0) & (at < control[1][:, None])
        return torch.where(inside, parts.gather(1, at.clamp_(0, parts.shape[1] - 1)), tokens)

    @torch.inference_mode()
    def read(self, verdict: Verdict, logits: torch.Tensor | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """Host copy of a verdict in one transfer; logprobs of the emitted tokens from logits [B, T, V] where asked for."""
        return sampling.read(verdict, logits, top_logprobs)

    def gather_rows(
        self, queries: Mapping[int, torch.Tensor], rows: torch.Tensor | Sequence[int], count: int = 1
    ) -> Mapping[int, torch.Tensor]:
        """Of each [B, T, S, D] the `count` rows that end at rows[b], row 0 repeated: [B, count, S, D]."""
        wanted = (rows if isinstance(rows, torch.Tensor) else ops.on_device(list(rows), torch.long, self._device)).long()[:, None]
        if count > 1:
            wanted = (wanted + torch.arange(1 - count, 1, device=self._device)).clamp_(min=0)
        at = torch.arange(len(wanted), device=self._device)[:, None]
        return {layer: q[at, wanted] for layer, q in queries.items()}

    def concat_queries(self, parts: Sequence[Mapping[int, torch.Tensor]]) -> Mapping[int, torch.Tensor]:
        """Join along the row axis. Raise ValueError when the parts hold different layers."""
        if any(set(part) != set(parts[0]) for part in parts):
            raise ValueError(f"parts hold layers {[sorted(part) for part in parts]}, expected the same in each")
        return {layer: torch.cat([part[layer] for part in parts], 1) for layer in parts[0]}

    def replace_rows(
        self, old: Mapping[int, torch.Tensor], new: Mapping[int, torch.Tensor], rows: Sequence[bool]
    ) -> Mapping[int, torch.Tensor]:
        """Row b from `new` where rows[b], else from `old`; both [B, R, S, D]. Raise ValueError when they do not match."""
        taken = ops.on_device(list(rows), torch.bool, self._device)[:, None, None, None]
        if set(old) != set(new) or any(old[layer].shape != q.shape for layer, q in new.items()):
            raise ValueError("old and new queries differ in layers or shapes, expected the same")
        return {layer: torch.where(taken, q, old[layer]) for layer, q in new.items()}

    @torch.inference_mode()
    def score(
        self,
        queries: Mapping[int, torch.Tensor],
        tap: Tap,
        model: TorchModel,
        cache: TorchCache,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> torch.Tensor:
        """[B, max(lengths)] fp32: see ops.score and, with `within`, set_ops.score_within."""
        if within is not None:
            return self._score_within(queries, tap, model, cache, lengths, within)
        return ops.score(queries, tap, cache, lengths, num_heads=model.spec.num_heads, scale=model.scale)

    def _score_within(
        self, queries: Mapping[int, torch.Tensor], tap: Tap, model: Any, cache: Any, lengths: Sequence[int], within: TokenSet
    ) -> torch.Tensor:
        check_lengths("lengths", lengths, [0] * cache.batch, cache.lengths)
        return set_ops.score_within(
            queries, tap, cache.flat_keys, cache.places(within.indices), within, max(lengths),
            num_heads=model.spec.num_heads, scale=model.scale,
        )  # fmt: skip

    @torch.inference_mode()
    def page_scores(
        self, queries: Mapping[int, torch.Tensor], tap: Tap, model: Any, cache: Any, lengths: Sequence[int], page_size: int
    ) -> torch.Tensor:
        """[B, max(lengths)] fp32: see set_ops.page_scores."""
        check_lengths("lengths", lengths, [0] * cache.batch, cache.lengths)
        every = torch.arange(max(lengths), device=self._device).expand(cache.batch, -1)
        return set_ops.page_scores(
            queries, tap, cache.flat_keys, cache.places(every), lengths, page_size,
            num_heads=model.spec.num_heads, scale=model.scale,
        )  # fmt: skip

    @torch.inference_mode()
    def smooth(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """Moving average: see set_ops.smooth."""
        return set_ops.smooth(scores, width)

    @torch.inference_mode()
    def accumulate(self, old: torch.Tensor, new: torch.Tensor, decay: float | Sequence[float]) -> torch.Tensor:
        """decay * old + new: see set_ops.accumulate."""
        return set_ops.accumulate(old, new, decay)

    @torch.inference_mode()
    def keep_mass(
        self,
        token_set: TokenSet,
        scores: torch.Tensor,
        lengths: Sequence[int],
        *,
        mass: float,
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> TokenSet:
        """The smallest part of each set that holds `mass`: see set_ops.keep_mass."""
        return set_ops.keep_mass(token_set, scores, lengths, mass, num_sink_tokens, num_recent_tokens)

    @torch.inference_mode()
    def compare_logits(self, reference: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> RowComparison:
        """See Measures.compare_logits."""
        return set_ops.compare_logits(reference, logits, tokens)

    @torch.inference_mode()
    def set_mass(self, token_set: TokenSet, scores: torch.Tensor) -> list[float]:
        """See Measures.set_mass."""
        return set_ops.set_mass(token_set, scores)

    def set_sizes(self, token_set: TokenSet) -> list[int]:
        """See Measures.set_sizes."""
        return token_set.counts.tolist()

    @torch.inference_mode()
    def narrow_queries(self, queries: Mapping[int, torch.Tensor], have: Tap, want: Tap) -> Mapping[int, torch.Tensor]:
        """See Measures.narrow_queries."""
        return {
            layer: queries[layer] if at == list(range(queries[layer].shape[2])) else queries[layer][:, :, at]
            for layer, at in have.places(want).items()
        }

    @torch.inference_mode()
    def select(
        self,
        target_scores: torch.Tensor | None,
        draft_scores: torch.Tensor | None,
        lengths: Sequence[int],
        *,
        budget: int,
        num_sink_tokens: int,
        num_recent_tokens: int,
        num_draft_selected: int,
    ) -> TokenSet:
        """The quota rule: see ops.select."""
        return ops.select(
            target_scores, draft_scores, lengths, budget, num_sink_tokens, num_recent_tokens, num_draft_selected, self._device
        )

    @torch.inference_mode()
    def extend(self, token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
        """Entries below min(starts[b], stops[b]) stay, starts[b]..stops[b]-1 join: see ops.extend."""
        return ops.extend(token_set, starts, stops)

    @torch.inference_mode()
    def replace_set_rows(self, old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
        """Row b from `new` where rows[b], else from `old`; padded to the wider of the two."""
        return ops.replace_set_rows(old, new, rows)

    @torch.inference_mode()
    def probabilities(
        self, logits: torch.Tensor, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: torch.Tensor | None
    ) -> torch.Tensor:
        """Warped distributions [B, T, V]: see sampling.probabilities."""
        return sampling.probabilities(logits, warp, context, inflight)

    @torch.inference_mode()
    def sample(self, probabilities: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
        """[B, 1] tokens by inverse CDF from [B, 1, V]."""
        if probabilities.shape[1] != 1 or len(uniforms) != len(probabilities):
            raise ValueError(f"probabilities {tuple(probabilities.shape)} and {len(uniforms)} uniforms, expected [B, 1, V] and B")
        return sampling.draw(probabilities[:, 0], uniforms)[:, None]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, T] tokens; the lower index wins a tie."""
        return sampling.first_argmax(logits)

    @torch.inference_mode()
    def confidence(self, logits: torch.Tensor, probabilities: torch.Tensor | None) -> torch.Tensor:
        """[B, 1] top probability of [B, 1, V] distributions, or of softmax(logits)."""
        return sampling.confidence(logits, probabilities)

    def peek(self, values: torch.Tensor) -> tuple[float, ...] | None:
        """The values [B, 1] on a CPU; None where a device would have to finish first."""
        return tuple(values[:, 0].tolist()) if values.device.type == "cpu" else None

    @torch.inference_mode()
    def favour(
        self, logits: torch.Tensor, drafts: torch.Tensor, num_drafts: Sequence[int], confidence: torch.Tensor, threshold: float
    ) -> torch.Tensor:
        """See sampling.favour."""
        return sampling.favour(logits, drafts, num_drafts, confidence, threshold)

    @torch.inference_mode()
    def accept_greedy(self, drafts: torch.Tensor, num_drafts: Sequence[int], logits: torch.Tensor) -> Verdict:
        """See sampling.accept_greedy."""
        return sampling.accept_greedy(drafts, num_drafts, logits)

    @torch.inference_mode()
    def accept_sampled(
        self,
        drafts: torch.Tensor,
        num_drafts: Sequence[int],
        draft_probabilities: torch.Tensor | None,
        target_probabilities: torch.Tensor,
        finite_of: torch.Tensor,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """See sampling.accept_sampled."""
        return sampling.accept_sampled(
            drafts, num_drafts, draft_probabilities, target_probabilities, finite_of, accept_uniforms, next_uniforms
        )

    def stack_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join [B, T_i, V] along T."""
        return torch.cat(list(parts), 1)

    @torch.inference_mode()
    def ragged_rows(self, parts: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> torch.Tensor:
        """[B, G, V]: row (b, i) is array[b, t] of parts[b][i]; padding is 0. No rows at all give [B, 0, 0]."""
        size = max((array.shape[-1] for part in parts for array, _ in part), default=0)
        out = torch.zeros(len(parts), max((len(part) for part in parts), default=0), size, device=self._device)
        for b, part in enumerate(parts):
            for i, (array, t) in enumerate(part):
                if not 0 <= t < array.shape[1]:
                    raise ValueError(f"parts[{b}][{i}] asks for row {t}, expected 0 to {array.shape[1] - 1}")
                out[b, i] = array[b, t]
        return out

    def peak_memory_bytes(self) -> int:
        """Peak resident memory of this process (Linux counts KiB, macOS bytes)."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
