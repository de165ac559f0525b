"""The torch backend: Backend of interfaces.py on the CPU; `create` gives the CUDA one where there is a GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dustin.backends.torch_triton import loading, ops, sampling
from dustin.backends.torch_triton.cache import TorchCache
from dustin.backends.torch_triton.model import TorchModel
from dustin.errors import UsageError
from dustin.interfaces import HostVerdict, Tap, TokenSet, Verdict, WarpBatch


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
    """Backend of interfaces.py, whose docstrings are the contract. Arrays are torch tensors; tokens are int64."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = device.type

    def load(self, source: Path, *, dtype: str = "auto") -> TorchModel:
        """A model from a folder of safetensors or a .gguf file. Raise ModelError with the reason, UsageError on a bad dtype."""
        config, weights, name = loading.load(Path(source), loading.choose_dtype(dtype, self._device), self._device)
        return TorchModel(config, weights, name)

    def tokens(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B, T] int64, short rows padded with 0."""
        width = max((len(row) for row in rows), default=0)
        padded = [list(row) + [0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self._device).view(len(rows), width)

    def concat_tokens(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join [B, T_i] along T."""
        return torch.cat(list(parts), 1)

    @torch.inference_mode()
    def read(self, verdict: Verdict, logits: torch.Tensor | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """Host copy of a verdict in one transfer; logprobs of the emitted tokens from logits [B, T, V] where asked for."""
        return sampling.read(verdict, logits, top_logprobs)

    def gather_rows(self, queries: Mapping[int, torch.Tensor], rows: torch.Tensor | Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Of each [B, T, S, D] row rows[b]: [B, 1, S, D]."""
        wanted = torch.as_tensor(rows, device=self._device).long()
        at = torch.arange(len(wanted), device=self._device)
        return {layer: q[at, wanted][:, None] for layer, q in queries.items()}

    def concat_queries(self, parts: Sequence[Mapping[int, torch.Tensor]]) -> Mapping[int, torch.Tensor]:
        """Join along the row axis. Raise ValueError when the parts hold different layers."""
        if any(set(part) != set(parts[0]) for part in parts):
            raise ValueError(f"parts hold layers {[sorted(part) for part in parts]}, expected the same in each")
        return {layer: torch.cat([part[layer] for part in parts], 1) for layer in parts[0]}

    def replace_rows(
        self, old: Mapping[int, torch.Tensor], new: Mapping[int, torch.Tensor], rows: Sequence[bool]
    ) -> Mapping[int, torch.Tensor]:
        """Row b from `new` where rows[b], else from `old`; both [B, R, S, D]. Raise ValueError when they do not match."""
        taken = torch.tensor(list(rows), dtype=torch.bool, device=self._device)[:, None, None, None]
        if set(old) != set(new) or any(old[layer].shape != q.shape for layer, q in new.items()):
            raise ValueError("old and new queries differ in layers or shapes, expected the same")
        return {layer: torch.where(taken, q, old[layer]) for layer, q in new.items()}

    @torch.inference_mode()
    def score(
        self, queries: Mapping[int, torch.Tensor], tap: Tap, model: TorchModel, cache: TorchCache, lengths: Sequence[int]
    ) -> torch.Tensor:
        """[B, max(lengths)] fp32: see ops.score."""
        return ops.score(queries, tap, cache, lengths, num_heads=model.spec.num_heads, scale=model.scale)

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
