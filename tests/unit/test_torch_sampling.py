"""Scores, selection, warps and acceptance of the torch backend against the numpy specification."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dustin.backends.numpy_reference.backend import create as create_numpy  # noqa: E402
from dustin.backends.numpy_reference.cache import Cache  # noqa: E402
from dustin.backends.torch_triton import ops  # noqa: E402
from dustin.backends.torch_triton.backend import create  # noqa: E402
from dustin.backends.torch_triton.cache import TorchCache  # noqa: E402
from dustin.interfaces import Tap, TokenSet, WarpBatch  # noqa: E402

OURS, SPEC = create("cpu"), create_numpy()
QUOTA = dict(num_sink_tokens=2, num_recent_tokens=5)


def rows_of(token_set) -> list[list[int]]:
    return [[int(i) for i in row[: int(n)]] for row, n in zip(token_set.indices, token_set.counts, strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("given", ["both", "target", "draft", "none"])
@pytest.mark.parametrize("levels", [3, 1000])
def test_select_equals_the_specification(seed, given, levels):
    rng = np.random.default_rng(seed)
    lengths = [40, 7, 120, 0, 33]
    scores = [(rng.integers(0, levels, (5, 120)) / levels).astype(np.float32) for _ in range(2)]
    for b, length in enumerate(lengths):
        for part in scores:
            part[b, length:] = -np.inf
    target, draft = (part if given in ("both", name) else None for part, name in zip(scores, ("target", "draft"), strict=True))
    options = dict(budget=20, num_draft_selected=int(rng.integers(0, 16)), **QUOTA)
    expected = SPEC.select(target, draft, lengths, **options)
    tensors = [None if part is None else torch.from_numpy(part) for part in (target, draft)]
    assert rows_of(OURS.select(*tensors, lengths, **options)) == rows_of(expected)


def test_select_refuses_a_budget_below_the_protected_tokens():
    with pytest.raises(ValueError, match="expected 7 or more"):
        OURS.select(None, None, [50], budget=6, num_draft_selected=0, **QUOTA)


def test_top_mask_prefers_lower_indices():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert ops.top_mask(scores, 2).tolist() == [[False, True, True, False, False], [True, True, False, False, False]]
    assert not ops.top_mask(scores, 0).any() and ops.top_mask(scores, 9).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_score_equals_the_specification(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(ops, "_SCORE_CHUNK", 16)
    rng = np.random.default_rng(0)
    lengths, tap = [37, 5, 0], Tap({0: (0, 1, 5), 2: (3,)})
    theirs, ours = Cache(3, 3, 40, 2, 8), TorchCache(3, 3, 40, 2, 8, dtype=dtype)
    for layer in range(3):
        keys = 3 * rng.standard_normal((3, 40, 2, 8)).astype(np.float32)
        theirs.keys[layer][:] = keys
        ours.keys[layer][:] = torch.from_numpy(keys).to(dtype)
        for b, length in enumerate(lengths):
            ours.keys[layer][b, length:] = float("nan")
    theirs.advance(lengths)
    ours.advance(lengths)
    queries = {layer: rng.standard_normal((3, 4, len(heads), 8)).astype(np.float32) for layer, heads in tap.heads.items()}

    class Shape:
        spec = type("Spec", (), {"num_heads": 6})
        scale, softcap = 8**-0.5, None

    expected = SPEC.score(queries, tap, Shape, theirs, lengths)
    got = OURS.score({layer: torch.from_numpy(q).to(dtype) for layer, q in queries.items()}, tap, Shape, ours, lengths).numpy()
    assert got.dtype == np.float32 and np.array_equal(np.isinf(got), np.isinf(expected))
    inside = np.isfinite(expected)
    error = np.sqrt(np.mean((got[inside] - expected[inside]) ** 2) / np.mean(expected[inside] ** 2))
    assert error < tolerance
    assert np.allclose(np.where(inside, got, 0).sum(1), [1, 1, 0], atol=1e-4)


def test_extend_and_replace_rows_equal_the_specification():
    indices = np.array([[0, 3, 6, 9, 12], [1, 2, 4, -1, -1]], dtype=np.int32)
    counts = np.array([5, 3], dtype=np.int32)
    ours = TokenSet(torch.from_numpy(indices), torch.from_numpy(counts))
    theirs = TokenSet(indices, counts)
    for starts, stops in (([13, 5], [15, 9]), ([13, 5], [13, 5]), ([13, 5], [8, 2]), ([20, 6], [21, 6])):
        assert rows_of(OURS.extend(ours, starts, stops)) == rows_of(SPEC.extend(theirs, starts, stops))
    grown = OURS.extend(ours, [13, 5], [15, 9])
    assert rows_of(OURS.replace_set_rows(ours, grown, [False, True])) == [[0, 3, 6, 9, 12], [1, 2, 4, 5, 6, 7, 8]]
    old, new = ({1: torch.full((2, 1, 3, 4), value)} for value in (1.0, 2.0))
    assert OURS.replace_rows(old, new, [True, False])[1][:, 0, 0, 0].tolist() == [2.0, 1.0]


def warp(count: int, **changes) -> WarpBatch:
    neutral = dict(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    return WarpBatch(**{name: (changes.get(name, value),) * count for name, value in neutral.items()})


WARPS = [
    {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "top_k": 9}, {"temperature": 0.0, "repetition_penalty": 9.0},
    {"temperature": 1e-6}, {"temperature": 1e-45, "top_p": 0.9}, {"temperature": 5e-324}, {"temperature": 1e300},
]  # fmt: skip


@pytest.mark.parametrize("changes", WARPS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_probabilities_equal_the_specification(changes, tied):
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((2, 4, 31))
    logits = np.round(logits) if tied else logits
    logits[1, 2, 3] = np.nan
    logits[1, 3, 4] = np.inf
    logits = logits.astype(np.float32)
    context, inflight = [[1, 2, 2, 9], [7]], np.array([[9, 4, 4], [0, 0, 30]])
    options = warp(2, **changes)
    expected = SPEC.probabilities(logits.astype(np.float64), options, context, inflight)
    got = OURS.probabilities(torch.from_numpy(logits), options, context, torch.from_numpy(inflight)).numpy()
    assert np.array_equal(got > 0, expected > 0)
    assert np.allclose(got, expected, atol=1e-6)


def test_sample_is_the_inverse_cdf():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).expand(6, 1, 6)
    assert OURS.sample(p, [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])[:, 0].tolist() == [1, 1, 3, 3, 4, 4]
    with pytest.raises(ValueError, match="uniforms"):
        OURS.sample(p[:1], [1.0])


def host(backend, verdict):
    return backend.read(verdict)


@pytest.mark.parametrize("seed", range(5))
def test_accept_greedy_equals_the_specification(seed):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((4, 4, 3))).astype(np.float32)
    drafts, counts = rng.integers(0, 3, (4, 3)), [3, 2, 0, 1]
    logits[3, 3] = np.nan
    logits[2, 0, 1] = np.nan
    expected = SPEC.accept_greedy(drafts, counts, logits)
    got = OURS.accept_greedy(torch.from_numpy(drafts), counts, torch.from_numpy(logits))
    ours, theirs = host(OURS, got), host(SPEC, expected)
    assert ours.finite == theirs.finite == (True, True, False, True)
    assert ours.num_accepted == theirs.num_accepted and ours.tokens[:2] == theirs.tokens[:2]
    nothing = OURS.accept_greedy(OURS.tokens([[], []]), [0, 0], torch.tensor([[[0.0, 1.0]], [[3.0, 3.0]]]))
    assert host(OURS, nothing).tokens == ((1,), (0,))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("one_hot", [False, True])
def test_accept_sampled_equals_the_specification(seed, one_hot):
    rng = np.random.default_rng(seed)
    # Eighths are exact in fp32, so both backends compare the same numbers.
    p, q = (rng.multinomial(8, np.ones(4) / 4, (5, n)) / 8 for n in (4, 3))
    drafts = rng.integers(0, 4, (5, 3))
    counts = [3, 3, 2, 1, 0]
    u, last = rng.random((5, 3)).tolist(), rng.random(5).tolist()
    expected = SPEC.accept_sampled(drafts, counts, None if one_hot else q, p, p, u, last)
    got = OURS.accept_sampled(
        torch.from_numpy(drafts), counts, None if one_hot else torch.from_numpy(q).float(), torch.from_numpy(p).float(),
        torch.from_numpy(p), u, last,
    )  # fmt: skip
    assert host(OURS, got) == host(SPEC, expected)


def test_speculative_sampling_keeps_the_law():
    """The first emitted token follows p whatever q is: chi-square over 20,000 rounds, 3 degrees of freedom."""
    rounds = 20000
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.55, 0.25, 0.15, 0.05])
    rng = np.random.default_rng(5)
    drafts = OURS.sample(q.expand(rounds, 1, 4), rng.random(rounds).tolist())
    both = p.expand(rounds, 2, 4)
    verdict = OURS.accept_sampled(
        drafts, [1] * rounds, q.expand(rounds, 1, 4), both, both, rng.random((rounds, 1)).tolist(), rng.random(rounds).tolist()
    )
    seen = torch.bincount(verdict.tokens[:, 0], minlength=4).double()
    assert float(((seen - rounds * p) ** 2 / (rounds * p)).sum()) < 16.3
    assert float(((seen - rounds * q) ** 2 / (rounds * q)).sum()) > 1000


def test_read_with_logprobs_equals_the_specification():
    rng = np.random.default_rng(2)
    logits = np.round(3 * rng.standard_normal((2, 3, 9))).astype(np.float32)
    drafts = np.array([[int(logits[0, 0].argmax()), 0], [1, 2]])
    got = OURS.read(OURS.accept_greedy(torch.from_numpy(drafts), [2, 0], torch.from_numpy(logits)), torch.from_numpy(logits), 4)
    expected = SPEC.read(SPEC.accept_greedy(drafts, [2, 0], logits), logits.astype(np.float64), 4)
    assert got.tokens == expected.tokens
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token, a.top_tokens) == (b.token, b.top_tokens)
            assert np.allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=1e-5)


def test_rows_are_gathered_joined_and_padded():
    q = {3: torch.arange(24.0).view(2, 3, 2, 2)}
    assert torch.equal(OURS.gather_rows(q, [2, 0])[3], torch.stack([q[3][0, 2], q[3][1, 0]])[:, None])
    assert OURS.concat_queries([q, q])[3].shape == (2, 6, 2, 2)
    a = torch.ones(2, 2, 5)
    assert OURS.stack_rows([a, a]).shape == (2, 4, 5)
    rows = OURS.ragged_rows([[(a, 1), (2 * a, 0)], []])
    assert rows.shape == (2, 2, 5) and rows[:, :, 0].tolist() == [[1, 2], [0, 0]]
    with pytest.raises(ValueError, match="row 2"):
        OURS.ragged_rows([[(a, 2)]])
    assert OURS.tokens([[1, 2], [3]]).tolist() == [[1, 2], [3, 0]]
    assert OURS.concat_tokens([OURS.tokens([[1]]), OURS.tokens([[2, 3]])]).tolist() == [[1, 2, 3]]
    assert OURS.peak_memory_bytes() > 2**20
