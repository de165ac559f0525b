"""The operations of a backend: arrays without policy. Axes and rules: `dustin.interfaces`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dustin.interfaces.models import Array, KVCache, Model, Tap, TokenSet


@dataclass(frozen=True)
class WarpBatch:
    """Sampling parameters of each sequence; every tuple has B entries. `temperature` 0 is greedy (one-hot at the argmax)."""

    temperature: tuple[float, ...]
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]
    repetition_penalty: tuple[float, ...]
    presence_penalty: tuple[float, ...]
    frequency_penalty: tuple[float, ...]

    @property
    def greedy(self) -> bool:
        """True when every row is greedy."""
        return not any(self.temperature)

    @property
    def penalised(self) -> bool:
        """True when some row has a penalty that changes logits."""
        return any(r != 1.0 for r in self.repetition_penalty) or any(self.presence_penalty) or any(self.frequency_penalty)


@dataclass
class Verdict:
    """Device-side result of one acceptance, for `Backend.read`.

    `num_accepted` [B] int32 drafts kept; `tokens` [B, G+1] int32: the accepted drafts followed by the next token at index
    num_accepted (entries beyond are undefined); `probabilities` [B, G+1, V] the warped target distribution the tokens
    were judged by (None when all rows are greedy); `finite` [B] bool: no NaN among the judged logits.
    """

    num_accepted: Array
    tokens: Array
    probabilities: Array | None
    finite: Array


@dataclass(frozen=True)
class HostVerdict:
    """What the host reads of a round. `logprobs[b][i]` is None unless asked for, else (logprob, top tokens, top logprobs)."""

    num_accepted: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    finite: tuple[bool, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of an emitted token under the verified (unwarped) target distribution, and the best alternatives."""

    token: int
    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Backend(Protocol):
    """Arrays without policy: knows nothing of rounds, drafts or modes."""

    name: str
    device: str

    # Models.
    def load(self, source: Path, *, dtype: str = "auto", role: str = "target") -> Model:
        """Load a model from a folder (safetensors) or a .gguf file. Raise ModelError with the reason.

        `role` is "target" or "draft": a backend of several devices splits a target over them and keeps a draft on one.
        """
        ...

    # Host -> device and back.
    def tokens(self, rows: Sequence[Sequence[int]]) -> Array:
        """[B, T] int token array; short rows are padded with 0."""
        ...

    def concat_tokens(self, parts: Sequence[Array]) -> Array:
        """Join token arrays [B, T_i] along T."""
        ...

    def insert_tokens(self, tokens: Array, starts: Sequence[int], parts: Array, counts: Sequence[int]) -> Array:
        """tokens [B, T] with the first counts[b] of parts [B, P] in place of those from starts[b] on; a copy. Raise ValueError
        where they do not fit."""
        ...

    def read(self, verdict: Verdict, logits: Array | None = None, top_logprobs: int | None = None) -> HostVerdict:
        """The one device-to-host read of a round. With `top_logprobs` (0 or more) also log-softmax of `logits` [B, T, V]."""
        ...

    # Selection (METHOD section 3).
    def gather_rows(self, queries: Mapping[int, Array], rows: Array | Sequence[int], count: int = 1) -> Mapping[int, Array]:
        """Of each [B, T, S, D] keep the `count` rows that end at `rows[b]`: [B, count, S, D]; row 0 repeats where there are fewer.

        `rows` may be a device array (`Verdict.num_accepted`).
        """
        ...

    def concat_queries(self, parts: Sequence[Mapping[int, Array]]) -> Mapping[int, Array]:
        """Join captured queries along the row axis."""
        ...

    def score(
        self,
        queries: Mapping[int, Array],
        tap: Tap,
        model: Model,
        cache: KVCache,
        lengths: Sequence[int],
        within: TokenSet | None = None,
    ) -> Array:
        """[B, Nmax] fp32, Nmax >= max(lengths): mean over layers, rows and heads of softmax_j(q.K_j * scale) over [0, lengths[b]).

        Softcap and QK-norm as the model's own attention has them. -inf at and beyond lengths[b]. With `within` only the keys
        of that set are read: the softmax runs over them alone, and all other tokens are -inf.
        """
        ...

    def page_scores(
        self, queries: Mapping[int, Array], tap: Tap, model: Model, cache: KVCache, lengths: Sequence[int], page_size: int
    ) -> Array:
        """[B, Nmax] fp32: a token's score is its page's, the mean over layers, rows and heads of softmax over pages of the bound.

        The bound on q.K_j * scale is the one that the elementwise minima and maxima of a page's keys allow (Quest). Pages are
        `page_size` tokens from 0 on, the last one may be short. -inf at and beyond lengths[b].
        """
        ...

    def smooth(self, scores: Array, width: int) -> Array:
        """Moving average of finite scores [B, Nmax] over `width` (odd) tokens around each; -inf stays and counts nowhere."""
        ...

    def accumulate(self, old: Array, new: Array, decay: float | Sequence[float]) -> Array:
        """decay * old + new, [B, Nmax] of `new` or wider; old entries that are missing or -inf count as 0. `decay` is one number
        or one for each sequence.

        Where `new` is -inf or missing the old entry stays as it is (a row that takes no part, tokens that were not scored).
        """
        ...

    def keep_mass(
        self,
        token_set: TokenSet,
        scores: Array,
        lengths: Sequence[int],
        *,
        mass: float,
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> TokenSet:
        """The smallest part of each row's set whose scores reach `mass` (of the row's finite scores), highest first.

        Sinks and recent tokens stay and count first; ties go to the lower index. A row short of `mass` keeps its whole set, and
        so does one whose set is all of [0, lengths[b]).
        """
        ...

    def select(
        self,
        target_scores: Array | None,
        draft_scores: Array | None,
        lengths: Sequence[int],
        *,
        budget: int,
        num_sink_tokens: int,
        num_recent_tokens: int,
        num_draft_selected: int,
    ) -> TokenSet:
        """The quota rule: protect sinks and recent, top `num_draft_selected` by draft, fill by target up to `budget` in all.

        Ties go to the lower index; protected and already chosen tokens are out of the running. If a score is None its
        share goes to the other; if both are None the recent window grows to fill the budget (streaming). Rows with
        lengths[b] <= budget get all of [0, lengths[b]).
        """
        ...

    # Sampling and acceptance.
    def extend(self, token_set: TokenSet, starts: Sequence[int], stops: Sequence[int]) -> TokenSet:
        """A new set for rows that have moved on: entries below min(starts[b], stops[b]) stay, starts[b]..stops[b]-1 join."""
        ...

    def replace_rows(self, old: Mapping[int, Array], new: Mapping[int, Array], rows: Sequence[bool]) -> Mapping[int, Array]:
        """Captured queries with row b from `new` where rows[b], else from `old`; both [B, R, S, D] of the same shape."""
        ...

    def replace_set_rows(self, old: TokenSet, new: TokenSet, rows: Sequence[bool]) -> TokenSet:
        """A set with row b from `new` where rows[b], else from `old`; the two may differ in width."""
        ...

    def probabilities(
        self, logits: Array, warp: WarpBatch, context: Sequence[Sequence[int]] | None, inflight: Array | None
    ) -> Array:
        """Warped distributions [B, T, V]. Order: penalties, temperature, top-k, top-p, min-p.

        Penalties of row t count `context[b]` (committed tokens) and the first I - (T - 1) + t of `inflight` [B, I], so the
        last row counts all of them and rejected drafts are never remembered. `context` is None when no row has a penalty;
        `inflight` None means I = 0 and T = 1.
        """
        ...

    def sample(self, probabilities: Array, uniforms: Sequence[float]) -> Array:
        """[B, 1] tokens from [B, 1, V] by inverse CDF in token order: the first token whose cumulative mass exceeds u."""
        ...

    def argmax(self, logits: Array) -> Array:
        """[B, T] tokens from [B, T, V]; the lower index wins a tie."""
        ...

    def confidence(self, logits: Array, probabilities: Array | None) -> Array:
        """[B, 1] top probability of the distributions [B, 1, V], or where they are None of softmax(logits)."""
        ...

    def peek(self, values: Array) -> tuple[float, ...] | None:
        """Host values of [B, 1] where having them waits for no device; else None. Not a round's read: see `read`."""
        ...

    def favour(self, logits: Array, drafts: Array, num_drafts: Sequence[int], confidence: Array, threshold: float) -> Array:
        """Logits [B, G+1, V] in which draft i < num_drafts[b] of row b is sure where confidence[b, i] >= threshold; a copy."""
        ...

    def accept_greedy(self, drafts: Array, num_drafts: Sequence[int], logits: Array) -> Verdict:
        """Keep the longest prefix of drafts [B, G] (num_drafts[b] valid, G may be 0) equal to the argmax of logits [B, G+1, V]."""
        ...

    def accept_sampled(
        self,
        drafts: Array,
        num_drafts: Sequence[int],
        draft_probabilities: Array | None,
        target_probabilities: Array,
        finite_of: Array,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """Speculative sampling (METHOD section 5): accept d_i while u_i < p_i(d)/q_i(d), else draw from max(p - q, 0).

        `draft_probabilities` [B, G, V]; None means one-hot drafts. After num_drafts[b] accepted, draw from p itself.
        `finite_of` are the logits checked for NaN. `next_uniforms` [B] draw the token after the accepted ones.
        """
        ...

    def stack_rows(self, parts: Sequence[Array]) -> Array:
        """Join [B, T_i, V] arrays along T (draft distributions of a round)."""
        ...

    def ragged_rows(self, parts: Sequence[Sequence[tuple[Array, int]]]) -> Array:
        """[B, G, V] from host-chosen rows: parts[b] lists (array [B, T, V], t), padded with zeros (exact mode keeps p_sparse)."""
        ...

    # Resources.
    def peak_memory_bytes(self) -> int:
        """Peak memory of this process (CPU) or device allocator since start."""
        ...


@dataclass(frozen=True)
class RowComparison:
    """Host values of `Measures.compare_logits`, each [B, T]: KL(reference || other) in nats, whether the argmax is the same, the
    reference's top-2 gap in logits, and the log-probability of a given token under both."""

    kl: Any
    same: Any
    gap: Any
    reference_logprob: Any
    logprob: Any


class Measures(Backend, Protocol):
    """What calibration and the fidelity benches ask of a backend beyond `Backend`: study, never a round's work. These wait."""

    def compare_logits(self, reference: Array, logits: Array, tokens: Array) -> RowComparison:
        """Row by row, in fp32 or better, of two [B, T, V] at the given tokens [B, T]."""
        ...

    def set_mass(self, token_set: TokenSet, scores: Array) -> Any:
        """[B] host floats: the sum of a row's scores [B, Nmax] over its set (-inf counts as 0)."""
        ...

    def set_sizes(self, token_set: TokenSet) -> Sequence[int]:
        """[B] host ints: the set's counts."""
        ...

    def narrow_queries(self, queries: Mapping[int, Array], have: Tap, want: Tap) -> Mapping[int, Array]:
        """The captured queries of the layers and heads of `want`, a part of `have`. Raise ValueError on one that is not there."""
        ...
