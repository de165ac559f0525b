"""`dustin serve` as a process: start, signals, exit codes, and memory under load."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("torch")

from dustin import cli as command_line
from dustin.config import EngineOptions
from dustin.serving.server import _say_when_ready, listen
from tests import tiny_model
from tests.server.helpers import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "dustin", "serve", *map(str, words)]


@contextlib.contextmanager
def process(model: Path, *words: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A served model: the process, its address, and the lines of its stderr so far."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = subprocess.Popen(
        command("-m", model, "--port", 0, "--device", "cpu", *words), stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    lines: list[str] = []

    def read() -> None:
        for line in started.stderr or ():
            lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        until(lambda: started.poll() is not None or any(line.startswith("serving ") for line in lines), 60)
        address = re.search(r"http://[\d.:]+", "".join(lines))
        assert address, "".join(lines)
        yield started, address.group(), lines
    finally:
        if started.poll() is None:
            started.kill()
        started.wait(10)
        reader.join(10)


def test_sigterm_finishes_what_runs(model: Path) -> None:
    with process(model, "--slots", 2) as (server, address, lines):
        assert "listening on" in lines[0] and "2 slots of 4096 tokens" in lines[1]
        body = {"prompt": "hello", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            chunks = reply.iter_lines()
            assert next(chunks).startswith("data: ")
            server.send_signal(signal.SIGTERM)
            text = list(chunks)
        assert text[-2] == "data: [DONE]" and '"finish_reason":"length"' in text[-4]
        assert server.wait(15) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(("max_kv_size", "noted"), [(None, True), (1000, True), (200, False)])
def test_a_draft_that_holds_less_is_noted(max_kv_size: int | None, noted: bool) -> None:
    lines: list[str] = []
    spec = SimpleNamespace(name="target", context_length=4096)
    small = SimpleNamespace(name="small", context_length=256)
    session = SimpleNamespace(target=SimpleNamespace(spec=spec), draft=SimpleNamespace(spec=small))
    scheduler = SimpleNamespace(
        state="ready", session=session, context=min(251, max_kv_size or 251), options=SimpleNamespace(slots=2),
        engine_options=EngineOptions(max_kv_size=max_kv_size),
    )  # fmt: skip
    _say_when_ready(SimpleNamespace(scheduler=scheduler, address="here"), lines.append).join(5)  # type: ignore[arg-type]
    asked = max_kv_size or 4096
    assert lines[1:] == [f"note: a slot could hold {asked} tokens, but draft small holds 256"] * noted


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child there")
def test_ctrl_c_is_130_and_a_second_one_does_not_wait(model: Path) -> None:
    with process(model) as (server, address, lines):
        body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            chunks = reply.iter_lines()
            next(chunks)
            server.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert server.poll() is None, "the first Ctrl-C waits for the answer"
            server.send_signal(signal.SIGINT)
            rest = list(chunks)
        assert '"code":"shutting_down"' in rest[-2] and "[DONE]" not in "".join(rest)
        assert server.wait(15) == 130
    assert "Traceback" not in "".join(lines)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child there")
def test_a_second_ctrl_c_tells_whoever_waits_for_a_whole_answer(model: Path) -> None:
    # The reference backend takes seconds for such a prompt: the engine's thread cannot answer.
    body = {"prompt": "hello " * 600, "max_tokens": 400, "ignore_eos": True}
    with process(model, "--backend", "numpy", "--prefill-chunk", 4000) as (server, address, lines), ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60)
        while "dustin_requests_running 1" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.02)
        server.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.send_signal(signal.SIGINT)
        reply = waiting.result(20)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down"
        assert server.wait(15) == 130
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_model_is_loaded(model: Path, sig: int, code: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command("-m", model, "--port", 0), stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as started:
        assert started.stderr is not None and "listening on" in started.stderr.readline()
        started.send_signal(sig)
        assert started.wait(60) == code
        assert "Traceback" not in started.stderr.read()


@pytest.mark.slow
def test_two_ranks_serve_what_one_does(model: Path) -> None:
    body = {
        "prompt": ["the same beginning, then one", "the same beginning, then two"],
        "n": 2,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    answers = []
    for words in ([], ["--tensor-parallel", 2]):
        with process(model, "--dtype", "float32", "--slots", 3, *words) as (server, address, _):
            replies = [httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"] for _ in range(2)]
            answers.append([[choice["text"] for choice in choices] for choices in replies])
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
    assert answers[0] == answers[1]


def test_what_cannot_start_says_so_in_one_line(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[list[object], int, str]] = [
            (["-m", tmp_path / "nothing"], 1, "no model at"),
            (["-m", model, "--port", port], 1, f"cannot listen on 127.0.0.1 port {port}"),
            (["-m", model, "--slots", 0], 2, "slots is 0"),
            (["-m", model, "--mode", "dense", "--drafter", "none"], 2, "needs a drafter"),
            (["-m", model, "--host", "no.such.host.invalid"], 2, "--host is"),
        ]
        before = signal.getsignal(signal.SIGTERM)
        for words, code, says in cases:
            words = ["serve", "--device", "cpu", *words, *([] if "--port" in words else ["--port", 0])]
            assert command_line.run([str(word) for word in words]) == code
            text = capfd.readouterr().err
            errors = [line for line in text.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and says in errors[0] and "Traceback" not in text
        assert signal.getsignal(signal.SIGTERM) is before


class Load:
    """Mixed requests from several clients for a time: chats and completions, streamed or not, some cut, some wrong."""

    def __init__(self, address: str, seconds: float, clients: int) -> None:
        self.address, self.end = address, time.monotonic() + seconds
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def run(self, every: float) -> list[tuple[float, float]]:
        """Until the time is up; (seconds, resident MiB) of the server (Linux: its own metrics tell)."""
        began = time.monotonic()
        samples: list[tuple[float, float]] = []
        for thread in self._threads:
            thread.start()
        while time.monotonic() < self.end:
            found = re.search(r"^process_resident_memory_bytes (\S+)", httpx.get(f"{self.address}/metrics").text, re.M)
            samples.append((time.monotonic() - began, float(found.group(1)) / 2**20 if found else 0.0))
            time.sleep(every)
        for thread in self._threads:
            thread.join(60)
        return samples

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=self.address, timeout=60) as client:
            while time.monotonic() < self.end:
                try:
                    self._one(client, rng)
                except Exception as error:  # collected: a thread's exception would be lost
                    self.failures.append(repr(error))

    def _one(self, client: httpx.Client, rng: random.Random) -> None:
        body: dict[str, Any] = {
            "max_tokens": rng.randint(1, 120), "temperature": rng.choice([0, 0, 0.8]), "stream": rng.random() < 0.5,
            "stop": rng.choice([None, "e", ["zz", "q "]]), "n": rng.choice([1, 1, 1, 3]),
        }  # fmt: skip
        text = "".join(rng.choices("abcdefghij ", k=rng.choice([5, 50, 400, 1500])))
        if rng.random() < 0.5:
            path, body = "/v1/completions", body | {"prompt": text, "logprobs": rng.choice([None, 2])}
        else:
            path, body = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        fate = rng.random()
        if fate < 0.1:
            body["temperature"] = "hot"
        if fate > 0.85 and body["stream"]:
            with client.stream("POST", path, json=body) as reply:
                for _ in zip(range(3), reply.iter_bytes(), strict=False):
                    pass
            return self._count("cut")
        reply = client.post(path, json=body)
        self._count(str(reply.status_code))
        if reply.status_code not in (200, 400, 429) or (reply.status_code == 400) != (fate < 0.1):
            self.failures.append(f"{reply.status_code}: {reply.text[:200]}")
        return None


def _load(model: Path, seconds: float) -> tuple[list[tuple[float, float]], Load, dict[str, float]]:
    words = ["--slots", 4, "--max-queue", 8, "--max-kv-size", 2048, "--dtype", "float32", "--mode", "dense", "--drafter", "lookup"]
    with process(model, *words) as (_, address, lines):
        load = Load(address, seconds, clients=6)
        samples = load.run(seconds / 60)
        found = {}

        def idle() -> bool:
            text = httpx.get(f"{address}/metrics").text
            found.update({line.split(" ")[0]: float(line.split(" ")[-1]) for line in text.splitlines() if line[0] != "#"})
            return found["dustin_requests_running"] == 0 == found["dustin_requests_waiting"]

        until(idle)
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert "Traceback" not in "".join(lines)
    return samples, load, found


def test_a_short_load_of_mixed_requests(model: Path) -> None:
    _, load, found = _load(model, 3)
    assert not load.failures, load.failures[:3]
    assert load.counts["200"] > 5 and found["dustin_spec_decode_num_accepted_tokens_total"] > 0
    assert found["dustin_engine_failures_total"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the server tells its memory on Linux only")
def test_ten_minutes_of_load_with_flat_memory(model: Path) -> None:
    seconds = float(os.environ.get("DUSTIN_TEST_LOAD_SECONDS", "600"))
    samples, load, found = _load(model, seconds)
    for at, mebibytes in samples[:: max(1, len(samples) // 12)]:
        print(f"{at:6.0f} s  {mebibytes:7.1f} MiB")
    print(load.counts, {name: value for name, value in found.items() if "_total" in name and "dustin" in name})
    assert not load.failures, load.failures[:3]
    # The first third fills the slots and warms the allocator; from then on nothing may grow.
    settled = [mebibytes for at, mebibytes in samples if at > seconds / 3]
    half = len(settled) // 2
    early, late = (sum(part) / len(part) for part in (settled[:half], settled[half:]))
    assert late - early < 8, f"memory grew from {early:.1f} to {late:.1f} MiB"
