"""Sets that layers choose themselves, as options, profiles and engines have them."""

from __future__ import annotations

import dataclasses

import click
import pytest

from dustin.cli_options import LayerList
from dustin.config import EngineOptions, RequestOptions
from dustin.engine import Engine
from dustin.errors import UsageError
from dustin.generation import load
from dustin.interfaces import ModelSpec, Tap
from dustin.profile_file import Profile, from_json, to_json
from dustin.scoring import ReadBytes, Scoring, all_heads
from dustin.selection import create_selector, prepare, usable, with_fidelity
from dustin.stats import Stats
from tests import tiny_model


class _Asked:
    """What a selector needs of a round to say which layers choose."""

    def __init__(self, spec):
        self.target, self.lengths = type("Target", (), {"spec": spec})(), (10,)


def test_the_selector_asks_for_it_and_counts_it():
    spec = ModelSpec("m", "a", 4, 8, 2, 64, 100, 4096, "bfloat16", "f", sliding_layers=(1,), bytes_per_kv_token=4 * 2 * 2 * 64 * 2)
    options = EngineOptions(
        budget=64, reselection_layers=(3, 0), reselection_rank=32, reselection_by_kv_head=True, reselection_reuse=True
    )
    selector = create_selector(options, Scoring(Tap({2: (0,)}), Tap({})), spec)
    assert selector.compact_rank == 32
    scoring = selector._scoring
    assert list(scoring.reselection.heads) == [0, 3]
    assert "chosen anew at layers 0, 3 by kv head by compact keys of 32, for those after them too" in scoring.describe()
    # Two layers of four, 16 bytes for each of the two kv heads of a token; whole keys are 128 bytes.
    assert ReadBytes(spec).reselection(scoring, 10) == 10 * 2 * 2 * 16
    assert ReadBytes(spec).reselection(dataclasses.replace(scoring, reselection_rank=0), 10) == 10 * 2 * 2 * 128
    for bad, said in (((4,), "names layer 4, expected 0 to 3"), ((1,), "names layer 1, which has a sliding window")):
        with pytest.raises(UsageError, match=said):
            create_selector(dataclasses.replace(options, reselection_layers=bad), scoring, spec)
    with pytest.raises(UsageError, match="reselection_rank is 8, expected 0 .whole keys., 32 or 64"):
        EngineOptions(reselection_rank=8)
    profile = Profile("p", ("f",), (), scoring)
    assert from_json(to_json(profile), "here").scoring == dataclasses.replace(scoring, source="profile p")
    old = to_json(profile)
    assert selector._again(_Asked(spec)).max_rows == 16
    fewer = create_selector(options, dataclasses.replace(scoring, reselection_rows=4), spec)
    assert fewer._again(_Asked(spec)).max_rows == 4
    lagged = create_selector(dataclasses.replace(options, lookahead_lag=1), scoring, spec)
    assert lagged._again(_Asked(spec)).max_rows == 1
    for name in ("reselection_heads", "reselection_rank", "reselection_by_kv_head", "reselection_reuse", "reselection_rows"):
        del old["scoring"][name]
    assert not from_json(old, "here").scoring.reselection.heads
    assert all_heads(spec, [0, 3]) == scoring.reselection


@pytest.mark.parametrize("mode", ["sparse", "exact"])
def test_a_set_that_nothing_reads_is_not_scored(tmp_path, monkeypatch, mode):
    """Every layer chooses for itself, and there is no draft model: the same tokens for fewer bytes."""
    model = str(tiny_model.write(tmp_path / "target", head_dim=32, num_hidden_layers=3))
    options = EngineOptions(mode=mode, budget=48, fidelity="high", drafter="lookup", exact_block=6)
    request, text = RequestOptions(max_tokens=12, ignore_eos=True), "one two three four five six " * 12
    session = load(model, backend="numpy", options=options)
    made = session.generate(text, request)
    assert "target layers" not in made.stats.scoring
    # The selector of a drafter that might read the set.
    scored = session.make_engine(Engine, dataclasses.replace(session.resolve(request), drafter="auto"), Stats())
    assert scored.selector.tap.heads
    monkeypatch.setattr("dustin.generation.create_selector", lambda *given: scored.selector)
    before = session.generate(text, request)
    assert made.tokens == before.tokens and made.stats.kv_bytes_read < before.stats.kv_bytes_read


def test_a_layer_that_reads_everything_chooses_nothing():
    spec = ModelSpec("m", "a", 4, 8, 2, 64, 100, 4096, "bfloat16", "f")
    own = Scoring(Tap({2: (0,)}), Tap({}), reselection=all_heads(spec, [1, 3]), reselection_rank=32)
    selector = create_selector(EngineOptions(dense_layers=(3, 3)), own, spec)
    assert list(selector.scoring.reselection.heads) == [1] and selector.scoring.dense_layers == (3,)
    assert "dense layers 3; chosen anew at layers 1 by compact" in selector.describe(False)
    with pytest.raises(UsageError, match="layer 3 is named by dense_layers and by reselection_layers"):
        EngineOptions(dense_layers=(1, 3), reselection_layers=(3,))


@pytest.mark.parametrize("name", ["reselection_rank", "reselection_by_kv_head", "reselection_reuse"])
def test_how_layers_choose_is_refused_where_none_does(name: str):
    spec = ModelSpec("m", "a", 4, 8, 2, 64, 100, 4096, "bfloat16", "f")
    shared, asked = Scoring(Tap({2: (0,)}), Tap({})), {name: 32 if name == "reselection_rank" else True}
    with pytest.raises(UsageError, match=f"{name} is (32|True), but no layer chooses a set of its own"):
        create_selector(EngineOptions(mode="sparse", **asked), shared, spec)
    # Nothing reads a set there, and a file of options may serve other modes too.
    create_selector(EngineOptions(mode="ar", **asked), shared, spec)
    create_selector(EngineOptions(mode="sparse", reselection_layers=(1,), **asked), shared, spec)


def test_high_fidelity_is_sets_of_every_layers_kv_heads(tmp_path):
    """The named option is the three long ones; a profile or --reselection-layers that say which layers choose come first."""
    folder = tiny_model.write(tmp_path / "model", num_hidden_layers=3, head_dim=32, hidden_size=64)
    prompt = [(11 * i * i + 5 * i) % 200 + 3 for i in range(150)]
    common = {"mode": "sparse", "drafter": "lookup", "selector": "history", "budget": 48, "profile": "none"}
    long = {"reselection_layers": (0, 1, 2), "reselection_rank": 32, "reselection_by_kv_head": True}
    made = {}
    for name, more in (("named", {"fidelity": "high"}), ("long", long), ("standard", {})):
        session = load(str(folder), None, device="cpu", dtype="float32", options=EngineOptions(**common, **more))
        made[name] = session.generate(prompt, RequestOptions(max_tokens=24, ignore_eos=True))
    assert made["named"].tokens == made["long"].tokens
    assert made["named"].stats.scoring == made["long"].stats.scoring != made["standard"].stats.scoring
    assert "chosen anew at layers 0-2 by kv head by compact keys of 32" in made["named"].stats.scoring
    given = Scoring(Tap({}), Tap({}), reselection=Tap({layer: (0,) for layer in range(3)}))
    assert with_fidelity(EngineOptions(fidelity="high"), given, session.target) is given
    # With a draft the set chosen before the forward is the draft's, by its own scores.
    both = Scoring(Tap({1: (0,)}), Tap({0: (1,)}))
    for drafter, selector, kept in (("draft", "dustin", {}), ("draft", "history", {1: (0,)}), ("self", "dustin", {1: (0,)})):
        asked = EngineOptions(fidelity="high", drafter=drafter, selector=selector)
        high = with_fidelity(asked, both, session.target)
        assert dict(high.target.heads) == kept and high.draft == both.draft
    with_draft = with_fidelity(EngineOptions(fidelity="high", drafter="draft"), both, session.target)
    assert with_draft.describe().startswith("heuristic, draft layers 0")
    # A layer or two beside a set that all others share are not what it asks for.
    few = Scoring(Tap({}), Tap({}), reselection=Tap({1: (0,)}))
    assert set(with_fidelity(EngineOptions(fidelity="high"), few, session.target).reselection.heads) == {0, 1, 2}
    some = EngineOptions(fidelity="high", reselection_layers=(1,))
    assert with_fidelity(some, Scoring(Tap({}), Tap({})), session.target) == Scoring(Tap({}), Tap({}))
    with pytest.raises(UsageError, match="fidelity is 'high', but this backend keeps no compact keys"):
        with_fidelity(EngineOptions(fidelity="high"), Scoring(Tap({}), Tap({})), dataclasses.make_dataclass("M", ["spec"])(None))
    with pytest.raises(UsageError, match="fidelity is 'higher', expected one of standard, high"):
        EngineOptions(fidelity="higher")


@pytest.mark.parametrize("lag", [0, 1])
def test_engines_run_with_it_and_exact_stays_exact(tmp_path, lag):
    folder = tiny_model.write(tmp_path / "model", num_hidden_layers=3, head_dim=32, hidden_size=64)
    prompt = [(11 * i * i + 5 * i) % 200 + 3 for i in range(120)]
    made = {}
    for mode in ("ar", "sparse", "exact"):
        options = EngineOptions(
            mode=mode, drafter="none" if mode == "ar" else "lookup", selector="history", budget=48, profile="none",
            reselection_layers=(0, 2), reselection_rank=32, reselection_by_kv_head=True, lookahead_lag=lag,
        )  # fmt: skip
        session = load(str(folder), None, device="cpu", dtype="float32", options=options)
        made[mode] = session.generate(prompt, RequestOptions(max_tokens=24, ignore_eos=True)).tokens
        if mode != "ar":
            assert session.target.compact is not None
    assert made["exact"] == made["ar"]
    assert len(made["sparse"]) == 24


def test_a_profile_s_own_sets_are_left_out_where_there_can_be_none():
    """A shipped profile serves every backend: its heads score there too, but no layer chooses by keys that it does not have."""
    scoring = Scoring(
        Tap({0: (0,)}),
        Tap({}),
        reselection=Tap({layer: (0, 1, 2, 3) for layer in range(3)}),
        reselection_rank=32,
        reselection_by_kv_head=True,
    )

    class Shared:
        def fit_compact_keys(self, tokens, rank) -> None: ...

    class Split(Shared):
        own_sets = False

    plain = dataclasses.replace(scoring, reselection=Tap({}), reselection_rank=0, reselection_by_kv_head=False)
    assert usable(scoring, Shared(), object()) is scoring
    for target, tokenizer in ((Shared(), None), (Split(), object()), (object(), object())):
        assert usable(scoring, target, tokenizer) == plain
    whole = dataclasses.replace(scoring, reselection_rank=0)
    assert usable(whole, object(), None) is whole


def test_only_modes_that_read_sets_wait_for_compact_keys(tmp_path):
    """A profile with a layer of own sets must not make plain decoding read a text first."""
    from dustin.config import EngineOptions, RequestOptions
    from dustin.generation import load
    from tests import tiny_model

    folder = tiny_model.write(tmp_path / "model", num_hidden_layers=3, head_dim=32, hidden_size=64)
    own = {"reselection_layers": (1,), "reselection_rank": 32, "reselection_by_kv_head": True, "profile": "none"}
    for mode, drafter, fitted in (("ar", "none", False), ("dense", "lookup", False), ("sparse", "lookup", True)):
        options = EngineOptions(mode=mode, drafter=drafter, budget=48, **own)
        session = load(str(folder), None, device="cpu", dtype="float32", options=options)
        session.generate([(11 * i) % 200 + 3 for i in range(90)], RequestOptions(max_tokens=3, ignore_eos=True))
        assert (session.target.compact is not None) == fitted, mode


def test_compact_keys_want_a_text_and_room(tmp_path):
    session = load(str(tiny_model.write(tmp_path / "model")), None, device="cpu", dtype="float32")
    options = EngineOptions(reselection_layers=(0,), reselection_rank=32)
    selector = create_selector(options, Scoring(Tap({}), Tap({})), session.target.spec)
    with pytest.raises(UsageError, match="reselection_rank is 32, expected at most the 8 numbers of a key"):
        prepare(selector, session.target, session.tokenizer)
    wide = load(str(tiny_model.write(tmp_path / "wide", head_dim=32)), None, device="cpu", dtype="float32")
    with pytest.raises(UsageError, match="no text to fit compact keys to"):
        prepare(selector, wide.target, None)
    with pytest.raises(UsageError, match="this backend keeps no compact keys"):
        prepare(selector, object(), wide.tokenizer)


@pytest.mark.parametrize(
    ("text", "layers"), [("14,19-21", (14, 19, 20, 21)), ("none", ()), ("0-3", (0, 1, 2, 3)), (" 5, 7 ", (5, 7))]
)
def test_layers_come_as_numbers_and_ranges(text, layers):
    assert LayerList().convert(text, None, None) == layers


@pytest.mark.parametrize("text", ["3-1", "a", "-3", "1-", "1--2", "", "1,,2"])
def test_other_lists_of_layers_are_refused(text):
    with pytest.raises(click.BadParameter, match="is no list of layers, expected numbers or ranges as 14,19-21, or none"):
        LayerList().convert(text, None, None)
