"""Errors as OpenAI clients read them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status."""

from __future__ import annotations

from typing import Any


class RequestFailure(Exception):
    """A request that gets an error object. `param` names the field at fault, `headers` go with the reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad_field(param: str, message: str, code: str | None = None) -> RequestFailure:
    """400 for one field of the body."""
    return RequestFailure(400, message, param=param, code=code)


def context_exceeded(param: str, prompt: int, asked: int | None, context: int) -> RequestFailure:
    """400 for a prompt, or a prompt and max_tokens, that the context cannot hold; the message has the numbers."""
    if asked is None:
        text = f"the prompt has {prompt} tokens, but the context of {context} leaves room for {context - 1}: shorten the prompt"
    else:
        text = (
            f"the prompt has {prompt} tokens and max_tokens is {asked}, {prompt + asked} in all, "
            f"but the context holds {context}: lower max_tokens to {context - prompt} or shorten the prompt"
        )
    return bad_field(param, text, "context_length_exceeded")


def queue_full(limit: int, seconds: int) -> RequestFailure:
    """429: come back later."""
    return RequestFailure(
        429,
        f"{limit} requests are waiting already, which is the limit: try again in about {seconds} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def unavailable(message: str, code: str) -> RequestFailure:
    """503: nothing is wrong with the request."""
    return RequestFailure(503, message, kind="server_error", code=code, headers={"Retry-After": "5"})


def stopping() -> RequestFailure:
    """503: this server ends."""
    return unavailable("the server is stopping", "shutting_down")


def timed_out(seconds: float) -> RequestFailure:
    """503 for a request that took too long. Repeating it would take as long again, and the client is told so."""
    return RequestFailure(
        503,
        f"the request was not finished within {seconds:g} s, the server's --request-timeout",
        kind="server_error",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def engine_failed(message: str) -> RequestFailure:
    """500: our own fault."""
    return RequestFailure(500, message, kind="server_error", code="engine_error")
