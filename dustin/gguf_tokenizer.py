"""A tokenizer from the metadata of a GGUF file: byte-level BPE with the pre-tokenizers of SmolLM, Qwen2 and Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustin.errors import ModelError
from dustin.gguf_metadata import read_metadata
from dustin.text import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": _WORDS + r"\p{N}" + _REST, "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST}
_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}

# Files name one end token; chat models also end turns with these.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>")


def from_gguf(path: Path) -> Tokenizer:
    """Tokenizer, special tokens and chat template of a GGUF file. Raise ModelError for kinds not listed above."""
    meta = read_metadata(path)
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(f"{path} has a tokenizer of type {model!r}, expected 'gpt2' (byte-level BPE): use its folder")
    try:
        tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    except KeyError as error:
        raise ModelError(f"{path} has no {error.args[0]} in its metadata: the file holds no tokenizer") from error
    kinds = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    core = _build(path, meta, tokens, merges, kinds)
    special = {}
    for name, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}.items():
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and token < len(tokens):
            special[name] = tokens[token]
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(tokens) if kinds[token] == _CONTROL and text in _ENDS]
    if meta.get("tokenizer.ggml.add_bos_token", _pre(meta) == "llama-bpe") and "bos_token" in special:
        _prepend(core, special["bos_token"])
    return Tokenizer(
        core,
        eos_ids=[token for token in ends if token is not None],
        special_tokens=special,
        chat_template=meta.get("tokenizer.chat_template"),
        unused_ids=frozenset(token for token, kind in enumerate(kinds) if kind == _UNUSED),
    )


def _pre(meta: Mapping[str, Any]) -> str:
    name = meta.get("tokenizer.ggml.pre", "default")
    return _NAMES.get(name, name)


def _build(path: Path, meta: Mapping[str, Any], tokens: list[str], merges: list[str], kinds: list[int]) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    pre = _pre(meta)
    parts: list[Any]
    if pre == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre in _SPLITS:
        parts = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        raise ModelError(f"{path} has the pre-tokenizer {pre!r}, expected smollm, qwen2 or llama-bpe: use its folder")
    vocab = {text: token for token, text in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    core = Core(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(parts)
    core.decoder = decoders.ByteLevel()
    named = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text, kind in named if kind == _CONTROL])
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text, kind in named if kind == _USER_DEFINED])
    return core


def _prepend(core: Any, bos: str) -> None:
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, core.token_to_id(bos))]
    )
