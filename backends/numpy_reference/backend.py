"""The numpy backend: every Backend method in float64, bounds-checked, made to be read and compared with."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dustin.backends.common.checks import check_inserted
from dustin.backends.numpy_reference import loading, ops, sampling, set_ops
from dustin.backends.numpy_reference.cache import Cache, Floats, check_lengths
from dustin.backends.numpy_reference.model import NumpyModel
from dustin.backends.numpy_reference.ops import Ints
from dustin.errors import UsageError
from dustin.interfaces import HostVerdict, RowComparison, Tap, TokenLogprobs, TokenSet, Verdict, WarpBatch


def create(device: str = "auto") -> NumpyBackend:
    """The backend; the CPU is its only device. Raise UsageError on another."""
    if device not in ("auto", "cpu"):
        raise UsageError(f"device is {device!r}, expected cpu: the numpy backend runs nowhere else")
    return NumpyBackend()


class NumpyBackend:
    """Backend of dustin.interfaces, whose docstrings are the contract. Undefined entries are -1 (tokens) or NaN (KV rows)."""

    name = "numpy"
    device = "cpu"

    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> NumpyModel:
        """A model from a folder of safetensors. Raise UsageError on a dtype other than float64."""
        if dtype not in ("auto", "float64"):
            raise UsageError(f"dtype is {dtype!r}, expected auto or float64: the numpy backend computes in nothing else")
        return loading.load(Path(source))

    def tokens(self, rows: Sequence[Sequence[int]]) -> Ints:
        """[B, T] int64, short rows padded with 0."""
        out = np.zeros((len(rows), max((len(row) for row in rows), default=0)), dtype=np.int64)
        for b, row in enumerate(rows):
            out[b, : len(row)] = row
        return out

    def concat_tokens(self, parts: Sequence[Ints]) -> Ints:
        """Join [B, T_i] along T."""
        return np.concatenate(parts, axis=1)

    def insert_tokens(self, tokens: Ints, starts: Sequence[int], parts: Ints, counts: Sequence[int]) -> Ints:
        """See Backend.insert_tokens."""
        check_inserted(tokens.shape, starts, parts.shape, counts)
        made = tokens.copy()
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            made[b, start : start + count] = parts[b, :count]
        return made

    def read(self, verdict: Verdict, logits: Floats | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """Host copy of a verdict; logprobs of the emitted tokens from logits [B, T, V] where asked for."""
        kept = tuple(int(n) for n in verdict.num_accepted)
        tokens = tuple(tuple(int(t) for t in verdict.tokens[b, : n + 1]) for b, n in enumerate(kept))
        logprobs = None
        if top_logprobs is not None:
            if logits is None:
                raise ValueError("logits is None, expected [B, T, V]: top_logprobs was asked for")
            logprobs = tuple(
                tuple(_logprobs(logits[b, t], token, top_logprobs) for t, token in enumerate(row)) for b, row in enumerate(tokens)
            )
        return HostVerdict(kept, tokens, tuple(bool(f) for f in verdict.finite), logprobs)

    def gather_rows(self, queries: Mapping[int, Floats], rows: Ints | Sequence[int], count: int = 1) -> Mapping[int, Floats]:
        """Of each [B, T, S, D] the `count` rows that end at rows[b], row 0 repeated. Raise ValueError on a bad row."""
        wanted = [int(row) for row in rows]
        for q in queries.values():
            check_lengths("rows", wanted, q.shape[0], [0] * q.shape[0], [q.shape[1] - 1] * q.shape[0])
        at = np.maximum(np.array(wanted, dtype=np.int64)[:, None] + np.arange(1 - count, 1), 0)
        return {layer: q[np.arange(len(wanted))[:, None], at] for layer, q in queries.items()}

    def concat_queries(self, parts: Sequence[Mapping[int, Floats]]) -> Mapping[int, Floats]:
        """Join along the row axis. Raise ValueError when the parts hold different layers."""
        if any(set(part) != set(parts[0]) for part in parts):
            raise ValueError(f"parts hold layers {[sorted(part) for part in parts]}, expected the same in each")
        return {layer: np.concatenate([part[layer] for part in parts], axis=1) for layer in parts[0]}

    def score(
        self,
        queries: Mapping[int, Floats],
        tap: Tap,
        model: NumpyModel,
        cache: Cache,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> npt.NDArray[np.float32]:
        """[B, max(lengths)] fp32: see ops.score."""
        shape = {"num_heads": model.spec.num_heads, "scale": model.scale}
        return ops.score(queries, tap, cache, lengths, softcap=model.softcap, within=within, **shape)  # type: ignore[arg-type]

    def page_scores(
        self, queries: Mapping[int, Floats], tap: Tap, model: NumpyModel, cache: Cache, lengths: Sequence[int], page_size: int
    ) -> npt.NDArray[np.float32]:
        """[B, max(lengths)] fp32: see set_ops.page_scores."""
        return set_ops.page_scores(
            queries, tap, cache, lengths, page_size, num_heads=model.spec.num_heads, scale=model.scale
        )

    def smooth(self, scores: npt.NDArray[np.floating], width: int) -> npt.NDArray[np.floating]:
        """Moving average: see set_ops.smooth."""
        return set_ops.smooth(scores, width)

    def accumulate(
        self, old: npt.NDArray[np.floating], new: npt.NDArray[np.floating], decay: float | Sequence[float]
    ) -> npt.NDArray[np.floating]:
        """decay * old + new: see set_ops.accumulate."""
        return set_ops.accumulate(old, new, decay)

    def keep_mass(
        self,
        token_set: TokenSet,
        scores: npt.NDArray[np.floating],
        lengths: Sequence[int],
        *,
        mass: float,
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> TokenSet:
        """The smallest part of each set that holds `mass`: see set_ops.keep_mass."""
        protected = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
        return set_ops.keep_mass(token_set, scores, lengths, mass=mass, **protected)

    def compare_logits(self, reference: Floats, logits: Floats, tokens: Ints) -> RowComparison:
        """See Measures.compare_logits."""
        return set_ops.compare_logits(reference, logits, tokens)

    def set_mass(self, token_set: TokenSet, scores: npt.NDArray[np.floating]) -> Floats:
        """See Measures.set_mass."""
        return set_ops.set_mass(token_set, scores)

    def set_sizes(self, token_set: TokenSet) -> list[int]:
        """See Measures.set_sizes."""
        return [int(count) for count in token_set.counts]

    def narrow_queries(self, queries: Mapping[int, Floats], have: Tap, want: Tap) -> Mapping[int, Floats]:
        """See Measures.narrow_queries."""
        return {layer: queries[layer][:, :, places] for layer, places in have.places(want).items()}

    def select(
        self,
        target_scores: npt.NDArray[np.floating] | None,
        draft_scores: npt.NDArray[np.floating] | None,
        lengths: Sequence[int],
        *,
        budget: int,
        num_sink_tokens: int,
        num_recent_tokens: int,
        num_draft_selected: int,
    ) -> TokenSet:
        """The quota rule: see ops.select."""
        return ops.select(
            target_scores,
            draft_scores,
            lengths,
            budget=budget,
            num_sink_tokens=num_sink_tokens,
            num_recent_tokens=num_recent_tokens,
            num_draft_selected=num_draft_selected,
        )

    def extend(self, token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
        """Entries below min(starts[b], stops[b]), then starts[b]..stops[b]-1."""
        rows = []
        for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            kept = np.asarray(token_set.indices[b][: int(token_set.counts[b])])
            rows.append(np.concatenate([kept[kept < min(start, stop)], np.arange(start, stop)]))
        indices = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int32)
        for b, row in enumerate(rows):
            indices[b, : len(row)] = row
        by_layer = {layer: self.extend(part, starts, stops) for layer, part in token_set.by_layer.items()}
        return TokenSet(indices, np.array([len(row) for row in rows], dtype=np.int32), token_set.dense_layers, by_layer)

    def replace_rows(self, old: Mapping[int, Floats], new: Mapping[int, Floats], rows: Sequence[bool]) -> Mapping[int, Floats]:
        """Row b from `new` where rows[b], else from `old`."""
        taken = np.asarray(rows, dtype=bool)[:, None, None, None]
        return {layer: np.where(taken, new[layer], old[layer]) for layer in new}

    def replace_set_rows(self, old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
        """Row b from `new` where rows[b], else from `old`; padded to the wider of the two."""
        width = max(old.indices.shape[1], new.indices.shape[1])
        indices = np.zeros((len(rows), width), dtype=np.int32)
        counts = np.zeros(len(rows), dtype=np.int32)
        for b, fresh in enumerate(rows):
            source = new if fresh else old
            counts[b] = source.counts[b]
            indices[b, : counts[b]] = source.indices[b, : counts[b]]
        return TokenSet(indices, counts, new.dense_layers)

    def probabilities(
        self, logits: Floats, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: Ints | None
    ) -> Floats:
        """Warped distributions [B, T, V]: see sampling.probabilities."""
        return sampling.probabilities(logits, warp, context, inflight)

    def sample(self, probabilities: Floats, uniforms: Sequence[float]) -> Ints:
        """[B, 1] tokens by inverse CDF."""
        return sampling.sample(probabilities, uniforms)

    def argmax(self, logits: Floats) -> Ints:
        """[B, T] tokens; numpy returns the first of equal maxima."""
        return np.asarray(logits.argmax(axis=-1))

    def confidence(self, logits: Floats, probabilities: Floats | None) -> Floats:
        """[B, 1] top probability of [B, 1, V] distributions, or of softmax(logits)."""
        return sampling.confidence(logits, probabilities)

    def peek(self, values: Floats) -> tuple[float, ...] | None:
        """The values [B, 1]: they are on the host."""
        return tuple(float(value) for value in values[:, 0])

    def favour(
        self, logits: Floats, drafts: Ints, num_drafts: Sequence[int], confidence: Floats, threshold: float
    ) -> Floats:
        """See sampling.favour."""
        return sampling.favour(logits, drafts, num_drafts, confidence, threshold)

    def accept_greedy(self, drafts: Ints, num_drafts: Sequence[int], logits: Floats) -> Verdict:
        """See sampling.accept_greedy."""
        return sampling.accept_greedy(drafts, num_drafts, logits)

    def accept_sampled(
        self,
        drafts: Ints,
        num_drafts: Sequence[int],
        draft_probabilities: Floats | None,
        target_probabilities: Floats,
        finite_of: Floats,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """See sampling.accept_sampled."""
        return sampling.accept_sampled(
            drafts, num_drafts, draft_probabilities, target_probabilities, finite_of, accept_uniforms, next_uniforms
        )

    def stack_rows(self, parts: Sequence[Floats]) -> Floats:
        """Join [B, T_i, V] along T."""
        return np.concatenate(parts, axis=1)

    def ragged_rows(self, parts: Sequence[Sequence[tuple[Floats, int]]]) -> Floats:
        """[B, G, V]: row (b, i) is array[b, t] of parts[b][i]; padding is 0. No rows at all give [B, 0, 0]."""
        size = max((array.shape[-1] for part in parts for array, _ in part), default=0)
        out = np.zeros((len(parts), max((len(part) for part in parts), default=0), size))
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


def _logprobs(logits: Floats, token: int, top: int) -> TokenLogprobs:
    """Log-softmax of logits [V] at `token`, and the `top` best; a tie goes to the lower index."""
    peak = logits.max()
    logprobs = logits - peak - np.log(np.exp(logits - peak).sum())
    order = np.argsort(-logprobs, kind="stable")[:top]
    return TokenLogprobs(token, float(logprobs[token]), tuple(int(i) for i in order), tuple(float(logprobs[i]) for i in order))
