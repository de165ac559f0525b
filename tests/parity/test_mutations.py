"""The checkers checked: every deliberately wrong implementation must fail, on cases named here, and the right one must pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.parity.cases import CASES, ParityError, cases, check, inputs_of, reference_of
from tests.parity.harness import quantise, specification

VERIFY = cases("dense_verify", "sparse_verify")


def rounded(case):
    """The right implementation as a kernel of that dtype returns it: the specification, rounded."""

    def impl(inputs):
        outputs = specification(case.op, inputs)
        return {"out": quantise(outputs["out"], case.dtype)} if "out" in outputs else outputs

    return impl


def changed(case, **changes):
    """The specification on inputs that a wrong kernel would effectively use: each change maps a copy of one input."""

    def impl(inputs):
        wrong = copy.copy(inputs)
        for name, change in changes.items():
            wrong[name] = change(copy.deepcopy(inputs[name]))
        return specification(case.op, wrong)

    return impl


def fails(impl, case):
    with pytest.raises(ParityError):
        check(impl, case)


def named(*fragments):
    found = [case for case in VERIFY if all(fragment in case.name for fragment in fragments)]
    assert found, f"no case is named like {fragments}"
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_answer_rounded_to_the_dtype_passes(case):
    check(rounded(case), case)


@pytest.mark.parametrize("case", VERIFY, ids=lambda case: case.name)
def test_zeros_fail(case):
    fails(lambda inputs: {"out": np.zeros(inputs["q"].shape)}, case)


@pytest.mark.parametrize("case", VERIFY, ids=lambda case: case.name)
def test_a_nan_leak_fails(case):
    def impl(inputs):
        out = specification(case.op, inputs)["out"]
        out[np.argmax(inputs["num_tokens"]), 0, -1, -1] = np.nan
        return {"out": out}

    fails(impl, case)


def masked(inputs, visible):
    """Attention by loops over `visible(b, r)`, a list of slots that may repeat; every value is read, NaN included."""
    q, keys, values = (inputs[name].astype(np.float64) for name in ("q", "keys", "values"))
    group, out = q.shape[2] // keys.shape[2], np.zeros(q.shape)
    for b, count in enumerate(inputs["num_tokens"]):
        for r in range(count):
            slots = visible(b, r)
            for h in range(q.shape[2]):
                logits = keys[b, slots, h // group] @ q[b, r, h] / np.sqrt(q.shape[3])
                weights = np.exp(logits - logits.max())
                out[b, r, h] = weights / weights.sum() @ values[b, slots, h // group]
    return {"out": out}


def slots_of(inputs, b, r):
    """What row r of sequence b may see."""
    start = inputs["lengths"][b]
    committed = inputs["indices"][b, : inputs["counts"][b]].tolist() if "indices" in inputs else list(range(start))
    return committed + list(range(start, start + r + 1))


def test_the_loop_that_the_mutations_use_is_right_itself():
    for case in named("g3-") + named("short") + named("first-token"):
        check(lambda inputs: masked(inputs, lambda b, r: slots_of(inputs, b, r)), case)


# A one-hot softmax seldom falls on the future token, so those cases cannot tell.
@pytest.mark.parametrize(
    "case", [c for c in VERIFY if max(inputs_of(c)["num_tokens"]) > 1 and "one-hot" not in c.name], ids=lambda case: case.name
)
def test_a_visible_future_token_fails(case):
    def impl(inputs):
        def visible(b, r):
            last = inputs["lengths"][b] + inputs["num_tokens"][b] - 1
            future = inputs["lengths"][b] + r + 1
            return slots_of(inputs, b, r) + ([future] if future <= last else [])

        return masked(inputs, visible)

    fails(impl, case)


@pytest.mark.parametrize("case", [c for c in VERIFY if "full-cache" not in c.name], ids=lambda case: case.name)
def test_a_stale_tail_fails(case):
    """One row beyond the valid ones is read: NaN poison in most cases, plausible old numbers in stale-tail."""

    def impl(inputs):
        end = [n + t for n, t in zip(inputs["lengths"], inputs["num_tokens"], strict=True)]
        return masked(inputs, lambda b, r: [*slots_of(inputs, b, r), end[b]])

    fails(impl, case)


CODED = [case for case in VERIFY if case.coded and case.op == "sparse_verify"]


@pytest.mark.parametrize("mutation", ["one-off", "missing", "doubled"])
@pytest.mark.parametrize("case", CODED, ids=lambda case: case.name)
def test_one_wrong_missing_or_doubled_index_fails(case, mutation):
    """Even among 1,024 selected tokens."""

    def impl(inputs):
        def visible(b, r):
            slots = slots_of(inputs, b, r)
            spot = int(inputs["counts"][b]) // 2
            if mutation == "missing":
                return slots[:spot] + slots[spot + 1 :]
            if mutation == "doubled":
                return [*slots, slots[spot]]
            step = 1 if slots[spot] + 1 < inputs["lengths"][b] else -1
            return [*slots[:spot], slots[spot] + step, *slots[spot + 1 :]]

        return masked(inputs, visible)

    fails(impl, case)


@pytest.mark.parametrize("case", [c for c in VERIFY if c.coded], ids=lambda case: case.name)
def test_a_wrong_kv_head_or_sequence_fails(case):
    fails(changed(case, values=lambda v: np.concatenate([v[1:], v[:1]])), case)
    if inputs_of(case)["keys"].shape[2] > 1:
        fails(changed(case, values=lambda v: v[:, :, ::-1]), case)


@pytest.mark.parametrize("case", named("g3-") + named("g7-d64") + named("g8-d128"), ids=lambda case: case.name)
def test_swapped_query_heads_fail(case):
    def impl(inputs):
        out = specification(case.op, inputs)["out"]
        out[:, :, [0, 1]] = out[:, :, [1, 0]]
        return {"out": out}

    if not case.coded:  # with q = 0 the heads of one group answer alike
        fails(impl, case)


def test_grouping_query_heads_by_remainder_instead_of_quotient_fails():
    def impl(inputs):
        order = np.arange(inputs["q"].shape[2]).reshape(inputs["keys"].shape[2], -1).T.ravel()
        return {"out": specification(case.op, inputs | {"q": inputs["q"][:, :, order]})["out"][:, :, np.argsort(order)]}

    for case in named("sparse_verify", "g7-d64") + named("dense_verify", "g3-d64"):
        fails(impl, case)


@pytest.mark.parametrize("case", named("idle-rows") + named("stale-tail"), ids=lambda case: case.name)
def test_writing_rows_that_take_no_part_fails(case):
    def impl(inputs):
        out = specification(case.op, inputs)["out"]
        for b, count in enumerate(inputs["num_tokens"]):
            out[b, count:] = 1.0
        return {"out": out}

    fails(impl, case)


@pytest.mark.parametrize("case", cases("dense_verify", "sparse_verify", dtypes=["fp32"]), ids=lambda case: case.name)
def test_fp32_computed_with_bf16_values_fails(case):
    if not case.coded and "one-token" not in case.name:
        fails(changed(case, values=lambda v: quantise(v, "bf16")), case)


@pytest.mark.parametrize("case", cases("score"), ids=lambda case: case.name)
def test_wrong_scores_fail(case):
    want = reference_of(case)["scores"]
    fails(lambda inputs: {"scores": np.zeros_like(want)}, case)
    fails(lambda inputs: {"scores": np.where(np.isinf(want), 0.0, want)}, case)
    fails(lambda inputs: {"scores": np.roll(want, 1, axis=1)}, case)
    fails(lambda inputs: {"scores": np.roll(want, 1, axis=0)}, case)
    fails(lambda inputs: {"scores": want * inputs["q"].shape[1] * 2}, case)
    if len(inputs_of(case)["heads"]) > 1:
        fails(changed(case, heads=lambda heads: heads[:1] * len(heads), q=lambda q: q[:, :, ::-1] * 0.5), case)
        fails(changed(case, q=lambda q: q[:, :, :1].repeat(q.shape[2], axis=2)), case)


@pytest.mark.parametrize("case", cases("select"), ids=lambda case: case.name)
def test_wrong_sets_fail(case):
    want = reference_of(case)
    long = int(np.argmax(inputs_of(case)["lengths"]))

    def other(change):
        def impl(inputs):
            indices = want["indices"].copy()
            indices[long] = change(indices[long])
            return {"indices": indices, "counts": want["counts"]}

        return impl

    fails(other(lambda row: row[::-1]), case)
    fails(other(lambda row: np.where(np.arange(len(row)) == 1, row[0], row)), case)
    fails(other(lambda row: np.where(np.arange(len(row)) == len(row) - 1, row + 1, row)), case)
    fails(lambda inputs: {"indices": want["indices"], "counts": want["counts"] - 1}, case)


def test_giving_ties_to_the_higher_index_fails():
    tied = [case for case in cases("select") if "ties" in case.name or "all-equal" in case.name]
    assert len(tied) == 2
    for case in tied:
        # Scores that rise a little with the index break every tie upwards.
        def upwards(x):
            return x + 1e-4 * np.arange(x.shape[1], dtype=np.float32)

        fails(changed(case, target=upwards, draft=upwards), case)


@pytest.mark.parametrize("case", cases("accept_greedy", "accept_sampled"), ids=lambda case: case.name)
def test_wrong_verdicts_fail(case):
    want = reference_of(case)

    def other(**changes):
        return lambda inputs: copy.deepcopy(want) | {name: change(want[name].copy()) for name, change in changes.items()}

    fails(other(num_accepted=lambda n: n + 1), case)
    fails(other(num_accepted=lambda n: n - 1), case)
    fails(other(tokens=lambda t: t + 1), case)
    fails(other(finite=lambda f: ~f), case)


def test_sampling_the_next_token_from_p_instead_of_the_residual_fails():
    def impl(inputs):
        verdict = specification("accept_sampled", inputs)
        for b, n in enumerate(verdict["num_accepted"]):
            share = np.cumsum(inputs["p"][b, n].astype(np.float64))
            verdict["tokens"][b, n] = np.searchsorted(share, inputs["next_uniforms"][b] * share[-1], side="right")
        return verdict

    for name in ("none", "half", "ragged"):
        fails(impl, next(case for case in CASES if case.name == f"accept_sampled-{name}"))


@pytest.mark.parametrize("case", cases("probabilities"), ids=lambda case: case.name)
def test_wrong_warps_fail(case):
    if "extreme" not in case.name:  # there one token has nearly all mass, whatever the penalties
        fails(changed(case, inflight=lambda tokens: tokens * 0), case)
        fails(changed(case, context=lambda rows: [row[:-5] for row in rows]), case)
    fails(lambda inputs: {"probabilities": reference_of(case)["probabilities"] * 1.001}, case)


@pytest.mark.parametrize("case", cases("append_rollback"), ids=lambda case: case.name)
def test_a_cache_that_trims_all_rows_alike_or_keeps_dropped_ones_fails(case):
    want = reference_of(case)
    alike = [tuple([min(lengths)] * len(lengths)) for lengths in want["lengths"]]
    fails(lambda inputs: want | {"lengths": alike}, case)
    fails(lambda inputs: want | {"keys": np.roll(want["keys"], 1, axis=1)}, case)
    fails(lambda inputs: want | {"values": want["keys"]}, case)
    fails(lambda inputs: want | {"dropped": [(0, 0, 0) for _ in want["dropped"]]}, case)


def one(name: str):
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("score_within-fp32", {"indices": lambda x: x + (np.arange(x.size).reshape(x.shape) == 0)}),
        ("score_within-fp32", {"heads": lambda heads: (heads[0], heads[2], heads[2])}),
        ("page_scores-fp32", {"page_size": lambda size: size + 1}),
        ("page_scores-bf16", {"q": lambda q: -q}),
        ("accumulate-longer", {"decay": lambda decay: decay + 0.01}),
        ("accumulate-a-row", {"decay": lambda decay: decay[::-1]}),
        ("smooth-3", {"width": lambda width: width + 2}),
        ("keep_mass-0.2", {"mass": lambda mass: 0.4}),
        ("keep_mass-0.9", {"num_recent_tokens": lambda count: 0, "mass": lambda mass: 0.0}),
        ("measures", {"logits": lambda logits: logits[..., ::-1]}),
        ("measures", {"tokens": lambda tokens: (tokens + 1) % 61}),
        ("measures", {"counts": lambda counts: np.maximum(counts - 1, 0)}),
    ],
)
def test_wrong_set_operations_fail(name, changes):
    fails(changed(one(name), **changes), one(name))


def test_a_score_outside_its_set_fails():
    case = one("score_within-fp32")

    def leaks(inputs):
        scores = specification(case.op, inputs)["scores"].copy()
        scores[0, np.flatnonzero(np.isneginf(scores[0, : inputs["lengths"][0]]))[0]] = 0.0
        return {"scores": scores}

    fails(leaks, case)


def test_cutting_a_whole_prefix_by_mass_fails():
    case = one("keep_mass-0.2")

    def cuts(inputs):
        outputs = {name: value.copy() for name, value in specification(case.op, inputs).items()}
        outputs["counts"][2] -= 1
        return outputs

    fails(cuts, case)
