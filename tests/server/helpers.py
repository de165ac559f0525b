"""Servers in this process over small models: a table model whose text is known, and a random one; raw HTTP and SSE."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from dustin.config import EngineOptions, SamplingOptions
from dustin.generation import Session
from dustin.serving.options import ServerOptions
from dustin.serving.scheduler import Scheduler
from dustin.serving.server import Prepared, prepare
from dustin.text import Tokenizer
from tests.tiny_model import SPECIAL, TEMPLATE, byte_tokenizer
from tests.unit.toy import ToyModel

# No byte twice: the next byte follows from the last one. One character of two bytes, one of three.
CYCLE = "Zürich €5"
JSON = {"content-type": "application/json"}


def tokenizer() -> Tokenizer:
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    core = byte_tokenizer()
    return Tokenizer(core, eos_ids=[core.token_to_id(SPECIAL[2])], special_tokens=names, chat_template=TEMPLATE)


class PacedModel(ToyModel):
    """Writes CYCLE for ever, after any prompt. Forwards wait for `gate` and take `pace` seconds; `fail_next` makes one raise."""

    def __init__(self, **more: Any) -> None:
        core = byte_tokenizer()
        ids = core.encode(CYCLE, add_special_tokens=False).ids
        table = np.zeros((core.get_vocab_size(), core.get_vocab_size()))
        table[:, ids[0]] = 5.0
        for this, after in zip(ids, [*ids[1:], ids[0]], strict=True):
            table[this, after] = 20.0
        super().__init__(table, **{"context_length": 512, "num_layers": 2} | more)
        self.gate = threading.Event()
        self.gate.set()
        self.pace = 0.0
        self.fail_next = False

    def forward(self, *args: Any, **more: Any) -> Any:
        self.gate.wait(30)
        if self.pace:
            time.sleep(self.pace)
        if self.fail_next:
            self.fail_next = False
            raise ArithmeticError("a broken kernel")
        return super().forward(*args, **more)


def toy_session(model: PacedModel | None = None, **options: Any) -> Session:
    from dustin.backends.numpy_reference.backend import create

    chosen = {"mode": "dense", "drafter": "lookup", "num_draft_tokens": 4} | options
    return Session(create("cpu"), model or PacedModel(), tokenizer(), EngineOptions(**chosen))


def tiny_session(folder: Path, draft: Path | None = None, **options: Any) -> Session:
    import dustin

    names = str(folder), str(draft) if draft else None
    return dustin.load(*names, backend="torch", device="cpu", dtype="float32", options=EngineOptions(**options))


@dataclass
class Running:
    """A server in a thread of this process."""

    prepared: Prepared
    thread: threading.Thread
    client: httpx.Client

    @property
    def url(self) -> str:
        return self.prepared.address

    @property
    def scheduler(self) -> Scheduler:
        return self.prepared.scheduler

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | fields)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt} | fields)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name with labels."""
        lines = [line for line in self.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def open_ai(self, **more: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | more)

    def stop(self) -> None:
        self.prepared.http.should_exit = True
        self.thread.join(20)


@contextlib.contextmanager
def running(
    session: Session | Callable[[], Session],
    defaults: SamplingOptions | None = None,
    names: list[str] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """A server over the session (or what loads it), with ServerOptions; it is gone afterwards."""
    load = session if callable(session) else lambda: session
    chosen = ServerOptions(**{"port": 0, "slots": 4, "drain_timeout": 5} | options)
    prepared = prepare(load, names or ["toy"], chosen, defaults or SamplingOptions())
    thread = threading.Thread(target=prepared.run, daemon=True)
    thread.start()
    with httpx.Client(base_url=prepared.address, timeout=30) as client:
        server = Running(prepared, thread, client)
        if not callable(session):
            until(lambda: prepared.scheduler.state != "loading")
        try:
            yield server
        finally:
            server.stop()
    assert not thread.is_alive(), "the server did not end"


def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Wait for a condition; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s")


def events(response: httpx.Response) -> list[Any]:
    """The data of every event of a finished SSE body; comments are left out. [DONE] must be the last."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


def ids(text: str) -> list[int]:
    """Tokens of a text in the models here: one a byte."""
    return list(byte_tokenizer().encode(text, add_special_tokens=False).ids)


def cycle(count: int) -> str:
    """What a PacedModel says in `count` tokens (bytes), as far as characters are whole."""
    raw = CYCLE.encode() * (count // len(CYCLE.encode()) + 1)
    return raw[:count].decode("utf-8", "replace")
