"""What the engine asks of a backend: protocols, shapes and contracts, nothing else.

Axes: B sequences, T query rows, R rows that score, S scoring heads, k selected tokens, V vocabulary (METHOD section 2).
An `Array` is opaque to the engine: it is passed from one backend method to another and never indexed. Arrays may be
lazy, on a device, or spread over ranks. Host values (`Sequence[int]`, `Sequence[float]`) go in freely; the only way
out is `Backend.read`, called once a round. A zero in `num_tokens` means: this row takes no part and nothing of it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Array = Any


@dataclass(frozen=True)
class ModelSpec:
    """Shape and identity of a model, as the engine needs it.

    `context_length` counts tokens. `sliding_layers` keep a native window and are never scored. `fingerprint` is stable
    over runs for the same weights and configuration (prompt caches and calibration profiles are keyed by it).
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    dtype: str
    fingerprint: str
    sliding_layers: tuple[int, ...] = ()
    bytes_per_kv_token: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class Tap:
    """Which queries a forward keeps: for each layer a tuple of query heads, for all rows or each sequence's last valid row."""

    heads: Mapping[int, tuple[int, ...]]
    last_row_only: bool = False

    def places(self, want: Tap) -> dict[int, list[int]]:
        """Layer -> where the heads of `want` lie among this tap's. Raise ValueError on one that is not there."""
        for layer, heads in want.heads.items():
            if missing := set(heads) - set(self.heads.get(layer, ())):
                raise ValueError(f"heads {sorted(missing)} of layer {layer} were not captured, expected some of {self.heads}")
        return {layer: [self.heads[layer].index(head) for head in heads] for layer, heads in want.heads.items()}


@dataclass
class TokenSet:
    """The committed tokens that sparse attention may see: ONE set for every layer and head.

    `indices` [B, k] int32 ascending, valid up to `counts` [B] int32 (entries beyond are ignored). `dense_layers` ignore
    the set; `by_layer` overrides it for single layers. A row whose count equals its committed length equals dense
    attention bit for bit.
    """

    indices: Array
    counts: Array
    dense_layers: tuple[int, ...] = ()
    by_layer: Mapping[int, TokenSet] = field(default_factory=dict)


@dataclass
class ForwardResult:
    """`logits` [B, T, V] (or [B, 1, V] for the last valid row, or None) and `queries`: layer -> [B, T or 1, S, D] post-RoPE."""

    logits: Array | None
    queries: Mapping[int, Array]


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of B ragged sequences, preallocated, owned by the backend. Dropping rows is by length only.

    `num_bytes` counts what is allocated. A cache may be paged; nothing here says where a row lies.
    """

    capacity: int
    num_bytes: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence in the cache, as the host knows them (no device read)."""
        ...

    def rollback(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shorten each sequence to `lengths[b]`; return how many rows each dropped. Raise ValueError on a longer length."""
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Sequence `target` becomes the first `length` rows of `source`; its own rows are gone. Raise ValueError out of range."""
        ...

    def take(self, rows: Sequence[int], capacity: int | None = None) -> KVCache:
        """A new, independent cache with copies of the given rows (a row may repeat), of the same capacity or another."""
        ...


@runtime_checkable
class PortableCache(KVCache, Protocol):
    """A cache whose sequences can be kept in a file; one that is spread over ranks is none."""

    def dump(self, row: int) -> list[Any]:
        """Keys and values of one sequence as host numpy arrays [2, length, Hkv, D], one a layer; bfloat16 as its bits, uint16."""
        ...

    def restore(self, row: int, layers: Sequence[Any]) -> None:
        """The empty sequence `row` holds these rows from now on. Raise ValueError on another shape or dtype, or too many rows."""
        ...


class Model(Protocol):
    """A loaded transformer."""

    spec: ModelSpec

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on (padded rows of target and draft differ). Changes `spec`."""
        ...

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `batch` sequences, `capacity` rows each. Raise MemoryLimitError with asked and available bytes."""
        ...

    def forward(
        self,
        tokens: Array,
        num_tokens: Sequence[int],
        cache: KVCache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """Run `tokens` [B, T] (from `Backend.tokens` or a sampled array) after the cached rows.

        Row b feeds its first `num_tokens[b]` tokens (0 = none) at positions `lengths[b]...`; their K and V are appended
        and `cache.lengths` grows by `num_tokens`. Query row r of sequence b sees the committed rows in `token_set` (all
        of them when None) and in-flight rows 0..r. `logits` is "all", "last" (each row's last valid one) or "none".
        Results of rows beyond `num_tokens[b]` are undefined but finite. Mutates `cache` alone.
        """
        ...


@runtime_checkable
class GreedyChain(Protocol):
    """A model that can take the greedy steps of a draft by itself. Optional: drafters go step by step without it."""

    def draft_greedy(
        self,
        tokens: Array,
        num_tokens: Sequence[int],
        cache: KVCache,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> tuple[Array, Mapping[int, Array]] | None:
        """What `steps` calls of `forward` with logits "last" give when each feeds the argmax of the one before.

        Row b feeds its first num_tokens[b] tokens (0: it takes no part) and then what it drafts; the cache grows by
        num_tokens[b] + steps - 1. Before each step the set, chosen at `set_lengths`, is extended to the cache's length
        (see Backend.extend). Returns tokens [B, steps] and the tap's queries [B, steps, S, D], or None, nothing done,
        where this call cannot be served so.
        """
        ...


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


@dataclass
class Drafts:
    """What a drafter proposes: `tokens` [B, G], per-row counts, q distributions (None = one-hot), lookahead queries.

    `confidence` [B, G] is each draft's top probability, where an option asks for it.
    """

    tokens: Array | None
    num_drafts: tuple[int, ...]
    probabilities: Array | None = None
    queries: Mapping[int, Array] | None = None
    confidence: Array | None = None


@dataclass
class SelectionContext:
    """What a selector may look at in one round. `history` and `lookahead` are captured queries or None.

    `inflight` [B, T] are the rows to be verified (the pending token and the drafts), `num_inflight[b]` of them valid. `prompt`
    are the queries of the prompt's last `Selector.prompt_rows` rows where it wants more than one. `repeat`: this round was
    selected for already, nothing may be remembered of it twice.
    """

    backend: Backend
    target: Model
    target_cache: KVCache
    lengths: tuple[int, ...]
    history: Mapping[int, Array] | None
    history_tap: Tap | None
    draft: Model | None
    draft_cache: KVCache | None
    lookahead: Mapping[int, Array] | None
    lookahead_tap: Tap | None
    inflight: Array | None = None
    num_inflight: tuple[int, ...] = ()
    prompt: Mapping[int, Array] | None = None
    repeat: bool = False


@dataclass
class SelectionCost:
    """Bytes that the last selection read of the target's and of the draft's cache (host arithmetic)."""

    target_bytes: int = 0
    draft_bytes: int = 0


class Selector(Protocol):
    """Chooses the tokens that verification reads (policy; array work goes through the backend). One batch, from its start on.

    `tap` names the target's queries it wants as history: the last `history_rows` confirmed rows of a round, and the last
    `prompt_rows` of the prompt. `cost` is what its last selection read.
    """

    name: str
    needs_history: bool
    needs_lookahead: bool
    tap: Tap
    history_rows: int
    prompt_rows: int
    cost: SelectionCost

    def resize(self, budget: int) -> None:
        """Sets have up to `budget` tokens from now on (the planner of mode auto asks for that)."""
        ...

    def restart(self, rows: set[int]) -> None:
        """These rows hold new sequences from now on: what is remembered of them is forgotten."""
        ...

    def select(self, context: SelectionContext) -> TokenSet | None:
        """The set of this round, or None for dense attention."""
        ...


@runtime_checkable
class SparseAttention(Protocol):
    """Attention of T in-flight rows over a selected set: the operation that backends accelerate and parity tests compare.

    q [B, T, Hq, D]; the in-flight K, V are already in the cache at lengths[b]..lengths[b]+num_tokens[b]-1 (`lengths` before
    them). Returns [B, T, Hq, D] in q's dtype, fp32 accumulation. Rows at or beyond num_tokens[b] return 0.
    """

    def __call__(
        self, q: Array, cache: KVCache, layer: int, lengths: Sequence[int], num_tokens: Sequence[int], token_set: TokenSet | None
    ) -> Array: ...


class AcceptanceRule(Protocol):
    """Judges drafts by target logits [B, G+1, V]."""

    name: str

    def judge(
        self,
        backend: Backend,
        drafts: Drafts,
        logits: Array,
        warp: WarpBatch,
        context: Sequence[Sequence[int]] | None,
        accept_uniforms: Sequence[Sequence[float]],
        next_uniforms: Sequence[float],
    ) -> Verdict:
        """A Verdict; no host read. Uniforms as in `Backend.accept_sampled`."""
        ...


@dataclass
class RoundState:
    """What a drafter may look at in one round.

    `tokens[b]` are the working tokens of row b (the last one is pending), `active[b]` is False for rows that take no part,
    `num_drafts[b]` limits what verification will take. `draft_set` is last round's set and `set_lengths` the target lengths
    it was chosen at; `select` gives this round's history-only set for drafters that read the target's cache.
    `uniforms[b]` has one number a draft; `context` is what penalties count (None without penalties). `may_stop`: no later
    draft is needed once every row's confidence has fallen too low (where a set waits for the queries, all are drafted).
    """

    tokens: Sequence[Sequence[int]]
    active: tuple[bool, ...]
    num_drafts: tuple[int, ...]
    max_drafts: int
    warp: WarpBatch
    uniforms: Sequence[Sequence[float]]
    context: Sequence[Sequence[int]] | None
    target_cache: KVCache
    draft_set: TokenSet | None
    set_lengths: tuple[int, ...]
    select: Callable[[], TokenSet | None]
    may_stop: bool = False


class Drafter(Protocol):
    """Guesses the next tokens of every active row."""

    name: str
    model: Model | None
    cache: KVCache | None
    tap: Tap | None

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: Callable[[int, int], None] | None) -> None:
        """Begin a batch: read the prompts where the drafter has a model of its own (dense, in chunks)."""
        ...

    def propose(self, state: RoundState) -> Drafts:
        """Up to `max_drafts` tokens for each active row. Device work only; the target's cache is left as it was."""
        ...

    def commit(self, lengths: Sequence[int]) -> None:
        """Row b now has lengths[b] working tokens of which the last one is new to the drafter: forget anything beyond."""
        ...
