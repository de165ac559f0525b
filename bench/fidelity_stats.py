"""Numbers of a cell with confidence intervals: documents are drawn again, not rows, for rows of one document hang together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dustin.replay import Measured

RESAMPLES = 500


def interval(parts: Sequence[np.ndarray], statistic: Callable[[np.ndarray], float], seed: int = 0) -> list[float]:
    """95 % bootstrap interval of `statistic` over all rows, resampling the documents' `parts`."""
    rng = np.random.default_rng(seed)
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return []
    drawn = [statistic(np.concatenate([parts[i] for i in rng.integers(0, len(parts), len(parts))])) for _ in range(RESAMPLES)]
    return [round(float(x), 5) for x in np.percentile(drawn, (2.5, 97.5))]


def cell(measured: Measured) -> dict[str, object]:
    """Summary of one replayed cell, rounded, with the intervals of what the tables show."""
    numbers = {name: round(value, 5) for name, value in measured.summary().items()}
    mean = lambda x: float(np.mean(x))  # noqa: E731
    parts = {
        "agreement": (measured.by_sequence(measured.same.astype(float)), mean),
        "hard_flips": (measured.by_sequence(measured.hard.astype(float)), mean),
        "kl": (measured.by_sequence(measured.kl), mean),
        "perplexity_ratio": (
            measured.by_sequence(measured.reference_logprob - measured.logprob),
            lambda x: float(np.exp(np.mean(x))),
        ),
    }
    numbers |= {"first_disagreement": round(first_disagreement(measured), 2)}
    numbers |= {f"{name}_ci95": interval(rows, statistic) for name, (rows, statistic) in parts.items()}  # type: ignore[misc, dict-item]
    return numbers | {
        "documents": sum(1 for row in measured.by_sequence(measured.kl) if len(row)),
        "bytes_per_round": round(measured.bytes_per_round),
        "scoring_bytes_per_round": round(measured.scoring_bytes_per_round),
        "share_of_dense_bytes": round(measured.bytes_per_round / measured.dense_bytes_per_round, 4),
    }


def by_document(measured: Measured, kinds: Sequence[str]) -> list[list[object]]:
    """[kind of text, agreement, KL] of each document."""
    rows = zip(kinds, measured.by_sequence(measured.same), measured.by_sequence(measured.kl), strict=True)
    return [[kind, round(float(same.mean()), 3), round(float(kl.mean()), 4)] for kind, same, kl in rows if len(same)]


def first_disagreement(measured: Measured) -> float:
    """Mean rows of a document before the first that dense attention would not have chosen (all of them where there is none)."""
    runs = [int(np.argmin(row)) if not row.all() else len(row) for row in measured.by_sequence(measured.same) if len(row)]
    return float(np.mean(runs)) if runs else 0.0


def quarters(measured: Measured) -> list[dict[str, float]]:
    """The summary of each quarter of the rounds, in order."""
    cut = np.array_split(np.arange(len(measured.kl)), 4)
    names = ("kl", "same", "gap", "reference_logprob", "logprob", "recovery", "valid")
    made = []
    for part in cut:
        sub = Measured(**{name: getattr(measured, name)[part] for name in names}, bytes_per_round=0, scoring_bytes_per_round=0,
                       dense_bytes_per_round=1)  # fmt: skip
        numbers = sub.summary()
        made.append({name: round(numbers[name], 5) for name in ("agreement", "hard_flips", "kl")})
    return made


def accuracy(scores: Sequence[float], dense: Sequence[float], documents: Sequence[int]) -> dict[str, object]:
    """Accuracy beside dense attention's on the same questions; `kept` is over the questions that dense attention answers fully."""
    mine, its, where = np.array(scores), np.array(dense), np.array(documents)
    right = its >= 1.0
    both = [np.stack([mine[where == d], its[where == d]], 1) for d in np.unique(where)]
    ratio = lambda x: float(x[:, 0].sum() / max(x[:, 1].sum(), 1e-9))  # noqa: E731
    return {
        "accuracy": round(float(mine.mean()), 4),
        "accuracy_dense": round(float(its.mean()), 4),
        "accuracy_of_dense": round(float(mine.sum() / max(its.sum(), 1e-9)), 4),
        "accuracy_of_dense_ci95": interval(both, ratio),
        "kept_of_dense": round(float((mine[right] >= 1.0).mean()), 4) if right.any() else None,
        "questions": len(mine),
        "dense_right": int(right.sum()),
        "documents": len(both),
    }
