"""The wheel holds every module and runs from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"dustin": "dustin"} | {name: f"dustin/{name}" for name in ("backends", "triton_kernels", "metal_kernels")}
BUILT = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt", "tests", "bench", "docs", *FOLDERS)


def copy(target: Path) -> Path:
    """A copy to build in: setuptools writes build/ and *.egg-info beside the sources."""
    target.mkdir()
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, made without a network."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    source = copy(tmp_path_factory.mktemp("source") / "tree")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


def modules() -> list[str]:
    """Where each source file must lie in the wheel."""
    found = []
    for folder, place in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".metal", ".html") or path.name == "py.typed":
                found.append(f"{place}/{path.relative_to(ROOT / folder)}")
    return found


def test_every_module_is_in_the_wheel(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    assert not [name for name in modules() if name not in names]
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"dustin"}, "nothing may install beside dustin: `backends` is another project's name"


def test_every_sub_folder_is_named() -> None:
    packages = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    needed = {name.rsplit("/", 1)[0].replace("/", ".") for name in modules() if name.endswith(".py")}
    assert needed <= packages


def test_the_sdist_can_be_tested(built: Path) -> None:
    import tarfile

    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"tests/test_packaging.py", "bench/rows.py", "constraints.txt", "dustin/cli.py", "backends/numpy_reference/backend.py"}
    wanted |= {"docs/method.md"}
    assert wanted <= names


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "dustin", "--help"],
        ["-m", "dustin", "generate", "--help"],
        ["-c", "import sys, dustin.backends.numpy_reference.backend as b; sys.exit('site' not in b.__file__ and b.__file__)"],
        ["-c", "import dustin; dustin.load; dustin.EngineOptions()"],
    ],
)
def test_it_runs_from_another_folder(unpacked: Path, tmp_path: Path, program: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUSTIN_")}
    environment["PYTHONPATH"] = str(unpacked)
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_it_runs_from_the_checkout() -> None:
    done = subprocess.run([sys.executable, "-m", "dustin", "--version"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("dustin, version")
