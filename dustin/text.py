"""Tokens and text: tokenizer and chat template of a model folder or a GGUF file, and target/draft compatibility."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from dustin.chat_template import render
from dustin.detokenizer import Detokenizer, StopMatcher, TextStream
from dustin.errors import ModelError, TokenizerMismatch, UsageError

__all__ = ["Detokenizer", "StopMatcher", "TextStream", "Tokenizer", "check_compatible"]


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes stand for themselves, the rest begin at U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_alphabet()
# Characters of a text whose encoding takes a millisecond or so.
_LONG_TEXT = 2048


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens and chat template.

    `eos_ids` holds every token that ends an answer. `special_tokens` maps names such as `bos_token` to their text, as chat
    templates use them. `unused_ids` are rows of the embedding without a token.
    """

    def __init__(
        self,
        core: Any,
        *,
        eos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        unused_ids: frozenset[int] = frozenset(),
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.unused_ids = unused_ids
        self._added = {token: str(entry.content) for token, entry in core.get_added_tokens_decoder().items()}
        special = {token for token, entry in core.get_added_tokens_decoder().items() if entry.special}
        self.special_ids = frozenset(special | set(self.eos_ids))
        self._byte_level, self.strips_leading_space = _decoder_kind(core)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """The tokenizer of a model folder or a .gguf file. Raise ModelError with the reason."""
        path = Path(source)
        if path.is_dir():
            return _from_folder(path)
        if path.is_file():
            from dustin.gguf_tokenizer import from_gguf

            return from_gguf(path)
        raise ModelError(f"no tokenizer at {path}: it is neither a model folder nor a .gguf file")

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, where there is one."""
        name = self.special_tokens.get("bos_token")
        return None if name is None else self.core.token_to_id(name)

    @cached_property
    def token_map(self) -> dict[int, str]:
        """Token id -> its string in the vocabulary, without unused rows."""
        vocab = self.core.get_vocab(with_added_tokens=True)
        return {token: text for text, token in vocab.items() if token not in self.unused_ids}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.token_map, default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`; with `add_special_tokens` also those the model begins a text with (BOS)."""
        try:
            if len(text) > _LONG_TEXT:
                # This call alone lets other threads run meanwhile: a server's streams do not wait for a prompt to be encoded.
                return list(self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(self.core.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            # Python keeps bytes that are not UTF-8 as lone surrogates, which have no tokens.
            at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if at is None:
                raise
            raise UsageError(f"the text is not UTF-8: lone surrogate {ascii(text[at])} at character {at}") from error

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `tokens`."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*(stream.add(token) for token in tokens), stream.finish()])

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (none for an id without a token)."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes_of(token)
        return piece

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self.core.id_to_token(token)
        if text is None or token in self.unused_ids:
            return b""
        if self._byte_level:
            known = all(char in _BYTES for char in text)
            return bytes(_BYTES[char] for char in text) if known else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation in the model's own form. Raise UsageError where the model has no chat template."""
        if self.chat_template is None:
            raise UsageError("the model has no chat template: give a plain prompt (command line: --raw)")
        return render(self.chat_template, messages, self.special_tokens, add_generation_prompt)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Tokens of a conversation; the template itself writes BOS where the model wants it."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)


def prompt_items(prompt: Any) -> list[Any]:
    """A prompt that is no string as a list: all chat messages, or all token ids. Raise UsageError for anything else."""
    if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
        kind = type(prompt).__name__
        raise UsageError(f"the prompt is {kind} {prompt!r:.60}, expected a string, or a list of chat messages or of token ids")
    items = list(prompt)
    for index, item in enumerate(items):
        if isinstance(items[0], dict):
            if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("role", "content")):
                raise UsageError(f'message {index} is {item!r:.60}, expected {{"role": "user", "content": "..."}}')
        elif not isinstance(item, Integral) or isinstance(item, bool):
            raise UsageError(f"item {index} of the prompt is {item!r:.60}, expected a token id, or a string for the whole prompt")
    return items


def check_compatible(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise TokenizerMismatch, naming the first differing id, unless both give every id the same string.

    The maps are compared, not the sizes: padded embedding rows beyond them do not matter.
    """
    ours, theirs = target.token_map, draft.token_map
    if ours == theirs:
        return
    first = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    names = [repr(side[first]) if first in side else "nothing" for side in (ours, theirs)]
    raise TokenizerMismatch(
        f"target and draft have different tokenizers: token {first} is {names[0]} in the target and {names[1]} in the draft. "
        "Choose a draft of the same family, or --drafter self or lookup"
    )


def _decoder_kind(core: Any) -> tuple[bool, bool]:
    """(byte level?, drops one leading space?) from the tokenizer's decoder. Raise ModelError for kinds we cannot stream."""
    decoder = json.loads(core.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, any(part.get("prepend_scheme", "always") != "never" for part in parts if part["type"] == "Metaspace")
    if "ByteFallback" in kinds or "Replace" in kinds:
        return False, any(part.get("type") == "Strip" and part.get("start") for part in parts)
    raise ModelError(f"the tokenizer's decoder is {kinds[0]}, expected ByteLevel, Metaspace or ByteFallback")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _from_folder(folder: Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the eos ids of both configurations."""
    from tokenizers import Tokenizer as Core

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json: a model folder needs one (save it with a fast tokenizer)")
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"cannot read {file}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    eos = [core.token_to_id(special["eos_token"])] if "eos_token" in special else []
    for source in ("generation_config.json", "config.json"):
        ids = _read_json(folder / source).get("eos_token_id")
        eos += ids if isinstance(ids, list) else [ids]
    ends = [token for token in eos if isinstance(token, int)]
    return Tokenizer(core, eos_ids=ends, special_tokens=special, chat_template=_folder_template(folder, config))


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default", next(iter(named.values()), None))
    return template
