"""Selection's further operations on paged caches, under Triton's interpreter, against the CPU backend on the same model."""

from __future__ import annotations

import pytest
import torch

from tests.unit.interpreted import interpreted, run_interpreted

pytest.importorskip("triton")


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(scope="module")
def sides():
    """(backend, model, cache of [40, 70] rows, queries of 3 rows of all heads) on the CPU and paged."""
    from dustin.backends.torch_triton.backend import TorchBackend
    from dustin.backends.torch_triton.cuda_backend import CudaBackend
    from dustin.scoring import all_heads
    from tests.unit.test_cuda_interpreted import make_models

    made = []
    for kind, model in zip((TorchBackend, CudaBackend), make_models(), strict=True):
        backend = kind(torch.device("cpu"))
        cache = model.new_cache(2, 80)
        tokens = torch.randint(0, 50, (2, 70), generator=torch.Generator().manual_seed(2))
        model.forward(tokens, [40, 70], cache, logits="none")
        tap = all_heads(model.spec, [0, 1])
        queries = model.forward(tokens[:, :3], [3, 3], cache, tap=tap, logits="none").queries
        cache.rollback([40, 70])
        made.append((backend, model, cache, queries, tap))
    return made


def both(sides, call):
    """The two answers, cut to the same columns."""
    one, other = (call(*side) for side in sides)
    width = min(one.shape[1], other.shape[1])
    return one[:, :width], other[:, :width]


@interpreted
def test_scores_within_a_set(sides):
    def call(backend, model, cache, queries, tap):
        chosen = backend.select(
            None, None, cache.lengths, budget=30, num_sink_tokens=3, num_recent_tokens=9, num_draft_selected=0
        )
        return backend.score(queries, tap, model, cache, cache.lengths, chosen)

    one, other = both(sides, call)
    assert torch.equal(torch.isneginf(one), torch.isneginf(other))
    assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(one.nan_to_num(neginf=0.0).sum(1), torch.ones(2), atol=1e-5)


@interpreted
def test_page_scores(sides):
    one, other = both(sides, lambda b, m, c, q, tap: b.page_scores(q, tap, m, c, c.lengths, 16))
    assert torch.equal(torch.isneginf(one), torch.isneginf(other)) and torch.allclose(one, other, atol=1e-5)


@interpreted
def test_more_rows_than_the_kernel_takes_at_once(sides):
    def call(backend, model, cache, queries, tap):
        many = {layer: q.repeat(1, 24, 1, 1) for layer, q in queries.items()}
        return backend.score(many, tap, model, cache, cache.lengths)

    one, other = both(sides, call)
    assert torch.allclose(one, other, atol=1e-5)
    few, _ = both(sides, lambda b, m, c, q, tap: b.score(q, tap, m, c, c.lengths))
    assert torch.allclose(one, few[:, : one.shape[1]], atol=1e-5)


@interpreted
def test_sets_cut_by_mass_and_measured(sides):
    def call(backend, model, cache, queries, tap):
        scores = backend.score(queries, tap, model, cache, cache.lengths)
        quota = {"budget": 36, "num_sink_tokens": 3, "num_recent_tokens": 9}
        chosen = backend.select(scores, None, cache.lengths, num_draft_selected=0, **quota)
        cut = backend.keep_mass(chosen, scores, cache.lengths, mass=0.4, num_sink_tokens=3, num_recent_tokens=9)
        mass, sizes = backend.set_mass(cut, scores), backend.set_sizes(cut)
        assert all(m >= 0.4 - 1e-6 for m in mass) and all(n < 36 for n in sizes)
        return torch.tensor([[*row, *[0.0] * 60][:60] for row in ([float(n)] for n in sizes)])

    one, other = both(sides, call)
    assert torch.equal(one, other)


@interpreted
@pytest.mark.parametrize("name", ["specattn", "quest", "oracle"])
def test_selectors_agree_with_the_cpu(sides, name):
    from dustin.config import EngineOptions
    from dustin.interfaces import SelectionContext
    from dustin.scoring import Scoring
    from dustin.selection import create_selector

    def call(backend, model, cache, queries, tap):
        options = EngineOptions(selector=name, budget=30, num_sink_tokens=3, num_recent_tokens=9)
        selector = create_selector(options, Scoring(tap, tap), model.spec)
        last = backend.gather_rows(queries, [2, 2])
        fed = torch.tensor([[1, 2, 3], [4, 5, 6]])
        context = SelectionContext(
            backend, model, cache, cache.lengths, last, tap, model, cache, queries, tap, fed, (3, 3), queries
        )
        chosen = selector.select(context)
        rows = [chosen, *chosen.by_layer.values()]
        return torch.cat([part.indices[:, :30] for part in rows], 1)

    one, other = both(sides, call)
    assert torch.equal(one, other)


@interpreted
def test_plain_selection_chooses_the_same(sides):
    backend, model, cache, queries, tap = sides[1]
    scores = backend.score(queries, tap, model, cache, cache.lengths)
    quota = {"budget": 30, "num_sink_tokens": 3, "num_recent_tokens": 9, "num_draft_selected": 7}
    sets = []
    for plain in (False, True):
        backend.plain_selection = plain
        sets.append(backend.select(scores, scores.flip(1).nan_to_num(neginf=0.0), cache.lengths, **quota))
    backend.plain_selection = False
    assert torch.equal(sets[0].indices, sets[1].indices) and torch.equal(sets[0].counts, sets[1].counts)


@interpreted
def test_scores_of_different_widths_select_alike(sides):
    backend, model, cache, queries, tap = sides[1]
    scores = backend.score(queries, tap, model, cache, cache.lengths)
    assert scores.shape[1] > max(cache.lengths)
    quota = {"budget": 30, "num_sink_tokens": 3, "num_recent_tokens": 9, "num_draft_selected": 7}
    other = scores.flip(1).nan_to_num(neginf=0.0)
    want = backend.select(scores, other, cache.lengths, **quota)
    for first, second in ((scores[:, : max(cache.lengths)], other), (scores, other[:, : max(cache.lengths)])):
        found = backend.select(first, second, cache.lengths, **quota)
        assert torch.equal(found.indices, want.indices) and torch.equal(found.counts, want.counts)


@interpreted
def test_a_profile_s_pool_is_left_out_where_scoring_all_tokens_costs_less(sides):
    from dataclasses import replace

    from dustin.config import EngineOptions
    from dustin.generation import Session
    from dustin.profile_file import scoring_of

    for backend, model, *_ in sides:
        for plain in (False, True):
            if hasattr(backend, "plain_selection"):
                backend.plain_selection = plain
            session = Session(backend, model, None, EngineOptions(profile="auto"))
            pooled = replace(scoring_of(session.options, model.spec, None), refresh=4)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("dustin.generation.scoring_of", lambda *_, pooled=pooled: pooled)
                refresh = session._scoring(session.options).refresh
            assert refresh == (1 if hasattr(backend, "plain_selection") and not plain else 4)
    sides[1][0].plain_selection = False


@interpreted
def test_one_kernel_scores_several_numbers_of_rows(sides, monkeypatch):
    """Rows are padded to few sizes, in shape and in what the launch is specialised on; padding counts for nothing."""
    from dustin.backends.torch_triton import cuda_backend

    backend, model, cache, queries, tap = sides[1]
    made, plain, seen = {}, cuda_backend.score_layers, []

    def watched(parts, *given, **named):
        seen.append((parts[0].shape[1], named["weight"], named["num_rows"].tolist()))
        return plain(parts, *given, **named)

    monkeypatch.setattr(cuda_backend, "score_layers", watched)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8):
        given = {layer: q.repeat(1, 3, 1, 1)[:, :rows] for layer, q in queries.items()}
        made[rows] = given, backend.score(given, tap, model, cache, cache.lengths)
    assert [wide for wide, *_ in seen] == [1, 4, 4, 4, 8, 8, 8, 8]
    assert {weight for _, weight, _ in seen} == {seen[0][1]}
    assert [counted for *_, counted in seen] == [[rows] * 2 for rows in made]
    monkeypatch.setattr(cuda_backend, "padded_rows", lambda rows, heads: rows)
    for given, scores in made.values():
        assert torch.allclose(backend.score(given, tap, model, cache, cache.lengths), scores, atol=1e-6)


def test_rows_are_padded_as_far_as_one_launch_reaches():
    from dustin.backends.torch_triton.cuda_backend import SCORE_ROWS, padded_rows

    assert [padded_rows(n, 7) for n in (1, 2, 4, 5, 8, 9, 16, 17)] == [1, 4, 4, 8, 8, 16, 16, 17]
    assert all(n <= padded_rows(n, heads) <= max(n, SCORE_ROWS // heads) for n in range(1, 70) for heads in (1, 2, 4, 7, 14, 64))
