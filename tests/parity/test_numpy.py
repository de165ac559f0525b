"""The float64 specification against second, independent formulations (whole masked matrices, sets, plain loops)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity.cases import CASES, Inputs, cases, check


def masked_attention(i: Inputs, sparse: bool) -> dict[str, Any]:
    """All rows and all keys at once: a mask, one softmax, one product."""
    q, keys, values = (np.nan_to_num(i[name].astype(np.float64)) for name in ("q", "keys", "values"))
    batch, rows, num_heads, head_dim = q.shape
    group = num_heads // keys.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (keys, values))
    slot, row = np.arange(keys.shape[1])[None, None], np.arange(rows)[None, :, None]
    start, count = (np.array(i[name])[:, None, None] for name in ("lengths", "num_tokens"))
    committed = slot < start
    if sparse:
        member = np.zeros((batch, keys.shape[1]), dtype=bool)
        for b in range(batch):
            member[b, i["indices"][b, : i["counts"][b]]] = True
        committed = committed & member[:, None]
    mask = committed | ((slot >= start) & (slot <= start + row))
    logits = np.einsum("bthd,bnhd->bthn", q, keys) / np.sqrt(head_dim)
    logits = np.where(mask[:, :, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    out = np.einsum("bthn,bnhd->bthd", weights / weights.sum(axis=-1, keepdims=True), values)
    return {"out": np.where((row < count)[..., None], out, 0.0)}


def batched_scores(i: Inputs) -> dict[str, Any]:
    """Scores by one padded softmax."""
    keys = np.nan_to_num(i["keys"].astype(np.float64))
    group = i["num_heads"] // keys.shape[2]
    logits = np.einsum("brsd,bnsd->brsn", i["q"].astype(np.float64), keys[:, :, [h // group for h in i["heads"]]])
    inside = np.arange(keys.shape[1])[None] < np.array(i["lengths"])[:, None]
    logits = np.where(inside[:, None, None], logits / np.sqrt(keys.shape[-1]), -1e300)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True)) * inside[:, None, None]
    total = weights.sum(axis=-1, keepdims=True)
    return {"scores": np.where(inside, (weights / np.where(total == 0, 1, total)).mean(axis=(1, 2)), -np.inf)}


def greedy_quota(i: Inputs) -> dict[str, Any]:
    """The quota rule one token at a time, with Python sets: always the best remaining (score, lower index)."""
    picked = []
    for b, n in enumerate(i["lengths"]):
        chosen = set(range(n))
        if n > i["budget"]:
            streaming = i["target"] is None and i["draft"] is None
            recent = i["budget"] - i["num_sink_tokens"] if streaming else i["num_recent_tokens"]
            chosen = set(range(i["num_sink_tokens"])) | set(range(n - recent, n))
            quota = i["num_draft_selected"] if i["draft"] is not None else 0
            while len(chosen) < i["budget"]:
                use = i["draft"] if (quota > 0 or i["target"] is None) else i["target"]
                scores = [use[b, j] if j < use.shape[1] else -np.inf for j in range(n)]
                chosen.add(min((j for j in range(n) if j not in chosen), key=lambda j: (-scores[j], j)))
                quota -= 1
        picked.append(sorted(chosen))
    indices = np.zeros((len(picked), max(map(len, picked))), dtype=np.int32)
    for b, row in enumerate(picked):
        indices[b, : len(row)] = row
    return {"indices": indices, "counts": np.array([len(row) for row in picked])}


@pytest.mark.parametrize("case", cases("dense_verify", "sparse_verify"), ids=lambda case: case.name)
def test_attention_equals_one_masked_softmax(case):
    check(lambda inputs: masked_attention(inputs, case.op == "sparse_verify"), case)


@pytest.mark.parametrize("case", cases("score"), ids=lambda case: case.name)
def test_scores_equal_a_padded_softmax(case):
    check(batched_scores, case)


@pytest.mark.parametrize("case", cases("select"), ids=lambda case: case.name)
def test_selection_equals_picking_one_token_at_a_time(case):
    check(greedy_quota, case)


def test_the_table_covers_what_it_promises():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    shapes = [getattr(case.make, "keywords", {}) for case in cases("sparse_verify")]
    assert {s["heads"][0] // s["heads"][1] for s in shapes if "heads" in s} >= {1, 3, 5, 6, 7, 8}
    assert {s["head_dim"] for s in shapes if "head_dim" in s} >= {32, 64, 80, 96, 128, 256}
    assert {max(s["num_tokens"]) for s in shapes} >= {1, 2, 4, 6, 9, 16}
    for op in ("dense_verify", "sparse_verify", "score", "append_rollback"):
        assert {case.dtype for case in cases(op)} == {"fp32", "fp16", "bf16"}


def test_acceptance_cases_hold_the_patterns_they_name():
    from tests.parity.cases import reference_of

    found = {case.name: reference_of(case)["num_accepted"].tolist() for case in cases("accept_greedy", "accept_sampled")}
    for op in ("accept_greedy", "accept_sampled"):
        assert found[f"{op}-none"] == [0, 0, 0]
        assert found[f"{op}-half"] == [2, 3, 2]
        assert found[f"{op}-all"] == [5, 5, 5]
        assert found[f"{op}-ragged"] == [5, 0, 2, 3, 0]
    assert found["accept_sampled-half-one-hot"] == found["accept_sampled-half-zeros"] == [2, 3, 2]
