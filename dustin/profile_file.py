"""Calibration profiles on disk: small JSON files that name scoring heads, found by the fingerprints of target and draft."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
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
# Field of Scoring -> its type, which values it takes, and those in words.
_COUNT = (int, lambda n: n >= 1, "1 or more")
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "lookahead_share": (float, lambda m: 0 <= m <= 1, "0 to 1"),
    "history_rows": _COUNT,
    "history_decay": (float, lambda decay: 0 <= decay <= 1, "0 to 1"),
    "lookahead_decay": (float, lambda decay: 0 <= decay <= 1, "0 to 1"),
    "smoothing": (int, lambda width: width >= 1 and width % 2 == 1, "an odd number of tokens"),
    "refresh": _COUNT,
    "pool": _COUNT,
    "reselection_rank": (int, lambda rank: rank >= 0 and rank % 2 == 0, "an even number, 0 for whole keys"),
    "reselection_by_kv_head": (bool, lambda _: True, "true or false"),
    "reselection_reuse": (bool, lambda _: True, "true or false"),
    "reselection_rows": _COUNT,
}
_LAYERS = ("target_heads", "draft_heads", "dense_layers", "reselection_heads")


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
        if strange := sorted(set(given) - {*_NUMBERS, *_LAYERS}):
            raise ValueError(f"scoring has {strange[0]!r}, which nothing reads")
        # Profiles of before have no reselection.
        named = {"target_heads": given["target_heads"], "draft_heads": given["draft_heads"]}
        named["reselection_heads"] = given.get("reselection_heads", {})
        taps = [_tap(name, part) for name, part in named.items()]
        numbers = {name: _number(name, given[name]) for name in _NUMBERS if name in given}
        dense = _whole_numbers("dense_layers", given.get("dense_layers", []))
        source = f"profile {content['name']}"
        scoring = Scoring(taps[0], taps[1], dense_layers=dense, reselection=taps[2], source=source, **numbers)
        keys = [_texts(name, content[name]) for name in ("target_fingerprints", "draft_fingerprints")]
        rest = [content.get(name, {}) for name in ("models", "retrieval_heads", "record")]
        if not all(isinstance(part, dict) for part in rest) or not all(isinstance(shape, list) for shape in rest[0].values()):
            raise ValueError("models, retrieval_heads and record are no objects")
        return Profile(_texts("name", [content["name"]])[0], keys[0], keys[1], scoring, *rest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"{where} is a damaged profile ({what}): make it anew with `dustin calibrate`") from error


def _texts(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{name} is {given!r}, expected a list of texts")
    return tuple(given)


def _tap(name: str, part: Mapping[str, Any]) -> Tap:
    """Layer -> heads. Raise ValueError for a layer without heads, or what is no number of one."""
    layers = _whole_numbers(name, [int(layer) for layer in part])
    heads = [_whole_numbers(f"{name} of layer {layer}", given) for layer, given in part.items()]
    if empty := [layer for layer, some in zip(layers, heads, strict=True) if not some]:
        raise ValueError(f"{name} has layer {empty[0]} without heads")
    return Tap(dict(zip(layers, heads, strict=True)))


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    """Layers or heads. Raise ValueError for anything but different whole numbers from 0 on."""
    fine = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    if not fine or len(set(given)) < len(given):
        raise ValueError(f"{name} is {given!r}, expected different whole numbers from 0 on")
    return tuple(given)


def _number(name: str, given: Any) -> Any:
    """A field's value. Raise ValueError for one that it does not take."""
    kind, fits, expected = _NUMBERS[name]
    # True is 1 to Python, and 1 is as good as 1.0.
    same = type(given) is kind or (kind is float and type(given) is int)
    if not same or not fits(given):
        raise ValueError(f"{name} is {given!r}, expected {expected}")
    return kind(given)


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


def known(damaged: list[str] | None = None) -> Iterator[Profile]:
    """The user's profiles, newest first, then the shipped ones. Damaged files of the cache are passed over; what is wrong with them
    is appended to `damaged`.
    """
    own = sorted((cache_dir() / "profiles").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*own, *sorted(SHIPPED.glob("*.json"))]:
        try:
            yield read(path)
        except UsageError as error:
            if damaged is not None:
                damaged.append(str(error))


def scoring_of(options: EngineOptions, target: ModelSpec, draft: ModelSpec | None) -> Scoring:
    """The scoring of a pair as the options ask: a file, the pair's profile, or the heuristic. Profiles of sets that layers choose
    themselves are found where `fidelity` is high, before others.

    Raise UsageError for a file that cannot be read, or that names layers or heads that these models lack.
    """
    damaged: list[str] = []
    if options.profile == "none":
        return heuristic(target, draft)
    if options.profile != "auto":
        scoring = _for_these(read(user_path(options.profile)), target, draft)
    else:
        high = options.fidelity == "high"
        profiles = [profile for profile in known(damaged) if high or not profile.scoring.of_own_sets]
        profiles.sort(key=lambda profile: high and not profile.scoring.of_own_sets)
        fitting = next((profile.scoring for profile in profiles if profile.fits(target, draft)), None)
        if fitting is None:
            named = next((profile.scoring for profile in profiles if profile.fits_by_name(target, draft)), None)
            fitting = replace(named, source=f"{named.source} (by name)") if named else heuristic(target, draft)
        # It may be the very profile that the user made for this pair: who reads the statistics is told.
        scoring = replace(fitting, passed_over=tuple(damaged))
    for kind, tap, spec in (("target", scoring.target, target), ("draft", scoring.draft, draft)):
        if spec is not None:
            _check(options.profile, kind, tap, spec)
    _check(options.profile, "reselection of the target", scoring.reselection, target)
    group = target.num_heads // target.num_kv_heads
    for layer, heads in scoring.reselection.heads.items() if scoring.reselection_by_kv_head else ():
        if lacking := sorted(set(range(target.num_kv_heads)) - {head // group for head in heads}):
            raise UsageError(
                f"profile {options.profile!r} lets the kv heads of layer {layer} choose, but names none of the query heads of kv "
                f"head {lacking[0]}: make it anew with `dustin calibrate`"
            )
    _check(options.profile, "dense layers of the target", Tap(dict.fromkeys(scoring.dense_layers, ())), target)
    return scoring if draft is not None else replace(scoring, draft=Tap({}))


def _for_these(profile: Profile, target: ModelSpec, draft: ModelSpec | None) -> Scoring:
    """The scoring of a profile that was named, whatever it was made for: `source` says where these are other models. Raise
    UsageError where they have other shapes."""
    if profile.fits(target, draft):
        return profile.scoring
    for kind, spec in (("target", target), ("draft", draft)):
        made_for = profile.models.get(kind)
        if spec is not None and made_for and made_for[1:] != identity(spec)[1:]:
            name, *shape = made_for
            raise UsageError(
                f"profile {profile.name!r} was made for {kind} {name} with {shape} layers, heads, kv heads and head dimension, but "
                f"{spec.name} has {identity(spec)[1:]}: make one with `dustin calibrate`, or leave --profile out"
            )
    how = "by name" if profile.fits_by_name(target, draft) else "of other models"
    return replace(profile.scoring, source=f"{profile.scoring.source} ({how})")


def _check(where: str, kind: str, tap: Tap, spec: ModelSpec) -> None:
    for layer, heads in tap.heads.items():
        if layer >= spec.num_layers or layer in spec.sliding_layers or any(head >= spec.num_heads for head in heads):
            raise UsageError(
                f"profile {where!r} names layer {layer} with heads {list(heads)} ({kind}), but {spec.name} has "
                f"{spec.num_layers} layers of {spec.num_heads} heads: it was made for another model"
            )
