"""What the fidelity bench measures: cells replayed on traces, ways to answer questions, and the profiles that are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.fidelity_cells import Cell, Way, named_scoring
from dustin.interfaces import Tap
from dustin.scoring import Scoring, without_own_sets

# Tracks of questions, by the kinds that count for them.
ASKED = {
    "needle": ("single", "multikey", "multivalue"), "tracking": ("variables",), "qa": ("qa",), "words": ("common words",),
    "tasks": ("single", "multikey", "multivalue", "variables", "qa"),
}  # fmt: skip
BUDGETS = (128, 256, 512, 1024, 2048)
PEERS = ("history", "lookahead", "streaming", "snapkv", "quest", "h2o", "specattn")
TRACKS = ("tasks", "chat", "text", "acceptance", "further", "drift", "words")
# Documents up to this length get a quarter of the budgets.
SHORT = 2048


def required(profiles: Collection[str]) -> list[Cell]:
    """What the tables need first: `dustin` at every budget, equal bytes (scoring included), the halves of the method, peers."""
    best, others = best_heads(profiles), [name for name in profiles if name not in ("profile", "srh")]
    srh = ["srh"] if "srh" in profiles else []
    cells = [Cell("dense", "heuristic", 1024)]
    cells += [Cell("dustin", best, budget) for budget in (1024, 512, 2048, 256, 128)]
    if best == "profile":
        cells += [Cell("dustin", "heuristic", budget) for budget in (1024, 512, 2048)]
    cells += [Cell("dustin", name, budget) for name in others for budget in (1024, 512)]
    cells += [Cell("dustin", "mid", budget) for budget in (1024, 512)]
    same = dict.fromkeys([best, *others, "heuristic", *srh])
    cells += [Cell("dustin", name, 0, bytes_of=1536) for name in same]
    cells += [Cell("dustin", name, 0, bytes_of=3072) for name in dict.fromkeys([best, *others, "heuristic", "mid"])]
    for budget in (512, 1024):
        cells += [Cell("oracle", "heuristic", budget)]
        cells += [Cell(name, best, budget) for name in PEERS if name != "quest" or budget == 512]
    return cells


def further(profiles: Collection[str]) -> list[Cell]:
    """Other forms and options beyond the paper."""
    best = best_heads(profiles)
    srh = ["srh"] if "srh" in profiles else []
    cells = [Cell("oracle by layer", "heuristic", budget) for budget in (512, 1024, 2048)] + [Cell("oracle", "heuristic", 2048)]
    cells += [Cell("dustin", best, 0, bytes_of=4800), Cell("dustin", "mid", 2048), Cell("dustin", best, 1024, lag=1)]
    cells += [Cell("dustin", name, budget) for name in ["one", *srh] for budget in (512, 1024)]
    cells += [Cell("dustin", best, 2048, top_mass=0.9), Cell("dustin", best, 2048, top_mass=0.8)]
    cells += [Cell("dustin", "heuristic/8", 0, bytes_of=1536), Cell("dustin", "heuristic/8", 1024), Cell("quest", best, 1024)]
    return cells


def of_text(cells: list[Cell]) -> list[Cell]:
    """Those replayed on the text track too."""
    kept = ("dense", "dustin", "oracle", "streaming", "history", "lookahead", "snapkv")
    return [cell for cell in cells if cell.selector in kept]


def fitting(cells: list[Cell], context: int) -> list[Cell]:
    """The cells, with a quarter of the budgets on short documents (small models, CPUs)."""
    return cells if context > SHORT else [replace(c, budget=c.budget // 4, bytes_of=c.bytes_of // 4) for c in cells]


def best_heads(profiles: Collection[str]) -> str:
    """The scoring heads that stand for the product: the pair's profile, else the heuristic."""
    return "profile" if "profile" in profiles else "heuristic"


def ways_of(session: Any, profiles: dict[str, Any], context: int, few: bool = False) -> list[Way]:
    """Dense attention, `dustin` at every budget, then the others at a budget of 512 (a quarter of all that on short documents);
    `few`: those at 512 alone."""
    best, part = best_heads(profiles), 1 if context > SHORT else 4

    def way(selector: str, heads: str, budget: int, mode: str = "sparse") -> Way:
        scoring = scoring_for(selector, named_scoring(heads, session, profiles))
        return Way(f"{selector} {heads} {budget // part}", mode, selector, scoring, heads, budget // part)

    # Where time runs out, what comes last is missing.
    made = [way("dustin", best, 512, "dense"), way("dustin", best, 512)]
    made += [way("dustin", name, 512) for name in dict.fromkeys([*profiles, "heuristic"]) if name not in (best, "srh")]
    peers = [name for name in PEERS if session.draft is not None or name not in ("lookahead", "specattn")]
    made += [way(name, best, 512) for name in peers if not few or name in ("history", "lookahead", "streaming", "snapkv")]
    if session.draft is not None and not few:
        made.append(replace(way("dustin", best, 512), sparse_draft=False))
    return made + [way("dustin", best, budget) for budget in (768, 1024, 2048, 256, 128) if budget // part > 64 and not few]


def scoring_for(selector: str, scoring: Scoring) -> Scoring:
    """A profile's scoring for the method and its halves; without sets of the layers' own for the peers, which have none."""
    return scoring if selector in ("dustin", "history", "lookahead") else without_own_sets(scoring)


def shares(contexts: list[int], began: float, seconds: float) -> Iterator[tuple[int, float]]:
    """Contexts from the longest on, each with the time at which it must make room for the next."""
    weights = [1.6 if i == 0 else 1.0 for i in range(len(contexts))]
    done = 0.0
    for context, weight in zip(sorted(contexts, reverse=True), weights, strict=True):
        done += weight
        yield context, began + seconds * done / sum(weights)


def compared_profiles(session: Any, opts: dict[str, Any]) -> dict[str, Scoring]:
    """name -> scoring of the profiles to compare: `profile` is the one that stands for the product, calibrated here where that is
    asked for; `srh` the paper's form from its retrieval heads."""
    from dustin import calibration, profile_file
    from dustin.config import EngineOptions

    made: dict[str, Scoring] = {}
    draft = session.draft.spec if session.draft else None
    for given in opts["profile"]:
        name, where = given.split("=", 1) if "=" in given else ("profile", given)
        scoring = profile_file.scoring_of(EngineOptions(profile=where), session.target.spec, draft)
        if scoring.source == "heuristic":
            continue
        if hasattr(session.backend, "plain_selection"):
            # Engines there score all tokens in every round (`scores_all`), whatever pool the profile names.
            scoring = replace(scoring, refresh=1)
        if name in made:
            raise click.UsageError(f"--profile names {name!r} twice: give each a name of its own, as NAME=FILE")
        made[name] = scoring
        if name == "profile":
            made |= _retrieval(_file_of(where, session))
            if scoring.reselection.heads:
                made["shared set"] = without_own_sets(scoring)
    if opts["calibrate"]:
        longest = max(c for c in (int(c) for c in opts["contexts"].split(",")) if c <= 16384 or "," not in opts["contexts"])
        short = longest <= 4096
        options = calibration.CalibrationOptions(
            context=longest, seconds=opts["calibration_seconds"], num_draft_tokens=opts["gamma"],
            allowance=384 if short else 1536, prefill_chunk=opts["prefill_chunk"], documents=2 if short else 12,
            tokens=31 if short else 193,
        )  # fmt: skip
        profile = calibration.calibrate(
            session.backend, session.target, session.draft, session.tokenizer, options, lambda line: click.echo(line, err=True)
        )
        profile_file.write(profile, Path(opts["profile_out"]) if opts["profile_out"] else profile_file.default_path(profile))
        name = "calibrated" if "profile" in made else "profile"
        made[name] = profile.scoring
        made = _retrieval(profile) | made
    return made


def _file_of(where: str, session: Any) -> Any:
    """The profile that `scoring_of` took: a file's, or the pair's own."""
    from dustin import profile_file
    from dustin.models import user_path

    if where != "auto":
        return profile_file.read(user_path(where))
    target, draft = session.target.spec, session.draft.spec if session.draft else None
    known = list(profile_file.known())
    return next((p for p in known if p.fits(target, draft)), None) or next(p for p in known if p.fits_by_name(target, draft))


def _retrieval(profile: Any) -> dict[str, Scoring]:
    """The paper's form: retrieval heads alone, four of one target layer and of three draft layers."""
    found = profile.retrieval_heads
    if "draft" not in found:
        return {}
    taps = [Tap({layer: tuple(heads) for layer, *heads in sorted(found[side][:n])}) for side, n in (("target", 1), ("draft", 3))]
    return {"srh": Scoring(taps[0], taps[1], source="retrieval heads")}
