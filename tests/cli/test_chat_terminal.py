"""The chat in a real terminal: tmux types, pastes, presses Ctrl-C, and the screen is read back."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.running import ROOT

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: no real terminal to try the chat in")

COLUMNS, ROWS = 80, 20


class Terminal:
    """A tmux server of its own with one window that runs a shell."""

    def __init__(self, socket: Path, environment: dict[str, str], columns: int) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(ROWS)]
        shell = ["sh", "-c", "PS1='$ ' exec sh -i"]
        subprocess.run([*self._tmux, "new-session", "-d", "-s", "test", *size, *shell], check=True, env=environment)

    def run(self, *args: str, stdin: str | None = None) -> str:
        done = subprocess.run([*self._tmux, *args], input=stdin, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout

    def screen(self) -> list[str]:
        return self.run("capture-pane", "-p", "-t", "test").splitlines()

    def everything(self) -> str:
        """The screen and what went off its top, lines unwrapped."""
        return self.run("capture-pane", "-p", "-J", "-S", "-500", "-t", "test")

    def keys(self, *names: str) -> None:
        self.run("send-keys", "-t", "test", *names)

    def type(self, text: str) -> None:
        self.run("send-keys", "-t", "test", "-l", text)
        self.keys("Enter")

    def paste(self, text: str) -> None:
        self.run("load-buffer", "-", stdin=text)
        self.run("paste-buffer", "-p", "-t", "test")

    def wait(self, ready: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
        """The screen, once `ready` says so of it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            screen = self.screen()
            if ready(screen):
                return screen
            time.sleep(0.1)
        pytest.fail("the screen never came:\n" + "\n".join(screen))

    def wait_for(self, text: str) -> list[str]:
        """Text that may be cut by the edge of the screen."""
        return self.wait(lambda _: text in self.run("capture-pane", "-p", "-J", "-t", "test"))

    def wait_for_prompt(self) -> list[str]:
        return self.wait(lambda screen: bool(filled := [line for line in screen if line]) and filled[-1].rstrip() == ">")

    def close(self) -> None:
        self.run("kill-server")


@pytest.fixture
def terminal(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(columns: int = COLUMNS) -> Terminal:
        kept = {name: value for name, value in environment.items() if not name.startswith(("TMUX", "NO_COLOR"))}
        mine = {"DUSTIN_MODE": "dense", "DUSTIN_DRAFTER": "lookup", "LC_ALL": "C.UTF-8"}
        opened.append(Terminal(tmp_path / f"tmux{len(opened)}", kept | mine, columns))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def command(model: Path, *args: object) -> str:
    words = [sys.executable, "-m", "dustin", "chat", "-m", model, "--ignore-eos", *args]
    return f"cd {shlex.quote(str(ROOT))} && {shlex.join(map(str, words))}; echo left with $?"


def test_status_line_ctrl_c_and_a_clean_screen_after(terminal: Callable[..., Terminal], slow: Path) -> None:
    one = terminal()
    one.type(command(slow, "-n", 40_000))
    one.wait_for_prompt()
    one.type("hello")
    # The answer flows above a last row that tells how it goes.
    one.wait(lambda screen: all(part in screen[-1] for part in (" tok/s", "KV read", " of 50000 tokens")))
    one.wait(lambda screen: "hello" not in "\n".join(screen))  # it scrolls
    assert "tok/s" in one.screen()[-1] and sum("tok/s" in line for line in one.screen()) == 1
    one.keys("C-c")
    one.wait_for("[stopped]")
    screen = one.wait_for_prompt()
    assert sum("tok/s" in line for line in screen) == 1 and any(line.startswith("[") and "tok/s" in line for line in screen)
    one.type("/stats")
    one.wait_for("conversation: 1 answer,")
    # Ctrl-C twice at the prompt leaves, and the terminal is as it was: it echoes, and all of its rows scroll.
    one.keys("C-c")
    one.wait_for("Ctrl-C again")
    one.keys("C-c")
    one.wait_for("left with 130")
    one.type("clear; stty -a | grep -o -- '-*echo '; seq 40")
    screen = one.wait(lambda screen: "40" in screen)
    assert screen[:ROWS - 1] == [str(number) for number in range(40 - ROWS + 2, 41)]
    one.type("clear; stty -a | grep -o -- '[-]*echo '")
    assert "-echo" not in "\n".join(one.wait_for("echo")[1:])


def test_a_long_paste_is_one_message(terminal: Callable[..., Terminal], slow: Path, tmp_path: Path) -> None:
    one = terminal()
    save = tmp_path / "c.json"
    one.type(command(slow, "-n", 3))
    one.wait_for_prompt()
    # Longer than any terminal passes on in one line, with lines that look like commands and other bytes than ASCII.
    text = "/quit\n\n" + "\n".join(f"line {number}: naïve café 漢字 {'x' * 10}" for number in range(20)) + "\n" + "y" * 5000
    one.paste(text)
    time.sleep(1)
    one.keys("Enter")
    one.wait_for("[cut at --max-tokens 3")
    one.wait_for_prompt()
    one.type(f"/save {save}")
    one.wait_for("1 answer saved")
    assert json.loads(save.read_text())["turns"][0]["content"] == text
    one.keys("C-d")
    one.wait_for("left with 0")


def test_history_editing_and_several_lines(terminal: Callable[..., Terminal], slow: Path, tmp_path: Path) -> None:
    one = terminal()
    save = tmp_path / "c.json"
    one.type(command(slow, "-n", 2))
    one.wait_for_prompt()
    one.keys("a", "c", "Left", "b", "M-Enter", "d", "Enter")  # editing, and a second line by Alt-Enter
    one.wait_for("[cut at")
    one.wait_for_prompt()
    one.type("/quit")
    one.wait_for("left with 0")
    one.type("clear; " + command(slow, "-n", 2))
    one.wait_for_prompt()
    one.keys("Up", "Up", "Enter")  # the message of the chat before
    one.wait_for("[cut at")
    one.wait_for_prompt()
    one.keys("/", "s", "a", "Tab")
    one.type(f" {save}")
    one.wait_for("1 answer saved")
    one.keys("C-d")
    one.wait_for("left with 0")
    text = json.loads(save.read_text())["turns"][0]["content"]
    assert text == "ab\ndc"
    assert (tmp_path / "state/dustin/chat_history").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_narrow_terminal(terminal: Callable[..., Terminal], slow: Path, variables: dict[str, str]) -> None:
    one = terminal(columns=40)
    for name, value in variables.items():
        one.type(f"export {name}={value}")  # tmux sets TERM itself
    one.type(command(slow, "-n", 40_000))
    one.wait(lambda screen: any(line.startswith(">") for line in screen))
    one.type("hello")
    if variables.get("TERM") == "dumb":
        one.wait(lambda screen: sum(bool(line) for line in screen) >= ROWS - 1)
        assert not any("tok/s" in line for line in one.screen())
    else:
        one.wait(lambda screen: "tok/s" in screen[-1] and len(screen[-1]) < 40)
    one.keys("C-c")
    one.wait_for("[stopped]")


def test_only_answers_reach_a_redirected_stdout(terminal: Callable[..., Terminal], slow: Path, tmp_path: Path) -> None:
    one = terminal()
    out = tmp_path / "out"
    one.type(f"cd {ROOT} && {sys.executable} -m dustin chat -m {slow} --ignore-eos -n 30 > {out}; echo left with $?")
    one.wait_for_prompt()
    one.type("hello")
    one.wait_for("[cut at")
    one.keys("C-d")
    one.wait_for("left with 0")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DUSTIN_")}
    environment = kept | {"DUSTIN_BACKEND": "numpy", "DUSTIN_MODE": "dense", "DUSTIN_DRAFTER": "lookup"}
    piped = subprocess.run(
        [sys.executable, "-m", "dustin", "chat", "-m", str(slow), "--ignore-eos", "-n", "30"],
        input=b"hello\n", capture_output=True, check=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert out.read_bytes() == piped.stdout


def test_a_second_ctrl_c_cuts_a_long_step_and_the_session_goes_on(
    terminal: Callable[..., Terminal], slow: Path, tmp_path: Path
) -> None:
    one = terminal()
    (tmp_path / "long.txt").write_text("word " * 4000)
    one.type(command(slow, "-n", 3, "--prefill-chunk", 8192))
    one.wait_for_prompt()
    for attempt in range(5):
        one.type(f"/file {tmp_path / 'long.txt'}")
        one.wait(lambda _, times=attempt + 1: one.everything().count("20000 tokens, goes") == times)
        one.type("hello")
        time.sleep(1 + 0.3 * attempt)
        one.keys("C-c")  # a step of a second or more: the first asks, ...
        one.wait(
            lambda screen, times=attempt + 1: (
                any("[stopping after" in line for line in screen) or one.everything().count("[stopped before") == times
            )
        )
        if any("[stopping after" in line for line in one.screen()):
            break
        # The step ended at once, and took the line with it: again, at another moment of a step.
    one.wait_for("[stopping after this step")
    one.keys("C-c")  # ... the second insists
    one.wait_for("Ctrl-C again")
    one.wait_for_prompt()
    one.type("/reset")
    one.wait_for("forgotten")
    one.type("hello again")
    one.wait_for("[cut at")
    one.keys("C-d")
    one.wait_for("left with 0")
