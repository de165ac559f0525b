"""The quota rule against answers written by hand, and its laws on random schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin.backends.numpy_reference.backend import create

backend = create("cpu")


def chosen(target, draft, length, budget=6, sinks=1, recent=2, drafts=0):
    quota = {"num_sink_tokens": sinks, "num_recent_tokens": recent, "num_draft_selected": drafts}
    rows = [None if x is None else np.array([x], dtype=np.float32) for x in (target, draft)]
    found = backend.select(*rows, [length], budget=budget, **quota)
    assert found.indices.dtype == found.counts.dtype == np.int32
    return found.indices[0, : found.counts[0]].tolist()


TARGET = [9, 1, 8, 2, 7, 3, 6, 4, 5, 5]
DRAFT = [0, 5, 1, 4, 9, 3, 2, 8, 7, 7]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Protected: 0, 8, 9; three more among 1..7.
        ({"drafts": 0}, [0, 2, 4, 6, 8, 9]),
        ({"drafts": 3}, [0, 1, 4, 7, 8, 9]),
        ({"drafts": 99}, [0, 1, 4, 7, 8, 9]),
        ({"drafts": 1}, [0, 2, 4, 6, 8, 9]),
        ({"drafts": 2}, [0, 2, 4, 7, 8, 9]),
        ({"budget": 3}, [0, 8, 9]),
        ({"budget": 9, "drafts": 2}, [0, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"budget": 10}, list(range(10))),
        ({"sinks": 0, "budget": 3}, [0, 8, 9]),
        ({"recent": 0, "budget": 2}, [0, 2]),
    ],
)
def test_a_mix_of_both_scores(options, expected):
    assert chosen(TARGET, DRAFT, 10, **options) == expected


def test_a_missing_score_leaves_its_share_to_the_other():
    assert chosen(None, DRAFT, 10, drafts=1) == [0, 1, 4, 7, 8, 9]
    assert chosen(TARGET, None, 10, drafts=2) == [0, 2, 4, 6, 8, 9]


def test_without_scores_the_recent_window_grows():
    assert chosen(None, None, 10) == [0, 5, 6, 7, 8, 9]


def test_ties_go_to_the_lower_index():
    assert chosen([1.0] * 10, [1.0] * 10, 10, drafts=1) == [0, 1, 2, 3, 8, 9]
    assert chosen([0, 1, 2, 2, 2, 1, 0, 0, 0, 0], None, 10, budget=5) == [0, 2, 3, 8, 9]


def test_a_draft_that_lags_counts_as_minus_infinity():
    assert chosen(TARGET, DRAFT[:5], 10, drafts=3) == [0, 1, 3, 4, 8, 9]


def test_nan_scores_come_last():
    assert chosen([9, np.nan, 1, 2, 3, 0, 0, 0, 0, 0], None, 10, budget=5) == [0, 3, 4, 8, 9]


def test_sets_of_empty_and_short_rows():
    scores = np.zeros((3, 9), dtype=np.float32)
    found = backend.select(scores, None, [0, 4, 9], budget=5, num_sink_tokens=1, num_recent_tokens=1, num_draft_selected=0)
    assert found.counts.tolist() == [0, 4, 5]
    assert found.indices[1, :4].tolist() == [0, 1, 2, 3]
    assert (found.indices[0] == -1).all()


def test_a_budget_below_the_protected_tokens_is_refused():
    with pytest.raises(ValueError, match="budget is 2 tokens, expected 3"):
        chosen(TARGET, DRAFT, 10, budget=2)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 25),
    st.integers(0, 30),
    st.integers(0, 10**6),
    st.integers(1, 5),
)
def test_laws(length, sinks, recent, rest, drafts, seed, levels):
    rng = np.random.default_rng(seed)
    target, draft = (np.floor(rng.random(max(length, 1)) * levels) for _ in range(2))
    budget = sinks + recent + rest
    got = chosen(target, draft, length, budget=budget, sinks=sinks, recent=recent, drafts=drafts)
    assert got == sorted(set(got)) and len(got) == min(budget, length)
    if length <= budget:
        return
    protected = set(range(sinks)) | set(range(length - recent, length))
    assert protected <= set(got)
    free, left_out = set(got) - protected, set(range(length)) - set(got)
    for out in left_out:
        # Whatever was left out loses to all that the target filled, and at most `drafts` others may owe their place to the draft.
        better = [j for j in free if (-target[j], j) < (-target[out], out)]
        assert len(free) - len(better) <= min(drafts, rest)
    if drafts >= rest:
        assert chosen(None, draft, length, budget=budget, sinks=sinks, recent=recent) == got
    if drafts == 0:
        assert chosen(target, None, length, budget=budget, sinks=sinks, recent=recent) == got


def test_a_set_is_extended_by_rows_younger_than_it_and_loses_what_was_rolled_back():
    old = backend.select(None, None, [10, 3, 10], budget=4, num_sink_tokens=1, num_recent_tokens=1, num_draft_selected=0)
    grown = backend.extend(old, [10, 3, 9], [12, 3, 11])
    rows = [grown.indices[b, : grown.counts[b]].tolist() for b in range(3)]
    assert rows == [[0, 7, 8, 9, 10, 11], [0, 1, 2], [0, 7, 8, 9, 10]]
    assert old.counts.tolist() == [4, 3, 4]


def test_rows_of_sets_and_queries_are_replaced_one_by_one():
    narrow = backend.select(None, None, [9, 9], budget=2, num_sink_tokens=1, num_recent_tokens=1, num_draft_selected=0)
    wide = backend.select(None, None, [9, 9], budget=5, num_sink_tokens=1, num_recent_tokens=1, num_draft_selected=0)
    for old, new, expected in ((narrow, wide, [[0, 8], [0, 5, 6, 7, 8]]), (wide, narrow, [[0, 5, 6, 7, 8], [0, 8]])):
        mixed = backend.replace_set_rows(old, new, [False, True])
        assert [mixed.indices[b, : mixed.counts[b]].tolist() for b in range(2)] == expected
    old, new = {3: np.zeros((2, 1, 2, 4))}, {3: np.ones((2, 1, 2, 4))}
    assert backend.replace_rows(old, new, [True, False])[3][:, 0, 0, 0].tolist() == [1, 0]
    assert backend.concat_queries([old, new])[3].shape == (2, 2, 2, 4)
    with pytest.raises(ValueError, match="expected the same"):
        backend.concat_queries([old, {1: new[3]}])
