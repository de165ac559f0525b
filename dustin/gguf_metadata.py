"""Key-value metadata of a GGUF file, read without touching its tensors (a few milliseconds where the full reader takes seconds)."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from dustin.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A position in the file's bytes; every read is checked against the end by struct or by length."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        end = self.at + size
        if end > len(self.data):
            raise struct.error("string beyond the end of the file")
        raw = self.data[self.at : end]
        self.at = end
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(count)]
            code = f"<{count}{_SCALARS[item]}"
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += struct.calcsize(code)
            return values
        return self.scalar(_SCALARS[kind])


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of `path`. Raise ModelError when it is no GGUF file, or a truncated one."""
    try:
        if path.stat().st_size < 24:
            raise ModelError(f"{path} is not a GGUF file: it has only {path.stat().st_size} bytes")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it starts with {data[:4]!r}, expected b'GGUF'")
            cursor.at = 4
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise ModelError(f"{path} is GGUF version {version}, expected 2 or 3 (little endian)")
            cursor.scalar("Q")  # tensor count
            count = cursor.scalar("Q")
            return {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(count)}
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, KeyError, MemoryError, OverflowError) as error:
        raise ModelError(f"{path} is damaged or truncated: its metadata ends early ({error}); fetch it again") from error
