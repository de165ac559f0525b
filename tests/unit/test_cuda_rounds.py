"""The benchmark's device rounds compute what the model's own calls compute (Triton's interpreter, CPU)."""

from __future__ import annotations

import pytest
import torch

from tests.unit.interpreted import interpreted, run_interpreted

pytest.importorskip("triton")


def test_under_the_interpreter():
    run_interpreted(__file__)


def make_side(seed: int, layers: int, batch: int, capacity: int):
    from bench.decode_rounds import Side
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.interfaces import Tap

    config = qwen2_config(64, 96, layers, 4, 2, 50, context_length=256)
    model = CudaModel(config, random_weights(config, torch.float32, torch.device("cpu"), seed), "toy")
    cache = model.new_cache(batch, capacity)
    for store in (*cache.pool.keys, *cache.pool.values):
        store.normal_(generator=torch.Generator().manual_seed(seed))
    return model, cache, Side(model, cache, Tap({layers - 1: (0, 1, 2, 3)}))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-4 * b.norm())


@interpreted
@pytest.mark.parametrize("kept", [[0, 3], [3, 1]])
def test_a_round_equals_the_models_own_calls(kept):
    from bench.decode_rounds import RoundOptions, Rounds
    from dustin.backends.torch_triton.ops import extend
    from dustin.interfaces import TokenSet

    batch, context = 2, 40
    target_model, target_cache, target = make_side(1, 2, batch, 64)
    draft_model, draft_cache, draft = make_side(2, 1, batch, 64)
    options = RoundOptions(True, True, num_draft_tokens=3, budget=16, num_sink_tokens=2, num_recent_tokens=4)
    table = torch.tensor([kept, [1, 2]], dtype=torch.int32)
    state = Rounds(target, draft, options, context, table)
    state.indices.copy_(torch.arange(16, dtype=torch.int32).repeat(batch, 1))
    state.whole()
    assert state.target_lengths.tolist() == [context + 1 + n for n in kept]
    assert state.draft_lengths.tolist() == [context + 1 + min(n, 2) for n in kept]
    assert state.verdict[:, 0].tolist() == kept

    # The second round by hand, through the host interface, from the same device state.
    for cache, lengths in ((target_cache, state.target_lengths), (draft_cache, state.draft_lengths)):
        cache.rollback([0] * batch)
        cache.advance(lengths.tolist())
    old = TokenSet(state.indices.clone(), state.counts.clone())
    starts = state.set_lengths.tolist()
    lag = [n + 1 - m for n, m in zip(state.target_lengths.tolist(), state.draft_lengths.tolist(), strict=True)]
    fed = torch.tensor(
        [[u, p] if two == 2 else [p, 0] for u, p, two in zip(state.unseen.tolist(), state.pending.tolist(), lag, strict=True)]
    )
    counts, expected = lag, []
    for _ in range(3):
        chosen = extend(old, starts, draft_cache.lengths)
        out = draft_model.forward(fed, counts, draft_cache, token_set=chosen, logits="last")
        fed, counts = out.logits.argmax(-1), [1] * batch
        expected.append(fed)
    drafts, lookahead = state.propose()
    assert torch.equal(drafts.long(), torch.cat(expected, 1))
    state.select(*state.score(lookahead))
    assert all(sorted(set(row)) == row and len(row) == 16 for row in state.indices.tolist())
    pending = state.pending[:, None].long()
    out = target_model.forward(
        torch.cat([pending, drafts.long()], 1), [4] * batch, target_cache, token_set=TokenSet(state.indices, state.counts)
    )
    logits, queries = state.verify(drafts)
    assert near(logits, out.logits)
    state.accept(drafts, logits, queries)
    assert state.verdict[:, 0].tolist() == [1, 2]
    assert [row[1:2] for row in state.verdict.tolist()] == [[d] for d in drafts[:, 0].tolist()]


@interpreted
def test_plain_steps_equal_the_models_own_calls():
    from bench.decode_rounds import RoundOptions, Rounds

    model, cache, side = make_side(1, 2, 2, 64)
    state = Rounds(side, side, RoundOptions(False, False), 40, torch.zeros(1, 2, dtype=torch.int32))
    state.plain_step()
    cache.advance([40, 40])
    out = model.forward(torch.ones(2, 1, dtype=torch.long), [1, 1], cache, logits="last")
    assert state.pending.tolist() == out.logits.argmax(-1)[:, 0].tolist()


@interpreted
def test_a_round_of_own_sets_equals_the_models_forward(monkeypatch):
    """Mode `own`: every kv head of every layer chooses by compact keys, which the bench has made for the whole pool."""
    from types import SimpleNamespace

    from bench import decode_own
    from bench.decode_rounds import RoundOptions, Rounds, Side
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
    from dustin.interfaces import Reselection, Tap, TokenSet

    monkeypatch.setattr(decode_own, "RANK", 32)
    batch, context, budget = 2, 70, 44
    config = qwen2_config(128, 96, 2, 4, 2, 50, context_length=256)
    model = CudaModel(config, random_weights(config, torch.float32, torch.device("cpu"), 1), "toy")
    pool = model.new_cache(batch + 1, 128).pool
    for store in (*pool.keys, *pool.values):
        store.normal_(generator=torch.Generator().manual_seed(1))
    again = decode_own.choice(SimpleNamespace(target=model, compact=None, choosing=0, own_layers=()), budget)
    cache = model.new_cache(batch, 128)
    assert cache.pool is pool
    target = Side(model, cache, Tap({1: (0, 1, 2, 3)}))
    _, _, draft = make_side(2, 1, batch, 128)
    options = RoundOptions(True, True, num_draft_tokens=3, budget=budget, again=again)
    state = Rounds(target, draft, options, context, torch.tensor([[0, 3]], dtype=torch.int32))
    drafts = torch.tensor([[3, 4, 5], [6, 7, 8]])
    got, _ = state.verify(drafts)
    shared, _ = Rounds(target, draft, RoundOptions(True, True, 3, budget), context, state.accepted).verify(drafts)
    assert not near(got, shared)

    model.compact = again.compact
    cache.advance([context] * batch)
    tokens = torch.cat([state.pending[:, None], drafts], 1)

    def by_the_model(layers):
        chosen = Reselection(dict.fromkeys(layers, (0, 1, 2, 3)), budget, 4, 32, rank=32, by_kv_head=True)
        token_set = TokenSet(state.indices.clone(), state.counts.clone(), reselection=chosen)
        out = model.forward(tokens, [4] * batch, cache, token_set=token_set).logits
        cache.rollback([context] * batch)
        return out

    assert near(got, by_the_model((0, 1)))
    # One layer beside the shared set.
    alone = decode_own.choice(SimpleNamespace(target=model, compact=again.compact, choosing=0, own_layers=(1,)), budget)
    one, _ = Rounds(target, draft, RoundOptions(True, True, 3, budget, again=alone), context, state.accepted).verify(drafts)
    assert near(one, by_the_model((1,)))
    assert not near(one, got) and not near(one, shared)


def test_layers_that_choose_beside_the_shared_set_are_layers_of_the_model():
    import click

    from bench.decode_own import layers_of

    assert layers_of("7, 2,7", 28) == (2, 7)
    assert layers_of("", 28) == ()
    for text in ("28", "-1", "a"):
        with pytest.raises(click.BadParameter, match=f"--own-layers is '{text}', expected layers of 0 to 27 as 7,12"):
            layers_of(text, 28)
