"""Running command lines in tests."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from dustin import cli as command_line

ROOT = Path(__file__).resolve().parents[2]


def dustin(
    environment: dict[str, str], *args: object, stdin: str | bytes = "", apart: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command line: here (quick), or `apart` in a process of its own where libraries read variables at import."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    words = [*map(str, args)]
    if apart:
        command = [sys.executable, "-m", "dustin", *words]
        done = subprocess.run(command, capture_output=True, input=data, check=False, env=environment, timeout=120)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())
    streams = [io.TextIOWrapper(io.BytesIO(start), "utf-8", newline="\n") for start in (data, b"", b"")]
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch.multiple(
        sys, stdin=streams[0], stdout=streams[1], stderr=streams[2]
    ):
        code = command_line.run(words)
    out, err = (stream.detach().getvalue().decode() for stream in streams[1:] if stream.flush() is None)
    return subprocess.CompletedProcess(words, code, out, err)


def fails(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One clear line, the right code, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(word in lines[-1] for word in words), lines[-1]


def popen(environment: dict[str, str], *args: object) -> subprocess.Popen[bytes]:
    """Start a command line in a process of its own, with pipes."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "dustin", *map(str, args)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


def first_output(process: subprocess.Popen[bytes]) -> bytes:
    """Wait for the first byte of the answer."""
    if process.stdout is None:
        raise RuntimeError("the process has no stdout pipe")
    return os.read(process.stdout.fileno(), 1)
