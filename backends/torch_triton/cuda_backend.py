"""The torch backend on an NVIDIA GPU: paged models, and the array work of a round as Triton kernels.

Nothing here waits for the device except `read`; what is not overridden runs as plain torch operations on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dustin.backends.torch_triton import loading, sampling
from dustin.backends.torch_triton.backend import TorchBackend
from dustin.backends.torch_triton.cache import check_lengths
from dustin.backends.torch_triton.cuda_cache import PagedCache
from dustin.backends.torch_triton.cuda_call import MAX_GRAPH_ROWS
from dustin.backends.torch_triton.cuda_fused import extend_set
from dustin.backends.torch_triton.cuda_memory import named_shortage
from dustin.backends.torch_triton.cuda_model import PROMPT_ROWS, CudaModel
from dustin.backends.torch_triton.cuda_replay import Inputs, Replays
from dustin.backends.torch_triton.ops import host_values, on_device
from dustin.backends.torch_triton.reselection import MAX_SELECTED, SCORE_ROWS
from dustin.interfaces import HostVerdict, Tap, TokenSet, Verdict
from dustin.triton_kernels import accept
from dustin.triton_kernels.argmax_rows import argmax_rows
from dustin.triton_kernels.runtime import power_of_two
from dustin.triton_kernels.score_heads import HeadGroups, group_heads, score_layers
from dustin.triton_kernels.select_tokens import select_tokens

# Fewer rows than this, but more than one, are padded to it; more to the next power of two: the kernels and graphs of one number of
# rows then serve several numbers of drafts.
LEAST_ROWS = 4
# Logits up to which a verdict is a graph, which reads a copy of them: launches then take longer than copying 8 MiB.
JUDGED_IN_GRAPH = 1 << 22


def padded_rows(rows: int, heads: int) -> int:
    """Rows that are scored instead of `rows` with so many heads of a kv head each: one of few numbers, or as they are."""
    wide = rows if rows <= 1 else max(LEAST_ROWS, power_of_two(rows))
    return wide if wide * heads <= SCORE_ROWS else rows


@dataclass
class SentVerdict(Verdict):
    """A verdict that is being copied to `host` [B, G + 3] (kept, finite, tokens): it is there once `sent` has passed."""

    host: torch.Tensor
    sent: torch.cuda.Event


class CudaBackend(TorchBackend):
    """Backend of dustin.interfaces on a CUDA device (or, under TRITON_INTERPRET=1, on the CPU)."""

    # The selection kernel is compiled for every budget and share: calibration, which tries many once, goes without it.
    plain_selection = False
    # Model calls of up to this many rows a sequence are recorded as graphs, one for each shape: few shapes are worth padding.
    recorded_rows = MAX_GRAPH_ROWS
    # Rows of a call, of all prompts together, up to which more are read faster: launching a call takes as long as some hundreds.
    prompt_rows = 8192

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._replays = Replays(self._device)

    @property
    def card(self) -> str:
        """The driver's name of the GPU, by which measured costs are found; empty where several ranks share the work."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" and not several else ""

    @property
    def recorded_prompt_rows(self) -> int:
        """Rows of one prompt, read alone, up to which a call is recorded; 0 without graphs."""
        return PROMPT_ROWS if self._replays.possible else 0

    @property
    def warms_up(self) -> bool:
        """Whether rounds of a new shape wait for compilers and recordings: not under the interpreter, which has neither."""
        return self._device.type == "cuda"

    @property
    def capture_seconds(self) -> float:
        """Seconds that recording scores and choices took."""
        return self._replays.seconds

    @property
    def scores_all(self) -> bool:
        """Whether all tokens are scored each round, whatever pool a profile names: the kernel reads every key of a few heads in
        less time than it takes to gather a pool's. Studies of what a pool loses, which select plainly, keep it."""
        return not self.plain_selection

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> CudaModel:  # type: ignore[override]
        """A model from a folder of safetensors or a .gguf file. Raise ModelError with the reason, UsageError on a bad dtype."""
        with named_shortage(f"the weights of {Path(source).name}", "choose --dtype bfloat16, a smaller model, or --device cpu"):
            config, weights, name = loading.load(Path(source), loading.choose_dtype(dtype, self._device), self._device)
        return CudaModel(config, weights, name)

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        """[B] int32 on the device, without waiting for it."""
        return on_device(list(values), torch.int32, self._device)

    @torch.inference_mode()
    def score(  # type: ignore[override]
        self,
        queries: Mapping[int, torch.Tensor],
        tap: Tap,
        model: CudaModel,
        cache: PagedCache,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> torch.Tensor:
        """[B, Nmax] fp32, Nmax the longest length in whole pages: see Backend.score."""
        if within is not None:
            return self._score_within(queries, tap, model, cache, lengths, within)
        if not queries:
            raise ValueError("queries is empty, expected captured queries of one layer or more")
        ends = check_lengths("lengths", lengths, [0] * cache.batch, cache.lengths)
        page_size = cache.pool.page_size
        pages = self._columns(max(1, -(-max(ends) // page_size)), cache.page_table.shape[1])
        spec, scale, columns = model.spec, model.scale, pages * page_size
        total = sum(q.shape[1] * q.shape[2] for q in queries.values())
        counts = {q.shape[1] for q in queries.values()}
        rows = max(counts) if len(counts) == 1 else None
        alike: dict[tuple[torch.Size, torch.Size], list[tuple[int, torch.Tensor, HeadGroups]]] = {}
        inputs = {"ends": host_values(ends, torch.int32, self._device), "page_table": cache.page_table}
        if rows is not None:
            inputs["rows"] = host_values([rows] * cache.batch, torch.int32, self._device)
        for layer, q in queries.items():
            groups = group_heads(tap.heads[layer], spec.num_heads, spec.num_kv_heads, self._device)
            if rows is not None:
                q = F.pad(q, (0, 0, 0, 0, 0, padded_rows(rows, groups.heads.shape[1]) - rows))
            inputs[str(layer)] = q
            alike.setdefault((q.shape, groups.heads.shape), []).append((layer, cache.pool.keys[layer], groups))

        def work(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            ends, table, added = inputs["ends"], inputs["page_table"], False
            scores = torch.empty(len(ends), columns, dtype=torch.float32, device=ends.device)
            # Layers with as many heads share launches. The kernel takes SCORE_ROWS rows and heads at once: more rows (a prompt's
            # end) go in parts.
            for (shape, heads), layers in alike.items():
                for start in range(0, shape[1], size := max(1, SCORE_ROWS // heads[1])):
                    parts = [inputs[str(layer)][:, start : start + size] for layer, *_ in layers]
                    taken, fed = parts[0].shape[1], inputs.get("rows")
                    if fed is None or rows is None or size < shape[1]:
                        fed = torch.full_like(ends, taken)
                    else:
                        # Padded rows do not count. The share of equal numbers of rows is the same for any number.
                        taken = rows
                    score_layers(
                        parts, [keys for _, keys, _ in layers], table, ends, [each for *_, each in layers], scores,
                        num_rows=fed, weight=taken * shape[2] / total, add=added, scale=scale,
                    )  # fmt: skip
                    added = True
            return (scores,)

        key = ("score", columns, tuple((layer, tuple(tap.heads[layer])) for layer in queries))
        return self._replays(cache.pool, key, inputs, work)[0]

    def _columns(self, pages: int, most: int) -> int:
        """Pages that scores cover, at least `pages`: where graphs are used, few numbers, so that a graph serves many rounds."""
        step = max(8, 1 << max(0, pages.bit_length() - 4)) if self._replays.possible else 1
        return min(most, -(-pages // step) * step)

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
        """The quota rule, indices [B, budget]: see Backend.select. Raise ValueError on a budget below the protected tokens."""
        if self.plain_selection or budget > MAX_SELECTED:
            return super().select(
                target_scores, draft_scores, lengths, budget=budget, num_sink_tokens=num_sink_tokens,
                num_recent_tokens=num_recent_tokens, num_draft_selected=num_draft_selected,
            )  # fmt: skip
        if target_scores is not None and draft_scores is not None and target_scores.shape != draft_scores.shape:
            # Scores kept from rounds before, or of a pool, are wider or narrower; what lies beyond the lengths is never chosen.
            columns = max(target_scores.shape[1], draft_scores.shape[1])
            target_scores, draft_scores = (
                F.pad(scores, (0, columns - scores.shape[1]), value=float("-inf")) for scores in (target_scores, draft_scores)
            )

        def work(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            return select_tokens(
                inputs.get("target"), inputs.get("draft"), inputs["lengths"], budget=budget, num_sink_tokens=num_sink_tokens,
                num_recent_tokens=num_recent_tokens, num_draft_selected=num_draft_selected,
            )  # fmt: skip

        inputs = {name: x for name, x in (("target", target_scores), ("draft", draft_scores)) if x is not None}
        inputs["lengths"] = host_values(list(lengths), torch.int32, self._device)
        key = ("select", budget, num_sink_tokens, num_recent_tokens, num_draft_selected)
        return TokenSet(*self._replays(self, key, inputs, work))

    @torch.inference_mode()
    def extend(self, token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
        """Entries below min(starts[b], stops[b]) stay, starts[b]..stops[b]-1 join; the same by layer."""
        grown = max(0, *(stop - start for start, stop in zip(starts, stops, strict=True)))
        begin, end = self._ints(starts), self._ints(stops)
        indices, counts = extend_set(token_set.indices, token_set.counts, begin, end, token_set.indices.shape[1] + grown)
        by_layer = {layer: self.extend(part, starts, stops) for layer, part in token_set.by_layer.items()}
        return TokenSet(indices, counts, token_set.dense_layers, by_layer)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, T] tokens; the lower index wins a tie."""
        return argmax_rows(logits.flatten(0, 1))[0].view(logits.shape[:2]).long()

    @torch.inference_mode()
    def accept_greedy(self, drafts: torch.Tensor, num_drafts: Sequence[int], logits: torch.Tensor) -> Verdict:
        """See Backend.accept_greedy."""
        batch, width = drafts.shape
        check_lengths("num_drafts", num_drafts, [0] * batch, [width] * batch)

        def work(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            best, finite = argmax_rows(inputs["logits"].flatten(0, 1))
            if width:
                best, finite = best.view(batch, width + 1), finite.view(batch, width + 1)
                kept, tokens, finite = accept.accept_greedy(inputs["drafts"], inputs["counts"], best, finite)
            else:
                kept, tokens = torch.zeros_like(best), best[:, None]
            return kept, tokens, finite, torch.cat([kept[:, None], finite.to(torch.int32)[:, None], tokens], 1)

        inputs = {"logits": logits}
        if width:
            inputs |= {"drafts": drafts, "counts": host_values(list(num_drafts), torch.int32, self._device)}
        if logits.numel() <= JUDGED_IN_GRAPH:
            kept, tokens, row_finite, packed = self._replays(self, ("accept", width), inputs, work)
        else:
            moved = {name: x.to(self._device, non_blocking=True) for name, x in inputs.items()}
            kept, tokens, row_finite, packed = work(moved)
        if self._device.type != "cuda":
            return Verdict(kept, tokens, None, row_finite)
        # On its way before the device is told to do more: the host will wait for this alone.
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record(torch.cuda.current_stream(self._device))
        return SentVerdict(kept, tokens, None, row_finite, host, sent)

    def read(self, verdict: Verdict, logits: torch.Tensor | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """See Backend.read. A greedy verdict is already on its way: what the device was told since is not waited for."""
        if not isinstance(verdict, SentVerdict) or top_logprobs is not None:
            return super().read(verdict, logits, top_logprobs)
        verdict.sent.synchronize()
        return HostVerdict(*sampling.unpacked(verdict.host.tolist()))

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
        """See Backend.accept_sampled."""
        batch, width = drafts.shape
        q = draft_probabilities
        if width == 0 or (q is not None and q.shape != (batch, width, target_probabilities.shape[2])):
            return sampling.accept_sampled(drafts, num_drafts, q, target_probabilities, finite_of, accept_uniforms, next_uniforms)
        check_lengths("num_drafts", num_drafts, [0] * batch, [width] * batch)
        padded = [[*row, *[0.0] * width][:width] for row in accept_uniforms]
        values = (padded, list(next_uniforms))
        uniforms, final = (on_device(v, torch.float64, self._device) for v in values)
        counts = self._ints(num_drafts)
        p = target_probabilities.contiguous()
        kept, tokens = accept.accept_sampled(drafts, counts, None if q is None else q.contiguous(), p, uniforms, final)
        return Verdict(kept, tokens, target_probabilities, sampling._finite(finite_of, counts))

    def peak_memory_bytes(self) -> int:
        """Peak of the device allocator since start."""
        return int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else super().peak_memory_bytes()
