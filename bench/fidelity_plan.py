"""What the fidelity bench measures: cells replayed on traces, ways to answer questions, and the profiles that are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.fidelity_cells import Cell, Way, named_scoring
from dustin.interfaces import CompactModel, Tap
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
    """What the tables need, the most asked for first: `dustin` at k = 1,024 and at equal bytes (scoring included), what says why it
    loses (perfect prediction, sets of the layers' own), every budget, the halves of the method, peers."""
    best, others = best_heads(profiles), [name for name in profiles if name not in ("profile", "srh")]
    srh = ["srh"] if "srh" in profiles else []
    plain = [] if best == "heuristic" else ["heuristic"]
    cells = [Cell("dense", "heuristic", 1024), Cell("dustin", best, 1024), Cell("dustin", best, 0, bytes_of=1536)]
    cells += [Cell("dustin", name, 1024) for name in [*others, "mid", *plain, "high"]]
    cells += [Cell("dustin", best, 1024, like="mid")]
    cells += [Cell("oracle", "heuristic", 1024), Cell("oracle by layer", "heuristic", 1024)]
    cells += [Cell("dustin", best, budget) for budget in (512, 2048)] + [Cell("dustin", "high", 2048)]
    cells += [Cell("dustin", best, 0, bytes_of=3072), Cell("dustin", "mid", 0, bytes_of=3072)]
    for budget in (512, 1024):
        cells += [Cell("oracle", "heuristic", budget)] if budget == 512 else []
        cells += [Cell(name, best, budget) for name in PEERS[:4]]
    cells += [Cell("dustin", best, budget) for budget in (256, 128)]
    cells += [Cell("dustin", name, budget) for name in plain for budget in (512, 2048)]
    cells += [Cell("dustin", name, 512) for name in [*others, "mid", "high"]]
    same = dict.fromkeys([*others, "heuristic", *srh])
    cells += [Cell("dustin", name, 0, bytes_of=1536) for name in same]
    cells += [Cell("dustin", name, 0, bytes_of=3072) for name in dict.fromkeys([*others, "heuristic"])]
    return cells + [Cell(name, best, budget) for budget in (512, 1024) for name in PEERS[4:]]


def further(profiles: Collection[str]) -> list[Cell]:
    """Other forms and options beyond the paper."""
    best = best_heads(profiles)
    srh = ["srh"] if "srh" in profiles else []
    cells = [Cell("oracle by layer", "heuristic", budget) for budget in (512, 2048)] + [Cell("oracle", "heuristic", 2048)]
    cells += [Cell("dustin", best, 0, bytes_of=4800), Cell("dustin", "mid", 2048), Cell("dustin", best, 1024, lag=1)]
    cells += [Cell("dustin", best, 4096), Cell("dustin", "high", 4096)]
    cells += [Cell("dustin", name, budget) for name in ["one", *srh] for budget in (512, 1024)]
    cells += [Cell("dustin", best, 2048, top_mass=0.9), Cell("dustin", best, 2048, top_mass=0.8)]
    return cells + [Cell("dustin", "heuristic/8", 0, bytes_of=1536), Cell("dustin", "heuristic/8", 1024)]


def of_text(cells: list[Cell]) -> list[Cell]:
    """Those replayed on the text track too."""
    kept = ("dense", "dustin", "oracle", "oracle by layer", "streaming", "history", "lookahead", "snapkv")
    return [cell for cell in cells if cell.selector in kept]


def fitting(cells: list[Cell], context: int) -> list[Cell]:
    """The cells, with a quarter of the budgets on short documents (small models, CPUs)."""
    return cells if context > SHORT else [replace(c, budget=c.budget // 4, bytes_of=c.bytes_of // 4) for c in cells]


def best_heads(profiles: Collection[str]) -> str:
    """The scoring heads that stand for the product: the pair's profile, else the heuristic."""
    return "profile" if "profile" in profiles else "heuristic"


def ways_of(session: Any, profiles: dict[str, Any], context: int, few: bool = False) -> list[Way]:
    """Dense attention, `dustin`, what says why it loses points (perfect prediction, sets of the layers' own), the halves of the
    method and peers, all at a budget of 512 (a quarter of that on short documents), plain decoding, which shows the noise of other
    batch shapes, then other budgets; `few`: no oracle, noise and other budgets."""
    best, part, drafted = best_heads(profiles), 1 if context > SHORT else 4, session.draft is not None

    def way(selector: str, heads: str, budget: int, mode: str = "sparse") -> Way:
        scoring = scoring_for(selector, named_scoring(heads, session, profiles))
        return Way(f"{selector} {heads} {budget // part}", mode, selector, scoring, heads, budget // part)

    # Where time runs out, what comes last is missing.
    made = [way("dustin", best, 512, "dense"), way("dustin", best, 512)]
    own = [] if few or not isinstance(session.target, CompactModel) else ["high"]
    others = [name for name in profiles if name not in (best, "srh", "shared set")]
    made += [way("dustin", name, 512) for name in [*others, *own]]
    peers = [name for name in PEERS if drafted or name not in ("lookahead", "specattn")]
    made += [way("oracle", "heuristic", 512)] if not few else []
    made += [way(name, best, 512) for name in peers if name in PEERS[:4]]
    made += [way("oracle by layer", "heuristic", 512)] if not few else []
    made += [way("dustin", name, 512) for name in ("shared set", "heuristic") if name in (*profiles, "heuristic") and name != best]
    if few:
        return made
    made += [way("dustin", best, 512, "ar")] + [way("dustin", best, budget) for budget in (1024, 2048, 4096) if budget < context]
    made += [replace(way("dustin", best, 512), sparse_draft=False)] if drafted else []
    made += [way(name, best, 512) for name in peers if name not in PEERS[:4]]
    return made + [way("dustin", best, budget) for budget in (768, 256, 128) if budget // part > 64]


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
