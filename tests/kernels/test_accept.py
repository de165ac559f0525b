"""argmax_rows, accept_greedy and accept_sampled against plain torch in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dustin.triton_kernels.accept import accept_greedy, accept_sampled  # noqa: E402
from dustin.triton_kernels.argmax_rows import argmax_rows  # noqa: E402
from tests.kernels.reference import speculative_sample  # noqa: E402


def test_argmax_prefers_the_lower_index_and_reports_nan(device: str) -> None:
    vocabulary = 200 if device == "cpu" else 152064
    logits = torch.randn(4, vocabulary, device=device)
    logits[0, 150] = logits[0, 70] = 50.0
    logits[1, 199] = 50.0
    logits[2, 3] = float("nan")
    logits[3].fill_(float("-inf"))
    tokens, finite = argmax_rows(logits)
    assert tokens.tolist()[:2] == [70, 199] and tokens[3] == 0
    assert tokens[2] == logits[2].nan_to_num(-1e9).argmax()
    assert finite.tolist() == [True, True, False, True]


def test_greedy(device: str) -> None:
    best = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32, device=device)
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]], device=device)
    finite = torch.ones(4, 4, dtype=torch.bool, device=device)
    finite[0, 3] = finite[3, 3] = False
    num_drafts = torch.tensor([3, 3, 3, 2], dtype=torch.int32, device=device)
    accepted, tokens, good = accept_greedy(drafts, num_drafts, best, finite)
    assert accepted.tolist() == [3, 1, 0, 2]
    assert tokens.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0], [1, 0, 0, 0], [5, 6, 7, 0]]
    assert good.tolist() == [False, True, True, True]


def distributions(batch: int, rows: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    p = torch.rand(batch, rows, vocabulary, generator=generator) ** 8
    p[p < 0.05] = 0
    p[..., 1] += 0.01
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("one_hot", [False, True])
def test_sampled(device: str, one_hot: bool) -> None:
    batch, num, vocabulary = (6, 3, 150) if device == "cpu" else (12, 5, 152064)
    generator = torch.Generator().manual_seed(3)
    p = distributions(batch, num + 1, vocabulary, generator)
    q = (p[:, :num] + distributions(batch, num, vocabulary, generator)) / 2
    source = p[:, :num] if one_hot else q
    drafts = torch.stack([torch.multinomial(row, 1, generator=generator)[0] for row in source.flatten(0, 1)]).reshape(batch, num)
    num_drafts = torch.randint(0, num + 1, (batch,), generator=generator).int()
    uniforms = torch.rand(batch, num, generator=generator, dtype=torch.float64)
    if one_hot:
        uniforms *= 1.5 * p[:, :num].gather(-1, drafts[..., None])[..., 0].double()
    last = torch.rand(batch, generator=generator, dtype=torch.float64)
    accepted, tokens = accept_sampled(
        drafts.to(device), num_drafts.to(device), None if one_hot else q.to(device), p.to(device),
        uniforms.to(device), last.to(device),
    )  # fmt: skip
    seen = set()
    for b in range(batch):
        limit = int(num_drafts[b])
        want = speculative_sample(
            drafts[b, :limit].tolist(), None if one_hot else q[b], p[b], uniforms[b].tolist(), float(last[b])
        )
        assert tokens[b, : len(want)].tolist() == want
        assert int(accepted[b]) == len(want) - 1
        seen.add(int(accepted[b]))
    assert len(seen) > 1


def test_sampled_equal_distributions_never_reject(device: str) -> None:
    p = torch.full((1, 3, 100), 0.01, device=device)
    accepted, tokens = accept_sampled(
        torch.tensor([[7, 8]], device=device), torch.tensor([2], dtype=torch.int32, device=device), p[:, :2].contiguous(), p,
        torch.tensor([[0.999, 0.999]], device=device), torch.tensor([0.555], device=device),
    )  # fmt: skip
    assert accepted.tolist() == [2] and tokens.tolist() == [[7, 8, 55]]


@pytest.mark.gpu
def test_sampled_law() -> None:
    """With fixed p and q the first emitted token follows p (chi-square, METHOD section 9)."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    trials, vocabulary = 40000, 16
    generator = torch.Generator().manual_seed(11)
    p = torch.rand(vocabulary, generator=generator).softmax(0)
    q = (torch.rand(vocabulary, generator=generator) * 3).softmax(0)
    drafts = torch.multinomial(q.expand(trials, -1), 1, generator=generator)
    _, tokens = accept_sampled(
        drafts.cuda(), torch.ones(trials, dtype=torch.int32).cuda(), q.expand(trials, 1, -1).contiguous().cuda(),
        p.expand(trials, 2, -1).contiguous().cuda(), torch.rand(trials, 1, generator=generator).cuda(),
        torch.rand(trials, generator=generator).cuda(),
    )  # fmt: skip
    seen = torch.bincount(tokens[:, 0].long().cpu(), minlength=vocabulary).double()
    statistic = ((seen - trials * p.double()) ** 2 / (trials * p.double())).sum()
    assert statistic < 37.7  # 0.1 % point of chi-square with 15 degrees of freedom
