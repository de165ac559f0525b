"""The KV of a conversation in a file, so that a long document is read once and not once a day."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np

from dustin.errors import MemoryLimitError, UsageError
from dustin.files import check_output
from dustin.interfaces import KVCache, Model, PortableCache
from dustin.launch import world_size

FORMAT = "dustin-prompt-cache-1"
# Rows that a loaded cache has room for beyond its own: the next question and its answer.
_ROOM = 1024

Kept = dict[str, tuple[list[int], KVCache]]


def continued(tokens: list[int], cache: KVCache, prompt: list[int], again: int, capacity: int, roomy: int) -> KVCache:
    """The cache of `tokens` cut to what `prompt` shares with them, all but its last `again` tokens at most: the last token's
    logits give the first new one. Where `capacity` is too small it is copied into one of `roomy` rows."""
    longest = max(0, min(len(tokens), len(prompt) - again))
    common = next((i for i in range(longest) if tokens[i] != prompt[i]), longest)
    cache.rollback([min(common, *cache.lengths)])
    return cache if cache.capacity >= capacity else cache.take([0], roomy)


def take_up(session: Any, path: Path | None) -> str | None:
    """Load a file that is there; what happened in words. Raise UsageError where no KV could be kept in one."""
    if path is None:
        return None
    if world_size() > 1:
        raise UsageError("--prompt-cache-file has no use with several ranks, whose KV cache is spread over them: drop one of them")
    if not os.path.exists(path):
        session.prefix_cache = True
        check_output(path)
        return None
    return f"prompt cache {path}: {session.load_kept(path)} tokens"


def identity(tokenizer: Any, model: Model) -> str:
    """What the rows of one side depend on: weights, dtype and the meaning of token ids."""
    words = hashlib.sha256()
    for token, text in sorted(tokenizer.token_map.items() if tokenizer is not None else ()):
        words.update(f"{token}\0{text}\0".encode(errors="surrogatepass"))
    return f"{model.spec.fingerprint}/{model.spec.dtype}/{words.hexdigest()[:16]}"


def save(path: Path, kept: Kept, models: dict[str, Model], tokenizer: Any) -> int:
    """Write what is kept, whole or not at all; returns bytes. Raise UsageError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: its folder does not exist")
    if "target" not in kept:
        return 0
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for side, (tokens, cache) in kept.items():
        if not isinstance(cache, PortableCache):
            raise UsageError("--prompt-cache-file: a KV cache that is spread over ranks cannot be kept in a file")
        about[side] = {"name": models[side].spec.name, "identity": identity(tokenizer, models[side])}
        arrays[f"{side}.tokens"] = np.array(tokens, dtype=np.int32)
        for layer, rows in enumerate(cache.dump(0)):
            arrays[f"{side}.{layer}"] = np.ascontiguousarray(rows[:, : len(tokens)])
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(arrays, str(part), metadata={"format": FORMAT, "about": json.dumps(about)})
        os.replace(part, path)
    except (OSError, ValueError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return path.stat().st_size


def load(path: Path, models: dict[str, Model], tokenizer: Any) -> Kept:
    """What `save` wrote, of the sides that are loaded. Raise UsageError: no such file, damaged, or of another model."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UsageError(f"{path} is no prompt cache: its format is {metadata.get('format')!r}, expected {FORMAT!r}")
            about = json.loads(metadata["about"])
            kept: Kept = {}
            for side, model in models.items():
                if side in about:
                    kept[side] = _side(path, file, side, about[side], model, tokenizer)
            return kept
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read the prompt cache {path}: {getattr(error, 'strerror', None) or error}") from error


def _side(path: Path, file: Any, side: str, about: dict[str, str], model: Model, tokenizer: Any) -> tuple[list[int], KVCache]:
    if about["identity"] != identity(tokenizer, model):
        raise UsageError(
            f"{path} holds the KV of {about['name']} as {side}, in other weights, dtype or tokenizer than {model.spec.name} here: "
            "name another file, or delete this one"
        )
    tokens = [int(token) for token in file.get_tensor(f"{side}.tokens")]
    if len(tokens) > model.spec.context_length:
        raise UsageError(f"{path} holds {len(tokens)} tokens, more than the context of {model.spec.name}")
    room = min(model.spec.context_length, len(tokens) + _ROOM)
    try:
        cache = model.new_cache(1, room)
    except MemoryLimitError:
        cache = model.new_cache(1, max(len(tokens), 1))
    if not isinstance(cache, PortableCache):
        raise UsageError("--prompt-cache-file: a KV cache that is spread over ranks cannot be read from a file")
    cast(PortableCache, cache).restore(0, [file.get_tensor(f"{side}.{layer}") for layer in range(model.spec.num_layers)])
    return tokens, cache
