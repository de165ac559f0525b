"""Tokenizers from folders and GGUF files, streaming text, stop strings, compatibility."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Core

from dustin.errors import ModelError, TokenizerMismatch, UsageError
from dustin.text import Detokenizer, StopMatcher, TextStream, Tokenizer, check_compatible
from tests import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, bytes fall back to <0xNN>, decoding drops one leading space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for text in ["\u2581", "a", "b", "\u2581a", "\u2581b"]:
        vocab[text] = len(vocab)
    core = Core(models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(core, eos_ids=[2])


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@given(text=st.text())
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert "".join(stream(tokenizer, tokens)) == text == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(3, 258)))
def test_any_bytes_stream_to_what_the_library_decodes(tokenizer: Tokenizer, tokens: list[int]) -> None:
    assert "".join(stream(tokenizer, tokens)) == tokenizer.core.decode(tokens)


def test_split_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, tokenizer.encode("a\U0001f469b"))
    assert pieces == ["a", "", "", "", "\U0001f469", "b", ""]


def test_broken_character_shows_once_it_is_certain(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("\U0001f469")
    assert stream(tokenizer, [*tokens[:2], *tokenizer.encode("x")]) == ["", "", "\ufffdx", ""]
    assert stream(tokenizer, tokens[:2]) == ["", "", "\ufffd"]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert tokens[0] == 1 and tokens[-1] == 2 and tokenizer.decode(tokens) == "hi"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("text", ["a b", "a é\U0001f469 b", "b", " a"])
def test_sentencepiece_equals_the_library(text: str) -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode(text)
    assert "".join(stream(tokenizer, tokens)) == tokenizer.core.decode(tokens) == text


def test_sentencepiece_text_that_goes_on_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    token = tokenizer.core.token_to_id("\u2581a")
    assert Detokenizer(tokenizer).add(token) == "a"
    assert Detokenizer(tokenizer, continues=True).add(token) == " a"


@given(
    text=st.text(alphabet="abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, cuts: list[int], stops: list[str]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    matcher = StopMatcher(stops)
    shown = "".join(matcher.add(text[a:b]) for a, b in zip(edges, edges[1:], strict=False)) + matcher.finish()
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text[: sum(min(ends))] if ends else text
    assert shown == expected
    assert matcher.stopped == bool(ends)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END", "</s>"])
    pieces = {"abc": "abc", "dE": "d", "N": "", "x": "ENx", "<": "", "/": "", "s>": "", "more": ""}
    assert [matcher.add(piece) for piece in pieces] == list(pieces.values())
    assert matcher.matched == "</s>" and matcher.finish() == ""


def test_text_stream_stops_and_flushes(tokenizer: Tokenizer) -> None:
    sink = TextStream(tokenizer, ["stop"])
    assert "".join(sink.add(token) for token in tokenizer.encode("go stop now")) == "go "
    assert sink.stopped and sink.finish() == ""
    held = TextStream(tokenizer, ["stop"])
    assert "".join(held.add(token) for token in tokenizer.encode("go sto")) == "go "
    assert held.finish() == "sto" and not held.stopped


def test_all_ends_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (0, 2) and tokenizer.bos_id == 1


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<|im_start|><é>"),
        ("{% for m in messages %}{% break %}{% endfor %}", ""),
    ],
)
def test_template_environment(tmp_path: Path, template: str, expected: str) -> None:
    made = Tokenizer.load(tiny_model.write(tmp_path, template=template))
    assert made.render_chat([{"role": "user", "content": "<é>"}]) == expected


def test_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    made = Tokenizer.load(tiny_model.write(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(UsageError, match="roles must alternate"):
        made.render_chat([])


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    made = Tokenizer.load(tiny_model.write(tmp_path, template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"))
    with pytest.raises(UsageError, match="cannot render"):
        made.render_chat([])


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--raw"):
        Tokenizer.load(tiny_model.write(tmp_path, template=None)).render_chat([])


def test_jinja_file_and_named_templates(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path, template=None)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(folder).render_chat([]) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).render_chat([]) == "file"


def test_mismatch_names_the_first_differing_token(tokenizer: Tokenizer) -> None:
    other = Tokenizer(tiny_model.byte_tokenizer(("<|endoftext|>", "<|begin|>", "<|im_end|>")))
    with pytest.raises(TokenizerMismatch, match=r"token 1 is '<\|im_start\|>' in the target and '<\|begin\|>' in the draft"):
        check_compatible(tokenizer, other)


def test_longer_map_is_a_mismatch_but_unused_rows_are_not(tokenizer: Tokenizer) -> None:
    longer = tiny_model.byte_tokenizer()
    longer.add_tokens(["[PAD259]"])
    with pytest.raises(TokenizerMismatch, match=r"token 259 is nothing in the target and '\[PAD259\]'"):
        check_compatible(tokenizer, Tokenizer(longer))
    check_compatible(tokenizer, Tokenizer(longer, unused_ids=frozenset([259])))


@pytest.mark.parametrize("missing", ["tokenizer.json", "folder"])
def test_missing_tokenizer(tmp_path: Path, missing: str) -> None:
    source = tmp_path if missing == "tokenizer.json" else tmp_path / "none"
    with pytest.raises(ModelError, match=r"no tokenizer"):
        Tokenizer.load(source)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_utf8_is_refused() -> None:
    from dustin.errors import UsageError
    from dustin.text import Tokenizer
    from tests.tiny_model import byte_tokenizer

    with pytest.raises(UsageError, match=r"lone surrogate '\\udc80' at character 2"):
        Tokenizer(byte_tokenizer()).encode("ab\udc80")


def test_other_threads_run_while_a_long_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's rounds and streams go on beside a prompt of 100,000 tokens."""
    import threading
    import time

    from dustin import text as module
    from tests.tiny_model import byte_tokenizer

    tokenizer, turns, done = Tokenizer(byte_tokenizer()), [0], threading.Event()
    words = "Ein Wort und noch eins, 1234 mal. " * 20000

    def others() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        before = turns[0]
        ids = tokenizer.encode(words)
        meanwhile = turns[0] - before
    finally:
        done.set()
        thread.join()
    assert meanwhile > 20
    monkeypatch.setattr(module, "_LONG_TEXT", 10**9)
    assert tokenizer.encode(words) == ids
    monkeypatch.setattr(module, "_LONG_TEXT", 4)
    with pytest.raises(UsageError, match=r"lone surrogate '\\udc80' at character 6"):
        tokenizer.encode("wrong \udc80 text")
