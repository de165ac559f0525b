"""`dustin chat`: a conversation, on a terminal or in a pipe. Ctrl-C stops the answer and keeps the session."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import closing
from typing import Any

import click

from dustin import prompt_cache
from dustin.chat_commands import Quit, carry_out, is_command
from dustin.chat_input import Reader, gather, history_path, open_reader
from dustin.cli_options import (
    CONTEXT,
    FILE,
    answer_options,
    build_engine_options,
    build_request,
    debug_option,
    engine_options,
    loading_options,
    prompt_cache_option,
    refuse_useless,
)
from dustin.conversation import Conversation
from dustin.errors import DustinError, RankError, UsageError
from dustin.help_pages import Sectioned
from dustin.status_line import StatusLine, quiet_keyboard, status_text
from dustin.terminal import check_text, note, prefill_bar, printable, read_file

_PATIENCE_SECONDS = 0.7
# Conversations begin in caches of up to this size, which share what was recorded.
_WARM_TOKENS = 4000


class _Stopped(Exception):
    """Ctrl-C while the prompt is read."""


class Interrupt:
    """While an answer is written Ctrl-C only sets a flag: the engine is never cut in the middle of a step. A second one raises."""

    def __init__(self) -> None:
        self.pressed = False
        self._patience: threading.Timer | None = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self._patience is not None:
            self._patience.cancel()

    def _press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        text = b"\n[stopping after this step; Ctrl-C again cuts it short]\n"
        self._patience = threading.Timer(_PATIENCE_SECONDS, os.write, (sys.stderr.fileno(), text))
        self._patience.daemon = True
        self._patience.start()


class Chat:
    """The loop: read a message, write the answer. `failure` is the exit code of the last turn that failed.

    While a person types the first message a GPU warms up.
    """

    def __init__(self, conversation: Conversation, reader: Reader, verbose: bool) -> None:
        self.conversation, self.reader, self.verbose = conversation, reader, verbose
        self.warming: Any = None
        self.terminal = sys.stdin.isatty()
        self.failure = 0

    def run(self) -> None:
        """Until /quit or the end of input."""
        if self.terminal and getattr(self.conversation.session.backend, "warms_up", False):
            from dustin.warm_up import WhileWaiting

            self.warming = WhileWaiting(self.conversation.session, _WARM_TOKENS)
        try:
            self._turns()
        finally:
            self._ready()

    def _ready(self) -> None:
        """The session is this thread's again."""
        if self.warming is not None:
            # Ctrl-C meanwhile leaves it there, to be waited for again.
            self.warming.stop(note if self.terminal else lambda text: None)
            self.warming = None

    def _turns(self) -> None:
        interrupted = False
        while True:
            try:
                text = self.reader.read().strip()
                interrupted = False
                if text:
                    self._ready()
                if text == "/multi":
                    self.answer(gather(self.reader).strip("\n"))
                elif is_command(text):
                    carry_out(self.conversation, text)
                elif text:
                    self.answer(text[1:] if text.startswith("//") else text)
            except (EOFError, Quit):
                return
            except KeyboardInterrupt:
                if interrupted or not self.terminal:
                    raise
                interrupted = True
                note("Ctrl-C again, Ctrl-D or /quit leaves")
            except RankError:
                raise  # Nothing works without the other ranks.
            except DustinError as error:
                note(f"error: {error}")
                self.failure = error.exit_code

    def answer(self, message: str) -> None:
        """Ask the model and write its answer to stdout; what Ctrl-C cuts short stays in the history as far as it came."""
        message = check_text(message, "the message")
        if not message.strip():
            raise UsageError("the message is empty: give some text")
        try:
            stopped = self._stream(message)
        except _Stopped:
            note("[stopped before an answer: the message is forgotten]")
            return
        except KeyboardInterrupt:
            # A step was cut short: what the caches hold is not to be trusted.
            self.conversation.session.forget()
            raise
        self._remarks(stopped)

    def _stream(self, message: str) -> bool:
        """Write the answer; whether Ctrl-C ended it."""
        chat, status = self.conversation, StatusLine()
        wrote: str | None = None
        with Interrupt() as interrupt, quiet_keyboard(status), prefill_bar() as bar:

            def progress(done: int, total: int) -> None:
                if interrupt.pressed:
                    raise _Stopped
                if bar is not None:
                    bar(done, total)

            try:
                with closing(chat.ask(message, progress)) as stream:
                    for response in stream:
                        text = printable(response.text)
                        wrote = text or wrote or ""
                        sys.stdout.write(text)
                        sys.stdout.flush()
                        status.wrote(text)
                        status.show(lambda: status_text(chat.stats, chat.tokens, chat.room))
                        if interrupt.pressed:
                            break
            finally:
                status.close()
                if wrote is not None and not wrote.endswith("\n"):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
            return interrupt.pressed

    def _remarks(self, stopped: bool) -> None:
        chat = self.conversation
        if stopped:
            note("[stopped]")
        elif chat.full:
            note(f"[the context of {chat.room} tokens is full: /reset begins a new conversation, /save PATH keeps this one]")
        elif chat.finish_reason == "length":
            note(f"[cut at --max-tokens {chat.request.max_tokens}: ask to go on]")
        if self.verbose:
            for line in chat.stats.summary_lines():
                note(line)
        elif self.terminal:
            note(f"[{status_text(chat.stats, chat.tokens, chat.room)}]")


@click.command(cls=Sectioned, context_settings=CONTEXT)
@click.option("--system-prompt", help="What the model is told about its task.")
@click.option("--file", "-f", "files", type=FILE, multiple=True, help="Put this text file before the first message; repeatable.")
@loading_options
@prompt_cache_option
@answer_options
@engine_options
@click.option("--history/--no-history", default=True, show_default=True, help="Keep messages for the next chat's up arrow.")
@click.option("--verbose", is_flag=True, help="Statistics after every answer.")
@debug_option
@click.pass_context
def chat(ctx: click.Context, **values: Any) -> int:
    """Talk with a model; /help lists the commands. A long document comes in by --file or /file PATH.

    In a pipe every line of stdin is a message, and the exit code is that of the last turn that failed.
    """
    options, request = build_engine_options(values), build_request(values)
    refuse_useless(ctx, values)
    if "-" in values["files"]:
        raise UsageError("--file - is stdin, where the messages come from: give the PATH of a file")
    documents = [read_file(name).strip("\n") for name in values["files"]]
    reader = open_reader(history_path() if values["history"] else None)

    from dustin.generation import load

    loading = {name: values[name] for name in ("backend", "device", "dtype")}
    if sys.stderr.isatty():
        note(f"loading {values['model']} ...")
    session = load(values["model"], values["draft_model"], options=options, **loading)
    if session.tokenizer is None or session.tokenizer.chat_template is None:
        raise UsageError(f"{values['model']} has no chat template: use `dustin generate --raw`")
    conversation = Conversation(session, request, values["system_prompt"])
    conversation.documents = documents
    session.resolve(request)
    if sys.stdin.isatty():
        note(f"{session.target.spec.name}, context {conversation.room} tokens; /help lists the commands")
    cache_file = values["prompt_cache_file"]
    if (taken := prompt_cache.take_up(session, cache_file)) is not None:
        note(taken)
    loop = Chat(conversation, reader, values["verbose"])
    try:
        loop.run()
    finally:
        if cache_file is not None:
            session.save_kept(cache_file)
    # In a pipe a turn that failed must show in the exit code; a person has seen the line.
    return 0 if sys.stdin.isatty() else loop.failure
