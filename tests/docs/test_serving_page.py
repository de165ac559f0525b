"""docs/serving.md: its servers start, its clients run against one, and its tables say what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from dustin import cli as command_line
from dustin.serving import asks
from tests import tiny_model
from tests.docs.running import ROOT, run_python, run_shell
from tests.server.helpers import Running, running, tiny_session

PAGE = (ROOT / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.S)
CLIENTS = [(language, text) for language, text in BLOCKS if "127.0.0.1:8000" in text]
SERVERS = [line for language, text in BLOCKS for line in text.splitlines() if "dustin serve" in line]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("torch")
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    with running(tiny_session(folder), names=["model.gguf"]) as server:
        yield server


@pytest.mark.parametrize(("language", "text"), CLIENTS, ids=lambda part: part if part in ("sh", "python") else "")
def test_clients_run(server: Running, tmp_path: Path, language: str, text: str) -> None:
    if language == "python":
        pytest.importorskip("openai")
    code = text.replace("http://127.0.0.1:8000", server.url)
    # curl says what failed where the server answers with an error.
    out = run_python(code, tmp_path) if language == "python" else run_shell(code.replace("curl -s", "curl -fsS"), tmp_path)
    assert out.strip()
    if language == "sh":
        assert out.count('"object"') > 3 and "data: [DONE]" in out and "dustin_requests_running" in out and '"status":"ok"' in out


def test_there_are_both_kinds() -> None:
    assert {language for language, _ in CLIENTS} == {"sh", "python"} and len(SERVERS) == 2


@pytest.mark.parametrize("line", SERVERS, ids=["plain", "public"])
def test_servers_start(tmp_path: Path, line: str) -> None:
    """On a free port, until they say that they serve; SIGTERM ends them with 0."""
    script = f"""
    {line.replace("--port 8000", "")} --port 0 --device cpu --backend torch 2>log &
    for _ in $(seq 600); do grep -q "^serving " log && break; kill -0 $! || {{ cat log; exit 1; }}; sleep 0.1; done
    grep "^serving " log
    kill -TERM $!
    wait $!
    """
    out = run_shell(script, tmp_path)
    assert ("4 slots" in out) == ("--slots 4" in line) and ("2048 tokens" in out) == ("--max-kv-size 2048" in line)


def test_every_field_and_option_is_on_the_page() -> None:
    named = set(re.findall(r"`([\w.-]+)`", PAGE))
    fields = asks.CHAT_FIELDS | asks.COMPLETION_FIELDS | asks.WITHOUT_EFFECT
    assert {field for field in fields if field not in named} <= {"stream_options"}
    options = {flag for param in command_line.cli.commands["serve"].params for flag in (*param.opts, *param.secondary_opts)}
    written = re.sub(r"<!-- table:.*?<!-- end -->", "", PAGE, flags=re.S)  # commands of benches have options of their own
    used = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", written))
    assert used <= options, used - options
