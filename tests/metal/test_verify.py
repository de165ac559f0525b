"""dense_verify, sparse_verify and sparse_verify_blocks against float64, under the checker."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal.emulator.dropin import installed
from tests.metal.helpers import call, parity_problem
from tests.metal.reference import TOLERANCE, Case

FORMS = ("dense", "sparse", "blocks")


def check(case: Case, form: str, splits: int | None = None, order: str = "forward", **options: bool) -> None:
    with installed(order=order) as log:
        got = call(case, form, splits, **options)
    assert not log.findings
    assert parity_problem(case, form, got) == ""


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_ragged(form: str, dtype: str, splits: int) -> None:
    """A long, a short and a finished sequence; 70 + 3 keys fit no tile; five splits leave some without a visible key."""
    check(Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, dtype, 90, 20), form, splits)


@pytest.mark.parametrize("dim", [96, 128, 256])
@pytest.mark.parametrize("form", FORMS)
def test_head_dims(form: str, dim: int) -> None:
    check(Case((45, 19), (2, 1), 2, 6, 2, dim, "float16", 50, 17, seed=dim), form)


@pytest.mark.parametrize("group,rows", [(5, 3), (6, 5), (7, 16), (8, 6), (1, 1), (16, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_group_sizes(form: str, group: int, rows: int) -> None:
    check(Case((50,), (rows,), rows, group, 1, 64, "float16", 70, 20, seed=group), form, 1)


@pytest.mark.parametrize("form", FORMS)
def test_many_sequences(form: str) -> None:
    """Ten lengths are a device array, three a constant one: the text must take both."""
    lengths = (0, 1, 15, 16, 17, 31, 32, 33, 40, 7)
    check(Case(lengths, (2, 1, 0, 2, 2, 1, 2, 2, 0, 2), 2, 4, 2, 64, "float16", 42, 9), form, 1)


@pytest.mark.parametrize("form", FORMS)
def test_scalar_lengths(form: str) -> None:
    """0-d lengths, counts and num_tokens (references in the kernel)."""
    import mlx.core as mx

    from dustin.metal_kernels.dense_verify import dense_verify
    from dustin.metal_kernels.sparse_verify import sparse_verify, sparse_verify_blocks

    case = Case((40, 40), (2, 2), 2, 4, 2, 64, "float16", 42, 9)
    q, k, v = (mx.array(x).astype(mx.float16) for x in (case.q, case.k, case.v))
    n, t = mx.array(40, mx.int32), mx.array(2, mx.int32)
    with installed() as log:
        if form == "dense":
            out = dense_verify(q, k, v, n, t, case.scale, splits=1)
        elif form == "sparse":
            out = sparse_verify(q, k, v, mx.array(case.indices), mx.array(9, mx.int32), n, t, case.scale, splits=1)
        else:
            case.block_counts[:] = case.block_counts.min()
            counts = mx.array(int(case.block_counts[0]), mx.int32)
            out = sparse_verify_blocks(q, k, v, mx.array(case.blocks), counts, n, t, case.scale, splits=1)
    assert not log.findings
    assert parity_problem(case, form, np.array(out.astype(mx.float32))) == ""


@pytest.mark.parametrize("order", ["reverse", "shuffled"])
@pytest.mark.parametrize("form", FORMS)
def test_thread_orders_agree(form: str, order: str) -> None:
    """The same bits whatever order threads and threadgroups run in."""
    case = Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, "float16", 90, 20)
    outputs = []
    for o in ("forward", order):
        with installed(order=o):
            outputs.append(call(case, form, 5))
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_coded_values_are_exact(form: str, dtype: str, splits: int) -> None:
    """q = 0 and v[j] = bits of j: one wrong, missing or doubled row changes an integer."""
    check(Case((77, 12, 30), (4, 2, 0), 4, 10, 2, 64, dtype, 90, 33, coded=True), form, splits)


@pytest.mark.parametrize("form", FORMS)
def test_strided_caches_are_read_in_place(form: str) -> None:
    """A view into larger caches: same result, and MLX is never asked to make it contiguous."""
    with installed() as log:
        got = call(Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, "float16", 90, 20), form, 1, sliced=True)
    assert parity_problem(Case((70, 5, 30), (3, 4, 0), 4, 10, 2, 64, "float16", 90, 20), form, got) == ""
    assert not any(k.row_contiguous for k in log.kernels)


def test_full_selection_equals_dense() -> None:
    case = Case((32,), (3,), 3, 4, 2, 64, "float16", 40, 32)
    with installed():
        assert np.array_equal(call(case, "dense", 1), call(case, "sparse", 1))


def test_one_build_serves_every_length() -> None:
    with installed() as log:
        for n in (3, 40, 41):
            call(Case((n,), (2,), 2, 4, 2, 64, "float16", 90, 20), "dense", 1)
    assert log.on_device or len({k.source for k in log.kernels}) == 1


@pytest.mark.parametrize(
    "change,word",
    [
        ({"head_dim": 80}, "head_dim"),
        ({"num_rows": 17, "num_tokens": (1,)}, "query rows"),
        ({"num_heads": 5}, "num_heads"),
    ],
)
def test_refused_shapes(change: dict, word: str) -> None:
    options = {"lengths": (9,), "num_tokens": (1,), "num_rows": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    options |= {"dtype": "float16", "capacity": 30, "budget": 4}
    case = Case(**(options | {"num_heads": 4})) if "num_heads" in change else Case(**(options | change))
    if "num_heads" in change:
        case.q = np.zeros((1, 2, 5, 64), np.float32)
    with installed(), pytest.raises(ValueError, match=word):
        call(case, "sparse")


@pytest.mark.slow
@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_sweep(form: str, dtype: str, dim: int, rows: int) -> None:
    """Every T, D and dtype; the group size and the split count turn with T."""
    group = (1, 2, 4, 5, 6, 7, 8)[rows % 7]
    case = Case((61, 4), (rows, max(0, rows - 2)), rows, 2 * group, 2, dim, dtype, 80, 23, seed=rows * dim)
    check(case, form, (1, 3, None)[rows % 3], ("forward", "reverse", "shuffled")[rows % 3])
