"""What the server does by default; the command line reads these as it reads `dustin.config`."""

from __future__ import annotations

from dataclasses import dataclass

from dustin.config import check_types, require


@dataclass(frozen=True)
class ServerOptions:
    """Limits and addresses. Times are in seconds; 0 seconds of `request_timeout` is no limit.

    `slots` requests run at once, `max_queue` more wait. `prefill_tokens` prompt tokens are read between two rounds while others
    stream (None: what suits the backend). With `share_prefixes` what prompts have in common is read once for all of them.
    `max_tokens` is for chat requests that name no limit (None: what the context leaves). `warmup` compiles and records the shapes
    of rounds before the first request (None: where the backend does either, a GPU). After `stall_timeout` without a finished step
    the server reports itself unhealthy.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    slots: int = 8
    max_queue: int = 64
    prefill_tokens: int | None = None
    share_prefixes: bool = True
    warmup: bool | None = None
    max_tokens: int | None = None
    max_body_bytes: int = 16 * 2**20
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    stall_timeout: float = 120.0
    keep_alive: float = 10.0

    def __post_init__(self) -> None:
        check_types(self)
        require("host", self.host, bool(self.host), "an address")
        require("port", self.port, 0 <= self.port <= 65535, "0 (any free one) to 65535")
        require("api_key", "", self.api_key is None or bool(self.api_key.strip()), "a key that is not empty")
        require("slots", self.slots, 1 <= self.slots <= 256, "1 to 256 requests")
        require("max_queue", self.max_queue, 0 <= self.max_queue <= 100_000, "0 to 100000 requests")
        require("prefill_tokens", self.prefill_tokens, self.prefill_tokens is None or self.prefill_tokens >= 1, "1 or more tokens")
        require("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more tokens")
        require("max_body_bytes", self.max_body_bytes, self.max_body_bytes >= 1024, "1024 or more bytes")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            require(name, value, 0 <= value < float("inf"), "0 or more seconds")
        for name in ("stall_timeout", "keep_alive"):
            value = getattr(self, name)
            require(name, value, 0 < value < float("inf"), "more than 0 seconds")
