"""The Python API over small random models: option combinations, limits, and KV kept between turns."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dustin.config import SELECTORS, EngineOptions, RequestOptions, SamplingOptions, defaults
from dustin.errors import ContextLengthError, UsageError
from dustin.generation import Session
from tests.unit.engine_helpers import VOCAB, backend, draft, greedy, target

PROMPT = tuple(int(t) for t in np.random.default_rng(11).integers(0, VOCAB, 30))
REQUEST = RequestOptions(max_tokens=9)


def session(with_draft: bool = False, **options: object) -> Session:
    return Session(backend, target(), None, EngineOptions(**options), draft() if with_draft else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["auto", "ar", "dense", "exact"])
@pytest.mark.parametrize("with_draft", [False, True])
def test_lossless_modes_through_the_api(mode: str, with_draft: bool) -> None:
    result = session(with_draft, mode=mode).generate(PROMPT, REQUEST)
    assert tuple(result.tokens) == greedy(PROMPT, 9)
    assert result.finish_reason == "length"
    assert result.stats.generated_tokens == 9


def test_streaming_gives_the_same_tokens_and_closing_it_early_is_safe() -> None:
    one = session(mode="dense")
    assert tuple(r.token for r in one.stream_generate(PROMPT, REQUEST)) == greedy(PROMPT, 9)
    stream = one.stream_generate(PROMPT, REQUEST)
    assert next(stream).token == greedy(PROMPT, 9)[0]
    stream.close()
    assert tuple(one.generate(PROMPT, REQUEST).tokens) == greedy(PROMPT, 9)


CONVERSATION = {"budget": 16, "num_sink_tokens": 2, "num_recent_tokens": 4, "rectify_interval": 4, "exact_block": 6}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft", "self", "lookup", "none"])
@pytest.mark.parametrize("mode", ["auto", "ar", "dense", "sparse", "rectified", "exact"])
def test_a_kept_conversation_equals_a_cold_run(mode: str, drafter: str, temperature: float) -> None:
    if (mode, drafter) in {("auto", "none"), ("dense", "none"), ("sparse", "self"), ("rectified", "self"), ("ar", "draft")}:
        pytest.skip("a combination that is refused, or the same as another here")
    options = CONVERSATION | {"mode": mode, "drafter": drafter}
    with_draft = drafter == "draft"
    request = RequestOptions(max_tokens=9, sampling=SamplingOptions(temperature=temperature, seed=5))
    warm = session(with_draft, **options)
    warm.prefix_cache = True
    turn = PROMPT
    for question in ((5, 6, 7), (8, 9), (1, 2, 3, 4)):
        answer = list(warm.stream_generate(turn, request))
        tokens = tuple(r.token for r in answer)
        assert list(tokens) == session(with_draft, **options).generate(turn, request).tokens
        # Rows that sparse attention wrote are not trusted; the document's are.
        assert turn == PROMPT or answer[-1].stats.reused_prompt_tokens >= len(PROMPT)
        turn = (*turn, *tokens, *question)


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_kept_conversation_equals_a_cold_run_with_every_selector(selector: str) -> None:
    # A long first prompt, and a second turn of fewer tokens than selectors observe at its end.
    prompt = tuple(int(t) for t in np.random.default_rng(12).integers(0, VOCAB, 90))
    options = CONVERSATION | {"mode": "sparse", "selector": selector}
    warm = session(True, **options)
    warm.prefix_cache = True
    turn = (*prompt, *(r.token for r in warm.stream_generate(prompt, REQUEST)), 5)
    answer = list(warm.stream_generate(turn, REQUEST))
    assert [r.token for r in answer] == session(True, **options).generate(turn, REQUEST).tokens
    assert answer[-1].stats.reused_prompt_tokens >= 30


@pytest.mark.parametrize("sparse_draft", [False, True])
def test_the_draft_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch, sparse_draft: bool) -> None:
    warm = session(True, **CONVERSATION, mode="sparse", sparse_draft=sparse_draft)
    warm.prefix_cache = True
    first = [r.token for r in warm.stream_generate(PROMPT, REQUEST)]
    fed: list[int] = []
    plain = draft().forward

    def counting(tokens: object, num_tokens: list[int], *rest: object, **named: object) -> object:
        fed.append(sum(num_tokens))
        return plain(tokens, num_tokens, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(draft(), "forward", counting)
    list(warm.stream_generate((*PROMPT, *first, 5, 6, 7), REQUEST))
    # The prompt stays; of the answer a sparse draft's own rows are read again.
    assert fed[0] <= len(first) + 4 if sparse_draft else fed[0] <= 5


def test_a_turn_without_the_draft_keeps_the_drafts_rows() -> None:
    from dataclasses import replace

    warm = session(True, **CONVERSATION, mode="sparse")
    warm.prefix_cache = True
    turn = (*PROMPT, *(r.token for r in warm.stream_generate(PROMPT, REQUEST)), 5)
    sparse = warm.options
    warm.options = replace(sparse, mode="ar")
    turn = (*turn, *(r.token for r in warm.stream_generate(turn, REQUEST)), 6)
    assert len(warm._kept["draft"][0]) >= len(PROMPT) - 1
    warm.options = sparse
    answer = [r.token for r in warm.stream_generate(turn, REQUEST)]
    assert answer == session(True, **CONVERSATION, mode="sparse").generate(turn, REQUEST).tokens


def test_a_conversation_that_outgrows_its_cache_is_copied_not_read_again() -> None:
    warm = session(mode="ar")
    warm.prefix_cache = True
    turn = PROMPT
    seen = set()
    for _ in range(5):
        turn = (*turn, *(r.token for r in warm.stream_generate(turn, REQUEST)), *range(30))
        seen.add(warm._kept["target"][1].capacity)
        answer = list(warm.stream_generate(turn, REQUEST))
        assert [r.token for r in answer] == list(greedy(turn, 9))
        assert answer[-1].stats.reused_prompt_tokens >= len(turn) - 31
    assert len(seen) > 1


def test_another_document_shares_nothing() -> None:
    warm = session(mode="ar")
    warm.prefix_cache = True
    list(warm.stream_generate(PROMPT, REQUEST))
    other = tuple(reversed(PROMPT))
    assert [r.token for r in warm.stream_generate(other, REQUEST)] == list(greedy(other, 9))


@pytest.mark.parametrize(
    ("options", "with_draft", "says"),
    [
        ({"drafter": "draft"}, False, "no draft model"),
        ({"drafter": "none", "mode": "dense"}, False, "needs a drafter"),
        ({"drafter": "self", "mode": "sparse"}, False, "gains nothing"),
        ({"selector": "lookahead", "mode": "sparse"}, False, "draft model's queries"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options: dict[str, object], with_draft: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        session(with_draft, **options).generate(PROMPT, REQUEST)


def test_exact_sampling_refuses_a_set_that_depends_on_its_drafts() -> None:
    sampled = RequestOptions(max_tokens=4, sampling=SamplingOptions(temperature=1.0))
    with pytest.raises(UsageError, match="lookahead_lag 1, got 0"):
        session(True, mode="exact", lookahead_lag=0).generate(PROMPT, sampled)
    session(True, mode="exact").generate(PROMPT, sampled)


def test_the_context_is_a_limit_and_the_message_has_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"600 tokens.*511"):
        session().generate([1] * 600, REQUEST)
    result = session(mode="ar").generate([1] * 505, RequestOptions(max_tokens=50))
    assert len(result.tokens) == 7 and result.finish_reason == "length"
    assert any("lowered from 50 to 7" in text for text in result.stats.warnings)


def test_drafts_never_pass_the_drafts_context() -> None:
    result = session(True, mode="dense", num_draft_tokens=4).generate([1] * 500, RequestOptions(max_tokens=50))
    assert len(result.tokens) == 8
    assert any("draft" in text for text in result.stats.warnings)


def test_max_kv_size_is_refused_when_it_cannot_hold_the_prompt() -> None:
    with pytest.raises(ContextLengthError, match="max-kv-size"):
        session(max_kv_size=20).generate(PROMPT, REQUEST)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1]])
def test_bad_prompts(prompt: list[int]) -> None:
    with pytest.raises(UsageError):
        session().generate(prompt, REQUEST)


@pytest.mark.parametrize(
    "options",
    [{"budget": 36}, {"mode": "fast"}, {"num_draft_tokens": 0}, {"lookahead_share": 1.5}, {"selector": "best"}, {"exact_block": 0}],
)
def test_bad_options_name_the_value(options: dict[str, object]) -> None:
    (value,) = options.values()
    with pytest.raises(UsageError, match=str(value)):
        EngineOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        (RequestOptions, "max_tokens", "5", "max_tokens is '5', expected a whole number"),
        (RequestOptions, "max_tokens", 5.5, "max_tokens is 5.5, expected a whole number"),
        (RequestOptions, "max_tokens", True, "max_tokens is True, expected a whole number"),
        (RequestOptions, "stop", (1,), "stop is (1,), expected a string or several"),
        (RequestOptions, "ignore_eos", 1, "ignore_eos is 1, expected True or False"),
        (RequestOptions, "sampling", {"temperature": 1}, "expected SamplingOptions(...)"),
        (SamplingOptions, "temperature", None, "temperature is None, expected a number"),
        (SamplingOptions, "seed", 1.0, "seed is 1.0, expected a whole number"),
        (EngineOptions, "dense_layers", 3, "dense_layers is 3, expected whole numbers"),
        (EngineOptions, "mode", None, "mode is None, expected a string"),
        (EngineOptions, "max_kv_size", "1", "max_kv_size is '1', expected a whole number"),
    ],
)
def test_values_of_a_wrong_type_are_refused(kind: type, name: str, value: object, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        kind(**{name: value})


def test_lists_and_single_strings_become_tuples_and_numpy_numbers_are_numbers() -> None:
    # Left as it is, "END" would stop at each of its letters.
    assert RequestOptions(stop="END").stop == ("END",) and RequestOptions(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert EngineOptions(dense_layers=[1, 2]).dense_layers == (1, 2)  # type: ignore[arg-type]
    assert SamplingOptions(temperature=1, seed=np.int64(3), top_p=np.float32(0.5)).seed == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "the prompt is int 5, expected a string"),
        (b"hi", "the prompt is bytes b'hi', expected a string"),
        ({"role": "user", "content": "x"}, "the prompt is dict"),
        ([1, 2.5], "item 1 of the prompt is 2.5, expected a token id"),
        (["a"], "item 0 of the prompt is 'a', expected a token id"),
        ([{"role": "user"}], 'message 0 is {\'role\': \'user\'}, expected {"role": "user", "content": "..."}'),
        ([{"role": "user", "content": "x"}, 3], "message 1 is 3"),
    ],
)
def test_prompts_of_a_wrong_kind_are_refused(prompt: object, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        session().generate(prompt)  # type: ignore[arg-type]


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(UsageError, match="request is {'max_tokens': 3}, expected RequestOptions"):
        session().generate(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a list of prompts"):
        session().batch_generate("two", REQUEST)  # type: ignore[arg-type]
    assert session().generate(np.array(PROMPT), REQUEST).tokens == list(greedy(PROMPT, 9))  # type: ignore[arg-type]


def test_defaults_are_readable() -> None:
    assert defaults(EngineOptions)["budget"] == 1024


def test_a_seed_repeats_in_auto_whatever_the_clock_says() -> None:
    request = RequestOptions(max_tokens=9, sampling=SamplingOptions(temperature=1.0, seed=3))
    assert session(mode="auto").generate(PROMPT, request).tokens == session(mode="ar").generate(PROMPT, request).tokens
    result = session(True, mode="auto").generate(PROMPT, request)
    assert result.tokens == session(True, mode="dense").generate(PROMPT, request).tokens
    assert any("seed repeats" in text for text in result.stats.warnings)


def test_stopping_while_the_prompt_is_read_keeps_what_was_read() -> None:
    warm = session(mode="ar", prefill_chunk=8)
    warm.prefix_cache = True

    def give_up(done: int, total: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(warm.stream_generate(PROMPT, REQUEST, progress=give_up))
    answer = list(warm.stream_generate(PROMPT, REQUEST))
    assert answer[-1].stats.reused_prompt_tokens >= 14
    assert [r.token for r in answer] == list(greedy(PROMPT, 9))


@pytest.mark.parametrize("mode", ["ar", "sparse", "exact"])
def test_an_answer_cut_short_counts_no_reads_of_tokens_it_does_not_have(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    one = session(mode=mode, drafter="none", budget=16, num_sink_tokens=2, num_recent_tokens=4, exact_block=4)
    forward, calls = target().forward, 0

    def interrupted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 8:  # in mode exact in the midst of a block
            raise KeyboardInterrupt
        return forward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(target(), "forward", interrupted)
    read, stats = [], None
    with pytest.raises(KeyboardInterrupt):
        for response in one.stream_generate(PROMPT, REQUEST):
            stats = response.stats
            read.append(stats.kv_bytes_read)
    assert stats is not None and 0 < len(read) < REQUEST.max_tokens
    assert stats.kv_bytes_read == read[-1] > 0
    assert mode != "ar" or stats.kv_read_share == 1


def test_a_conversation_never_asks_for_more_than_max_kv_size() -> None:
    warm = session(mode="ar", max_kv_size=60)
    warm.prefix_cache = True
    list(warm.stream_generate(PROMPT, REQUEST))
    assert warm._kept["target"][1].capacity <= 60


def test_each_request_gets_the_logprobs_it_asked_for() -> None:
    requests = [RequestOptions(max_tokens=3, top_logprobs=0), RequestOptions(max_tokens=3, top_logprobs=5), REQUEST]
    results = session(mode="ar").batch_generate([PROMPT] * 3, requests)
    assert [len(r.logprobs[0].top_tokens) for r in results[:2]] == [0, 5]
    assert results[2].logprobs == []


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("mode", ["dense", "sparse", "exact"])
def test_no_cache_is_larger_than_its_context(monkeypatch: pytest.MonkeyPatch, mode: str, with_draft: bool) -> None:
    for model in (target(), draft()):
        plain = model.new_cache

        def checked(batch: int, capacity: int, plain: object = plain, model: object = model) -> object:
            assert capacity <= model.spec.context_length  # type: ignore[attr-defined]
            return plain(batch, capacity)  # type: ignore[operator]

        monkeypatch.setattr(model, "new_cache", checked)
    drafter = "auto" if with_draft or mode != "sparse" else "lookup"
    result = session(with_draft, mode=mode, drafter=drafter).generate([1] * 490, RequestOptions(max_tokens=100))
    assert result.finish_reason == "length"
