"""The chat in a pipe, and the conversation behind it, on tiny random models."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from dustin.chat_commands import COMMANDS, is_command
from dustin.config import MODES, EngineOptions, RequestOptions, SamplingOptions
from dustin.conversation import Conversation
from dustin.errors import UsageError
from dustin.generation import Session, load
from tests import tiny_model
from tests.cli.running import dustin, fails, first_output, popen


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "draft", seed=3, num_hidden_layers=1)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]


# In a pipe.


def test_a_script_of_commands_and_questions(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a document")
    script = f"/help\n/file {tmp_path / 'a.txt'}\nhello\n/stats\nmore\n/system be brief\n/reset\nagain\n/quit\nnever\n"
    done = dustin(environment, "chat", "-m", model, "-n", 5, stdin=script)
    assert done.returncode == 0, done.stderr
    assert "10 tokens" in done.stderr and "generated: 5 tokens" in done.stderr and "conversation: 1 answer," in done.stderr
    assert all(usage in done.stderr for usage, _, _ in COMMANDS.values())
    assert "error" not in done.stderr and "never" not in done.stderr


def test_no_escape_codes_in_a_pipe(slow: Path, environment: dict[str, str]) -> None:
    # Far enough to see every code that a terminal would get; the model itself may emit any byte, so stderr is what counts.
    done = dustin(environment | {"TERM": "xterm-256color"}, "chat", "-m", slow, "-n", 300, "--ignore-eos", stdin="hi\n", apart=True)
    assert done.returncode == 0 and "\x1b" not in done.stderr and "\r" not in done.stderr and "> " not in done.stderr


def test_it_goes_on_after_an_error_and_the_exit_code_tells(model: Path, environment: dict[str, str]) -> None:
    script = f"/bad\n/file /nonexistent\n{'x' * 600}\nhi\n/stats\n"
    done = dustin(environment, "chat", "-m", model, "-n", 5, stdin=script)
    assert done.returncode == 2 and "generated: 5 tokens" in done.stderr
    unknown, missing, long = errors(done)
    assert unknown.startswith("unknown command /bad") and "No such file" in missing
    assert "600" not in unknown and "tokens, but the context" in long and "shorten the message" in long


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"/file", "/file needs a PATH"),
        (b"/file -", "cannot read stdin"),
        (b"/file .", "Is a directory"),
        (b"/save", "/save needs a PATH"),
        (b"/load nowhere.json", "No such file"),
        (b"/mode fast", "expected one of auto, ar"),
        (b"/budget lots", "expected a number of tokens"),
        (b"/budget 3", "budget is 3 tokens, expected more than the 36 protected ones"),
        (b"/reset now", "/reset takes nothing after it"),
        (b"/end", "/end came without /multi"),
        (b"/multi\nhalf", "ended before /end, 1 lines are dropped"),
        (b"/multi\n/end", "the message is empty"),
        (b"caf\xe9", "line 1 of stdin is not UTF-8 text: byte 0xe9 at offset 3"),
        (b"a\0b", "line 1 of stdin is a binary file"),
    ],
)
def test_lines_that_cannot_work(model: Path, environment: dict[str, str], line: bytes, says: str) -> None:
    fails(dustin(environment, "chat", "-m", model, stdin=line + b"\n"), 2, says)


def test_files_before_the_first_message(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("a document\n")
    save = tmp_path / "c.json"
    dustin(environment, "chat", "-m", model, "-n", 3, "-f", tmp_path / "a b.txt", stdin=f"hi\n/save {save}\n")
    by_flag = json.loads(save.read_text())["turns"]
    dustin(environment, "chat", "-m", model, "-n", 3, stdin=f'/file "{tmp_path / "a b.txt"}"\nhi\n/save {save}\n')
    assert by_flag == json.loads(save.read_text())["turns"] and by_flag[0]["content"] == "a document\n\nhi"
    fails(dustin(environment, "chat", "-m", model, "-f", "-", stdin="hi\n"), 2, "--file - is stdin")


def test_a_file_that_will_not_fit_is_told_at_once(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 600)
    done = dustin(environment, "chat", "-m", model, "-n", 3, stdin=f"/file {tmp_path / 'long.txt'}\nhi\nagain\n")
    assert "600 tokens" in done.stderr and "more than the 512 tokens left of 512" in done.stderr
    # The message that does not fit drops the document, so the next one is answered.
    assert len(errors(done)) == 1 and "the pending document was dropped" in done.stderr and done.stdout.count("\n") >= 1


def test_several_lines_are_one_message(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    save = tmp_path / "c.json"
    script = f"/multi\none\n\n/quit\n/end\n//usr\n/usr/bin is a path\n/save {save}\n"
    assert dustin(environment, "chat", "-m", model, "-n", 2, stdin=script).returncode == 0
    asked = [turn["content"] for turn in json.loads(save.read_text())["turns"] if turn["role"] == "user"]
    assert asked == ["one\n\n/quit", "/usr", "/usr/bin is a path"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/help", True),
        ("/file a b", True),
        ("/nope", True),
        ("/usr/bin", False),
        ("/* a comment */", False),
        ("//x", False),
        ("/help\nis a command", False),
        ("/system be\nbrief", True),
        ("hi /help", False),
        ("", False),
    ],
)
def test_what_is_a_command(text: str, expected: bool) -> None:
    assert is_command(text) is expected


def test_a_saved_conversation_goes_on_as_if_never_left(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    save = tmp_path / "c.json"
    chat = ["chat", "-m", model, "-n", 8, "--system-prompt", "be brief"]
    whole = dustin(environment, *chat, stdin="one\ntwo\n").stdout
    first = dustin(environment, *chat, stdin=f"one\n/save {save}\n").stdout
    second = dustin(environment, "chat", "-m", model, "-n", 8, stdin=f"/load {save}\ntwo\n")
    assert first + second.stdout == whole and "2 answers" not in second.stderr and "1 answer," in second.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("notes of mine", "holds no conversation"),
        ("[]", "expected a JSON object of format"),
        ('{"format": "dustin-conversation-1", "turns": [{"role": "assistant", "content": "x"}], "system": null}', "is damaged"),
        ('{"format": "dustin-conversation-1", "turns": [{"role": "user", "content": "x"}], "system": null}', "is damaged"),
        ('{"format": "dustin-conversation-1", "turns": [], "system": 3}', "system must be text"),
    ],
)
def test_a_file_that_is_no_conversation(model: Path, environment: dict[str, str], tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    fails(dustin(environment, "chat", "-m", model, stdin=f"/load {file}\n"), 2, str(file), says)
    if "format" not in content:
        # Nor is it written over.
        fails(dustin(environment, "chat", "-m", model, stdin=f"/save {file}\n"), 2, "holds no conversation")
        assert file.read_text() == content


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    environment: dict[str, str], slow: Path, start: list[subprocess.Popen[bytes]]
) -> None:
    start.append(popen(environment, "chat", "-m", slow, "-n", 40_000, "--ignore-eos"))
    process = start[0]
    if process.stdin is None:
        raise RuntimeError("the process has no stdin pipe")
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    first_output(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(b"/stats\n/quit\n", timeout=60)
    assert process.returncode == 0, err
    assert b"[stopped]" in err and b"generated: " in err and b"Traceback" not in err


# The conversation itself.


def conversation(
    model: Path, draft: Path | None = None, max_tokens: int = 9, temperature: float = 0.0, **options: object
) -> Conversation:
    made = load(str(model), str(draft) if draft else None, backend="numpy", options=EngineOptions(**options))  # type: ignore[arg-type]
    return Conversation(made, RequestOptions(max_tokens=max_tokens, sampling=SamplingOptions(temperature=temperature, seed=2)))


def ask(chat: Conversation, message: str) -> list[int]:
    return [response.token for response in chat.ask(message)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft", "self", "lookup", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_every_turn_equals_a_cold_run(model: Path, draft: Path, mode: str, drafter: str, temperature: float) -> None:
    if mode in ("ar",) and drafter != "none" or (mode, drafter) in {("auto", "none"), ("dense", "none")}:
        pytest.skip("a combination that is refused, or the same as another here")
    if drafter == "self" and mode in ("sparse", "rectified"):
        pytest.skip("refused")
    if mode == "auto" and drafter != "draft" and temperature:
        pytest.skip("samples as mode ar does")
    options = {"mode": mode, "drafter": drafter, "budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "exact_block": 6}
    chat = conversation(model, draft if drafter == "draft" else None, temperature=temperature, rectify_interval=5, **options)
    session = chat.session
    for message in ("one question", "another", "and a third one"):
        prompt = chat.messages(message)
        cold = Session(session.backend, session.target, session.tokenizer, session.options, session.draft)
        assert ask(chat, message) == cold.generate(prompt, chat.request).tokens
        if len(chat.turns) > 2:
            assert chat.stats.reused_prompt_tokens > len("one question")


def test_changing_mode_and_budget_between_turns_equals_cold_runs(model: Path, draft: Path) -> None:
    chat = conversation(model, draft, mode="sparse", budget=40)
    session = chat.session
    for changes in ({}, {"mode": "ar"}, {"mode": "exact"}, {"mode": "sparse", "budget": 50}, {"mode": "dense"}):
        chat.set_options(**changes)
        prompt = chat.messages("go on")
        cold = Session(session.backend, session.target, session.tokenizer, session.options, session.draft)
        assert ask(chat, "go on") == cold.generate(prompt, chat.request).tokens


def test_options_that_cannot_work_change_nothing(model: Path) -> None:
    chat = conversation(model, mode="dense", drafter="self")
    before = chat.session.options
    for changes in ({"mode": "sparse"}, {"budget": 1}, {"mode": "fast"}):
        with pytest.raises(UsageError):
            chat.set_options(**changes)
        assert chat.session.options == before


def test_an_answer_cut_short_stays_as_far_as_it_came(model: Path) -> None:
    chat = conversation(model, max_tokens=50, mode="ar")
    stream = chat.ask("hello")
    pieces = [next(stream).text for _ in range(5)]
    stream.close()
    assert chat.turns == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "".join(pieces)}]


def test_stopping_while_the_prompt_is_read_leaves_no_trace(model: Path) -> None:
    chat = conversation(model, mode="ar")
    chat.documents = ["a document"]

    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("hello", give_up))
    assert chat.turns == [] and chat.documents == ["a document"]


def test_a_conversation_that_fits_no_more_says_what_to_do(model: Path) -> None:
    chat = conversation(model, max_tokens=100, mode="ar")
    chat.documents = ["x" * 600]
    with pytest.raises(UsageError, match=r"has 6\d\d tokens, but the context .* room for 511; the pending document was dropped"):
        ask(chat, "hello")
    ask(chat, "y" * 100)
    assert not chat.full and len(chat.turns) == 2
    ask(chat, "z" * (500 - len(chat.session.encode(chat.messages("")))))
    assert chat.full and chat.finish_reason == "length"
    with pytest.raises(UsageError, match="/reset begins a new conversation"):
        ask(chat, "go on, please")
    assert len(chat.turns) == 4
    chat.forget()
    assert ask(chat, "hello")
