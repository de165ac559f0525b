"""ONE table of parity cases: operations, shapes, dtypes and input makers (makers.py). Backends, kernels and bench take them from
here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tests.parity.harness import TOLERANCES, Case, Implementation, Inputs, ParityError, check, inputs_of, reference_of
from tests.parity.makers import (
    attention,
    cache_script,
    greedy,
    massed,
    measured,
    pages,
    ragged_scores,
    routed,
    sampled,
    scores,
    scores_within,
    selection,
    two_scores,
    warps,
)

__all__ = ["CASES", "TOLERANCES", "Case", "Implementation", "Inputs", "ParityError", "cases", "check", "inputs_of", "reference_of"]


# (Hq, Hkv), D, T, dtype: every GQA ratio, head dim and row count once or more; the full product would only cost time.
_SHAPES = [
    ((2, 2), 32, 1, "fp32"),
    ((6, 2), 64, 2, "fp16"),
    ((5, 1), 80, 6, "bf16"),
    ((12, 2), 96, 4, "fp32"),
    ((14, 2), 64, 6, "fp16"),
    ((16, 2), 128, 9, "bf16"),
    ((8, 1), 256, 16, "fp32"),
    ((7, 1), 128, 6, "fp32"),
    ((8, 8), 64, 3, "bf16"),
    ((9, 3), 64, 6, "fp32"),
]
_RAGGED = [150, 33, 97]


def _verify_cases() -> list[Case]:
    out: list[Case] = []

    def both(name: str, budget: int, dtype: str = "fp32", coded: bool = False, **shape: Any) -> None:
        dense = functools.partial(attention, dtype=dtype, coded=coded, **shape)
        sparse = functools.partial(dense, budget=budget)
        out.append(Case(f"dense_verify-{name}-{dtype}", "dense_verify", dense, dtype, coded))
        out.append(Case(f"sparse_verify-{name}-{dtype}", "sparse_verify", sparse, dtype, coded))

    for heads, head_dim, rows, dtype in _SHAPES:
        tokens = [rows, max(rows - 1, 1), (rows + 1) // 2]
        name = f"g{heads[0] // heads[1]}-d{head_dim}-t{rows}"
        both(name, 64, dtype, lengths=_RAGGED, num_tokens=tokens, heads=heads, head_dim=head_dim)
        both(f"coded-{name}", 24, dtype, True, lengths=[31, 26, 29], num_tokens=tokens, heads=heads, head_dim=head_dim)
    for dtype in TOLERANCES:
        both("short", 64, dtype, lengths=[3, 17, 1], num_tokens=[4, 2, 4])
        both("first-token", 16, dtype, lengths=[0, 0, 40], num_tokens=[1, 5, 3])
        both("idle-rows", 16, dtype, lengths=[40, 20, 0], num_tokens=[0, 3, 0], rows=4)
        both("one-hot", 32, dtype, lengths=[90, 40], num_tokens=[3, 2], size=40.0)
        both("stale-tail", 32, dtype, lengths=[90, 40], num_tokens=[3, 1], tail="stale")
    both("tile-edges", 64, lengths=[63, 64, 65, 128, 127], num_tokens=[1, 1, 2, 1, 2])
    both("coded-tile-edges", 64, "fp32", True, lengths=[63, 64, 65, 128, 127], num_tokens=[1, 1, 2, 1, 2])
    both("coded-1024", 1024, "fp32", True, lengths=[2500, 1024, 1025], num_tokens=[2, 1, 2], heads=(6, 2))
    both("long", 512, "bf16", lengths=[4096, 2047], num_tokens=[6, 6], heads=(14, 2), head_dim=64)
    both("one-token", 1, lengths=[70, 1], num_tokens=[2, 1])
    both("full-cache", 32, lengths=[60, 61], num_tokens=[4, 3], spare=0)
    return out


def _score_cases() -> list[Case]:
    shapes = [
        ((6, 2), 64, (0, 1, 2, 3, 4, 5), 1),
        ((14, 2), 64, (3, 7, 12), 5),
        ((8, 1), 128, (0, 7), 4),
        ((5, 1), 32, (4,), 15),
        ((16, 2), 256, (1, 8, 9), 2),
        ((9, 3), 64, (8, 0, 5), 3),
    ]
    out = []
    for dtype in TOLERANCES:
        for heads, head_dim, scoring, rows in shapes:
            make = functools.partial(
                scores, lengths=[130, 1, 64, 0, 77], rows=rows, scoring=scoring, heads=heads, head_dim=head_dim, dtype=dtype
            )
            out.append(Case(f"score-g{heads[0] // heads[1]}-d{head_dim}-r{rows}-{dtype}", "score", make, dtype))
        make = functools.partial(scores, lengths=[90, 3], rows=2, scoring=(0, 3), heads=(4, 2), head_dim=64, dtype=dtype, size=30.0)
        out.append(Case(f"score-extreme-{dtype}", "score", make, dtype))
    return out


def _select_cases() -> list[Case]:
    ragged = [200, 40, 64, 65, 3, 0, 131]
    rows: dict[str, dict[str, Any]] = {
        "mixed": {"drafts": 30},
        "history-only": {"drafts": 0},
        "draft-only": {"drafts": 64 - 12},
        "draft-share-too-large": {"drafts": 500},
        "no-target-scores": {"given": "draft", "drafts": 10},
        "no-draft-scores": {"given": "target", "drafts": 10},
        "streaming": {"given": "none", "drafts": 10},
        "ties": {"drafts": 20, "levels": 3},
        "all-equal": {"drafts": 20, "levels": 1},
        "draft-lags": {"drafts": 20, "lag": 1},
        "no-sinks": {"drafts": 20, "sinks": 0},
        "protected-fill-budget": {"drafts": 5, "sinks": 24, "recent": 40},
        "budget-of-13": {"drafts": 1, "budget": 13},
    }
    out = []
    for name, options in rows.items():
        shape: dict[str, Any] = {"lengths": ragged, "budget": 64} | options
        make = functools.partial(selection, **shape)
        out.append(Case(f"select-{name}", "select", make))
    long = functools.partial(selection, lengths=[5000, 1025], budget=1024, recent=32, drafts=590, levels=200)
    return [*out, Case("select-long", "select", long)]


def _accept_cases() -> list[Case]:
    patterns = {
        "none": ([0, 0, 0], [5, 5, 5]),
        "half": ([2, 3, 2], [5, 5, 5]),
        "all": ([5, 5, 5], [5, 5, 5]),
        "ragged": ([5, 0, 2, 3, 0], [5, 0, 4, 3, 2]),
    }
    out = []
    for name, (agree, drafts) in patterns.items():
        shape: dict[str, Any] = {"agree": agree, "num_drafts": drafts, "width": 5}
        out.append(Case(f"accept_greedy-{name}", "accept_greedy", functools.partial(greedy, **shape)))
        kinds: dict[str, dict[str, Any]] = {"": {}, "-one-hot": {"one_hot": True}, "-zeros": {"zeros": True}}
        for kind, extra in kinds.items():
            out.append(Case(f"accept_sampled-{name}{kind}", "accept_sampled", functools.partial(sampled, **shape, **extra)))
    for trouble in ("ties", "nan-judged", "nan-unused"):
        make = functools.partial(greedy, agree=[2, 1, 3], num_drafts=[4, 2, 3], width=5, trouble=trouble)
        out.append(Case(f"accept_greedy-{trouble}", "accept_greedy", make))
    wide = functools.partial(greedy, agree=[7, 0], num_drafts=[15, 15], width=15, vocab=4099)
    no_drafts = functools.partial(greedy, agree=[0, 0], num_drafts=[0, 0], width=0)
    out.append(Case("accept_greedy-wide", "accept_greedy", wide))
    return [*out, Case("accept_greedy-no-drafts", "accept_greedy", no_drafts)]


def _set_cases() -> list[Case]:
    out = [Case("measures", "measures", measured)]
    shape = {"lengths": [130, 1, 64, 0, 77], "heads": (6, 2), "head_dim": 64, "rows": 3, "scoring": (0, 1, 4)}
    for dtype in TOLERANCES:
        within = functools.partial(scores_within, dtype=dtype, **shape)
        out.append(Case(f"score_within-{dtype}", "score_within", within, dtype))
        bounds = functools.partial(pages, page_size=16, dtype=dtype, **shape)
        out.append(Case(f"page_scores-{dtype}", "page_scores", bounds, dtype))
    out.append(Case("page_scores-one-token", "page_scores", functools.partial(pages, page_size=1, dtype="fp32", **shape)))
    for name, old, new in (("longer", 40, 44), ("shorter", 44, 40)):
        out.append(Case(f"accumulate-{name}", "accumulate", functools.partial(two_scores, decay=0.5, old=old, new=new)))
    per_row = functools.partial(two_scores, decay=[0.0, 0.5, 1.0], old=30, new=30)
    out.append(Case("accumulate-a-row", "accumulate", per_row))
    out += [Case(f"smooth-{width}", "smooth", functools.partial(ragged_scores, width=width)) for width in (1, 3, 7)]
    for mass in (0.0, 0.2, 0.9, 1.0):
        out.append(Case(f"keep_mass-{mass}", "keep_mass", functools.partial(massed, mass=mass)))
    out.append(Case("keep_mass-ties", "keep_mass", functools.partial(massed, mass=0.15, levels=2)))
    return out


CASES: tuple[Case, ...] = (
    *_set_cases(),
    *_verify_cases(),
    *_score_cases(),
    *_select_cases(),
    *_accept_cases(),
    Case("favour", "favour", functools.partial(routed, num_drafts=[4, 0, 2])),
    Case("probabilities-warps", "probabilities", warps),
    Case("probabilities-one-row", "probabilities", functools.partial(warps, rows=1, inflight=4)),
    Case("probabilities-ties", "probabilities", functools.partial(warps, ties=True)),
    Case("probabilities-extreme", "probabilities", functools.partial(warps, size=60.0)),
    *(Case(f"append_rollback-{t}", "append_rollback", functools.partial(cache_script, dtype=t), t) for t in TOLERANCES),
)


def cases(*ops: str, dtypes: Sequence[str] = tuple(TOLERANCES)) -> list[Case]:
    """The cases of the given operations (all when none is named) and dtypes."""
    return [case for case in CASES if (not ops or case.op in ops) and case.dtype in dtypes]
