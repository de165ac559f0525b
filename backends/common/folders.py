"""Model folders: JSON files and the list of their weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dustin.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A parsed JSON object. Raise ModelError naming the file."""
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, expected a JSON object")
    return parsed


def weight_files(source: Path) -> list[Path]:
    """The .safetensors files of a folder, those that its index names where it has one. Raise ModelError on a missing one."""
    index = source / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        for shard in shards:
            if not (source / shard).is_file():
                raise ModelError(f"{source / shard} is missing: model.safetensors.index.json names it. Fetch the model again")
        files = [source / shard for shard in shards]
    else:
        files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{source} holds no .safetensors file")
    return files
