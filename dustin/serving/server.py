"""Runs the application: one listening socket, one engine thread, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from dustin.config import SamplingOptions
from dustin.errors import DustinError, UsageError
from dustin.generation import Session
from dustin.serving.app import Server
from dustin.serving.metrics import Metrics
from dustin.serving.options import ServerOptions
from dustin.serving.scheduler import Scheduler

# What connections may take to close once every request has its answer, in seconds.
_CLOSING = 5
# What clients may take to read that the server stops, in seconds.
_FAREWELL = 1.0
_BACKLOG = 2048
# Seconds after which a thread that runs Python lets another one run.
_SWITCH = 0.001


class HttpServer(uvicorn.Server):
    """uvicorn with our end: the first signal drains, the second stops at once; neither kills the process half-way."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, server: Server) -> None:
        super().__init__(config)
        self.scheduler = scheduler
        self.signal: int | None = None
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal. uvicorn would raise it again at the end."""
        self.scheduler.drain()
        if self.signal is None:
            self.signal = sig
            self.should_exit = True
        else:
            loop, self._loop = self._loop, None
            if loop is None:  # the third, or one before the loop runs
                self.scheduler.abandon()
                self.force_exit = True
            else:
                # A signal comes in the middle of anything: the loop does it when it may.
                loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """Tell the clients rather than hang up: the engine's thread may be in a long step."""
        # What is cut now is cut on purpose: no tracebacks of cancelled tasks.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.scheduler.abandon()
        self._server.stop()
        asyncio.get_running_loop().call_later(_FAREWELL, setattr, self, "force_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let what runs finish within the drain timeout, end the rest with an error."""
        self.scheduler.drain()
        limit = asyncio.get_running_loop().call_later(self.scheduler.options.drain_timeout, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raise UsageError for an address that cannot be had, saying why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host is {host!r}, expected an address of this machine: {error.strerror or error}") from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        # From here on a connection waits for the loop instead of being refused.
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise DustinError(f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port") from error
    made.set_inheritable(True)
    return made


@dataclass
class Prepared:
    """A server that listens but does not answer yet: `run` does both."""

    http: HttpServer
    socket: socket.socket
    scheduler: Scheduler
    address: str

    def run(self) -> None:
        """Load the model and serve until a signal, or until the engine's thread ends."""
        scheduler = self.scheduler
        scheduler.start()
        try:
            self.http.run(sockets=[self.socket])
        finally:
            scheduler.abandon()
            # A model that is still being loaded is not waited for: the process may end.
            if scheduler.session is not None or scheduler.error is not None:
                scheduler.join(_CLOSING)
            self.socket.close()


def prepare(load: Callable[[], Session], names: list[str], options: ServerOptions, defaults: SamplingOptions) -> Prepared:
    """Everything but the start. Raise UsageError or DustinError for an address that cannot be had."""
    metrics = Metrics()
    scheduler = Scheduler(load, options, metrics)
    metrics.watch(scheduler)
    listening = listen(options.host, options.port)
    server = Server(scheduler, metrics, options, defaults, names)
    config = uvicorn.Config(
        server.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.drain_timeout) + _CLOSING,
    )
    http = HttpServer(config, scheduler, server)
    # Also where the engine's thread ends by itself (a model that cannot be loaded).
    scheduler.on_stop = lambda: setattr(http, "should_exit", True)
    host, port = listening.getsockname()[:2]
    return Prepared(http, listening, scheduler, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def run(prepared: Prepared, model: str, say: Callable[[str], None]) -> int:
    """Serve to the end. Returns 0 after SIGTERM, 130 after Ctrl-C; raises what loading or the engine failed with."""
    # uvicorn takes signals only once it runs; whoever reads the line below may send one sooner.
    prepared.scheduler.say = say
    # A round waits so long, each time, for another thread that is busy with a request (the interpreter's own 5 ms are two rounds).
    sys.setswitchinterval(_SWITCH)
    before = {sig: signal.signal(sig, prepared.http.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        say(f"listening on {prepared.address}, loading {model} ...")
        _say_when_ready(prepared, say)
        prepared.run()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    if prepared.scheduler.error is not None:
        raise prepared.scheduler.error
    return 130 if prepared.http.signal == signal.SIGINT else 0


def _say_when_ready(prepared: Prepared, say: Callable[[str], None]) -> threading.Thread:
    scheduler = prepared.scheduler

    def wait() -> None:
        while scheduler.state in ("loading", "warming"):
            time.sleep(0.05)
        session = scheduler.session
        if scheduler.state == "ready" and session is not None:
            slots = f"{scheduler.options.slots} slots of {scheduler.context} tokens"
            say(f"serving {session.target.spec.name} at {prepared.address}: {slots}, mode {scheduler.engine_options.mode}")
            longest = session.target.spec.context_length
            asked = min(longest, scheduler.engine_options.max_kv_size or longest)
            if session.draft is not None and session.draft.spec.context_length < asked and scheduler.context < asked:
                draft = session.draft.spec
                say(f"note: a slot could hold {asked} tokens, but draft {draft.name} holds {draft.context_length}")

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    return waiting
