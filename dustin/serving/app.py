"""The HTTP side: routes, limits, authorisation, and events from the engine's thread to each client."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dustin.config import SamplingOptions
from dustin.errors import DustinError
from dustin.generation import Session
from dustin.sequence import Event
from dustin.serving import asks, failures, replies
from dustin.serving.failures import RequestFailure
from dustin.serving.inbox import Inbox, Outbox
from dustin.serving.metrics import Metrics
from dustin.serving.options import ServerOptions
from dustin.serving.scheduler import Job, Scheduler
from dustin.text import TextStream

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Bodies from this size on are parsed in a thread: the loop serves the streams meanwhile.
_LARGE_BODY = 64 * 1024


class Server:
    """Everything the routes share. `names` are the model names that a request may use; the first is the one shown."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics, options: ServerOptions, defaults: SamplingOptions, names: list[str]):
        self.scheduler = scheduler
        self.metrics = metrics
        self.options = options
        self.defaults = defaults
        self.names = names
        self.started = int(time.time())
        self.answers: set[Answer] = set()
        self._outbox = Outbox()
        scheduler.flush = self._outbox.flush

    def stop(self) -> None:
        """End every answer now, with an error its client can read, whatever the engine's thread is busy with."""
        for answer in list(self.answers):
            answer.stop()

    def app(self) -> Starlette:
        """The ASGI application."""
        handlers: Any = {RequestFailure: _failure, HTTPException: _http_error, ClientDisconnect: _left, Exception: _crash}
        return Starlette(
            routes=[
                Route("/v1/models", self._guarded(self.list_models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded(self.one_model), methods=["GET"]),
                Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
                Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
                Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ],
            exception_handlers=handlers,
        )

    def _guarded(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The endpoint behind --api-key or, without a key on a loopback address, behind a name of this machine."""
        key = self.options.api_key
        if key is None:
            return self._for_this_machine(endpoint) if self.options.host in LOOPBACK else endpoint

        async def checked(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
                message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                headers = {"WWW-Authenticate": "Bearer"}
                raise RequestFailure(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
            response: Response = await endpoint(request)
            return response

        return checked

    @staticmethod
    def _for_this_machine(endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A web page whose own name was pointed at 127.0.0.1 (DNS rebinding) comes with that name as Host."""

        async def checked(request: Request) -> Response:
            host = request.url.hostname or ""
            if host not in LOOPBACK:
                text = f"the Host is {host[:100]!r}, expected localhost or 127.0.0.1; with --api-key any name will do"
                raise RequestFailure(403, text, kind="permission_error", code="wrong_host")
            response: Response = await endpoint(request)
            return response

        return checked

    # Small endpoints.

    async def health(self, request: Request) -> Response:
        """200 when requests can be served; 503 while loading, warming, draining, failed, or when no step ends."""
        scheduler = self.scheduler
        state = "stalled" if scheduler.state == "ready" and scheduler.stalled else scheduler.state
        return _json({"status": "ok" if state == "ready" else state}, 200 if state == "ready" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.started,
            "owned_by": "dustin",
            "context_length": self.scheduler.context or None,
        }

    async def list_models(self, request: Request) -> Response:
        """What is loaded."""
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """The loaded model, by name."""
        self._check_model(request.path_params["name"])
        return _json(self._model())

    def _check_model(self, name: str | None) -> None:
        session = self.scheduler.session
        known = {*self.names, session.target.spec.name} if session is not None else set(self.names)
        if name is not None and name not in known:
            text = f"the model {name[:100]!r} is not loaded here, this server has {self.names[0]!r}"
            raise RequestFailure(404, text, param="model", code="model_not_found")

    # Generation.

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, chat=True)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, chat=False)

    async def _generate(self, request: Request, chat: bool) -> Response:
        raw = await self._body(request)
        if len(raw) < _LARGE_BODY:
            ask = asks.parse_ask(asks.parse_body(raw), chat, self.defaults)
        else:
            ask = await asyncio.to_thread(lambda: asks.parse_ask(asks.parse_body(raw), chat, self.defaults))
        self._check_model(ask.model)
        session = self.scheduler.session
        if session is None or self.scheduler.state != "ready":
            raise failures.unavailable("the model is not ready: see /health", self.scheduler.state)
        # A long prompt takes a while to tokenise: not in the loop that serves the others.
        prompts = await asyncio.to_thread(self._encode, session, ask)
        inbox = Inbox()
        reply = self._jobs(session, ask, prompts, inbox)
        jobs = [choice.job for choice in reply.choices]
        self.scheduler.submit(jobs)
        return Answer(self, ask, reply, inbox)

    async def _body(self, request: Request) -> bytes:
        """The body up to the limit. Raise RequestFailure 413 beyond it, 400 for another content type."""
        # A web page can post anything but JSON to a server on this machine without the browser asking first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestFailure(400, f"the content type is {kind[:100] or 'missing'!r}, expected application/json")
        limit = self.options.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(int(declared), limit)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.options.request_timeout or None):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise _too_large(size, limit)
                    parts.append(part)
        except TimeoutError as error:
            raise RequestFailure(408, "the body did not arrive in time", code="request_timeout") from error
        return b"".join(parts)

    def _encode(self, session: Session, ask: asks.Ask) -> list[list[int]]:
        try:
            prompts = [session.encode(prompt) for prompt in ask.prompts]
        except DustinError as error:
            raise failures.bad_field("messages" if ask.chat else "prompt", str(error)) from error
        vocab, context = session.target.spec.vocab_size, self.scheduler.context
        for prompt in prompts:
            if not prompt:
                raise failures.bad_field("prompt", "the prompt is empty: give at least one token of text")
            if min(prompt) < 0 or max(prompt) >= vocab:
                wrong = next(token for token in prompt if not 0 <= token < vocab)
                text = f"prompt token {str(wrong)[:20]} is outside the vocabulary of {vocab} tokens"
                raise failures.bad_field("prompt", text)
            if len(prompt) >= context:
                raise failures.context_exceeded("messages" if ask.chat else "prompt", len(prompt), None, context)
            if ask.max_tokens is not None and len(prompt) + ask.max_tokens > context:
                raise failures.context_exceeded("max_tokens", len(prompt), ask.max_tokens, context)
        return prompts

    def _jobs(self, session: Session, ask: asks.Ask, prompts: list[list[int]], inbox: Inbox) -> replies.Reply:
        total, most = len(prompts) * ask.n, self.options.slots + self.options.max_queue
        if total > most:
            raise failures.bad_field(
                "n", f"{len(prompts)} prompts with n {ask.n} ask for {total} answers, this server takes {most}"
            )
        options = self.scheduler.engine_options
        if ask.sampling.temperature > 0 and options.mode == "exact" and options.drafter == "draft" and options.lookahead_lag == 0:
            raise failures.bad_field("temperature", "this server runs with --lookahead-lag 0, which mode exact cannot sample with")
        choices = []
        for index in range(total):
            prompt = prompts[index // ask.n]
            limit = ask.max_tokens or min(self.options.max_tokens or self.scheduler.context, self.scheduler.context - len(prompt))
            sink = None
            if session.tokenizer is not None:
                sink = TextStream(session.tokenizer, ask.stop, continues=not ask.chat)
            job = Job(prompt, ask.request(index, limit), sink, _nowhere)
            echoed = self._echo(session, ask, index // ask.n, prompt)
            if ask.echo:
                job.prompt_top_logprobs = ask.top_logprobs
            choice = replies.Choice(index, job, session.tokenizer, echoed)
            job.deliver = self._outbox.deliverer(inbox, choice)
            choices.append(choice)
        fingerprint = f"fp_{session.target.spec.fingerprint[:12]}"
        return replies.Reply(ask.chat, self.names[0], fingerprint, choices, ask.top_logprobs is not None, ask.include_usage)

    @staticmethod
    def _echo(session: Session, ask: asks.Ask, index: int, prompt: list[int]) -> str:
        if not ask.echo:
            return ""
        source = ask.prompts[index]
        if isinstance(source, str):
            return source
        return session.tokenizer.decode(prompt) if session.tokenizer is not None else ""


def _nowhere(events: list[Event] | None) -> None:
    """Replaced before the job is queued."""


class Answer(Response):
    """Sends an answer as it is made, whole or as events; a client that leaves cancels its jobs."""

    def __init__(self, server: Server, ask: asks.Ask, reply: replies.Reply, inbox: Inbox) -> None:
        super().__init__()
        self._server, self._ask, self._reply, self._inbox = server, ask, reply, inbox

    def stop(self) -> None:
        """The answer ends with what came so far, and the server's farewell."""
        for choice in self._reply.choices:
            choice.job.failure = failures.stopping()
            self._inbox.put((choice, None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._server.answers.add(self)
        write = asyncio.ensure_future(self._write(scope, receive, send))
        leave = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({write, leave}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also where this task is cancelled: nobody reads what the jobs would still make.
            if not write.done():
                write.cancel()
            leave.cancel()
            self._inbox.close()
            self._server.answers.discard(self)
            self._server.scheduler.cancel([choice.job for choice in self._reply.choices])
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await write

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await (self._stream(send) if self._ask.stream else self._whole())
        except RequestFailure as failure:
            response = _failure_response(failure)
        if response is not None:
            await response(scope, receive, send)

    async def _whole(self) -> Response:
        async for choice, events in self._events():
            if events is not None:
                choice.take(events)
        return _json(self._reply.whole())

    async def _events(self) -> AsyncIterator[tuple[replies.Choice, list[Event] | None]]:
        """What comes from the engine; None events end a choice. Raises a choice's failure."""
        open_choices = len(self._reply.choices)
        while open_choices:
            for choice, events in await self._inbox.get():
                if events is None:
                    open_choices -= 1
                    if choice.job.failure is not None:
                        raise choice.job.failure
                yield choice, events

    async def _stream(self, send: Send) -> Response | None:
        """Events over one connection; None when all is sent. What fails before the first byte is an ordinary error."""
        reply = self._reply
        begun: set[int] = set()
        open_choices = len(reply.choices)
        started = False

        async def put(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def end() -> None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        self._inbox.beat(self._server.options.keep_alive)
        while open_choices:
            found = await self._inbox.get()
            data = replies.KEEP_ALIVE if not found else b""
            for choice, events in found:
                if events is None and choice.job.failure is not None:
                    if not (started or data):
                        raise choice.job.failure
                    await put(data + replies.sse(choice.job.failure.body()))
                    await end()
                    return None
                chunks = []
                if choice.index not in begun:
                    begun.add(choice.index)
                    chunks.append(reply.opening(choice))
                if events is None:
                    open_choices -= 1
                    chunks.append(reply.closing(choice))
                else:
                    chunks.append(reply.piece(choice, events))
                data += b"".join(replies.sse(chunk) for chunk in chunks if chunk is not None)
            if data:
                await put(data)
        await put((replies.sse(reply.usage_chunk()) if self._ask.include_usage else b"") + replies.DONE)
        await end()
        return None


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Replies that are not answers.


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(replies.dumps(value), status, headers, media_type="application/json")


def _failure_response(failure: RequestFailure) -> Response:
    return _json(failure.body(), failure.status, failure.headers)


async def _failure(request: Request, failure: RequestFailure) -> Response:
    return _failure_response(failure)


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    where = f"{request.method} {request.url.path[:200]}"
    text = {404: f"{where}: no such path", 405: f"{where}: the method is not allowed here"}.get(error.status_code, error.detail)
    failure = RequestFailure(error.status_code, text, code=code, headers=dict(error.headers or {}))
    return _failure_response(failure)


async def _left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # to nobody


async def _crash(request: Request, error: Exception) -> Response:
    return _failure_response(failures.engine_failed(f"unexpected {type(error).__name__}; the server's log says where"))


def _too_large(size: int, limit: int) -> RequestFailure:
    text = f"the body has {size} bytes or more, this server takes up to {limit} (--max-body-bytes)"
    return RequestFailure(413, text, code="body_too_large", headers={"Connection": "close"})
