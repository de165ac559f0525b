"""Random input of people: chat lines, configuration files and saved conversations end in an answer or one clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dustin import cli as command_line
from dustin.chat_commands import COMMANDS, Quit, carry_out, is_command
from dustin.config import RequestOptions
from dustin.config_file import option_names, read_config, walk
from dustin.conversation import FORMAT, Conversation
from dustin.errors import DustinError
from dustin.generation import Session, load
from dustin.terminal import check_text

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = ["8", "-1", "exact", "sparse", "a/b", "~", ".", "..", "'", '"x"', "\0", "x\0y", "é" * 300, "~nobody/x", "c.json", "\ud800"]
WORDS = st.one_of(st.sampled_from(ODD), st.text(max_size=20))
LINES = st.one_of(st.tuples(st.sampled_from([*COMMANDS, "/end", "/nope"]), WORDS).map(" ".join), WORDS)


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return load(str(model), backend="numpy")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def run(chat: Conversation, text: str) -> None:
    """What the chat's loop does with a line."""
    try:
        if is_command(text):
            carry_out(chat, text)
        elif check_text(text, "the message").strip():
            list(chat.ask(text))
    except (DustinError, Quit) as end:
        assert "\n" not in str(end)


@QUICK
@given(st.lists(LINES, min_size=1, max_size=6))
def test_lines_of_a_chat(session: Session, lines: list[str]) -> None:
    chat = Conversation(session, RequestOptions(max_tokens=2))
    for line in lines:
        run(chat, line.strip())
    assert len(chat.turns) % 2 == 0
    assert all(path.is_relative_to(Path.cwd()) for path in Path.cwd().rglob("*"))


KEYS = sorted({key.replace("_", "-") for _, command in walk(command_line.cli) for key in option_names(command)})
VALUES: Any = st.recursive(
    st.one_of(st.booleans(), st.integers(-5, 2000), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*KEYS, "x"]), inner, max_size=3)),
    max_leaves=4,
)


def toml(table: dict[str, Any]) -> str:
    """A TOML document (inline tables below the first level), surrogates left out."""

    def value(x: Any) -> str:
        if isinstance(x, bool):
            return str(x).lower()
        if isinstance(x, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(value, x)) + "]"
        return repr(x) if isinstance(x, int | float) else json.dumps(x)

    return "".join(f"{json.dumps(k)} = {value(v)}\n" for k, v in table.items())


@QUICK
@given(st.dictionaries(st.one_of(st.sampled_from([*KEYS, "generate", "chat", "models"]), st.text(max_size=6)), VALUES))
def test_configuration_files(table: dict[str, Any]) -> None:
    path = Path("c.toml")
    path.write_bytes(toml(table).encode(errors="replace"))
    try:
        read_config(command_line.cli, path)
    except DustinError as error:
        assert "c.toml" in str(error)


JSON: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
CONTENT = st.one_of(st.text(max_size=5), JSON)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", 3]), "content": CONTENT})


@QUICK
@given(
    st.one_of(
        JSON,
        st.fixed_dictionaries(
            {"format": st.just(FORMAT), "turns": st.one_of(st.lists(TURN, max_size=3), JSON)},
            optional={"system": st.one_of(st.none(), st.text(max_size=5), JSON), "documents": JSON, "model": JSON},
        ),
    )
)
def test_saved_conversations(session: Session, content: Any) -> None:
    Path("c.json").write_text(json.dumps(content))
    chat = Conversation(session, RequestOptions(max_tokens=2))
    try:
        chat.load(Path("c.json"))
    except DustinError as error:
        assert "c.json" in str(error)
        assert chat.turns == []
    run(chat, "hello")
    os.remove("c.json")
    chat.save(Path("c.json"))
    assert Conversation(session, RequestOptions()).load(Path("c.json")) == session.target.spec.name
