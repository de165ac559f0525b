"""Calibration profiles on disk: small JSON files that name scoring heads, found by the fingerprints of target and draft."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dustin.config import EngineOptions
from dustin.errors import UsageError
from dustin.interfaces import ModelSpec, Tap
from dustin.models import cache_dir, user_path
from dustin.scoring import Scoring, heuristic

VERSION = 1
SHIPPED = Path(__file__).resolve().parent / "profiles"
_NUMBERS = {
    "lookahead_share": float, "history_rows": int, "history_decay": float, "lookahead_decay": float, "smoothing": int,
    "refresh": int, "pool": int, "reselection_rank": int, "reselection_by_kv_head": bool,
    "reselection_reuse": bool, "reselection_rows": int,
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """One calibrated pair. `target` and `draft` are fingerprints of the same weights in several dtypes. `models` names both as
    [name, layers, heads, kv heads, head dim], for copies of other precision, whose fingerprints differ. `retrieval_heads` lists
    for each of the two [layer, its best heads...], best layer first; `record` says how it was made."""

    name: str
    target: tuple[str, ...]
    draft: tuple[str, ...]
    scoring: Scoring
    models: Mapping[str, list[Any]] = field(default_factory=dict)
    retrieval_heads: Mapping[str, list[list[int]]] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, target: ModelSpec, draft: ModelSpec | None) -> bool:
        """Whether it was made for these weights. A profile with a draft serves its target alone too (history only)."""
        return target.fingerprint in self.target and (draft is None or draft.fingerprint in self.draft)

    def fits_by_name(self, target: ModelSpec, draft: ModelSpec | None) -> bool:
        """Whether it was made for models of these names and shapes."""
        pairs = [("target", target), *([("draft", draft)] if draft is not None else [])]
        return all(spec is not None and self.models.get(kind) == identity(spec) for kind, spec in pairs)


def identity(spec: ModelSpec) -> list[Any]:
    """[name without precision and file type, layers, heads, kv heads, head dim] of a model."""
    name = re.sub(r"(\.gguf|\.safetensors)$", "", spec.name.rsplit("/", 1)[-1].lower())
    name = re.sub(r"[-._](q\d\w*|iq\d\w*|f16|f32|fp16|bf16|fp32|eval)$", "", name)
    return [name, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim]


def to_json(profile: Profile) -> dict[str, Any]:
    """The file's content."""
    scoring = profile.scoring
    return {
        "version": VERSION,
        "name": profile.name,
        "target_fingerprints": list(profile.target),
        "draft_fingerprints": list(profile.draft),
        "models": dict(profile.models),
        "scoring": {
            "target_heads": {str(layer): list(heads) for layer, heads in scoring.target.heads.items()},
            "draft_heads": {str(layer): list(heads) for layer, heads in scoring.draft.heads.items()},
            "dense_layers": list(scoring.dense_layers),
            "reselection_heads": {str(layer): list(heads) for layer, heads in scoring.reselection.heads.items()},
        }
        | {name: getattr(scoring, name) for name in _NUMBERS},
        "retrieval_heads": dict(profile.retrieval_heads),
        "record": dict(profile.record),
    }


def from_json(content: Any, where: str) -> Profile:
    """A profile from a file's content. Raise UsageError that names `where` and what is wrong."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise UsageError(f"{where} is no profile of version {VERSION} (found {found!r}): make it anew with `dustin calibrate`")
    try:
        given = content["scoring"]
        # Profiles of before have no reselection.
        named = [given["target_heads"], given["draft_heads"], given.get("reselection_heads", {})]
        taps = [Tap({int(layer): tuple(int(head) for head in heads) for layer, heads in part.items()}) for part in named]
        numbers = {name: kind(given[name]) for name, kind in _NUMBERS.items() if name in given}
        dense = tuple(int(layer) for layer in given.get("dense_layers", ()))
        source = f"profile {content['name']}"
        scoring = Scoring(taps[0], taps[1], dense_layers=dense, reselection=taps[2], source=source, **numbers)
        keys = (tuple(content["target_fingerprints"]), tuple(content["draft_fingerprints"]))
        rest = [content.get(name, {}) for name in ("models", "retrieval_heads", "record")]
        return Profile(content["name"], *keys, scoring, *rest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where} is a damaged profile ({error!r}): make it anew with `dustin calibrate`") from error


def read(path: Path) -> Profile:
    """Raise UsageError when the file cannot be read or is no profile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {getattr(error, 'strerror', None) or error}") from error
    return from_json(content, str(path))


def default_path(profile: Profile) -> Path:
    """Where `dustin calibrate` writes: one file a pair in the user's cache, and another for sets of the layers' own."""
    key = hashlib.sha256("".join((*profile.target, *profile.draft)).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}{'-own' if profile.scoring.of_own_sets else ''}.json"


def write(profile: Profile, path: Path) -> None:
    """Write the file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(profile), indent=1) + "\n", encoding="utf-8")


def known() -> Iterator[Profile]:
    """The user's profiles, newest first, then the shipped ones. Damaged files of the cache are passed over."""
    own = sorted((cache_dir() / "profiles").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*own, *sorted(SHIPPED.glob("*.json"))]:
        try:
            yield read(path)
        except UsageError:
            continue


def scoring_of(options: EngineOptions, target: ModelSpec, draft: ModelSpec | None) -> Scoring:
    """The scoring of a pair as the options ask: a file, the pair's profile, or the heuristic. Profiles of sets that layers choose
    themselves are found where `fidelity` is high, before others.

    Raise UsageError for a file that cannot be read, or that names layers or heads that these models lack.
    """
    if options.profile == "none":
        return heuristic(target, draft)
    if options.profile != "auto":
        scoring = read(user_path(options.profile)).scoring
    else:
        high = options.fidelity == "high"
        profiles = [profile for profile in known() if high or not profile.scoring.of_own_sets]
        profiles.sort(key=lambda profile: high and not profile.scoring.of_own_sets)
        fitting = next((profile.scoring for profile in profiles if profile.fits(target, draft)), None)
        if fitting is None:
            named = next((profile.scoring for profile in profiles if profile.fits_by_name(target, draft)), None)
            if named is None:
                return heuristic(target, draft)
            fitting = replace(named, source=f"{named.source} (by name)")
        scoring = fitting
    for kind, tap, spec in (("target", scoring.target, target), ("draft", scoring.draft, draft)):
        if spec is not None:
            _check(options.profile, kind, tap, spec)
    _check(options.profile, "reselection of the target", scoring.reselection, target)
    _check(options.profile, "dense layers of the target", Tap(dict.fromkeys(scoring.dense_layers, ())), target)
    return scoring if draft is not None else replace(scoring, draft=Tap({}))


def _check(where: str, kind: str, tap: Tap, spec: ModelSpec) -> None:
    for layer, heads in tap.heads.items():
        if layer >= spec.num_layers or layer in spec.sliding_layers or any(head >= spec.num_heads for head in heads):
            raise UsageError(
                f"profile {where!r} names layer {layer} with heads {list(heads)} ({kind}), but {spec.name} has "
                f"{spec.num_layers} layers of {spec.num_heads} heads: it was made for another model"
            )
