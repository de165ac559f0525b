"""Profiles on disk: what is damaged, or was made for other models, is said by name before anything reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dustin.config import EngineOptions
from dustin.errors import UsageError
from dustin.interfaces import ModelSpec, Tap
from dustin.profile_file import Profile, from_json, identity, read, scoring_of, to_json, write
from dustin.scoring import Scoring

SPEC = ModelSpec("target-q4_k_m.gguf", "llama", 4, 4, 2, 64, 100, 4096, "float32", "weights")
SCORING = Scoring(Tap({1: (0, 3)}), Tap({0: (1,)}), 0.5, (2,), source="profile p")
PROFILE = Profile("p", ("weights",), (), SCORING, {"target": identity(SPEC)})


def _changed(part: str | None, **changes: object) -> dict[str, object]:
    content = json.loads(json.dumps(to_json(PROFILE)))
    (content if part is None else content[part]).update(changes)
    return content


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(PROFILE, tmp_path / "p.json")
    assert read(tmp_path / "p.json") == PROFILE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_heads": {"-1": [0]}}, "target_heads is .-1., expected different whole numbers from 0 on"),
        ({"target_heads": {"1": [-2]}}, "target_heads of layer 1 is .-2."),
        ({"target_heads": {"1": [0.7]}}, "target_heads of layer 1 is .0.7."),
        ({"draft_heads": {"0": [True]}}, "draft_heads of layer 0 is .True."),
        ({"draft_heads": {"0": [1, 1]}}, "draft_heads of layer 0 is .1, 1."),
        ({"draft_heads": {"0": 3}}, "draft_heads of layer 0 is 3"),
        ({"reselection_heads": {"1": []}}, "reselection_heads has layer 1 without heads"),
        ({"reselection_heads": [1]}, "damaged profile"),
        ({"dense_layers": [-1]}, "dense_layers is .-1."),
        ({"dense_layers": 2}, "dense_layers is 2"),
        ({"lookahead_share": float("nan")}, "lookahead_share is nan, expected 0 to 1"),
        ({"lookahead_share": "0.5"}, "lookahead_share is '0.5', expected 0 to 1"),
        ({"history_rows": 0}, "history_rows is 0, expected 1 or more"),
        ({"history_decay": -0.5}, "history_decay is -0.5, expected 0 to 1"),
        ({"smoothing": 4}, "smoothing is 4, expected an odd number of tokens"),
        ({"refresh": True}, "refresh is True, expected 1 or more"),
        ({"pool": -5}, "pool is -5, expected 1 or more"),
        ({"reselection_rank": 7}, "reselection_rank is 7, expected an even number"),
        ({"reselection_by_kv_head": "false"}, "reselection_by_kv_head is 'false', expected true or false"),
        ({"lookahead_shar": 0.5}, "scoring has 'lookahead_shar', which nothing reads"),
    ],
)
def test_a_damaged_scoring_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=rf"^here is a damaged profile \(.*{said}|^here is a {said}"):
        from_json(_changed("scoring", **changes), "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_fingerprints": "weights"}, "target_fingerprints is 'weights', expected a list of texts"),
        ({"name": 5}, "expected a list of texts"),
        ({"models": {"target": "name"}}, "models, retrieval_heads and record are no objects"),
        ({"record": []}, "models, retrieval_heads and record are no objects"),
        ({"scoring": None}, "damaged profile"),
        ({"version": 2}, "no profile of version 1 .found 2."),
    ],
)
def test_a_damaged_file_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        from_json(_changed(None, **changes), "here")
    lacking = _changed(None)
    del lacking["scoring"]
    with pytest.raises(UsageError, match="it lacks 'scoring'"):
        from_json(lacking, "here")


def test_a_named_profile_of_other_models_says_so(tmp_path: Path) -> None:
    write(PROFILE, tmp_path / "p.json")
    options = EngineOptions(profile=str(tmp_path / "p.json"))
    assert scoring_of(options, SPEC, None).source == "profile p"
    quantised = replace(SPEC, fingerprint="unknown", name="target-q8_0.gguf")
    assert scoring_of(options, quantised, None).source == "profile p (by name)"
    tuned = replace(SPEC, fingerprint="unknown", name="another")
    assert scoring_of(options, tuned, None).source == "profile p (of other models)"
    for other in ({"num_layers": 5}, {"head_dim": 128}):
        with pytest.raises(UsageError, match="profile 'p' was made for target target with .4, 4, 2, 64. layers, heads"):
            scoring_of(options, replace(tuned, **other), None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": Tap({4: (0,)})}, "names layer 4 with heads .0. .target., but target-q4_k_m.gguf has 4 layers"),
        ({"dense_layers": (9,)}, "names layer 9 .* .dense layers of the target."),
        ({"reselection": Tap({1: (0, 7)})}, "names layer 1 with heads .0, 7. .reselection of the target."),
        ({"reselection": Tap({1: (0, 1)}), "reselection_by_kv_head": True}, "none of the query heads of kv head 1"),
    ],
)
def test_layers_and_heads_that_the_model_lacks_are_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    write(replace(PROFILE, scoring=replace(SCORING, **changes)), tmp_path / "p.json")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=said):
        scoring_of(EngineOptions(profile=str(tmp_path / "p.json")), SPEC, None)


def test_a_damaged_profile_of_the_cache_is_told_in_the_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    folder = tmp_path / "profiles"
    write(PROFILE, folder / "good.json")
    assert scoring_of(EngineOptions(), SPEC, None).passed_over == ()
    (folder / "bad.json").write_text('{"version": 1, "name": "b"')
    scoring = scoring_of(EngineOptions(), SPEC, None)
    assert scoring.source == "profile p"
    assert f"passed over: cannot read the profile {folder / 'bad.json'}" in scoring.describe()
    (folder / "good.json").unlink()
    scoring = scoring_of(EngineOptions(), SPEC, None)
    assert scoring.source == "heuristic" and "bad.json" in scoring.describe()
    assert scoring_of(EngineOptions(profile="none"), SPEC, None).passed_over == ()
