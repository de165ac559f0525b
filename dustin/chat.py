"""`dustin chat`: a conversation, on a terminal or in a pipe. Ctrl-C stops the answer and keeps the session."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from typing import Any

import click

from dustin.cli_options import (
    CONTEXT,
    build_engine_options,
    build_request,
    debug_option,
    engine_options,
    loading_options,
    refuse_useless,
    request_options,
)
from dustin.config import RequestOptions
from dustin.errors import DustinError, UsageError
from dustin.terminal import note, prefill_bar, read_file

HELP = """/help          this list
/file PATH     put a text file before your next message
/system TEXT   set the system prompt (without TEXT: remove it)
/reset         forget the conversation
/stats         statistics of the last answer
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


class _Stopped(Exception):
    """Ctrl-C while the prompt is read."""


class Interrupt:
    """While an answer is written Ctrl-C only sets a flag: the engine is never cut in the middle of a step. A second one raises."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


class Conversation:
    """History, pending documents and the last statistics of one chat."""

    def __init__(self, session: Any, request: RequestOptions, system: str | None, verbose: bool) -> None:
        self.session, self.request, self.verbose = session, request, verbose
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.documents: list[str] = []
        self.stats: Any = None
        self.failure = 0

    def command(self, line: str) -> bool:
        """Carry out a /command; False ends the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            note(HELP)
        elif name == "/reset":
            self.turns, self.documents = [], []
            note("conversation forgotten")
        elif name == "/system":
            self.system = rest or None
            note("system prompt set" if rest else "system prompt removed")
        elif name == "/file" and rest:
            text = read_file(rest).strip("\n")
            self.documents.append(text)
            note(f"{rest}: {len(self.session.tokenizer.encode(text))} tokens, goes before your next message")
        elif name == "/stats":
            for text in self.stats.summary_lines() if self.stats else ["no answer yet"]:
                note(text)
        else:
            raise UsageError("/file needs a PATH" if name == "/file" else f"unknown command {name}: /help lists them")
        return True

    def answer(self, message: str) -> None:
        """Ask the model and write its answer to stdout; what Ctrl-C cuts short stays in the history as far as it came."""
        content = "\n\n".join([*self.documents, message])
        asked = [*self.turns, {"role": "user", "content": content}]
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        text = self._stream(system + asked)
        self.documents = []
        self.turns = [*asked, {"role": "assistant", "content": text}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        pieces: list[str] = []
        with Interrupt() as interrupt, prefill_bar() as bar:

            def progress(done: int, total: int) -> None:
                if interrupt.pressed:
                    raise _Stopped
                if bar is not None:
                    bar(done, total)

            try:
                with closing(self.session.stream_generate(messages, self.request, progress=progress)) as stream:
                    for response in stream:
                        self.stats = response.stats
                        pieces.append(response.text)
                        sys.stdout.write(response.text)
                        sys.stdout.flush()
                        if interrupt.pressed:
                            break
            except _Stopped:
                pass
            if interrupt.pressed:
                note("[stopped]")
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self.verbose and self.stats is not None:
            for line in self.stats.summary_lines():
                note(line)
        return "".join(pieces)

    def run(self) -> None:
        """Read lines until /quit or the end of input."""
        terminal = sys.stdin.isatty()
        interrupted = False
        while True:
            try:
                line = input("> " if terminal else "").strip()
                interrupted = False
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted or not terminal:
                    raise
                interrupted = True
                note("\nCtrl-C again, Ctrl-D or /quit leaves")
                continue
            if not line:
                continue
            try:
                if not line.startswith("/"):
                    self.answer(line)
                elif not self.command(line):
                    return
            except DustinError as error:
                note(f"error: {error}")
                self.failure = error.exit_code


@click.command(context_settings=CONTEXT)
@click.option("--system-prompt", help="What the model is told about its task.")
@loading_options
@request_options
@engine_options
@click.option("--verbose", is_flag=True, help="Statistics after every answer.")
@debug_option
@click.pass_context
def chat(ctx: click.Context, **values: Any) -> int:
    """Talk with a model, line by line; /help lists the commands. A long document comes in by /file PATH."""
    options, request = build_engine_options(values), build_request(values)
    refuse_useless(ctx, values)
    if request.top_logprobs is not None:
        raise UsageError("--logprobs needs `dustin generate --json`: a chat has no place for them")

    from dustin.generation import load

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    session = load(values["model"], values["draft_model"], options=options, **loading)
    if session.tokenizer is None or session.tokenizer.chat_template is None:
        raise UsageError(f"{values['model']} has no chat template: use `dustin generate --raw`")
    session.prefix_cache = True
    if sys.stdin.isatty():
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing for input()
        note(f"{session.target.spec.name}, context {session.target.spec.context_length} tokens; /help lists the commands")
    conversation = Conversation(session, request, values["system_prompt"], values["verbose"])
    conversation.run()
    # In a pipe a turn that failed must show in the exit code; a person has seen the line.
    return 0 if sys.stdin.isatty() else conversation.failure
