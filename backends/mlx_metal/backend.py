"""The MLX backend: mlx-lm's models on Metal, with our kernels where a gate finds them faster; on MLX's CPU and CUDA by arrays."""

from __future__ import annotations

import importlib.util
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from dustin.backends.common.checks import check_inserted
from dustin.backends.mlx_metal import loading, ops, sampling, set_ops, sets
from dustin.backends.mlx_metal.cache import MlxCache, device_info
from dustin.backends.mlx_metal.model import MlxModel
from dustin.errors import ModelError, UsageError
from dustin.interfaces import HostVerdict, RowComparison, Tap, TokenSet, Verdict, WarpBatch
from dustin.metal_kernels.gate import Gate
from dustin.metal_kernels.plan import HEAD_DIMS

DEVICES = ("auto", "cpu", "gpu", "metal", "cuda")


def create(device: str = "auto") -> MlxBackend:
    """The backend on `device` (auto takes a GPU where MLX has one). Raise UsageError with the reason and what to do."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise UsageError("backend 'mlx' needs mlx-lm for its model definitions: pip install mlx-lm")
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}, expected {', '.join(DEVICES)} for the mlx backend")
    metal = mx.metal.is_available()
    gpu = metal or mx.is_available(mx.gpu)
    if device == "metal" and not metal:
        raise UsageError("device is 'metal', but MLX finds no Metal GPU here (a Mac with Apple silicon has one): use --device cpu")
    if device == "cuda" and (metal or not gpu):
        raise UsageError("device is 'cuda', but this MLX finds no CUDA GPU: install mlx[cuda13] beside one, or use --device cpu")
    if device == "gpu" and not gpu:
        raise UsageError("device is 'gpu', but MLX finds neither Metal nor CUDA here: use --device cpu")
    try:
        gate = Gate()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return MlxBackend("cpu" if device == "cpu" or not gpu else "metal" if metal else "cuda", gate)


class MlxBackend:
    """Backend of dustin.interfaces, whose docstrings are the contract. Arrays are MLX arrays; tokens are int32.

    `gate` decides between Metal kernels and the array path (environment DUSTIN_METAL_GATE). The device is MLX's default device,
    one a process: making a backend sets it.
    """

    name = "mlx"

    def __init__(self, device: str, gate: Gate) -> None:
        self.device, self.gate = device, gate
        mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
        if device == "cpu" and gate.mode == "auto":
            # Metal kernels run on the GPU stream only.
            gate.chip = None

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> MlxModel:
        """A model from a folder (plain or mlx-lm's quantised one) or a .gguf file.

        Raise ModelError with the reason, UsageError on a bad dtype.
        """
        source = Path(source)
        inner, config, name = loading.load(source, loading.choose_dtype(dtype))
        if self.gate.mode == "kernel" and config.head_dim not in HEAD_DIMS:
            raise ModelError(
                f"head_dim of {source} is {config.head_dim}, and DUSTIN_METAL_GATE=kernel asks for Metal kernels, which serve "
                f"{', '.join(map(str, HEAD_DIMS))}: unset it, or set it to array"
            )
        limit = device_info().get("max_recommended_working_set_size") if self.device == "metal" else None
        if limit:
            # As mlx-lm does: a model near the machine's memory is paged out between rounds otherwise.
            mx.set_wired_limit(limit)
        return MlxModel(inner, config, name, self.gate)

    def tokens(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """[B, T] int32, short rows padded with 0."""
        width = max((len(row) for row in rows), default=0)
        if not width:
            return mx.zeros((len(rows), 0), mx.int32)
        return mx.array([list(row) + [0] * (width - len(row)) for row in rows], mx.int32)

    def concat_tokens(self, parts: Sequence[mx.array]) -> mx.array:
        """Join [B, T_i] along T."""
        return mx.concatenate(list(parts), axis=1)

    def insert_tokens(self, tokens: mx.array, starts: Sequence[int], parts: mx.array, counts: Sequence[int]) -> mx.array:
        """See Backend.insert_tokens."""
        check_inserted(tokens.shape, starts, parts.shape, counts)
        at = mx.arange(tokens.shape[1])[None] - mx.array(list(starts))[:, None]
        inside = (at >= 0) & (at < mx.array(list(counts))[:, None])
        taken = mx.take_along_axis(parts, mx.clip(at, 0, parts.shape[1] - 1), axis=1)
        return mx.where(inside, taken.astype(tokens.dtype), tokens)

    def read(self, verdict: Verdict, logits: mx.array | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """Host copy of a verdict, waited for once; logprobs of the emitted tokens from logits [B, T, V] where asked for."""
        return sampling.read(verdict, logits, top_logprobs)

    def gather_rows(
        self, queries: Mapping[int, mx.array], rows: mx.array | Sequence[int], count: int = 1
    ) -> Mapping[int, mx.array]:
        """Of each [B, T, S, D] the `count` rows that end at rows[b], row 0 repeated: [B, count, S, D]."""
        wanted = (rows if isinstance(rows, mx.array) else mx.array(list(rows), mx.int32)).reshape(-1, 1)
        at = mx.maximum(wanted + mx.arange(1 - count, 1)[None], 0)
        sequences = mx.arange(at.shape[0])[:, None]
        return {layer: q[sequences, at] for layer, q in queries.items()}

    def concat_queries(self, parts: Sequence[Mapping[int, mx.array]]) -> Mapping[int, mx.array]:
        """Join along the row axis. Raise ValueError when the parts hold different layers."""
        if any(set(part) != set(parts[0]) for part in parts):
            raise ValueError(f"parts hold layers {[sorted(part) for part in parts]}, expected the same in each")
        return {layer: mx.concatenate([part[layer] for part in parts], axis=1) for layer in parts[0]}

    def replace_rows(
        self, old: Mapping[int, mx.array], new: Mapping[int, mx.array], rows: Sequence[bool]
    ) -> Mapping[int, mx.array]:
        """Row b from `new` where rows[b], else from `old`; both [B, R, S, D]. Raise ValueError when they do not match."""
        taken = mx.array([bool(row) for row in rows])[:, None, None, None]
        if set(old) != set(new) or any(old[layer].shape != q.shape for layer, q in new.items()):
            raise ValueError("old and new queries differ in layers or shapes, expected the same")
        return {layer: mx.where(taken, q, old[layer]) for layer, q in new.items()}

    def score(
        self,
        queries: Mapping[int, mx.array],
        tap: Tap,
        model: MlxModel,
        cache: MlxCache,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> mx.array:
        """[B, max(lengths)] fp32: see ops.score and, with `within`, set_ops.score_within."""
        shape = {"num_heads": model.spec.num_heads, "scale": model.scale}
        if within is not None:
            return set_ops.score_within(queries, tap, cache, lengths, within, **shape)
        return ops.score(queries, tap, cache, lengths, gate=self.gate, **shape)

    def page_scores(
        self, queries: Mapping[int, mx.array], tap: Tap, model: MlxModel, cache: MlxCache, lengths: Sequence[int], page_size: int
    ) -> mx.array:
        """[B, max(lengths)] fp32: see set_ops.page_scores."""
        shape = {"num_heads": model.spec.num_heads, "scale": model.scale}
        return set_ops.page_scores(queries, tap, cache, lengths, page_size, **shape)

    def smooth(self, scores: mx.array, width: int) -> mx.array:
        """Moving average: see set_ops.smooth."""
        return set_ops.smooth(scores, width)

    def accumulate(self, old: mx.array, new: mx.array, decay: float | Sequence[float]) -> mx.array:
        """decay * old + new: see set_ops.accumulate."""
        return set_ops.accumulate(old, new, decay)

    def keep_mass(
        self,
        token_set: TokenSet,
        scores: mx.array,
        lengths: Sequence[int],
        *,
        mass: float,
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> TokenSet:
        """The smallest part of each set that holds `mass`: see set_ops.keep_mass."""
        return set_ops.keep_mass(token_set, scores, lengths, mass, num_sink_tokens, num_recent_tokens)

    def compare_logits(self, reference: mx.array, logits: mx.array, tokens: mx.array) -> RowComparison:
        """See Measures.compare_logits."""
        return set_ops.compare_logits(reference, logits, tokens)

    def set_mass(self, token_set: TokenSet, scores: mx.array) -> list[float]:
        """See Measures.set_mass."""
        return set_ops.set_mass(token_set, scores)

    def set_sizes(self, token_set: TokenSet) -> list[int]:
        """See Measures.set_sizes."""
        return token_set.counts.tolist()

    def narrow_queries(self, queries: Mapping[int, mx.array], have: Tap, want: Tap) -> Mapping[int, mx.array]:
        """See Measures.narrow_queries."""
        return {layer: queries[layer][:, :, mx.array(list(at), mx.int32)] for layer, at in have.places(want).items()}

    def select(
        self,
        target_scores: mx.array | None,
        draft_scores: mx.array | None,
        lengths: Sequence[int],
        *,
        budget: int,
        num_sink_tokens: int,
        num_recent_tokens: int,
        num_draft_selected: int,
    ) -> TokenSet:
        """The quota rule: see ops.select."""
        quota = (budget, num_sink_tokens, num_recent_tokens, num_draft_selected)
        return ops.select(target_scores, draft_scores, lengths, *quota, self.gate)

    def extend(self, token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
        """Entries below min(starts[b], stops[b]) stay, starts[b]..stops[b]-1 join: see sets.extend."""
        return sets.extend(token_set, starts, stops)

    def replace_set_rows(self, old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
        """Row b from `new` where rows[b], else from `old`; padded to the wider of the two."""
        return sets.replace_set_rows(old, new, rows)

    def probabilities(
        self, logits: mx.array, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: mx.array | None
    ) -> mx.array:
        """Warped distributions [B, T, V]: see sampling.probabilities."""
        return sampling.probabilities(logits, warp, context, inflight)

    def sample(self, probabilities: mx.array, uniforms: Sequence[float]) -> mx.array:
        """[B, 1] tokens by inverse CDF from [B, 1, V]."""
        if probabilities.shape[1] != 1 or len(uniforms) != len(probabilities):
            raise ValueError(f"probabilities {probabilities.shape} and {len(uniforms)} uniforms, expected [B, 1, V] and B")
        return sampling.draw(probabilities[:, 0], uniforms)[:, None]

    def argmax(self, logits: mx.array) -> mx.array:
        """[B, T] tokens; the lower index wins a tie."""
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def confidence(self, logits: mx.array, probabilities: mx.array | None) -> mx.array:
        """[B, 1] top probability of [B, 1, V] distributions, or of softmax(logits)."""
        return sampling.confidence(logits, probabilities)

    def peek(self, values: mx.array) -> tuple[float, ...] | None:
        """None: a look at a lazy array would run what was put off for the round's one read."""
        return None

    def favour(
        self, logits: mx.array, drafts: mx.array, num_drafts: Sequence[int], confidence: mx.array, threshold: float
    ) -> mx.array:
        """See sampling.favour."""
        return sampling.favour(logits, drafts, num_drafts, confidence, threshold)

    def accept_greedy(self, drafts: mx.array, num_drafts: Sequence[int], logits: mx.array) -> Verdict:
        """See sampling.accept_greedy."""
        return sampling.accept_greedy(drafts, num_drafts, logits)

    def accept_sampled(
        self,
        drafts: mx.array,
        num_drafts: Sequence[int],
        draft_probabilities: mx.array | None,
        target_probabilities: mx.array,
        finite_of: mx.array,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """See sampling.accept_sampled."""
        return sampling.accept_sampled(
            drafts, num_drafts, draft_probabilities, target_probabilities, finite_of, accept_uniforms, next_uniforms
        )

    def stack_rows(self, parts: Sequence[mx.array]) -> mx.array:
        """Join [B, T_i, V] along T."""
        return mx.concatenate(list(parts), axis=1)

    def ragged_rows(self, parts: Sequence[Sequence[tuple[mx.array, int]]]) -> mx.array:
        """[B, G, V]: row (b, i) is array[b, t] of parts[b][i]; padding is 0. No rows at all give [B, 0, 0]."""
        size = max((array.shape[-1] for part in parts for array, _ in part), default=0)
        width = max((len(part) for part in parts), default=0)
        if not width:
            return mx.zeros((len(parts), 0, 0))
        blank = mx.zeros((size,))
        lines = []
        for b, part in enumerate(parts):
            for i, (array, t) in enumerate(part):
                if not 0 <= t < array.shape[1]:
                    raise ValueError(f"parts[{b}][{i}] asks for row {t}, expected 0 to {array.shape[1] - 1}")
            lines.append(mx.stack([array[b, t] for array, t in part] + [blank] * (width - len(part))))
        return mx.stack(lines)

    def peak_memory_bytes(self) -> int:
        """Peak of MLX's allocator on a GPU; on the CPU of this process (Linux counts KiB, macOS bytes)."""
        if self.device != "cpu":
            return int(mx.get_peak_memory())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
