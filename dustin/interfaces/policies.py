"""The engine's exchangeable parts: what drafts, selects and accepts. Axes and rules: `dustin.interfaces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dustin.interfaces.backend import Backend, HostVerdict, Verdict, WarpBatch
from dustin.interfaces.models import Array, KVCache, Model, Tap, TokenSet


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
    """Bytes that the last selection read of the target's and of the draft's cache, and those that layers which choose anew read
    in a forward over its set (host arithmetic)."""

    target_bytes: int = 0
    draft_bytes: int = 0
    own_bytes: int = 0


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
    `planned` is what a usual round drafts: a device that records calls by their shape drafts as many at a text's end too.
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
    planned: int = 0


class Drafter(Protocol):
    """Guesses the next tokens of every active row."""

    name: str
    model: Model | None
    cache: KVCache | None
    tap: Tap | None
    # Whether the last drafts could have been begun ahead (`foresee`) and were not, as in a first round.
    cold: bool

    @property
    def foresees(self) -> bool:
        """Whether `foresee` can begin anything."""
        ...

    def start(self, prompts: Sequence[Sequence[int]], capacity: int, progress: Callable[[int, int], None] | None) -> None:
        """Begin a batch: read the prompts where the drafter has a model of its own (dense, in chunks)."""
        ...

    def propose(self, state: RoundState) -> Drafts:
        """Up to `max_drafts` tokens for each active row. Device work only; the target's cache is left as it was."""
        ...

    def foresee(
        self,
        verdict: Verdict,
        judged: Sequence[int],
        known: Sequence[int],
        active: Sequence[bool],
        steps: int,
        draft_set: TokenSet | None,
        set_lengths: Sequence[int],
    ) -> None:
        """Before the host reads `verdict` on judged[b] tokens of row b: begin `steps` further drafts where that can be done.
        known[b] counts the working tokens of row b before the judged ones; set and lengths as in RoundState."""
        ...

    def those(self, active: set[int]) -> set[int]:
        """The rows of `active` that a greedy round takes: those that drafts were begun for, all where none were."""
        ...

    def settle(self, verdict: HostVerdict) -> None:
        """What the host has read of the verdict that `foresee` was given."""
        ...

    def drop(self) -> bool:
        """Forget what `foresee` began; True where something was, which the device goes on with for nothing."""
        ...

    def commit(self, lengths: Sequence[int]) -> None:
        """Row b now has lengths[b] working tokens of which the last one is new to the drafter: forget anything beyond."""
        ...
