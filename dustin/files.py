"""Files that a command is to write after minutes of work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dustin.errors import UsageError


def check_output(path: Path) -> None:
    """Raise UsageError where `path` cannot be written; nothing is left behind, and a file that is there stays as it is."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        if path.exists():
            if path.is_dir() or not os.access(path, os.W_OK):
                raise UsageError(f"cannot write {path}: it is {'a folder' if path.is_dir() else 'read-only'}")
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
