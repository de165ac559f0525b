"""Calibration: planted retrieval heads are found, the search finds what lowers KL at equal bytes, profiles survive the disk."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dustin import profile_file
from dustin.backends.numpy_reference.backend import NumpyBackend
from dustin.backends.numpy_reference.cache import Cache
from dustin.calibration import CalibrationOptions, Calibrator, calibrate
from dustin.calibration_texts import documents, reference_text
from dustin.config import EngineOptions
from dustin.errors import UsageError
from dustin.generation import Session
from dustin.interfaces import ForwardResult, ModelSpec, Tap
from dustin.profile_file import Profile, scoring_of
from dustin.replay import Measured
from dustin.retrieval_heads import NeedlePrompt, best_heads, find_retrieval_heads, needle_prompts, plain_words
from dustin.scoring import Scoring, all_heads, budget_within, heuristic, scoring_bytes

LAYERS, HEADS, DIM, VOCAB = 4, 4, 8, 40
KV_BYTES = 2 * LAYERS * 2 * DIM
SPEC = ModelSpec("planted", "test", LAYERS, HEADS, 2, DIM, VOCAB, 4096, "float64", "planted", bytes_per_kv_token=KV_BYTES)
NEEDLE = 7


class Retriever:
    """Heads (1, 2) and (3, 0) look at NEEDLE tokens, all others elsewhere; it says what the prompt's needle says."""

    spec, scale, softcap = SPEC, 1.0, None
    looking = {(1, 2), (3, 0)}

    def new_cache(self, batch, capacity):
        return Cache(LAYERS, batch, capacity, 2, DIM)

    def forward(self, tokens, num_tokens, cache, *, token_set=None, tap=None, logits="all"):
        batch, rows = tokens.shape
        keys = 0.1 * np.eye(VOCAB, DIM)[tokens % DIM][:, :, None].repeat(2, 2)
        keys[tokens == NEEDLE] = 6.0 * np.eye(DIM)[0]
        for layer in range(LAYERS):
            cache.write(layer, num_tokens, keys, keys)
        cache.advance(num_tokens)
        queries = {}
        for layer, heads in (tap.heads if tap else {}).items():
            along = np.stack([np.eye(DIM)[0 if (layer, head) in self.looking else 1] for head in heads])
            queries[layer] = np.tile(along, (batch, rows, 1, 1))
        out = np.zeros((batch, rows, VOCAB))
        out[..., NEEDLE] = 9.0
        return ForwardResult(out, queries)


def test_planted_heads_are_found() -> None:
    prompts = [NeedlePrompt([1, 2, 3, *[NEEDLE] * 5, 4, 5, 6 + i], [NEEDLE] * 5, (3, 8)) for i in range(3)]
    ranking, answered = find_retrieval_heads(NumpyBackend(), Retriever(), prompts, 4)  # type: ignore[arg-type]
    assert answered == 3
    best = sorted(((mass, layer, head) for layer, row in ranking.items() for mass, head in row), reverse=True)[:2]
    assert {(layer, head) for _, layer, head in best} == Retriever.looking
    assert ranking[1][0][1] == 2 and 0 in best_heads(ranking, 3)


def test_unanswered_needles_do_not_count() -> None:
    right = NeedlePrompt([1, 2, 3, *[NEEDLE] * 5, 4, 5, 6], [NEEDLE] * 5, (3, 8))
    wrong = NeedlePrompt([1, 2, 3, 9, 9, 9, 9, 9, 4, 5, 6], [9] * 5, (3, 8))
    ranking, answered = find_retrieval_heads(NumpyBackend(), Retriever(), [right, wrong], 4)  # type: ignore[arg-type]
    assert answered == 1 and ranking[1][0][0] > 0.9


class Words:
    """A tokenizer of one token a word, without a chat template."""

    eos_ids = (0,)
    pieces = [b"<end>", b".", b"\n\n", *[f" word{chr(97 + i // 26)}{chr(97 + i % 26)}".encode() for i in range(300)]]
    vocab_size = len(pieces)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + hash_of(word) % 300 for word in text.split()]

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[token].decode() for token in tokens)

    def render_chat(self, messages, add_generation_prompt: bool = True) -> str:
        raise UsageError("the model has no chat template")


def hash_of(word: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(word))


def test_needles_lie_where_they_are_said_to_lie() -> None:
    made = needle_prompts(Words(), list(range(3, 200)), [120, 200], [0.0, 0.9], seed=1)  # type: ignore[arg-type]
    for prompt, length in zip(made, (120, 200), strict=True):
        start, stop = prompt.span
        assert prompt.tokens[start:stop] == prompt.answer and len(prompt.answer) == 5
        assert abs(len(prompt.tokens) - length) < 12
    assert made[0].span[0] < 20 and made[1].span[0] > 120
    assert len({*made[0].answer, *made[1].answer}) == 10
    assert made == needle_prompts(Words(), list(range(3, 200)), [120, 200], [0.0, 0.9], seed=1)  # type: ignore[arg-type]


def test_a_vocabulary_of_letters_serves_and_one_without_is_refused() -> None:
    class Few(Words):
        pieces = [b"<end>", b".", b"a", b" b"]
        vocab_size = 4

    class Nothing(Words):
        pieces = [b"<end>", b"."]
        vocab_size = 2

    got = plain_words(Few(), 9, random.Random(0))  # type: ignore[arg-type]
    assert len(got) == 9 and set(got) == {2, 3}
    assert len(set(plain_words(Words(), 200, random.Random(0)))) == 200  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no lower-case letters"):
        plain_words(Nothing(), 1, random.Random(0))  # type: ignore[arg-type]


class FakeReplay:
    """KL as a function of the scoring: layers 1 and 3 of the target and 2 of the draft are good, layer 0 wants to be dense."""

    start = (4096, 4096)
    height = 6

    def __init__(self) -> None:
        self.budgets: dict[str, int] = {}

    def run(self, selector, draft_tap) -> Measured:
        scoring = selector._scoring
        kl = 1.0
        kl *= 0.6 if 1 in scoring.target.heads else 1.0
        kl *= 0.7 if 3 in scoring.target.heads else 1.0
        kl *= 0.8 if 2 in draft_tap.heads else 1.0
        kl *= 0.5 if 0 in scoring.dense_layers else 1.0
        kl *= 1.0 + abs(scoring.lookahead_share - 0.8)
        kl *= (1024 / selector._options.budget) ** 0.25
        kl *= 0.9 if scoring.history_rows == 3 else 1.0
        self.budgets[repr(replace(scoring, source=""))] = selector._options.budget
        rows = np.full((2, 2, 6), kl)
        return Measured(rows, rows > 0, rows, rows, rows, np.ones((2, 2)), rows > 0, 1.0, 1.0, 1.0)


class Shape:
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec


def test_the_search_finds_the_good_layers_at_equal_bytes() -> None:
    lines: list[str] = []
    replay = FakeReplay()
    options = CalibrationOptions(context=4096, allowance=2048)
    search = Calibrator(replay, Shape(SPEC), Shape(SPEC), options, lines.append)  # type: ignore[arg-type]
    ranking = {layer: [(0.1, head) for head in range(HEADS)] for layer in range(LAYERS)}
    start, best = search.search(ranking, ranking)
    assert set(best.scoring.target.heads) == {1, 3} and 2 in best.scoring.draft.heads
    assert best.scoring.dense_layers == () or 0 in best.scoring.dense_layers
    assert best.scoring.lookahead_share == 0.8 and best.scoring.history_rows == 3
    assert best.kl < 0.5 * start.kl
    # Whatever was tried read no more than the heuristic at the budget.
    for trial in search.trials:
        dense = len(trial.scoring.dense_layers)
        spent = scoring_bytes(trial.scoring, SPEC, SPEC, 4096, trial.budget)
        spent += KV_BYTES * (trial.budget * (LAYERS - dense) + 4096 * dense) // LAYERS
        assert spent <= search.allowed
    assert any("dense layer 1" in line for line in lines)


def test_the_search_begins_with_the_profile_so_far() -> None:
    """The first sweep finds one of two good layers at a time; a profile that has both is where it starts, and stays no worse."""
    known = Scoring(all_heads(SPEC, [1, 3]), all_heads(SPEC, [2]), 0.8, history_rows=3, source="profile before")
    options = CalibrationOptions(context=4096, allowance=2048)
    lines: list[str] = []
    search = Calibrator(FakeReplay(), Shape(SPEC), Shape(SPEC), options, lines.append, known=known)  # type: ignore[arg-type]
    ranking = {layer: [(0.1, head) for head in range(HEADS)] for layer in range(LAYERS)}
    _, best = search.search(ranking, ranking)
    assert search.trials[1].scoring == known and best.kl <= search.trials[1].kl < search.trials[0].kl
    assert "the profile so far" in lines[1]


@pytest.mark.parametrize("pools", [False, True])
def test_pools_are_tried_only_where_engines_have_them(pools: bool) -> None:
    options = CalibrationOptions(context=4096, allowance=2048)
    search = Calibrator(FakeReplay(), Shape(SPEC), Shape(SPEC), options, lambda line: None, pools=pools)  # type: ignore[arg-type]
    search.search({layer: [(0.1, 0)] for layer in range(LAYERS)}, {layer: [(0.1, 0)] for layer in range(LAYERS)})
    assert any(trial.scoring.refresh > 1 for trial in search.trials) == pools


class Unlike(FakeReplay):
    """Layer 2 is served badly by the set that serves the others, layer 0 a little."""

    def run(self, selector, draft_tap) -> Measured:
        measured, own = super().run(selector, draft_tap), selector._scoring.reselection.heads
        measured.kl[:] *= (0.6 if 2 in own else 1.0) * (0.97 if 0 in own else 1.0)
        return measured


class Compact(Shape):
    def fit_compact_keys(self, tokens, rank) -> None:
        self.fitted = rank


@pytest.mark.parametrize("compact", [True, False])
def test_only_layers_that_are_worth_it_choose_sets_of_their_own(compact: bool) -> None:
    spec = replace(SPEC, head_dim=32, bytes_per_kv_token=4 * KV_BYTES)
    target = (Compact if compact else Shape)(spec)
    options = CalibrationOptions(context=4096, allowance=2048)
    search = Calibrator(Unlike(), target, Shape(spec), options, lambda line: None)  # type: ignore[arg-type]
    search.tokenizer = Words()  # type: ignore[assignment]
    ranking = {layer: [(0.1, head) for head in range(HEADS)] for layer in range(LAYERS)}
    _, best = search.search(ranking, ranking)
    if not compact:
        assert not best.scoring.reselection.heads and "own sets" not in search.single
        return
    assert set(best.scoring.reselection.heads) == {2} and search.single["own sets"]["2"] == min(search.single["own sets"].values())
    assert (best.scoring.reselection_rank, best.scoring.reselection_by_kv_head, best.scoring.reselection_reuse) == (32, True, False)
    assert target.fitted == 32


def test_some_documents_go_on_as_their_text_does() -> None:
    made = documents(Words(), 8, 300, 20)  # type: ignore[arg-type]
    assert [document.following is not None for document in made] == [i % 4 == 3 for i in range(8)]
    whole = reference_text(Words())  # type: ignore[arg-type]
    assert reference_text(Words(), 900) == whole[:900]  # type: ignore[arg-type]
    for document in made:
        assert len(document.prompt) <= 300
        if document.following is not None:
            tail = [*document.prompt[-40:], *document.following]
            assert len(document.following) == 20
            assert any(whole[at : at + 60] == tail for at in range(len(whole) - 59))


def test_budgets_at_equal_bytes_by_hand() -> None:
    """One of four layers scores with both kv heads: an eighth of the KV; the draft's the same; so 4096 tokens cost 1024."""
    scoring = Scoring(all_heads(SPEC, [1]), all_heads(SPEC, [2]))
    assert scoring_bytes(scoring, SPEC, SPEC, 4096, 512) == 1024 * KV_BYTES
    assert budget_within(1536 * KV_BYTES, scoring, SPEC, SPEC, 4096) == 512
    assert budget_within(1000 * KV_BYTES, scoring, SPEC, SPEC, 4096) == 0
    # Every 4th round all tokens, in between 1024: 1792 a round, whose quarter is 448.
    pooled = replace(scoring, refresh=4, pool=1024)
    assert budget_within(960 * KV_BYTES, pooled, SPEC, SPEC, 4096) == 512
    assert budget_within(1536 * KV_BYTES, replace(pooled, dense_layers=(0, 1, 2, 3)), SPEC, SPEC, 4096) == 0


def test_time_bounds_the_search() -> None:
    options = CalibrationOptions(context=4096, allowance=2048, seconds=-1.0)
    search = Calibrator(FakeReplay(), Shape(SPEC), Shape(SPEC), options, lambda line: None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leave nothing to read at context 4096"):
        search.search({}, {})


def test_a_whole_calibration_on_random_models() -> None:
    from dustin.backends.numpy_reference.model import random_model
    from tests.unit.engine_helpers import backend, tiny

    config = replace(tiny(), vocab_size=303)
    models = [random_model(replace(config, num_layers=n), seed=n) for n in (3, 2)]
    lines: list[str] = []
    shape = {"context": 240, "documents": 2, "tokens": 9, "allowance": 440, "num_draft_tokens": 2, "prefill_chunk": 64}
    options = CalibrationOptions(seconds=3.0, **shape)  # type: ignore[arg-type]
    profile = calibrate(backend, *models, Words(), options, lines.append)  # type: ignore[arg-type]
    assert profile.fits(models[0].spec, models[1].spec) and profile.fits(models[0].spec, None)
    assert profile.record["chosen"]["kl"] <= profile.record["heuristic"]["kl"]
    assert profile.record["scorings_tried"] > 3 and any("calibrated in" in line for line in lines)
    assert profile_file.from_json(json.loads(json.dumps(profile_file.to_json(profile))), "here") == profile
    with pytest.raises(UsageError, match="context is 600 tokens"):
        calibrate(backend, *models, Words(), replace(options, context=600), lines.append)  # type: ignore[arg-type]


def profile_of(target: ModelSpec, draft: ModelSpec, **changes) -> Profile:
    scoring = Scoring(all_heads(target, [1]), Tap({0: (1, 3)}), 0.45, (2,), history_rows=2, source="profile test", **changes)
    keys = ((target.fingerprint, "other dtype"), (draft.fingerprint,))
    models = {"target": profile_file.identity(target), "draft": profile_file.identity(draft)}
    return Profile("test", *keys, scoring, models, {"target": [[1, 0]]}, {"seconds": 1.5})


def test_a_profile_is_found_by_fingerprint_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.engine_helpers import backend, draft, target

    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    session = Session(backend, target(), None, EngineOptions(mode="sparse", budget=48, num_recent_tokens=8), draft())
    prompt = [i % 40 for i in range(90)]
    from dustin.config import RequestOptions

    assert session.generate(prompt, RequestOptions(max_tokens=4)).stats.scoring.startswith("heuristic, target layers")
    profile = profile_of(target().spec, draft().spec)
    profile_file.write(profile, profile_file.default_path(profile))
    fresh = Session(backend, target(), None, session.options, draft())
    said = fresh.generate(prompt, RequestOptions(max_tokens=4)).stats.scoring
    assert said == "profile test, target layers 1 (heads 0-3); draft layers 0 (heads 1, 3); dense layers 2"
    off = replace(session.options, profile="none")
    assert scoring_of(off, target().spec, draft().spec) == heuristic(target().spec, draft().spec)
    assert scoring_of(session.options, target().spec, None).draft == Tap({})
    quantised = replace(target().spec, fingerprint="unknown", name=target().spec.name + "-Q4_K_M.gguf")
    assert scoring_of(session.options, quantised, draft().spec).source == "profile test (by name)"
    for other in ({"name": "another"}, {"num_heads": 8}):
        spec = replace(target().spec, fingerprint="unknown", **other)
        assert scoring_of(session.options, spec, draft().spec).source == "heuristic"


class WithoutCompactKeys:
    """A model of a backend that keeps none."""

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name: str):
        if name == "fit_compact_keys":
            raise AttributeError(name)
        return getattr(self._model, name)


def test_a_profile_with_sets_of_layers_is_no_start_where_none_can_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by another backend: its scoring heads are, in one set for all layers."""
    from dustin.backends.numpy_reference.model import random_model
    from tests.unit.engine_helpers import backend, tiny

    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    target, draft = (random_model(replace(tiny(), vocab_size=303, num_layers=n), seed=n) for n in (3, 2))
    own = {"reselection": all_heads(target.spec, [1]), "reselection_rank": 32, "reselection_by_kv_head": True}
    profile = profile_of(target.spec, draft.spec, **own)
    profile_file.write(profile, profile_file.default_path(profile))
    shape = {"context": 240, "documents": 1, "tokens": 9, "allowance": 440, "num_draft_tokens": 2, "prefill_chunk": 64}
    options, lines = CalibrationOptions(seconds=1.0, **shape), []  # type: ignore[arg-type, var-annotated]
    made = calibrate(backend, WithoutCompactKeys(target), draft, Words(), options, lines.append)  # type: ignore[arg-type]
    assert not made.scoring.reselection.heads and any("the profile so far" in line for line in lines)


def test_a_profile_of_own_sets_is_one_for_high_fidelity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept beside the pair's other profile, and found before it where that is asked for."""
    from tests.unit.engine_helpers import draft, target

    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    specs = target().spec, draft().spec
    usual = profile_of(*specs)
    assert specs[0].num_layers >= 3
    own = profile_of(*specs, reselection=all_heads(specs[0], [0, 1, 2]), reselection_rank=32)
    assert own.scoring.of_own_sets and not usual.scoring.of_own_sets
    for profile in (usual, own):
        profile_file.write(profile, profile_file.default_path(profile))
    assert len(list((tmp_path / "profiles").iterdir())) == 2
    assert not scoring_of(EngineOptions(), *specs).reselection.heads
    assert list(scoring_of(EngineOptions(fidelity="high"), *specs).reselection.heads) == [0, 1, 2]
    profile_file.default_path(own).unlink()
    assert scoring_of(EngineOptions(fidelity="high"), *specs).source == "profile test"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b-instruct"),
        ("Qwen2.5-Coder-1.5B-Instruct-eval", "qwen2.5-coder-1.5b-instruct"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("Qwen3-8B-bf16", "qwen3-8b"),
        ("model", "model"),
    ],
)
def test_names_of_models_without_precision(name: str, plain: str) -> None:
    assert profile_file.identity(replace(SPEC, name=name)) == [plain, LAYERS, HEADS, 2, DIM]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the profile"),
        ("[]", "no profile of version 1"),
        ('{"version": 7}', "found 7"),
        ('{"version": 1, "scoring": {}}', "damaged profile"),
        ('{"version": 1, "scoring": {"target_heads": {"x": [0]}, "draft_heads": {}}}', "damaged profile"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        scoring_of(EngineOptions(profile=str(path)), SPEC, None)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    big = replace(SPEC, num_layers=60)
    path = tmp_path / "big.json"
    profile_file.write(profile_of(big, SPEC), path)
    assert scoring_of(EngineOptions(profile=str(path)), SPEC, SPEC).lookahead_share == 0.45
    profile_file.write(replace(profile_of(big, SPEC), scoring=Scoring(all_heads(big, [40]), Tap({}))), path)
    with pytest.raises(UsageError, match="names layer 40 .* made for another model"):
        scoring_of(EngineOptions(profile=str(path)), SPEC, None)


def test_shipped_profiles_can_be_read() -> None:
    for path in profile_file.SHIPPED.glob("*.json"):
        assert profile_file.read(path).scoring.target.heads
