"""The toy model of the engine tests: it obeys the Model contract and notices every wrong read."""

from __future__ import annotations

import numpy as np
import pytest

from dustin.backends.numpy_reference.backend import create
from dustin.interfaces import Tap, TokenSet
from tests.unit.toy import ToyModel, altered, random_table

backend = create("cpu")
TABLE = random_table(23, 5)
ROW = [3, 1, 22, 7, 7, 0, 15]


def feed(model, cache, *rows, **options):
    return model.forward(backend.tokens(rows), [len(row) for row in rows], cache, **options)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_single_steps_batches_and_rollback_agree(weight):
    model = ToyModel(TABLE, set_weight=weight)
    cache = model.new_cache(2, 12)
    whole = feed(model, cache, ROW, ROW[:2]).logits
    alone = model.new_cache(1, 12)
    steps = np.stack([feed(model, alone, [token]).logits[0, 0] for token in ROW])
    assert np.array_equal(whole[0], steps) and np.array_equal(whole[1, :2], steps[:2])
    assert model.states(cache, 0) == model.states(alone, 0)
    assert model.cached_tokens(cache, 1) == ROW[:2]
    cache.rollback([3, 0])
    assert np.array_equal(feed(model, cache, ROW[3:], []).logits[0], steps[3:])
    if weight == 0:
        assert np.array_equal(steps, TABLE[ROW])


def test_a_sparse_set_changes_states_and_only_with_weight_the_logits():
    chosen = TokenSet(np.array([[0, 2, 6]]), np.array([3]))
    for weight in (0.0, 2.0):
        model = ToyModel(TABLE, set_weight=weight)
        dense, sparse = model.new_cache(1, 12), model.new_cache(1, 12)
        for cache in (dense, sparse):
            feed(model, cache, ROW)
        same = np.array_equal(feed(model, dense, [4]).logits, feed(model, sparse, [4], token_set=chosen).logits)
        assert same == (weight == 0)
        assert model.states(dense, 0) != model.states(sparse, 0)
        full = TokenSet(np.arange(8)[None], np.array([8]))
        sparse.rollback([7])
        feed(model, sparse, [4])
        assert model.states(dense, 0) == model.states(sparse, 0)
        again = feed(model, sparse, [9], token_set=full).logits
        assert np.array_equal(again, feed(model, dense, [9]).logits)


def test_a_dropped_row_that_is_read_raises():
    model = ToyModel(TABLE)
    cache = model.new_cache(1, 12)
    feed(model, cache, ROW)
    for store in (*cache.keys, *cache.values):
        store[0, 2] = np.nan
    with pytest.raises(FloatingPointError):
        feed(model, cache, [4])


def test_altered_tables_agree_in_the_share_asked_for():
    for share, least, most in ((0.0, 1.0, 1.0), (0.5, 0.45, 0.55), (1.0, 0.0, 0.0)):
        agreement = (altered(TABLE, share).argmax(axis=-1) == TABLE.argmax(axis=-1)).mean()
        assert least <= agreement <= most


def test_two_token_tables_padding_and_nan():
    table = np.random.default_rng(0).standard_normal((5, 5, 5))
    model = ToyModel(table, vocab_size=8, nan_after=4)
    logits = feed(model, model.new_cache(1, 9), [1, 3, 4]).logits[0]
    assert np.array_equal(logits[1, :5], table[1, 3]) and (logits[1, 5:] < table.min()).all()
    assert np.isnan(logits[2, :5]).all()


def test_queries_and_scores_have_the_contract_shapes():
    model = ToyModel(TABLE)
    cache = model.new_cache(2, 12)
    tap = Tap({1: (0, 1), 3: (1,)}, last_row_only=True)
    result = feed(model, cache, ROW, [2], tap=tap, logits="last")
    assert result.logits.shape == (2, 1, 23)
    assert {layer: q.shape for layer, q in result.queries.items()} == {1: (2, 1, 2, 4), 3: (2, 1, 1, 4)}
    scores = backend.score(result.queries, tap, model, cache, cache.lengths)
    assert np.allclose(np.where(np.isinf(scores), 0, scores).sum(axis=1), 1)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["dense", "exact", "sparse"])
def test_an_engine_on_a_model_whose_output_hangs_on_the_set(monkeypatch, mode, share):
    """Lossless modes equal plain decoding although every sparse decision is wrong or unsure; sparse itself then differs."""
    from dustin.config import EngineOptions, RequestOptions
    from tests.unit import engine_helpers

    table = random_table(engine_helpers.VOCAB, 1)
    target, draft = ToyModel(table, set_weight=3.0), ToyModel(altered(table, share))
    monkeypatch.setattr(engine_helpers, "target", lambda: target)
    monkeypatch.setattr(engine_helpers, "draft", lambda: draft)

    def tokens(mode, drafter):
        options = EngineOptions(mode=mode, budget=16, num_sink_tokens=2, num_recent_tokens=4)
        engine = engine_helpers.make_engine(options, drafter)
        rows, _ = engine_helpers.run(engine, [list(range(40)), [3, 4, 5]], RequestOptions(max_tokens=40))
        return [list(row.tokens) for row in rows]

    assert (tokens(mode, "draft") == tokens("ar", "none")) == (mode != "sparse")


def test_a_limited_vocabulary_keeps_the_table():
    model = ToyModel(TABLE, vocab_size=30)
    model.limit_vocabulary(25)
    assert feed(model, model.new_cache(1, 4), [3]).logits.shape == (1, 1, 25)
    with pytest.raises(ValueError, match="size is 20"):
        model.limit_vocabulary(20)
