"""Where calls are recorded by their shape, the end of a text takes the shapes of its middle, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dustin.backends.torch_triton.backend import TorchBackend
from dustin.backends.torch_triton.cuda_graphs import few_sizes, table_columns
from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
from dustin.backends.torch_triton.model import TorchModel
from dustin.config import EngineOptions, RequestOptions, SamplingOptions
from dustin.generation import Session
from dustin.interfaces import TokenSet

DRAFTS, BLOCK, VOCABULARY = 3, 7, 24


class Recording(TorchBackend):
    recorded_rows = 64


class Chain(TorchModel):
    """A model that takes all steps of a draft at once, and notes how many."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps: list[int] = []
        self.rows: list[int] = []

    def forward(self, tokens: torch.Tensor, *given: Any, **more: Any) -> Any:
        self.rows.append(tokens.shape[1])
        return super().forward(tokens, *given, **more)

    def draft_greedy(
        self, tokens: torch.Tensor, num_tokens: Sequence[int], cache: Any, steps: int, *,
        token_set: TokenSet | None = None, set_lengths: Sequence[int] = (), tap: Any = None,
    ) -> Any:  # fmt: skip
        self.steps.append(steps)
        backend, made, queries = TorchBackend(torch.device("cpu")), [], []
        for _ in range(steps):
            chosen = None if token_set is None else backend.extend(token_set, set_lengths, cache.lengths)
            out = super().forward(tokens, num_tokens, cache, token_set=chosen, tap=tap, logits="last")
            tokens, num_tokens = backend.argmax(out.logits), [int(n > 0) for n in num_tokens]
            made.append(tokens)
            queries.append(out.queries)
        return torch.cat(made, 1), backend.concat_queries(queries)


def generate(backend: TorchBackend, kinds: tuple[type, type], mode: str, tokens: int, context: int = 256):
    models = []
    for (seed, layers), kind in zip(((1, 2), (1, 1)), kinds, strict=True):
        config = qwen2_config(64, 96, layers, 4, 2, VOCABULARY, context_length=context)
        models.append(kind(config, random_weights(config, torch.float32, torch.device("cpu"), seed), f"{layers} layers"))
    options = EngineOptions(
        mode=mode, drafter="draft", budget=24, num_sink_tokens=2, num_recent_tokens=4, exact_block=BLOCK, num_draft_tokens=DRAFTS
    )
    session = Session(backend, models[0], None, options, models[1])
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (60, 51)]
    answers = [r.tokens for r in session.batch_generate(prompts, RequestOptions(max_tokens=tokens, ignore_eos=True))]
    return answers, models


@pytest.mark.parametrize("mode", ["dense", "sparse", "rectified", "exact"])
@pytest.mark.parametrize("tokens", [3, 18, 23])
def test_the_end_of_a_text_needs_no_shape_of_its_own(mode, tokens):
    device = torch.device("cpu")
    expected, _ = generate(TorchBackend(device), (TorchModel, TorchModel), mode, tokens)
    answers, (target, draft) = generate(Recording(device), (Chain, Chain), mode, tokens)
    assert answers == expected
    assert all(len(answer) == tokens for answer in answers)
    # Any number of steps are replays of the same two graphs; a block ends with one more than a round has.
    assert {DRAFTS} <= set(draft.steps) <= ({DRAFTS, DRAFTS + 1} if mode == "exact" else {DRAFTS})
    if mode == "exact":
        # After the prompt: sparse rounds, checks of a whole block, and where one token is left, that alone.
        assert set(target.rows[1:]) <= {1 + DRAFTS, 1 + BLOCK, 1}
        assert 1 + BLOCK in target.rows


def test_a_draft_that_fell_behind_catches_up_in_few_shapes():
    """After rounds of plain decoding the steps are the usual ones, over the same rows as if it had followed all along."""
    from dustin.drafting import ModelDrafter
    from dustin.interfaces import RoundState, Tap
    from dustin.sequence import warp_batch
    from dustin.stats import Stats

    config = qwen2_config(64, 96, 1, 4, 2, VOCABULARY, context_length=256)
    weights = random_weights(config, torch.float32, torch.device("cpu"), 1)
    options = EngineOptions(mode="dense", num_draft_tokens=DRAFTS)
    warp = warp_batch([RequestOptions().sampling] * 2)
    texts = [torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (60, 41)]
    made = []
    for known in ((58, 39), (47, 39), (25, 38)):
        model = Chain(config, weights, "draft")
        drafter = ModelDrafter(Recording(torch.device("cpu")), model, Tap({0: (0,)}), options, Stats())
        drafter.start([text[: n + 1] for text, n in zip(texts, known, strict=True)], 128, None)
        model.rows.clear()
        state = RoundState(
            texts, (True, True), (DRAFTS, DRAFTS), DRAFTS, warp, [[0.0] * DRAFTS] * 2, None, model.new_cache(1, 1), None, (),
            lambda: None, planned=DRAFTS,
        )  # fmt: skip
        made.append(drafter.propose(state).tokens.tolist())
        assert model.steps == [DRAFTS] and model.rows in ([], [16], [64])
        assert list(drafter.cache.lengths) == drafter.dense_rows == [62, 43]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(("missed", "read"), [(20, [32]), (150, [64, 64, 32]), (300, [256, 64])])
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_what_a_draft_missed_is_read_in_pieces_of_few_widths(missed, read, heat):
    from dustin.drafting import ModelDrafter
    from dustin.interfaces import RoundState, Tap
    from dustin.sequence import warp_batch
    from dustin.stats import Stats

    config = qwen2_config(64, 96, 1, 4, 2, VOCABULARY, context_length=512)
    weights = random_weights(config, torch.float32, torch.device("cpu"), 1)
    text = torch.randint(0, VOCABULARY, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    warp = warp_batch([RequestOptions(sampling=SamplingOptions(temperature=heat, seed=1)).sampling])
    made = []
    for known in (398, 399 - missed):
        model = Chain(config, weights, "draft")
        drafter = ModelDrafter(Recording(torch.device("cpu")), model, Tap({0: (0,)}), EngineOptions(num_draft_tokens=3), Stats())
        drafter.start([text[: known + 1]], 512, None)
        model.rows.clear()
        state = RoundState(
            [text], (True,), (3,), 3, warp, [[0.4] * 3], None, model.new_cache(1, 1), None, (), lambda: None, planned=3,
        )  # fmt: skip
        made.append(drafter.propose(state).tokens.tolist())
        # Where something is drawn, steps are taken one by one: a few missed tokens are fed with the first.
        expected = read if missed > 64 or not heat else [missed + 1]
        assert [n for n in model.rows if n > 2] == (expected if known < 398 else [])
        assert drafter.dense_rows == list(drafter.cache.lengths)
    assert made[0] == made[1]


def test_a_full_context_has_no_room_for_spare_steps():
    """The last drafts end where the context does."""
    device = torch.device("cpu")
    expected, _ = generate(TorchBackend(device), (TorchModel, TorchModel), "dense", 12, context=72)
    answers, (_, draft) = generate(Recording(device), (Chain, Chain), "dense", 12, context=72)
    assert answers == expected
    assert max(draft.steps) <= DRAFTS


def test_small_caches_share_what_is_recorded_on_a_gpu():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert {table_columns(n, cuda) for n in (1, 7, 36, 64)} == {64} and table_columns(65, cuda) == few_sizes(65)
    assert [table_columns(n, cpu) for n in (1, 7, 17)] == [1, 7, 18]


def test_few_sizes_are_at_most_an_eighth_more():
    assert [few_sizes(n) for n in (1, 7, 15, 16, 17, 131, 503, 2048)] == [1, 7, 15, 16, 18, 144, 512, 2048]
    for n in range(1, 5000):
        assert n <= few_sizes(n) <= n * 9 / 8
        assert few_sizes(few_sizes(n)) == few_sizes(n)
