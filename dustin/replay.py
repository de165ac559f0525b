"""Known continuations read again through a selection: what sparse attention changes, row by row, against dense attention.

Both models read the prompts once. Then the target reads the continuations densely in rounds of `num_draft_tokens` + 1 rows, the
draft with it; every later run rolls the target's cache back and reads the same rounds through sets of tokens, as an engine
would in which all drafts are right. The draft's queries are those of its dense reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dustin.interfaces import Array, KVCache, Measures, Model, RowComparison, SelectionContext, Selector, Tap, TokenSet
from dustin.scoring import ReadBytes, all_heads, full_layers

Floats = npt.NDArray[np.float64]
# A disagreement counts as hard where dense attention prefers its own token by more than this, in logits.
HARD_GAP = 0.5


@dataclass
class Reading:
    """A model, its cache with the prompts in it, and the queries of every head of its full layers."""

    model: Model
    cache: KVCache
    tap: Tap = field(init=False)

    def __post_init__(self) -> None:
        self.tap = all_heads(self.model.spec, full_layers(self.model.spec))


@dataclass
class Round:
    """What dense attention says of one round: `tokens` [B, T] fed, `following` [B, T] after them, `logits`, the target's
    queries, its mean attention [B, Nmax] over rows, layers and heads, and the draft's queries of the drafted rows."""

    tokens: Array
    following: Array
    logits: Array
    queries: Mapping[int, Array]
    attention: Array
    lookahead: Mapping[int, Array] | None


@dataclass
class Measured:
    """Rows of one run. Arrays are [R, B, T] over rounds, sequences and rows, `recovery` [R, B]; bytes are means a round."""

    kl: Floats
    same: npt.NDArray[np.bool_]
    gap: Floats
    reference_logprob: Floats
    logprob: Floats
    recovery: Floats
    valid: npt.NDArray[np.bool_]
    bytes_per_round: float
    scoring_bytes_per_round: float
    dense_bytes_per_round: float

    def by_sequence(self, values: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """The valid rows of [R, B, T], sequence by sequence in order of position."""
        return [values[:, b][self.valid[:, b]] for b in range(values.shape[1])]

    @property
    def hard(self) -> npt.NDArray[np.bool_]:
        """Rows that chose another token although dense attention was not in doubt."""
        return ~self.same & (self.gap > HARD_GAP)

    def summary(self) -> dict[str, float]:
        """Shares and means over all valid rows; recovery over rounds and sequences."""
        keep = self.valid
        rows = max(int(keep.sum()), 1)
        flips = int((~self.same[keep]).sum())
        recovery = self.recovery[keep.any(-1)]
        return {
            "agreement": float(self.same[keep].mean()),
            "hard_flips": float(self.hard[keep].mean()),
            "kl": float(self.kl[keep].mean()),
            "perplexity_ratio": float(np.exp((self.reference_logprob - self.logprob)[keep].mean())),
            "recovery_mean": float(recovery.mean()),
            "recovery_p5": float(np.percentile(recovery, 5)),
            "run_length": rows / max(flips, 1),
            "rows": rows,
        }


class Replay:
    """Rounds over B sequences whose prompts both caches hold (the target's history is the last prompt row's queries)."""

    def __init__(
        self,
        backend: Measures,
        target: Reading,
        draft: Reading | None,
        continuations: Sequence[Sequence[int]],
        num_draft_tokens: int,
        history: Mapping[int, Array],
        prompt: Mapping[int, Array] | None = None,
        valid_tokens: Sequence[int] | None = None,
    ) -> None:
        """Read the continuations densely: as many whole rounds as the shortest holds. Rows at and beyond `valid_tokens[b]`
        are left out of what is measured. Raise ValueError where no round fits.
        """
        self.backend, self.target, self.draft = backend, target, draft
        self.height = num_draft_tokens + 1
        self._history, self._prompt = history, prompt
        self.start = tuple(target.cache.lengths)
        self.draft_start = tuple(draft.cache.lengths) if draft is not None else ()
        self._batch = len(continuations)
        shortest = min(len(row) for row in continuations)
        count = (shortest - 1) // self.height
        if count < 1:
            raise ValueError(f"the shortest continuation has {shortest} tokens, expected {self.height + 1} or more")
        self.rounds = [self._read(continuations, i * self.height) for i in range(count)]
        at = np.arange(count)[:, None, None] * self.height + np.arange(self.height)
        ends = np.array([len(row) for row in continuations] if valid_tokens is None else list(valid_tokens))
        self.valid = np.broadcast_to(at, (count, self._batch, self.height)) + 1 < ends[None, :, None]

    def _read(self, continuations: Sequence[Sequence[int]], at: int) -> Round:
        backend, height = self.backend, self.height
        fed = backend.tokens([row[at : at + height] for row in continuations])
        following = backend.tokens([row[at + 1 : at + height + 1] for row in continuations])
        counts, before = [height] * self._batch, self.target.cache.lengths
        out = self.target.model.forward(fed, counts, self.target.cache, tap=self.target.tap, logits="all")
        attention = backend.score(out.queries, self.target.tap, self.target.model, self.target.cache, before)
        lookahead = None
        if self.draft is not None:
            read = self.draft.model.forward(fed, counts, self.draft.cache, tap=self.draft.tap, logits="none")
            lookahead = backend.gather_rows(read.queries, [height - 2] * self._batch, height - 1)
        return Round(fed, following, out.logits, out.queries, attention, lookahead)

    def run(
        self,
        selector: Selector,
        draft_tap: Tap | None = None,
        *,
        rectify: int | None = None,
        num_rounds: int | None = None,
        lag: int = 0,
    ) -> Measured:
        """Read the rounds through the selector's sets. `draft_tap` are the draft's scoring heads; `rectify`: rows older than
        this are read again densely; `num_rounds` stops early; `lag` 1 shows it the lookahead of the round before."""
        cache, counts = self.target.cache, tuple([self.height] * self._batch)
        cache.rollback(self.start)
        history = self._first_history(selector)
        prompt = self._narrow(self._prompt, selector.tap) if selector.prompt_rows > 1 and self._prompt is not None else None
        compared: list[RowComparison] = []
        recovery: list[Sequence[float]] = []
        read = scored = dense = 0
        first_sparse = 0
        for i, known in enumerate(self.rounds[:num_rounds]):
            lengths = tuple(cache.lengths)
            shown = self.rounds[i - lag].lookahead if i >= lag else None
            context = SelectionContext(
                self.backend, self.target.model, cache, lengths, history, selector.tap,
                self.draft.model if self.draft else None, self.draft.cache if self.draft else None,
                self._narrow_draft(shown, draft_tap), draft_tap, known.tokens, counts, prompt,
            )  # fmt: skip
            chosen, prompt = selector.select(context), None
            # One tap for all runs: a backend that keeps a graph a shape finds it again.
            out = self.target.model.forward(known.tokens, counts, cache, token_set=chosen, tap=self.target.tap, logits="all")
            mine = self._narrow(out.queries, selector.tap)
            history = self.backend.gather_rows(mine, [self.height - 1] * self._batch, selector.history_rows) if mine else None
            compared.append(self.backend.compare_logits(known.logits, out.logits, known.following))
            recovery.append(self._recovered(chosen, known))
            scored += selector.cost.target_bytes + selector.cost.draft_bytes + selector.cost.own_bytes
            read += self._read_bytes(chosen, lengths)
            dense += ReadBytes(self.target.model.spec).tokens(sum(lengths))
            if rectify is not None and (i + 1 - first_sparse) * self.height >= rectify:
                self._rectify(first_sparse, i + 1)
                first_sparse = i + 1
        rows = {name: np.stack([np.asarray(getattr(row, name)) for row in compared]) for name in RowComparison.__dataclass_fields__}
        n = len(compared)
        return Measured(
            **rows,
            recovery=np.array(recovery),
            valid=self.valid[:n],
            bytes_per_round=(read + scored) / n / self._batch,
            scoring_bytes_per_round=scored / n / self._batch,
            dense_bytes_per_round=dense / n / self._batch,
        )

    def close(self) -> None:
        """Both caches as they were before the continuations."""
        self.target.cache.rollback(self.start)
        if self.draft is not None:
            self.draft.cache.rollback(self.draft_start)

    # Pieces.

    def _first_history(self, selector: Selector) -> Mapping[int, Array] | None:
        mine = self._narrow(self._history, selector.tap)
        rows = selector.history_rows
        return mine if rows == 1 or not mine else self.backend.gather_rows(mine, [0] * self._batch, rows)

    def _narrow(self, queries: Mapping[int, Array] | None, tap: Tap) -> Mapping[int, Array] | None:
        return self.backend.narrow_queries(queries, self.target.tap, tap) if queries and tap.heads else None

    def _narrow_draft(self, queries: Mapping[int, Array] | None, tap: Tap | None) -> Mapping[int, Array] | None:
        if queries is None or tap is None or not tap.heads or self.draft is None:
            return None
        return self.backend.narrow_queries(queries, self.draft.tap, tap)

    def _recovered(self, chosen: TokenSet | None, known: Round) -> Sequence[float]:
        """Share of the window's true attention to the committed tokens that falls into the set."""
        return [1.0] * self._batch if chosen is None else self.backend.set_mass(chosen, known.attention)

    def _read_bytes(self, chosen: TokenSet | None, lengths: Sequence[int]) -> int:
        """Bytes that verification reads of committed rows."""
        cost, spec = ReadBytes(self.target.model.spec), self.target.model.spec
        if chosen is None:
            return cost.tokens(sum(lengths))
        sizes = self.backend.set_sizes(chosen)
        own = set(chosen.dense_layers) | set(chosen.by_layer)
        read = cost.layers(spec.num_layers - len(own), sum(sizes)) + cost.layers(len(chosen.dense_layers), sum(lengths))
        # The layers' own sets are of one size: reading each would wait for the device once a layer.
        if chosen.by_layer:
            one = self.backend.set_sizes(next(iter(chosen.by_layer.values())))
            read += cost.layers(len(chosen.by_layer), sum(one))
        return read

    def _rectify(self, first: int, end: int) -> None:
        """The rows of rounds first..end-1 once more, densely, in one causal pass."""
        cache = self.target.cache
        cache.rollback([start + first * self.height for start in self.start])
        tokens = self.backend.concat_tokens([known.tokens for known in self.rounds[first:end]])
        self.target.model.forward(tokens, [(end - first) * self.height] * self._batch, cache, logits="none")
