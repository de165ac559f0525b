"""Dependence goes downwards only, and nothing heavy is imported before a model is loaded."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What the extra `serve` brings, for dustin/serving alone.
SERVER = {"starlette", "uvicorn", "prometheus_client"}
HEAVY = {"torch", "mlx", "mlx_lm", "triton", "transformers"}
# What each folder must never import, wherever in a file.
FORBIDDEN = {
    "backends": ("dustin.engine", "dustin.cli", "dustin.generation", "dustin.drafting", "dustin.selection", "dustin.acceptance"),
    "triton_kernels": ("dustin.engine", "dustin.cli", "dustin.generation", "dustin.backends", "dustin.interfaces"),
    "metal_kernels": ("dustin.engine", "dustin.cli", "dustin.generation", "dustin.backends", "dustin.interfaces"),
}


def imports(tree: ast.AST, nested: bool) -> Iterator[str]:
    """Full names of imported modules; without `nested` only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from (name for other in node.orelse for name in imports(ast.Module([other], []), nested))
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, nested)


def below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", files("dustin"), ids=lambda path: path.stem)
def test_the_engine_imports_no_framework(path: Path) -> None:
    names = set(imports(ast.parse(path.read_text()), nested=False))
    assert not [name for name in names if name.split(".")[0] in HEAVY]
    third_party = {name.split(".")[0] for name in names if not name.startswith(".")} - set(sys.stdlib_module_names)
    assert third_party <= {"dustin", "numpy", "click"} | (SERVER if path.parent.name == "serving" else set())


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_lower_layers_do_not_look_up(folder: str) -> None:
    for path in files(folder):
        for name in imports(ast.parse(path.read_text()), nested=True):
            upward = [module for module in FORBIDDEN[folder] if below(name, module)]
            assert not upward, f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in ("backends", "triton_kernels", "metal_kernels"), f"{path}: use dustin.{name}"


def test_kernels_know_no_models() -> None:
    for folder in ("triton_kernels", "metal_kernels"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / "backends" / "__init__.py").exists()


def test_importing_everything_loads_no_framework() -> None:
    paths = [path.relative_to(ROOT).with_suffix("") for path in files("dustin") if path.stem not in ("__init__", "__main__")]
    modules = [".".join(path.parts) for path in paths if path.parts[1] != "serving" or importlib.util.find_spec("uvicorn")]
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import dustin\nfor name in dustin.__all__: getattr(dustin, name)\n"
        f"found = {HEAVY | {'huggingface_hub', 'tokenizers', 'jinja2', 'gguf', 'rich'}!r} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(found)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_walk_sees_what_it_must() -> None:
    source = "import os\nif True:\n    import torch\ndef f():\n    from mlx import core\nclass A:\n    import triton.language\n"
    assert set(imports(ast.parse(source), nested=False)) == {"os", "torch", "triton.language"}
    assert "mlx.core" in set(imports(ast.parse(source), nested=True))
