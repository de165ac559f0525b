"""Warps and samplers against answers written by hand, and the law of what is drawn by chi-square with fixed p and q."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dustin.backends.numpy_reference.backend import create
from dustin.interfaces import WarpBatch

backend = create("cpu")
P = np.array([0.4, 0.3, 0.2, 0.1])


def warped(logits, context=None, inflight=None, **options):
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    warp = WarpBatch(**{name: (value,) for name, value in (neutral | options).items()})
    logits = np.atleast_2d(np.asarray(logits, dtype=np.float64))[None]
    return backend.probabilities(logits, warp, None if context is None else [context], inflight)[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.95}, [0.4, 0.3, 0.2, 0.1]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        # top-k leaves 4/9, 3/9, 2/9; then 7/9 of the mass lies in the first two.
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_warps_by_hand(options, expected):
    assert np.allclose(warped(np.log(P), **options)[0], expected, atol=1e-12)


def test_ties_of_warps_keep_the_lower_index():
    assert warped([1.0, 2.0, 2.0, 2.0], top_k=2)[0].tolist() == [0, 0.5, 0.5, 0]
    assert warped([1.0, 2.0, 2.0, 2.0], temperature=0.0)[0].tolist() == [0, 1, 0, 0]
    assert warped([2.0, 2.0, 2.0, 2.0], top_p=0.5)[0].tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324])
def test_the_coldest_temperatures_share_the_mass_among_ties(temperature):
    assert warped([1.0, 2.0, -3e38, 2.0], temperature=temperature)[0].tolist() == [0, 0.5, 0, 0.5]


def test_penalties_by_hand():
    logits = np.array([2.0, -1.0, 0.5, 0.0])
    got = warped(logits, [0, 0, 1], repetition_penalty=2.0)[0]
    assert np.allclose(got, np.exp([1.0, -2.0, 0.5, 0.0]) / np.exp([1.0, -2.0, 0.5, 0.0]).sum())
    got = warped(logits, [0, 0, 1], presence_penalty=0.5, frequency_penalty=0.25)[0]
    assert np.allclose(np.log(got[0] / got[3]), 2.0 - 0.5 - 2 * 0.25)
    assert np.allclose(np.log(got[1] / got[3]), -1.0 - 0.5 - 0.25)


def test_a_row_counts_only_the_drafts_before_it():
    rows = np.zeros((3, 4))
    got = warped(rows, [3], np.array([[1, 2]]), presence_penalty=1.0)
    for t, seen in enumerate(([3], [3, 1], [3, 1, 2])):
        want = np.exp([-1.0 if token in seen else 0.0 for token in range(4)])
        assert np.allclose(got[t], want / want.sum())
    # One row with drafts in flight counts all of them, as the last row above did.
    alone = warped(rows[:1], [3], np.array([[1, 2]]), presence_penalty=1.0)
    assert np.allclose(alone[0], got[2])


def test_infinite_and_nan_logits_give_finite_probabilities():
    assert warped([-np.inf, 0.0, np.inf, np.inf])[0].tolist() == [0, 0, 1, 0]
    assert warped([-np.inf, 0.0, 0.0, -np.inf])[0].tolist() == [0, 0.5, 0.5, 0]
    assert np.isfinite(warped([np.nan, 0.0, 1.0, 2.0])[0]).all()


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.39, 0), (0.41, 1), (0.69, 1), (0.71, 3), (0.999999, 3)])
def test_the_first_token_whose_cumulative_mass_exceeds_u(u, token):
    assert backend.sample(np.array([[[0.4, 0.3, 0.0, 0.3, 0.0]]]), [u]).tolist() == [[token]]


def test_no_token_of_mass_zero_is_drawn_at_the_ends():
    p = np.array([[[0.0, 0.5, 0.5, 0.0]]])
    assert backend.sample(p, [0.0]).item() == 1
    assert backend.sample(p, [math.nextafter(1.0, 0.0)]).item() == 2
    with pytest.raises(ValueError, match="uniform is 1"):
        backend.sample(p, [1.0])


def chi_square(counts, p):
    """The statistic and the bound that chance exceeds once in about a million (Wilson-Hilferty)."""
    p = np.asarray(p) / np.sum(p)
    total, used = np.sum(counts), p > 0
    assert np.all(np.asarray(counts)[~used] == 0), "a token of mass 0 was drawn"
    df = used.sum() - 1
    bound = df * (1 - 2 / (9 * df) + 4.75 * math.sqrt(2 / (9 * df))) ** 3
    return float((((counts - total * p) ** 2)[used] / (total * p)[used]).sum()), bound


def drawn(p, q, draws, seed, num_drafts=1, one_hot=False):
    """Counts of the first emitted token over `draws` rounds with drafts drawn from q."""
    rng = np.random.default_rng(seed)
    size = len(p)
    drafts = rng.choice(size, (draws, 1), p=q)
    target = np.tile(np.stack([p, p])[None], (draws, 1, 1))
    proposal = None if one_hot else np.tile(q[None, None], (draws, 1, 1))
    verdict = backend.accept_sampled(
        drafts,
        [num_drafts] * draws,
        proposal,
        target,
        np.zeros((draws, 2, size)),
        rng.random((draws, 1)).tolist(),
        rng.random(draws),
    )
    return np.bincount(verdict.tokens[:, 0], minlength=size), verdict


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]),
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.3, 0.7, 0.0]),
        ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
        ([0.0, 1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_the_emitted_token_follows_p_whatever_q(p, q):
    statistic, bound = chi_square(drawn(np.array(p), np.array(q), 6000, 11)[0], p)
    assert statistic < bound


def test_one_hot_drafts_and_no_drafts_follow_p_too():
    for options in ({"one_hot": True}, {"num_drafts": 0}):
        statistic, bound = chi_square(drawn(P, np.array([0.1, 0.2, 0.3, 0.4]), 6000, 12, **options)[0], P)
        assert statistic < bound


def test_the_chi_square_test_itself_notices_q():
    q = np.array([0.1, 0.2, 0.3, 0.4])
    counts = np.random.default_rng(13).multinomial(6000, 0.9 * P + 0.1 * q)
    statistic, bound = chi_square(counts, P)
    assert statistic > bound


def test_the_share_of_accepted_drafts_is_the_overlap_of_p_and_q():
    q = np.array([0.1, 0.2, 0.3, 0.4])
    _, verdict = drawn(P, q, 6000, 14)
    assert abs(verdict.num_accepted.mean() - np.minimum(P, q).sum()) < 4.5 * 0.5 / math.sqrt(6000)


def test_equal_p_and_q_accept_everything_and_draw_the_bonus_from_the_last_p():
    _, verdict = drawn(P, P, 4000, 15)
    assert (verdict.num_accepted == 1).all()
    statistic, bound = chi_square(np.bincount(verdict.tokens[:, 1], minlength=4), P)
    assert statistic < bound


def test_pairs_of_tokens_follow_p_times_p():
    """Two drafts: tokens 1 and 2 together have the product law where both are emitted by acceptance or after it."""
    rng, draws = np.random.default_rng(16), 9000
    q, second = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.1, 0.1, 0.2, 0.6])
    drafts = np.stack([rng.choice(4, draws, p=q), rng.choice(4, draws, p=q)], axis=1)
    verdict = backend.accept_sampled(
        drafts,
        [2] * draws,
        np.tile(q, (draws, 2, 1)),
        np.tile(np.stack([P, second, P]), (draws, 1, 1)),
        np.zeros((draws, 3, 4)),
        rng.random((draws, 2)).tolist(),
        rng.random(draws),
    )
    going_on = verdict.num_accepted >= 1
    statistic, bound = chi_square(np.bincount(verdict.tokens[going_on, 1], minlength=4), second)
    assert statistic < bound


def test_greedy_acceptance_by_hand():
    logits = np.zeros((3, 4, 5))
    for t, token in enumerate((2, 4, 1, 3)):
        logits[:, t, token] = 1.0
    verdict = backend.accept_greedy(np.array([[2, 4, 1], [2, 0, 1], [0, 4, 1]]), [3, 3, 0], logits)
    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.tokens.tolist() == [[2, 4, 1, 3], [2, 4, -1, -1], [2, -1, -1, -1]]
    assert verdict.probabilities is None and verdict.finite.all()
    host = backend.read(verdict)
    assert host.tokens == ((2, 4, 1, 3), (2, 4), (2,)) and host.logprobs is None


def test_drafts_beyond_the_count_are_never_accepted():
    logits = np.zeros((1, 3, 4))
    logits[0, :, 1] = 1.0
    assert backend.accept_greedy(np.array([[1, 1]]), [1], logits).num_accepted.tolist() == [1]


def test_nan_is_reported_for_judged_rows_alone():
    logits = np.zeros((2, 3, 4))
    logits[:, 2, 0] = np.nan
    assert backend.accept_greedy(np.zeros((2, 2), dtype=int), [1, 2], logits).finite.tolist() == [True, False]


def test_logprobs_by_hand_with_ties_to_the_lower_token():
    logits = np.log(np.array([[[0.5, 0.125, 0.125, 0.25], [0.1, 0.2, 0.3, 0.4]]]))
    verdict = backend.accept_greedy(np.array([[0]]), [1], logits)
    host = backend.read(verdict, logits, 3)
    first, second = host.logprobs[0]
    assert first.token == 0 and math.isclose(first.logprob, math.log(0.5))
    assert first.top_tokens == (0, 3, 1)
    assert np.allclose(first.top_logprobs, np.log([0.5, 0.25, 0.125]))
    assert second.token == 3 and math.isclose(second.logprob, math.log(0.4))
    assert backend.read(verdict, logits, 0).logprobs[0][0].top_tokens == ()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one more than drafts"):
        backend.accept_greedy(np.zeros((1, 2), dtype=int), [2], np.zeros((1, 2, 4)))
    with pytest.raises(ValueError, match=r"num_drafts\[0\] is 3"):
        backend.accept_greedy(np.zeros((1, 2), dtype=int), [3], np.zeros((1, 3, 4)))


def test_rows_are_stacked_and_gathered():
    a, b = np.arange(12.0).reshape(2, 1, 6), np.arange(24.0).reshape(2, 2, 6)
    assert backend.stack_rows([a, b]).shape == (2, 3, 6)
    ragged = backend.ragged_rows([[(a, 0), (b, 1)], [(b, 0)]])
    assert np.array_equal(ragged[0], np.stack([a[0, 0], b[0, 1]]))
    assert np.array_equal(ragged[1], np.stack([b[1, 0], np.zeros(6)]))
    with pytest.raises(ValueError, match="row 2"):
        backend.ragged_rows([[(b, 2)], []])
    assert backend.tokens([[1, 2], [], [3]]).tolist() == [[1, 2], [0, 0], [3, 0]]
