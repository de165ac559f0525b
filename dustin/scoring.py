"""Which queries score a set, of target and draft: a calibrated profile's, or the stated heuristic (METHOD sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dustin.interfaces import ModelSpec, Tap

# m of METHOD 3 where nothing was calibrated.
DEFAULT_SHARE = 0.6
# Layers with sets of their own, at most, beside a shared set that all others read (own_layers).
FEW_LAYERS = 2


@dataclass(frozen=True)
class Scoring:
    """What a selector scores with.

    `target` and `draft` are the scoring heads; `lookahead_share` is m; `dense_layers` ignore the set; at the layers of
    `reselection` their heads' queries of the first `reselection_rows` rows in flight choose it anew, by compact keys of
    `reselection_rank` numbers (0: by whole ones), with `reselection_reuse` for the layers up to the next of these too. The target's
    history is the mean over the last `history_rows` confirmed rows, plus `history_decay` times the scores of the rounds before; the
    draft's are those of its drafted rows, plus `lookahead_decay` times those of the rounds before; `smoothing` is the width in
    tokens of a moving average over scores (1: none). Every `refresh` rounds all tokens are scored, in the rounds between only the
    `pool` best of then. `source` names where this comes from, `passed_over` what is wrong with profiles that could not be read.
    """

    target: Tap
    draft: Tap
    lookahead_share: float = DEFAULT_SHARE
    dense_layers: tuple[int, ...] = ()
    history_rows: int = 1
    history_decay: float = 0.0
    lookahead_decay: float = 0.0
    smoothing: int = 1
    refresh: int = 1
    pool: int = 4096
    reselection: Tap = field(default_factory=lambda: Tap({}))
    reselection_rank: int = 0
    reselection_by_kv_head: bool = False
    reselection_reuse: bool = False
    reselection_rows: int = 16
    source: str = "heuristic"
    passed_over: tuple[str, ...] = ()

    @property
    def of_own_sets(self) -> bool:
        """Whether layers choose their own sets throughout, and not a few beside a shared one."""
        return len(self.reselection.heads) > FEW_LAYERS

    def pool_for(self, budget: int) -> int:
        """Tokens of the pool: twice the budget or more, or the set would be the pool."""
        return max(self.pool, 2 * budget)

    def describe(self, with_draft: bool = True) -> str:
        """One line for statistics: where it comes from and which heads score."""
        say = layers_text if self.source == "heuristic" else heads_text
        parts = [f"target {say(self.target)}"] if self.target.heads else []
        if with_draft and self.draft.heads:
            parts.append(f"draft {say(self.draft)}")
        if self.refresh > 1:
            parts.append(f"all tokens every {self.refresh} rounds, a pool in between")
        if self.dense_layers:
            parts.append("dense layers " + ", ".join(str(layer) for layer in self.dense_layers))
        if self.reselection.heads:
            by = " by kv head" if self.reselection_by_kv_head else ""
            by += f" by compact keys of {self.reselection_rank}" if self.reselection_rank else ""
            by += ", for those after them too" if self.reselection_reuse else ""
            parts.append("chosen anew at layers " + _ranges(list(self.reselection.heads)) + by)
        return f"{self.source}, " + "; ".join([*parts, *(f"passed over: {wrong}" for wrong in self.passed_over)])


@dataclass(frozen=True)
class ReadBytes:
    """Bytes of a cache's rows, for one model."""

    spec: ModelSpec = field(repr=False)

    def tokens(self, count: int) -> int:
        """Keys and values of `count` tokens in every layer."""
        return count * self.spec.bytes_per_kv_token

    def scoring(self, tap: Tap, tokens: int) -> int:
        """Keys of `tokens` tokens of the kv heads that serve the scoring heads: half of K and V of a layer's kv head."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        heads = sum(len({head // group for head in chosen}) for chosen in tap.heads.values())
        return tokens * self.spec.bytes_per_kv_token * heads // (2 * self.spec.num_layers * self.spec.num_kv_heads)

    def reselection(self, scoring: Scoring, tokens: int) -> int:
        """What choosing anew reads: keys of the kv heads that serve the choosing heads, or their codes of half a byte a number."""
        whole = self.scoring(scoring.reselection, tokens)
        entry = self.spec.bytes_per_kv_token // (2 * self.spec.num_layers * self.spec.num_kv_heads)
        return whole * scoring.reselection_rank // (2 * entry) if scoring.reselection_rank else whole

    def layers(self, count: int, tokens: int) -> int:
        """Keys and values of `tokens` tokens in `count` layers."""
        return tokens * self.spec.bytes_per_kv_token * count // self.spec.num_layers


def scoring_bytes(scoring: Scoring, target: ModelSpec, draft: ModelSpec | None, context: int, budget: int) -> int:
    """Bytes of both caches that scoring reads a round and sequence, on average over refreshes."""
    pool = min(scoring.pool_for(budget), context)
    tokens = round((context + (scoring.refresh - 1) * pool) / scoring.refresh)
    own = ReadBytes(target).scoring(scoring.target, tokens) + ReadBytes(target).reselection(scoring, context)
    return own + (ReadBytes(draft).scoring(scoring.draft, tokens) if draft else 0)


def budget_within(allowed: int, scoring: Scoring, target: ModelSpec, draft: ModelSpec | None, context: int, step: int = 64) -> int:
    """The largest budget in steps that, with its scoring and dense layers, reads no more than `allowed` bytes a round; 0: none."""
    dense = len(scoring.dense_layers)
    if dense >= target.num_layers:
        return 0
    own = target.bytes_per_kv_token * (target.num_layers - dense) / target.num_layers
    fixed = ReadBytes(target).layers(dense, context)
    for budget in range(context // step * step, 0, -step):
        if budget * own + fixed + scoring_bytes(scoring, target, draft, context, budget) <= allowed:
            return budget
    return 0


def layers_text(tap: Tap) -> str:
    """`layers 18, 21 (all heads)`."""
    return "layers " + ", ".join(str(layer) for layer in tap.heads) + " (all heads)"


def heads_text(tap: Tap) -> str:
    """`layers 18 (heads 0-5), 21 (heads 1, 4)`."""
    return "layers " + ", ".join(f"{layer} (heads {_ranges(heads)})" for layer, heads in tap.heads.items())


def _ranges(numbers: Sequence[int]) -> str:
    """`0-5, 8` for 0, 1, 2, 3, 4, 5, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def all_heads(spec: ModelSpec, layers: Sequence[int]) -> Tap:
    """Every query head of the given layers."""
    return Tap({layer: tuple(range(spec.num_heads)) for layer in layers})


def kv_heads_of(spec: ModelSpec) -> list[tuple[int, ...]]:
    """The query heads of each kv head."""
    group = spec.num_heads // spec.num_kv_heads
    return [tuple(range(kv * group, (kv + 1) * group)) for kv in range(spec.num_kv_heads)]


def with_own_sets(scoring: Scoring, spec: ModelSpec, layers: Sequence[int], rank: int, reuse: bool = False) -> Scoring:
    """The scoring with sets that the kv heads of `layers` choose by compact keys of `rank` numbers, with `reuse` for the layers
    after them too."""
    return replace(
        scoring, reselection=all_heads(spec, sorted(layers)), reselection_rank=rank,
        reselection_by_kv_head=spec.num_kv_heads > 1, reselection_reuse=reuse,
    )  # fmt: skip


def without_own_sets(scoring: Scoring) -> Scoring:
    """The scoring with one set for all layers."""
    return replace(scoring, reselection=Tap({}), reselection_rank=0, reselection_by_kv_head=False)


def full_layers(spec: ModelSpec) -> list[int]:
    """Layers that see the whole prefix: those with a sliding window are never scored and never read a set."""
    return [layer for layer in range(spec.num_layers) if layer not in set(spec.sliding_layers)]


def default_tap(spec: ModelSpec, depths: tuple[float, ...]) -> Tap:
    """All heads of the layers at the given shares of depth, moved off sliding-window layers."""
    full = full_layers(spec)
    if not full:
        return Tap({})
    return all_heads(spec, sorted({min(full, key=lambda layer: abs(layer - depth * (spec.num_layers - 1))) for depth in depths}))


def target_tap(spec: ModelSpec) -> Tap:
    """Scoring heads of a target without a profile: all heads of two layers at 0.65 and 0.75 of depth (METHOD section 4)."""
    return default_tap(spec, (0.65, 0.75))


def draft_tap(spec: ModelSpec) -> Tap:
    """Scoring heads of a draft without a profile: all heads of three layers at 0.5 to 0.7 of depth (METHOD section 4)."""
    return default_tap(spec, (0.5, 0.6, 0.7))


def heuristic(target: ModelSpec, draft: ModelSpec | None) -> Scoring:
    """The scoring of an uncalibrated pair."""
    return Scoring(target_tap(target), draft_tap(draft) if draft is not None else Tap({}))
