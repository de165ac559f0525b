"""`help(dustin)`: the example in it runs, every public name is documented, exported and typed."""

from __future__ import annotations

import contextlib
import inspect
import io
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dustin
from tests.docs.running import run_python

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_of_the_module_run(tmp_path: Path) -> None:
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", dustin.__doc__ or "")
    assert len(blocks) == 2
    out = run_python("\n".join(textwrap.dedent(block) for block in blocks), tmp_path)
    assert out.strip()


def test_help_shows_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(dustin))
    for name in dustin.__all__:
        assert re.search(rf"^    (class )?{name}\b", text, re.M), name
    with contextlib.redirect_stdout(io.StringIO()) as out:
        help(dustin.Session)
    assert "agenerate" in out.getvalue()


@pytest.mark.parametrize("name", dustin.__all__)
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    thing = getattr(dustin, name)
    assert name in dir(dustin) and (thing.__doc__ or "").strip()
    calls = [thing] if inspect.isfunction(thing) else [
        member for attribute, member in vars(thing).items() if inspect.isfunction(member) and not attribute.startswith("_")
    ]  # fmt: skip
    for call in calls:
        signature = inspect.signature(call)
        assert call.__doc__, f"{call.__qualname__} has no docstring"
        assert signature.return_annotation is not inspect.Signature.empty, call.__qualname__
        untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
        assert not untyped, f"{call.__qualname__}: {untyped}"


def test_type_checkers_see_the_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (ROOT / "dustin" / "py.typed").is_file()
    (tmp_path / "user.py").write_text(
        "import dustin\n"
        "async def main(session: dustin.Session) -> None:\n"
        "    reveal_type(dustin.load())\n"
        "    reveal_type(session.generate('x').text)\n"
        "    reveal_type(await session.agenerate('x'))\n"
        "    async for response in session.astream_generate('x'):\n"
        "        reveal_type(response.stats.acceptance_rate)\n"
        "    dustin.EngineOptions(budget='many')\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", "user.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"MYPYPATH": str(ROOT)})
    # Versions of mypy differ in whether they write "builtins.".
    seen = [name.removeprefix("builtins.") for name in re.findall(r'Revealed type is "([\w.]+)"', done.stdout)]
    assert seen == ["dustin.generation.Session", "str", "dustin.responses.GenerationResult", "float"], done.stdout + done.stderr
    assert "incompatible type" in done.stdout
