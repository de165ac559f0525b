"""Calibration of a pair: scoring heads, m and dense layers by KL at equal bytes on recorded traces (METHOD 3.1 and 3.2).

No data set is needed: documents are the language reference and library sources that come with every CPython, needles are made
of the tokenizer's own vocabulary, and what is continued are the target's own dense greedy answers and, in one document of four,
the text itself. A pair's profile is where its search begins, so that a new one is no worse on these documents. Attention
recovery is reported beside KL and is not the objective: on a real pair the selection with the higher recovery had the higher KL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dustin import own_layers, own_set_search
from dustin.calibration_options import STEP, CalibrationOptions, check, starts, too_few_bytes
from dustin.calibration_texts import documents, reference_text
from dustin.config import EngineOptions
from dustin.interfaces import Measures, Model, Tap
from dustin.profile_file import Profile, identity, scoring_of
from dustin.reading import continue_greedily, read_prompts
from dustin.replay import Measured, Reading, Replay
from dustin.retrieval_heads import best_heads, needle_prompts, rank_heads, ranked_layers
from dustin.scoring import ReadBytes, Scoring, all_heads, budget_within, full_layers, kv_heads_of
from dustin.selection import prepare, usable
from dustin.selectors.quota import QuotaSelector
from dustin.text import Tokenizer

# A change is kept when it lowers the KL by this share: less is noise.
WORTHWHILE = 0.02
MAX_DENSE_LAYERS = 3
# Layers that are best alone, which may help beside others.
PROMISING = 9


@dataclass
class Trial:
    """One scoring on the traces, at equal bytes."""

    scoring: Scoring
    budget: int
    numbers: dict[str, float]

    @property
    def kl(self) -> float:
        """Mean KL of the dense distribution from the sparse one, in nats a token."""
        return self.numbers["kl"]


@dataclass
class Calibrator:
    """Measures scorings on one set of traces. `say` takes a line of progress; `single` keeps the KL of each layer scoring alone
    ("target", "draft") or kept dense ("dense")."""

    replay: Replay
    target: Model
    draft: Model | None
    options: CalibrationOptions
    say: Callable[[str], None]
    context: int = 0
    allowed: int = 0
    deadline: float = 0.0
    # Whether rounds may score within a pool: not where the backend's engines never do.
    pools: bool = True
    # What the pair has used so far, where that is a profile's.
    known: Scoring | None = None
    # For compact keys, where own sets are tried.
    tokenizer: Tokenizer | None = None
    trials: list[Trial] = field(default_factory=list)
    single: dict[str, dict[str, float]] = field(default_factory=dict)
    _seen: dict[Any, Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context = sum(self.replay.start) // len(self.replay.start)
        self.allowed = ReadBytes(self.target.spec).tokens(self.options.allowance)

    def budget_of(self, scoring: Scoring) -> int:
        """The budget whose bytes, with this scoring's own, are what all candidates may read; 0 where that is too little."""
        return budget_within(self.allowed, scoring, self.target.spec, self.draft.spec if self.draft else None, self.context, STEP)

    def measure(self, scoring: Scoring, budget: int) -> Measured:
        """The traces through this scoring's sets."""
        options = EngineOptions(budget=budget, num_draft_tokens=self.options.num_draft_tokens)
        selector = QuotaSelector("dustin", options, scoring)
        prepare(selector, self.target, self.tokenizer)
        return self.replay.run(selector, scoring.draft)

    def trial(self, scoring: Scoring) -> Trial | None:
        """KL at equal bytes; None where scoring leaves too few tokens to read, or time is up."""
        key = repr(replace(scoring, source=""))
        if key in self._seen:
            return self._seen[key]
        budget = self.budget_of(scoring)
        if budget < 2 * STEP or time.perf_counter() > self.deadline:
            return None
        made = Trial(scoring, budget, self.measure(scoring, budget).summary())
        self._seen[key] = made
        self.trials.append(made)
        return made

    def best(self, now: Trial, candidates: Sequence[Scoring], what: str, least: float = WORTHWHILE) -> Trial:
        """`now`, or the best candidate where it is better by `least`."""
        found = [made for made in (self.trial(scoring) for scoring in candidates) if made is not None]
        winner = min(found, key=lambda made: made.kl, default=now)
        if winner.kl > now.kl * (1 - least):
            winner = now
        self.say(
            f"{what}: {len(found)} tried, KL {winner.kl:.4f} at budget {winner.budget} "
            f"(recovery {winner.numbers['recovery_mean']:.3f}, hard flips {100 * winner.numbers['hard_flips']:.2f} %)"
        )
        return winner

    def search(self, target_heads: dict[int, Any], draft_heads: dict[int, Any]) -> tuple[Trial, Trial]:
        """The heuristic and the best scoring found, coordinate by coordinate, greedily (METHOD 3.2)."""
        self.deadline = time.perf_counter() + self.options.seconds
        start = self._start()
        self.say(f"heuristic: KL {start.kl:.4f} at budget {start.budget}, {start.scoring.describe()}")
        best = start if self.known is None else self.best(start, [self.known], "the profile so far", 0.0)
        # First what helps most on a pair of 28 layers: time may be up before the end.
        best = self._pools(own_layers.search(self, best))
        rankings = {"target": target_heads} | ({"draft": draft_heads} if self.draft is not None else {})
        for side in rankings:
            best = self._layers(best, side)
        best = self._shares(best)
        for side, ranking in rankings.items():
            best = self._heads(best, side, ranking)
        best = self._pools(self._memory(best))
        for side in rankings:
            best = self._more_layers(best, side)
        # What costs no bytes, once more for the heads that were found.
        best = self._memory(self._shares(best))
        return start, self._dense_layers(best)

    def _shares(self, best: Trial) -> Trial:
        """m, where there is a draft."""
        if self.draft is None:
            return best
        shares = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
        return self.best(best, [replace(best.scoring, lookahead_share=m) for m in shares], "share of lookahead", 0.005)

    def _memory(self, best: Trial) -> Trial:
        """Rows and rounds before, and neighbours."""
        rows = [replace(best.scoring, history_rows=n) for n in (1, 2, 3, self.options.num_draft_tokens + 1)]
        best = self.best(best, rows, "history rows")
        best = self.best(best, [replace(best.scoring, history_decay=d) for d in (0.0, 0.3, 0.5, 0.7, 0.85)], "history decay")
        if self.draft is not None:
            decays = (0.0, 0.3, 0.6, 0.85)
            best = self.best(best, [replace(best.scoring, lookahead_decay=d) for d in decays], "lookahead decay", 0.005)
        return self.best(best, [replace(best.scoring, smoothing=width) for width in (1, 3, 5, 7)], "smoothing")

    def _start(self) -> Trial:
        """The heuristic, scoring within a pool where it would not fit the bytes otherwise."""
        for scoring in starts(self.target.spec, self.draft.spec if self.draft else None, self.context):
            made = self.trial(scoring)
            if made is not None:
                return made
        raise too_few_bytes(self.options, self.context)

    def _pools(self, best: Trial) -> Trial:
        """Score everything only now and then, a pool in between."""
        if not self.pools:
            return best
        sizes = sorted({min(most, self.context // part) for most, part in ((2048, 8), (4096, 4))})
        pools = [replace(best.scoring, refresh=every, pool=size) for every in (1, 2, 4, 8) for size in sizes]
        return self.best(best, pools, "scoring within a pool")

    def _layers(self, best: Trial, side: str) -> Trial:
        """Single layers, then a second and a third beside the best ones."""
        spec = self.target.spec if side == "target" or self.draft is None else self.draft.spec
        layers = [layer for layer in full_layers(spec) if layer >= spec.num_layers // 4]
        singles = [_with(best.scoring, side, all_heads(spec, [layer])) for layer in layers]
        best = self.best(best, singles, f"{side} layer", 0.0)
        ranked = sorted((self.kl_of(scoring), layer) for scoring, layer in zip(singles, layers, strict=True))
        self.single[side] = {str(layer): round(kl, 4) for kl, layer in ranked if kl < float("inf")}
        promising = [layer for _, layer in ranked[:PROMISING]]
        pair = [[a, b] for a in promising[:2] for b in promising if b != a]
        best = self.best(best, [_with(best.scoring, side, all_heads(spec, sorted(p))) for p in pair], f"two {side} layers")
        return self._more_layers(best, side, promising)

    def _more_layers(self, best: Trial, side: str, among: Sequence[int] | None = None) -> Trial:
        """Another layer of `among` beside those that score, as long as that helps; without, a kv head of one best alone."""
        spec = self.target.spec if side == "target" or self.draft is None else self.draft.spec
        parts = [tuple(range(spec.num_heads))] if among else kv_heads_of(spec)
        layers = among or [int(layer) for layer in list(self.single.get(side, {}))[:PROMISING]]
        while True:
            have = dict(getattr(best.scoring, side).heads)
            wider = [
                Tap(dict(sorted({**have, layer: tuple(sorted({*have.get(layer, ()), *part}))}.items())))
                for layer in layers
                for part in parts
                if not set(part) <= set(have.get(layer, ())) and not (among and layer in have)
            ]
            what = "layer" if among else "kv head"
            found = self.best(best, [_with(best.scoring, side, tap) for tap in wider], f"one more {side} {what}")
            if found is best:
                return best
            best = found

    def _heads(self, best: Trial, side: str, ranking: dict[int, Any]) -> Trial:
        """Layer by layer: one kv head's query heads, or the best retrieval heads."""
        spec = self.target.spec if side == "target" or self.draft is None else self.draft.spec
        group = spec.num_heads // spec.num_kv_heads
        for layer in list(getattr(best.scoring, side).heads):
            choices = [tuple(range(kv * group, (kv + 1) * group)) for kv in range(spec.num_kv_heads)]
            choices.append(best_heads(ranking, layer))
            taps = [Tap({**getattr(best.scoring, side).heads, layer: heads}) for heads in choices]
            best = self.best(best, [_with(best.scoring, side, tap) for tap in taps], f"heads of {side} layer {layer}", 0.01)
        return best

    def _dense_layers(self, best: Trial) -> Trial:
        """One to MAX_DENSE_LAYERS layers that read everything, where that is worth its bytes."""
        layers = [layer for layer in full_layers(self.target.spec) if layer not in best.scoring.reselection.heads]
        for number in range(MAX_DENSE_LAYERS):
            have = best.scoring.dense_layers
            wider = [replace(best.scoring, dense_layers=tuple(sorted((*have, layer)))) for layer in layers if layer not in have]
            found = self.best(best, wider, f"dense layer {number + 1}")
            if not number:
                tried = {str(scoring.dense_layers[-1]): self.kl_of(scoring) for scoring in wider}
                self.single["dense"] = {layer: round(kl, 4) for layer, kl in tried.items() if kl < float("inf")}
            if found is best:
                break
            best = found
            # The layers that helped most alone are those that may help beside the first.
            ranked = sorted(zip((self.kl_of(scoring) for scoring in wider), (s.dense_layers for s in wider), strict=True))
            layers = sorted({layer for _, chosen in ranked[:8] for layer in chosen})
        return best

    def kl_of(self, scoring: Scoring) -> float:
        """Its KL, infinite where it was not tried."""
        made = self._seen.get(repr(replace(scoring, source="")))
        return made.kl if made is not None else float("inf")


def _with(scoring: Scoring, side: str, tap: Tap) -> Scoring:
    """The scoring with other heads on one side."""
    return replace(scoring, target=tap) if side == "target" else replace(scoring, draft=tap)


def calibrate(
    backend: Measures,
    target: Model,
    draft: Model | None,
    tokenizer: Tokenizer,
    options: CalibrationOptions,
    say: Callable[[str], None],
    name: str = "",
) -> Profile:
    """The profile of a pair, measured here. Raise UsageError where the context does not fit the models."""
    began = time.perf_counter()
    check(options, backend, target, draft)
    prepared = getattr(backend, "plain_selection", None)
    # Engines of a backend that can do without plain selection score all tokens every round.
    pools = prepared is None
    if prepared is not None:
        backend.plain_selection = True  # type: ignore[attr-defined]
    try:
        return _calibrate(backend, target, draft, tokenizer, options, say, name, began, pools)
    finally:
        if prepared is not None:
            backend.plain_selection = prepared  # type: ignore[attr-defined]


def _calibrate(
    backend: Measures,
    target: Model,
    draft: Model | None,
    tokenizer: Tokenizer,
    options: CalibrationOptions,
    tell: Callable[[str], None],
    name: str,
    began: float,
    pools: bool,
) -> Profile:
    def say(line: str) -> None:
        tell(f"[{time.perf_counter() - began:5.1f} s] {line}")

    rankings, answered = _retrieval(backend, target, draft, tokenizer, options, say)
    replay = record(backend, target, draft, tokenizer, options, say)
    ready = time.perf_counter()
    known = usable(scoring_of(EngineOptions(), target.spec, draft.spec if draft else None), target, tokenizer)
    known = known if pools else replace(known, refresh=1)
    # Own sets get what is left of the time: most of it where the pair has a profile, whose scoring stays.
    first = replace(options, seconds=options.seconds * (0.6 if options.own_sets else 1.0))
    shares = own_set_search.held(replay) if options.own_sets else []
    calibrator = Calibrator(replay, target, draft, first, say, pools=pools, known=None if known.source == "heuristic" else known)
    calibrator.tokenizer = tokenizer
    begun = own_set_search.begin(calibrator) if options.own_sets and calibrator.known is not None else None
    start, best = begun or calibrator.search(rankings[0], rankings[1] if draft else {})
    shared = best
    if options.own_sets:
        calibrator.deadline = time.perf_counter() + max(0.4 * options.seconds, ready + options.seconds - time.perf_counter())
        best = own_set_search.search(calibrator, best, shares, say)
    replay.close()
    spent = time.perf_counter() - began
    say(f"calibrated in {spent:.0f} s: reading {ready - began:.0f} s, {len(calibrator.trials)} scorings tried")
    label = name or (target.spec.name + (f" + {draft.spec.name}" if draft else ""))
    heads = {"target": ranked_layers(rankings[0])} | ({"draft": ranked_layers(rankings[1])} if draft else {})
    record_ = {
        "context": calibrator.context,
        "documents": options.documents,
        "tokens": options.tokens,
        "bytes_per_round": calibrator.allowed,
        "seconds": round(spent, 1),
        "scorings_tried": len(calibrator.trials),
        "needles_answered": answered,
        "kl_of_single_layers": calibrator.single,
        "heuristic": {"budget": start.budget, **_rounded(start.numbers)},
        "chosen": {"budget": best.budget, **_rounded(best.numbers)},
    } | ({"one_shared_set": {"budget": shared.budget, **_rounded(shared.numbers)}} if options.own_sets else {})
    fingerprints = ((target.spec.fingerprint,), (draft.spec.fingerprint,) if draft else ())
    models = {"target": identity(target.spec)} | ({"draft": identity(draft.spec)} if draft else {})
    return Profile(label, *fingerprints, replace(best.scoring, source=f"profile {label}"), models, heads, record_)


def record(
    backend: Measures,
    target: Model,
    draft: Model | None,
    tokenizer: Tokenizer,
    options: CalibrationOptions,
    say: Callable[[str], None],
) -> Replay:
    """Dense traces of the target's own greedy answers over the calibration documents."""
    began = time.perf_counter()
    made = documents(tokenizer, options.documents, options.context, options.tokens)
    rows = [document.prompt for document in made]
    capacity = max(len(row) for row in rows) + options.tokens + 8
    reading = Reading(target, target.new_cache(len(rows), capacity))
    prompts = read_prompts(backend, target, reading.cache, rows, reading.tap, options.prefill_chunk)
    texts, valid = continue_greedily(
        backend, target, reading.cache, prompts.logits, options.tokens, frozenset(tokenizer.eos_ids)
    )
    texts = [answer if document.following is None else document.following for document, answer in zip(made, texts, strict=True)]
    valid = [n if document.following is None else len(text) for document, n, text in zip(made, valid, texts, strict=True)]
    other = None
    if draft is not None:
        other = Reading(draft, draft.new_cache(len(rows), capacity))
        read_prompts(backend, draft, other.cache, rows, other.tap, options.prefill_chunk)
    replay = Replay(
        backend, reading, other, texts, options.num_draft_tokens, prompts.last, prompts.rows, [max(n, 8) for n in valid]
    )
    say(f"read {len(rows)} documents of {options.context} tokens and their answers in {time.perf_counter() - began:.1f} s")
    return replay


def _retrieval(
    backend: Measures,
    target: Model,
    draft: Model | None,
    tokenizer: Tokenizer,
    options: CalibrationOptions,
    say: Callable[[str], None],
) -> tuple[list[dict[int, list[tuple[float, int]]]], dict[str, str]]:
    """Rankings of the target's and the draft's heads, and how many needles each answered."""
    count = 2 * options.documents
    longest = min(options.context, 8192)
    lengths = [max(128, longest * (1 + i % 8) // 8) for i in range(count)]
    prompts = needle_prompts(tokenizer, reference_text(tokenizer), lengths, [(i + 0.5) / count for i in range(count)], options.seed)
    models = {"target": target} | ({"draft": draft} if draft is not None else {})
    return rank_heads(backend, models, prompts, options.prefill_chunk, say)


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in numbers.items()}
