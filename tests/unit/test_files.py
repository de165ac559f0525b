"""Outputs are checked before the work that fills them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dustin.errors import UsageError
from dustin.files import check_output


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("text")
    check_output(tmp_path / "old")
    check_output(tmp_path / "new")
    check_output(Path(os.devnull))
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "text"


def test_what_cannot_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("text")
    with pytest.raises(UsageError, match="cannot write .*: it is a folder"):
        check_output(tmp_path)
    for folder in ("none", "old"):
        with pytest.raises(UsageError, match="there is no folder"):
            check_output(tmp_path / folder / "x")
    if Path("/proc/version").exists():
        with pytest.raises(UsageError, match="cannot write /proc/x: "):
            check_output(Path("/proc/x"))
    # The superuser may write what is read-only.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="it is read-only"):
        check_output(tmp_path / "old")
