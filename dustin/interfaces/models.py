"""Models and their caches: what one forward is given and gives. Axes and rules: `dustin.interfaces`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from dustin.interfaces.backend import Verdict

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


@dataclass(frozen=True)
class Reselection:
    """Layers that choose a set of their own in the middle of a forward, from the in-flight rows' queries.

    `heads` maps each to the query heads that score there, whose keys are read whole. It reads sinks, recent tokens, then the
    best by the mean over those heads and a sequence's first `max_rows` valid rows (on a GPU no more than 128 / the query heads
    of a kv head) of the softmax over [0, lengths[b]); `budget` tokens in all, ties to the lower index. With `max_rows` 1 the
    set depends on committed tokens alone, whatever was drafted. With a `rank` the softmax is over compact keys of that many
    numbers (see CompactModel) instead of whole ones. With `by_kv_head` each kv head reads what the scoring heads among its own
    query heads choose; each needs one at least. With `reuse` a layer that is not named reads what the last one before it that
    chose has chosen, kv head by kv head, unless it is dense, has a set given or a sliding window.
    """

    heads: Mapping[int, tuple[int, ...]]
    budget: int
    num_sink_tokens: int
    num_recent_tokens: int
    max_rows: int = 16
    rank: int = 0
    by_kv_head: bool = False
    reuse: bool = False

    def of_kv_heads(self, layer: int, num_heads: int, num_kv_heads: int) -> list[Reselection]:
        """One for each kv head, with its share of the scoring heads. Raise ValueError where a kv head has none."""
        group = num_heads // num_kv_heads
        made = []
        for kv in range(num_kv_heads):
            own = tuple(head for head in self.heads[layer] if head // group == kv)
            if not own:
                raise ValueError(f"reselection by kv head has no scoring head of kv head {kv} in layer {layer}")
            made.append(replace(self, heads={layer: own}, by_kv_head=False))
        return made


@dataclass
class TokenSet:
    """The committed tokens that sparse attention may see: ONE set for every layer and head.

    `indices` [B, k] int32 ascending, valid up to `counts` [B] int32 (entries beyond are ignored). `dense_layers` ignore
    the set; `by_layer` overrides it for single layers, and layers of `reselection` choose their own. A row whose count
    equals its committed length equals dense attention bit for bit.
    """

    indices: Array
    counts: Array
    dense_layers: tuple[int, ...] = ()
    by_layer: Mapping[int, TokenSet] = field(default_factory=dict)
    reselection: Reselection | None = None


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
class CompactModel(Protocol):
    """A model that keeps a compact copy of its keys for reselection: of every key `rank` numbers of four bits a kv head."""

    def fit_compact_keys(self, tokens: Sequence[int], rank: int) -> None:
        """Fit the copy to the model's own queries and keys of a text of `tokens`; once for a rank, later calls do nothing."""
        ...


@runtime_checkable
class ChoosingModel(Protocol):
    """A model that says which sets its layers choose by a Reselection. Optional: traces show those sets where it does."""

    def chosen_sets(
        self, queries: Mapping[int, Array], num_tokens: Sequence[int], cache: KVCache, token_set: TokenSet
    ) -> Mapping[int, Sequence[TokenSet]]:
        """layer -> its set, or one for each of its kv heads, where it is among those of `token_set.reselection` and of `queries`:
        what `forward` would have it read. The queries [B, T, Hq, D] are those of all heads, post-RoPE, of the num_tokens[b]
        valid rows after cache.lengths[b], as a tap of `forward` gives them. The cache stays as it is.
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


class BegunDrafts(Protocol):
    """Draft steps that a device was told to take before the host knew what they follow."""

    def finish(self, num_tokens: Sequence[int], steps: int) -> tuple[Array, Mapping[int, Array]] | None:
        """What `draft_greedy` would give for these counts and `steps`; the cache grows as there. None, nothing done, where other
        steps were taken since."""
        ...


@runtime_checkable
class GreedyAhead(GreedyChain, Protocol):
    """A GreedyChain that can begin a round's steps before the host has read the verdict that they follow. Optional."""

    def draft_ahead(
        self,
        verdict: Verdict,
        known: Sequence[int],
        active: Sequence[bool],
        cache: KVCache,
        steps: int,
        *,
        token_set: TokenSet | None = None,
        set_lengths: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> BegunDrafts | None:
        """Begin `steps` steps after `verdict`, on the device's own knowledge of what it kept. None where that cannot be.

        Row b (where active[b]) had known[b] tokens, the pending one with them. Of the tokens that any outcome leaves it the cache
        holds all but the last two at most. Its lengths stay as they are: what is written lies beyond those of any outcome.
        """
        ...


class BegunForward(Protocol):
    """A forward that a device was told to run before the host knew its tokens."""

    def finish(self, num_tokens: Sequence[int]) -> ForwardResult:
        """Its result for the rows that feed num_tokens[b] tokens (0 or 1); the cache grows by them."""
        ...


@runtime_checkable
class ForwardAhead(Protocol):
    """A model whose next plain step can begin before the host has read the tokens that it feeds. Optional."""

    def forward_ahead(
        self, tokens: Array, num_tokens: Sequence[int], cache: KVCache, *, tap: Tap | None = None
    ) -> BegunForward | None:
        """Begin `forward` with logits "all"; the cache's lengths stay as they are. None where that cannot be."""
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
