"""score_heads against float64 and select_tokens against sorting."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dustin.triton_kernels.score_heads import ScoreConfig, group_heads, score_heads, score_layers, workspace_for  # noqa: E402
from dustin.triton_kernels.select_tokens import select_tokens  # noqa: E402
from tests.kernels.reference import check_parity, choose, head_scores, paged_case, relative_rms  # noqa: E402


@pytest.mark.parametrize("keep,direct", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("softcap,wide", [(0.0, False), (3.0, True), (0.0, True)])
def test_scores(device: str, keep: bool, direct: bool, softcap: float, wide: bool) -> None:
    small = device == "cpu"
    heads = (6, 2, 16) if small else (28, 4, 128)
    lengths = [150, 20, 7] if small else [5000, 1024, 33]
    query_heads, num_rows = ([1, 5, 0], [2, 1, 0]) if small else ([3, 27, 0, 1, 8], [5, 2, 0])
    # Direct stores are of 16-bit weights alone.
    few = [torch.float16] if direct else [torch.float32]
    for dtype in few if small else [torch.float32, torch.float16, torch.bfloat16]:
        case = paged_case(device, dtype, lengths=lengths, num_tokens=[0] * 3, tokens=1, heads=heads, page_size=32)
        columns = max(lengths) + 1
        group = heads[0] // heads[1]
        queries = torch.randn(3, max(num_rows), len(query_heads), heads[2], device=device).to(dtype)
        groups = group_heads(query_heads, heads[0], heads[1], device)
        # Tiles wider than a page, and pages wider than a tile.
        config = ScoreConfig(64 if wide else 16, 64 if small else 512, 3, direct=direct)
        workspace = workspace_for(3, max(num_rows), groups, columns, heads[2], dtype, keep, config)
        rows = torch.tensor(num_rows, dtype=torch.int32, device=device)
        want = head_scores(case, queries, [h // group for h in query_heads], num_rows, columns, softcap)
        scores = torch.full((3, columns), float("nan"), device=device)
        for add, factor in ((False, 0.5), (True, 1.0)):
            score_heads(
                queries, case.k_pool, case.page_table, case.lengths, groups, scores,
                num_rows=rows, weight=0.5, add=add, softcap=softcap, keep_weights=keep, workspace=workspace,
                config=config,
            )  # fmt: skip
            inside = ~want.isinf()
            assert torch.equal(scores.isinf(), ~inside)
            check_parity(scores[inside], want[inside] * factor, torch.float32 if dtype == torch.float32 else torch.float16)


@pytest.mark.parametrize("keep,direct", [(True, False), (True, True), (False, False)])
def test_layers_share_launches(device: str, keep: bool, direct: bool) -> None:
    """Layers with other heads and pools, one more than a launch takes and one of another shape; finished and empty rows between."""
    small = device == "cpu"
    heads, page_size = ((4, 2, 16), 16) if small else ((28, 4, 128), 32)
    lengths, num_rows = ([70, 0, 33, 150], [2, 1, 0, 1]) if small else ([3000, 0, 1025, 5000], [5, 5, 0, 2])
    chosen = [[0, 3], [1, 2], [2, 0], [3, 1], [0, 2], [1]] if small else [[3, 27], [0, 8], [20, 9], [1, 22], [6, 7], [5]]
    dtype, group = torch.float32 if small else torch.bfloat16, heads[0] // heads[1]
    columns = max(lengths) + 3
    cases = [
        paged_case(device, dtype, lengths=lengths, num_tokens=[0] * 4, tokens=1, heads=heads, page_size=page_size, seed=0)
        for _ in chosen
    ]
    for seed, case in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        case.k.copy_(torch.randn(case.k.shape, generator=generator).to(dtype))
        for b, length in enumerate(lengths):
            positions = torch.arange(length, device=device)
            case.k_pool[case.page_table[b][positions // page_size].long(), positions % page_size] = case.k[b, :length]
    queries = [torch.randn(4, max(num_rows), len(h), heads[2], device=device).to(dtype) for h in chosen]
    want = sum(
        head_scores(case, q, [head // group for head in h], num_rows, columns) / len(chosen)
        for case, q, h in zip(cases, queries, chosen, strict=True)
    )
    groups = [group_heads(h, heads[0], heads[1], device) for h in chosen]
    rows = torch.tensor(num_rows, dtype=torch.int32, device=device)
    scores = torch.full((4, columns), float("nan"), device=device)
    for _ in range(2):
        score_layers(
            queries, [case.k_pool for case in cases], cases[0].page_table, cases[0].lengths, groups, scores,
            num_rows=rows, weight=1 / len(chosen), keep_weights=keep,
            config=ScoreConfig(16, 32, 3, direct=direct) if small else ScoreConfig(128, 1024, direct=direct),
        )  # fmt: skip
        inside = ~want.isinf()
        assert torch.equal(scores.isinf(), ~inside)
        check_parity(scores[inside], want[inside], torch.float32 if small else torch.float16)


SCORED = [((14, 2, 64), 4, 5, 3), ((64, 8, 128), 4, 1, 1), ((28, 4, 128), 9, 1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads,query_heads,rows,layers", SCORED)
def test_stores_of_either_kind_agree(heads: tuple[int, int, int], query_heads: int, rows: int, layers: int) -> None:
    """Weights stored from the registers of a product or through shared memory, in every tile size; repeats are bit-identical."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    lengths, num_rows = [9000, 1025, 0, 20000, 70], [rows, max(1, rows - 2), rows, 0, rows]
    case = paged_case("cuda", torch.bfloat16, lengths=lengths, num_tokens=[0] * 5, tokens=1, heads=heads, page_size=64)
    queries = [torch.randn(5, rows, query_heads, heads[2], device="cuda").bfloat16() for _ in range(layers)]
    groups = [group_heads(range(query_heads), heads[0], heads[1], "cuda")] * layers
    fed = torch.tensor(num_rows, dtype=torch.int32, device="cuda")
    for block_n, num_stages, num_warps in ((64, 3, 4), (64, 4, 4), (128, 3, 4), (128, 3, 8)):
        found = []
        for direct in (False, True, True):
            scores = torch.full((5, max(lengths)), float("nan"), device="cuda")
            score_layers(
                queries, [case.k_pool] * layers, case.page_table, case.lengths, groups, scores,
                num_rows=fed, weight=1 / layers, keep_weights=True,
                config=ScoreConfig(block_n, 1024, num_stages, num_warps, direct=direct),
            )  # fmt: skip
            found.append(scores)
        inside = ~found[0].isinf()
        assert torch.equal(found[1], found[2]) and torch.equal(inside, ~found[1].isinf())
        assert relative_rms(found[1][inside], found[0][inside]) < 1e-6


def test_no_query_rows_at_all_scores_zero(device: str) -> None:
    case = paged_case(device, torch.float32, lengths=[20], num_tokens=[0], tokens=1, heads=(2, 2, 16), page_size=16)
    groups = group_heads([0], 2, 2, device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    scores = torch.full((1, 30), float("nan"), device=device)
    score_heads(case.q[:, :, :1], case.k_pool, case.page_table, case.lengths, groups, scores, num_rows=rows)
    assert not scores[0, :20].any() and scores[0, 20:].isinf().all()


def check_choice(device: str, columns: int, lengths: list[int], quota: tuple[int, int, int, int], target, draft) -> None:
    budget, sinks, recent, by_draft = quota
    lists = [None if scores is None else scores.tolist() for scores in (target, draft)]
    indices, counts = select_tokens(
        None if target is None else target.to(device),
        None if draft is None else draft.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        budget=budget, num_sink_tokens=sinks, num_recent_tokens=recent, num_draft_selected=by_draft,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        want = choose(
            *(None if scores is None else scores[b] for scores in lists), length, budget, sinks, recent, by_draft
        )
        assert indices[b, : int(counts[b])].tolist() == want
        assert not indices[b, int(counts[b]) :].any()


def scores_of(kind: str, batch: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "random":
        return torch.rand(batch, columns, generator=generator)
    if kind == "ties":
        return torch.randint(0, 3, (batch, columns), generator=generator).float()
    if kind == "signed":
        return torch.randn(batch, columns, generator=generator).round(decimals=1)
    return torch.zeros(batch, columns)


@pytest.mark.parametrize("kind", ["random", "ties", "signed", "equal"])
def test_choice(device: str, kind: str) -> None:
    columns, lengths, quota = (150, [150, 61, 12, 0], (20, 2, 4, 8))
    if device == "cuda":
        columns, lengths, quota = (32762, [32762, 20001, 512, 513, 0], (512, 4, 32, 286))
    batch = len(lengths)
    target, draft = scores_of(kind, batch, columns), scores_of(kind, batch, columns).flip(1)
    for b, length in enumerate(lengths):
        target[b, length:], draft[b, length:] = float("-inf"), float("-inf")
    check_choice(device, columns, lengths, quota, target, draft)
    check_choice(device, columns, lengths, quota, target, None)
    check_choice(device, columns, lengths, quota, None, draft)
    check_choice(device, columns, lengths, (quota[0], 0, 0, quota[0]), target, draft)
    check_choice(device, columns, lengths, (quota[0], 3, 0, 0), target, draft)
    check_choice(device, columns, lengths, quota, None, None)


def test_choice_in_one_pass(device: str) -> None:
    columns = 64 if device == "cpu" else 8000
    quota = (8, 1, 2, 3) if device == "cpu" else (512, 4, 32, 286)
    target, draft = scores_of("ties", 1, columns), scores_of("signed", 1, columns)
    check_choice(device, columns, [columns], quota, target, draft)


@pytest.mark.gpu
@pytest.mark.parametrize("columns,budget", [(131072, 1024), (131072, 2048), (40000, 4096), (9000, 128)])
def test_choice_of_long_rows(columns: int, budget: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    target, draft = scores_of("random", 2, columns), scores_of("random", 2, columns).flip(1)
    check_choice("cuda", columns, [columns, columns // 2 + 1], (budget, 4, 32, int(0.6 * (budget - 36))), target, draft)


def test_bad_budgets_are_refused(device: str) -> None:
    lengths = torch.tensor([100], dtype=torch.int32, device=device)
    scores = torch.zeros(1, 100, device=device)
    with pytest.raises(ValueError, match="budget: expected at least 36"):
        select_tokens(scores, None, lengths, budget=35, num_sink_tokens=4, num_recent_tokens=32, num_draft_selected=0)
    with pytest.raises(ValueError, match="target_scores: expected dtype"):
        select_tokens(scores.half(), None, lengths, budget=50, num_sink_tokens=4, num_recent_tokens=32, num_draft_selected=0)
    with pytest.raises(ValueError, match=r"query_heads: expected heads in 0..5"):
        group_heads([6], 6, 2, device)
