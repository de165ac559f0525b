"""The bench of servers: what it refuses, and how answers are counted."""

from __future__ import annotations

import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("httpx")

from bench import serve, serve_tables


class Words:
    """A tokenizer of words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return text.split()


class Asked:
    """A client whose server says two words and then nothing that has text."""

    tokens = 5

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def counts(self) -> dict[str, float]:
        return {}

    def ask(self, text: str, tokens: int | None = None, whole: bool = False) -> tuple[str, list[float]]:
        self.asked.append(whole)
        return "two words", [0.0, 0.5, 0.75]


@pytest.mark.parametrize("whole", [False, True])
def test_whole_answers_count_what_has_no_text(whole: bool) -> None:
    made, client = serve.Measured("dustin ar", 2, 1, whole), Asked()
    made.add(client, ["a", "b", "c"], Words())  # type: ignore[arg-type]
    row = made.as_dict()
    assert client.asked == [whole] * 3
    assert row["generated_tokens"] == (15 if whole else 6) and row["requests"] == 3
    assert row["ttft_ms_median"] == 500 and row["gap_ms_worst"] == 250
    assert row.get("whole_answers", False) is whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--whole", "exact"], "--whole has 'exact', expected some of --modes ar,auto"),
        (["--alone", "9", "--requests", "8"], "--alone is 9, expected 1 to the 8 of --requests"),
        (["--alone", "0"], "--alone is 0, expected 1 to the 8 of --requests"),
    ],
)
def test_what_cannot_be_is_refused(more: list[str], message: str) -> None:
    result = CliRunner().invoke(serve.main, ["--modes", "ar,auto", "--peers", "", *more])
    assert result.exit_code == 2 and message in result.output


def test_a_server_that_does_not_come_up_says_what_it_last_said() -> None:
    slow = "import sys, time; print('loading shard 1 of 9', flush=True); time.sleep(60)"
    with (
        pytest.raises(click.ClickException, match=r"(?s)not ready after [1-9] s: loading shard 1 of 9"),
        serve.serving([sys.executable, "-c", slow], serve.free_port(), "/health", 1, patience=1.5),
    ):
        pass


def test_a_table_names_whole_answers_and_how_many_were_asked_alone() -> None:
    def row(clients: int, requests: int, **more: Any) -> dict[str, Any]:
        numbers = {"tokens_per_s": 9.0, "ratio": 1.0, "ttft_ms_median": 5.0, "gap_ms_worst": 7.0, "context": 60, "max_tokens": 256}
        names = {"side": "dustin ar", "model": "m", "dtype": "bfloat16", "processor": "p", "command": "c", "commit": "0"}
        return numbers | names | {"note": "", "threads": 2, "clients": clients, "requests": requests} | more

    table = serve_tables._run([row(1, 4), row(16, 32, whole_answers=True)])
    assert "`dustin ar`, 16 clients, answers of 256 tokens" in table
    assert "32 chats of about 60 prompt tokens, 4 of them one by one," in table
