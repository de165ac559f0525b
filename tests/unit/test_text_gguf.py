"""A tokenizer out of GGUF metadata equals the same one built by hand."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import pre_tokenizers

from dustin.errors import ModelError
from dustin.text import Tokenizer

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(path: Path, pre: str = "smollm", *, add_bos: bool | None = None, model: str = "gpt2", padded: int = 0) -> Path:
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3) + [gguf.TokenType.UNUSED] * padded
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{len(tokens) + n}]" for n in range(padded)])
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.core.encode(text).tokens


def test_smollm_splits_digits_one_by_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf"))
    assert words(tokenizer, "hello w12") == ["hello", "Ġw", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("hello é w12")) == "hello é w12"
    assert tokenizer.eos_ids == (0, 2) and tokenizer.bos_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])[0] == 1


@pytest.mark.parametrize(("pre", "digits"), [("qwen2", ["1", "2"]), ("llama-bpe", ["12"])])
def test_regex_pre_tokenizers(tmp_path: Path, pre: str, digits: list[str]) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", pre, add_bos=False))
    assert words(tokenizer, "12") == digits
    assert tokenizer.decode(tokenizer.encode("it's  12\n\n x")) == "it's  12\n\n x"


def test_bos_as_the_file_says(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path / "a.gguf", add_bos=True)).encode("he")[0] == 1
    assert Tokenizer.load(write(tmp_path / "b.gguf", add_bos=False)).encode("he")[0] != 1
    assert Tokenizer.load(write(tmp_path / "c.gguf", "llama-bpe")).encode("he")[0] == 1
    assert 1 not in Tokenizer.load(write(tmp_path / "d.gguf", add_bos=True)).encode("he", add_special_tokens=False)


def test_padded_rows_are_no_tokens(tmp_path: Path) -> None:
    plain, padded = Tokenizer.load(write(tmp_path / "a.gguf")), Tokenizer.load(write(tmp_path / "b.gguf", padded=5))
    assert plain.token_map == padded.token_map
    assert padded.decode([plain.vocab_size + 1]) == ""


@pytest.mark.parametrize(("options", "message"), [({"model": "llama"}, "'llama'"), ({"pre": "tekken"}, "'tekken'")])
def test_unknown_kinds_are_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write(tmp_path / "m.gguf", **options))


@pytest.mark.parametrize("keep", [0, 10, 23, 100, 2000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="GGUF file|truncated"):
        Tokenizer.load(path)


def test_other_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        Tokenizer.load(path)
