"""What the server does when it is asked too much, wrongly, or for longer than the client stays."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")

from dustin.config import SamplingOptions
from dustin.errors import DustinError, MemoryLimitError, UsageError
from dustin.serving.options import ServerOptions
from dustin.serving.server import listen
from tests.server.helpers import JSON, PacedModel, Running, cycle, events, ids, running, toy_session, until


@contextlib.contextmanager
def slow(pace: float = 0.02, session: dict[str, Any] | None = None, **options: Any) -> Any:
    model = PacedModel(context_length=4096)
    with running(toy_session(model, **session or {}), **options) as server:
        model.pace = pace
        server.model = model  # type: ignore[attr-defined]
        try:
            yield server
        finally:
            model.pace = 0.0
            model.gate.set()


def idle(server: Running) -> bool:
    found = server.metrics()
    return found["dustin_requests_running"] == 0 == found["dustin_requests_waiting"]


def cut(server: Running, after: int, stream: bool = True, path: str = "/v1/chat/completions") -> None:
    """A client that leaves after so many bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 3000}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        seen = b""
        while len(seen) < after:
            more = connection.recv(4096)
            assert more, f"the server hung up after {seen[:200]!r}"
            seen += more


# Clients that leave.


def test_fifty_clients_cut_mid_stream_leave_nothing_behind() -> None:
    with slow(0.002, slots=4, max_queue=64) as server:
        with ThreadPoolExecutor(50) as pool:
            list(pool.map(lambda number: cut(server, 1 + 40 * (number % 20)), range(50)))
        assert server.chat(max_tokens=12).json()["choices"][0]["message"]["content"] == cycle(12)
        until(lambda: idle(server))
        found = server.metrics()
        assert found['dustin_requests_total{outcome="cancelled"}'] == 50
        assert found["dustin_kv_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot_within_a_round(stream: bool) -> None:
    with slow(slots=1) as server:
        cut(server, 200 if stream else 0, stream)
        until(lambda: idle(server), 3)
        assert server.chat(max_tokens=3).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body(capfd: pytest.CaptureFixture[str]) -> None:
    with running(toy_session()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for head in (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n", b"NONSENSE\r\n\r\n", b"\x16\x03\x01\x02"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
        assert server.complete("x", max_tokens=2).status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    with slow(slots=1) as server:
        with ThreadPoolExecutor(1) as pool:
            running_one = pool.submit(lambda: server.chat(max_tokens=40))
            until(lambda: server.scheduler.num_running)
            cut(server, 0)
            until(lambda: server.metrics().get('dustin_requests_total{outcome="cancelled"}') == 1)
            assert server.scheduler.num_running == 1 and server.scheduler.num_waiting == 0
            assert running_one.result().status_code == 200


# Too many.


def test_a_full_queue_says_when_to_come_back() -> None:
    with slow(slots=1, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        server.model.gate.clear()  # type: ignore[attr-defined]
        asked = [pool.submit(lambda: server.chat(max_tokens=4)) for _ in range(2)]
        until(lambda: server.scheduler.num_running + server.scheduler.num_waiting == 2)
        refused = server.chat(max_tokens=4)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full" and refused.json()["error"]["type"] == "rate_limit_error"
        assert server.metrics()["dustin_requests_refused_total"] == 1
        server.model.gate.set()  # type: ignore[attr-defined]
        assert [reply.result().status_code for reply in asked] == [200, 200]
        assert server.chat(max_tokens=4).status_code == 200
        too_many = server.chat(n=3)
        assert too_many.status_code == 400 and "takes 2" in too_many.text


def test_a_request_that_takes_too_long() -> None:
    with slow(0.05, slots=1, request_timeout=0.5) as server:
        late = server.chat(max_tokens=2000)
        assert late.status_code == 503 and late.json()["error"]["code"] == "request_timeout"
        assert late.headers["x-should-retry"] == "false"
        # A stream has begun by then: the error is an event.
        body = server.chat(max_tokens=2000, stream=True).text
        assert json.loads(body.strip().rsplit("data: ", 1)[1])["error"]["code"] == "request_timeout"
        assert "[DONE]" not in body
        until(lambda: idle(server))
        assert server.chat(max_tokens=2).status_code == 200


def test_a_large_body_is_refused_with_both_numbers() -> None:
    with running(toy_session(), max_body_bytes=2000) as server:
        reply = server.chat("x" * 3000)
        assert reply.status_code == 413 and "2000" in reply.text and "3" in reply.text

        def endless() -> Any:
            for _ in range(100):
                yield b" " * 1000

        chunked = server.client.post("/v1/chat/completions", content=endless(), headers=JSON)
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"
        assert server.chat(max_tokens=2).status_code == 200


def test_a_long_prompt_stalls_nobody() -> None:
    """While 3,000 tokens are read in chunks, another stream goes on: no gap is longer than a chunk and a round."""
    with slow(0.01, slots=2, prefill_tokens=100) as server:
        arrived: list[float] = []
        begun = threading.Event()

        def listen_to_stream() -> None:
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 400}
            with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        arrived.append(time.monotonic())
                        begun.set()

        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen_to_stream)
            begun.wait(10)
            started = time.monotonic()
            with httpx.Client(base_url=server.url, timeout=30) as other:
                assert other.post("/v1/completions", json={"prompt": "y" * 3000, "max_tokens": 1}).status_code == 200
            ended = time.monotonic()
            server.model.pace = 0  # type: ignore[attr-defined]
            listening.result(30)
        during = [at for at in arrived if started <= at <= ended]
        assert len(during) >= 20, "the stream stood still while the prompt was read"
        gaps = [b - a for a, b in zip(during, during[1:], strict=False)]
        assert max(gaps) < 0.5 * (ended - started)


def test_comments_keep_a_silent_stream_alive() -> None:
    with slow(0.05, slots=1, keep_alive=0.1, prefill_tokens=8, session={"prefill_chunk": 8}) as server:
        reply = server.complete("x" * 60, max_tokens=2, stream=True)
        assert reply.text.startswith(": keep-alive\n\n")
        assert "".join(event["choices"][0]["text"] for event in events(reply)) == "Z\ufffd"


# Keys, paths, content types.


def test_the_api_key() -> None:
    with running(toy_session(), api_key="secret") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"}):
            reply = server.chat(max_tokens=2) if not headers else server.client.get("/v1/models", headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/metrics").status_code == 401 and server.client.get("/health").status_code == 200
        assert server.open_ai(api_key="secret").models.list().data[0].id == "toy"


def test_errors_are_objects_everywhere() -> None:
    with running(toy_session()) as server:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/models/other", 404),
        ):
            reply = server.client.request(method, path)
            assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
        # A web page may send such bodies without asking first.
        reply = server.client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert reply.status_code == 400 and "application/json" in reply.text


def test_a_loopback_server_answers_to_names_of_this_machine() -> None:
    with running(toy_session()) as server:
        port = server.url.rsplit(":", 1)[1]
        for host, status in (
            (f"localhost:{port}", 200),
            (f"[::1]:{port}", 200),
            ("evil.example", 403),
            (f"evil.example:{port}", 403),
        ):
            assert server.client.get("/v1/models", headers={"host": host}).status_code == status
    with running(toy_session(), api_key="secret") as server:
        headers = {"host": "models.example", "authorization": "Bearer secret"}
        assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_a_large_body_is_parsed_too() -> None:
    with running(toy_session()) as server:
        reply = server.complete([[1] * 100_000, [2] * 100_000])
        assert reply.status_code == 400 and "100000 tokens" in reply.text


# Health, failures, the end.


def test_health_while_loading_and_when_loading_fails() -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait(10)
        raise UsageError("no such model")

    with running(load) as server:
        assert server.client.get("/health").json() == {"status": "loading"}
        assert server.chat().status_code == 503 and server.chat().json()["error"]["code"] == "loading"
        gate.set()
        server.thread.join(10)
        assert isinstance(server.scheduler.error, UsageError)


def test_health_when_the_engine_does_not_advance() -> None:
    with slow(slots=1, stall_timeout=0.2) as server, ThreadPoolExecutor(1) as pool:
        assert server.client.get("/health").status_code == 200
        server.model.gate.clear()  # type: ignore[attr-defined]
        asked = pool.submit(lambda: server.chat(max_tokens=4))
        until(lambda: server.client.get("/health").json() == {"status": "stalled"})
        server.model.gate.set()  # type: ignore[attr-defined]
        assert asked.result().status_code == 200
        until(lambda: server.client.get("/health").status_code == 200)


def test_a_failing_step_is_a_500_for_those_in_it_and_nothing_for_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    with slow(0.01, slots=2) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda: server.chat(max_tokens=50)) for _ in range(2)]
        until(lambda: server.scheduler.num_running == 2)
        server.model.fail_next = True  # type: ignore[attr-defined]
        for reply in asked:
            error = reply.result().json()["error"]
            assert reply.result().status_code == 500 and error["code"] == "engine_error"
            assert "ArithmeticError" in error["message"] and "Traceback" not in error["message"]
        assert "a broken kernel" in capfd.readouterr().err
        assert server.chat(max_tokens=5).json()["choices"][0]["message"]["content"] == cycle(5)
        assert server.metrics()["dustin_engine_failures_total"] == 1


def test_nan_logits_end_one_request_alone() -> None:
    (broken,) = ids("q")
    model = PacedModel(nan_after=broken)
    with running(toy_session(model), slots=2) as server, ThreadPoolExecutor(1) as pool:
        model.pace = 0.01
        good = pool.submit(lambda: server.complete("x", max_tokens=30))
        until(lambda: server.scheduler.num_running)
        bad = server.complete([broken], max_tokens=5)
        assert bad.status_code == 500 and "NaN" in bad.json()["error"]["message"]
        assert good.result().json()["choices"][0]["text"] == cycle(30)


def test_a_drain_finishes_what_runs_and_takes_no_more() -> None:
    with slow(0.01, slots=1) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda: server.chat(max_tokens=30)) for _ in range(2)]
        until(lambda: server.scheduler.num_running and server.scheduler.num_waiting)
        server.prepared.http.handle_exit(15, None)
        until(lambda: server.scheduler.state == "draining")
        assert [reply.result().json()["choices"][0]["message"]["content"] for reply in asked] == [cycle(30)] * 2
        server.thread.join(10)
        assert server.scheduler.state == "stopped"


def test_a_drain_that_takes_too_long_ends_with_an_error() -> None:
    with slow(0.05, slots=1, drain_timeout=0.3) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: server.chat(max_tokens=3000))
        until(lambda: server.scheduler.num_running)
        server.prepared.http.handle_exit(15, None)
        assert asked.result().status_code == 503 and asked.result().json()["error"]["code"] == "shutting_down"
        server.thread.join(10)


def test_an_address_that_cannot_be_had() -> None:
    with listen("127.0.0.1", 0) as taken:
        with pytest.raises(DustinError, match="Choose another --port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match="--host is 'no.such.host.invalid'"):
        listen("no.such.host.invalid", 0)


def test_slots_that_do_not_fit_are_refused_at_the_start() -> None:
    with running(lambda: toy_session(PacedModel(context_length=2**31)), slots=64) as server:
        server.thread.join(10)
        assert isinstance(server.scheduler.error, MemoryLimitError)


@pytest.mark.parametrize(
    "options", [{"slots": 0}, {"port": 70000}, {"max_queue": -1}, {"api_key": " "}, {"request_timeout": -1.0}, {"max_tokens": 0}]
)
def test_bad_options_name_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ServerOptions(**options)


def test_the_servers_defaults_are_for_requests_that_name_none() -> None:
    with running(toy_session(), SamplingOptions(temperature=1.5, seed=3), max_tokens=6) as server:
        server.scheduler.session.target.table *= 0.1  # type: ignore[union-attr]
        first, again = (server.chat().json() for _ in range(2))
        assert first["choices"][0]["message"] == again["choices"][0]["message"] and first["usage"]["completion_tokens"] == 6
        assert server.chat(temperature=0).json()["choices"][0]["message"]["content"] == cycle(6)
