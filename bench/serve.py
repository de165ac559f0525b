"""The server against the same requests one by one, and against other servers of the same weights on the same machine.

Every side is an OpenAI-compatible process on loopback, asked by the same clients for the same chats, greedily and streamed. One
by one means one client; together means `--clients` of them. Tokens are counted by encoding the answers, the same way for all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench import rows
from bench.cpu import load_transformers, passages

OUT = rows.RESULTS / "serve.jsonl"
# New tokens of the first requests, which nobody times.
_WARM_TOKENS = 16


def export(source: Path, folder: Path, tokenizer: Any, dtype: str) -> None:
    """The dequantised weights of a .gguf as a folder that transformers and mlx-lm load."""
    model = load_transformers(source, dtype)
    model.generation_config.eos_token_id = list(tokenizer.eos_ids)
    model.config.eos_token_id = list(tokenizer.eos_ids)
    model.save_pretrained(folder)
    tokenizer.core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template, **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ready:
    """A server that answers: where, after how many seconds, and how many of those it says it was warming up (0: it did not)."""

    address: str
    ready_seconds: float
    warm_up_seconds: float


@contextlib.contextmanager
def serving(command: list[str], port: int, path: str, threads: int, patience: float = 300.0) -> Iterator[Ready]:
    """A server process, once it answers GET `path`, within `patience` seconds. Ended afterwards."""
    import httpx

    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=rows.ROOT)
        began, address = time.monotonic(), f"http://127.0.0.1:{port}"
        end = began + patience
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(address + path, timeout=5).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    after = time.monotonic() - began
                    raise click.ClickException(f"{' '.join(command[:4])} ... not ready after {after:.0f} s: {log.read()[-800:]}")
                time.sleep(0.2)
            seconds = time.monotonic() - began
            # The position in the file is the server's too.
            said = re.search(rb"warmed up in ([0-9.]+) s", os.pread(log.fileno(), 1 << 20, 0))
            yield Ready(address, seconds, float(said[1]) if said else 0.0)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Client:
    """Streams one chat after another; notes when text arrives."""

    def __init__(self, ready: Ready, model: str, tokens: int) -> None:
        self.ready, self.address, self.model, self.tokens = ready, ready.address, model, tokens

    @functools.cached_property
    def _http(self) -> Any:
        """Connections are kept, as programs that ask for more than one chat do."""
        import httpx

        return httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None))

    def counts(self) -> dict[str, float]:
        """What one of our servers has counted so far, by the names of its metrics; nothing of others."""
        reply = self._http.get(f"{self.address}/metrics")
        found = re.findall(r'^(?:dustin_)?(\w+?)(?:_total)?(?:\{mode="(\w+)"\})? ([0-9.e+-]+)$', reply.text, re.MULTILINE)
        return {f"{name} {mode}".strip(): float(value) for name, mode, value in found} if reply.status_code == 200 else {}

    def ask(self, text: str, tokens: int | None = None, whole: bool = False) -> tuple[str, list[float]]:
        """The answer, of `tokens` at most (None: as many as all), and the arrival times of its pieces, the first being when it
        was asked for. `whole`: it has so many whatever ends it, as our servers alone know how to."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens or self.tokens,
            "temperature": 0, "stream": True, **({"ignore_eos": True} if whole else {}),
        }  # fmt: skip
        pieces, times = [], [time.perf_counter()]
        with self._http.stream("POST", f"{self.address}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise click.ClickException(f"{self.address}: {reply.status_code} {reply.read()[:300]!r}")
            for line in reply.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                choices = json.loads(line[5:]).get("choices") or [{}]
                if piece := (choices[0].get("delta") or {}).get("content"):
                    pieces.append(piece)
                    times.append(time.perf_counter())
        return "".join(pieces), times


def warm(client: Client, opts: dict[str, Any]) -> None:
    """The first requests: one, and as many as will come at once, short ones. What else a GPU compiles and records, `dustin serve`
    has by the time it says that it is ready, and that is part of what is measured here."""
    for clients in (1, opts["clients"]) if opts["device"] == "cuda" else (1,):
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda i: client.ask(f"Hello {i}", min(_WARM_TOKENS, client.tokens)), range(clients)))


@dataclass
class Measured:
    """What one side did with so many clients, over all rounds."""

    side: str
    clients: int
    per_passage: int = 1
    whole: bool = False
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    client_cpu_seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, client: Client, prompts: list[str], tokenizer: Any) -> None:
        """All of these prompts."""
        before, began, cpu = client.counts(), time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(self.clients) as pool:
            answers = list(pool.map(lambda prompt: client.ask(prompt, whole=self.whole), prompts))
        self.seconds += time.perf_counter() - began
        self.client_cpu_seconds += time.process_time() - cpu
        self.counts.update({name: value - before.get(name, 0.0) for name, value in client.counts().items()})
        self.requests += len(prompts)
        # What follows the end of an answer may have no text.
        counted = (client.tokens if self.whole else len(tokenizer.encode(text, add_special_tokens=False)) for text, _ in answers)
        self.tokens += sum(counted)
        self.texts += [text for text, _ in answers]
        self.first += [times[1] - times[0] for _, times in answers if len(times) > 1]
        self.gaps += [b - a for _, times in answers for a, b in zip(times[1:], times[2:], strict=False)]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def of_rounds(self) -> dict[str, Any]:
        """What our server's own counts say of where the time went; nothing of other servers."""
        counts = self.counts
        if not counts:
            return {}
        row = {"prefill_s": round(counts["prefill_seconds"], 2), "decode_s": round(counts["decode_seconds"], 2)}
        row["server_cpu_s"] = round(counts["process_cpu_seconds"], 2)
        row["rounds_by_mode"] = {name.split()[1]: int(n) for name, n in counts.items() if name.startswith("rounds ") and n}
        if steps := counts["spec_decode_num_drafts"]:
            row["acceptance_length"] = round(1 + counts["spec_decode_num_accepted_tokens"] / steps, 2)
        return row

    def as_dict(self) -> dict[str, Any]:
        """For a row."""
        return {
            "side": self.side,
            "clients": self.clients,
            "per_passage": self.per_passage,
            **({"whole_answers": True} if self.whole else {}),
            "requests": self.requests,
            "generated_tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "client_cpu_s": round(self.client_cpu_seconds, 2),
            "tokens_per_s": round(self.rate, 2),
            "ttft_ms_median": round(1e3 * statistics.median(self.first), 1),
            "gap_ms_median": round(1e3 * statistics.median(self.gaps), 1) if self.gaps else None,
            "gap_ms_worst": round(1e3 * max(self.gaps), 1) if self.gaps else None,
        }


def sides(
    opts: dict[str, Any], source: Path, draft: Path | None, folder: Path | None
) -> Iterator[tuple[str, list[str], int, str, str]]:
    """Name, command, port, path that answers when ready, and model name of every side; peers first."""
    python = sys.executable
    for peer in filter(None, opts["peers"].split(",")):
        port = free_port()
        if peer in ("transformers", "transformers-cb"):
            words = ["-m", "transformers.cli.transformers", "serve", "--port", str(port)]
            words += ["--device", opts["device"], "--dtype", opts["dtype"]]
            words += ["--continuous-batching"] if peer == "transformers-cb" else []
            yield peer, [python, *words], port, "/health", str(folder)
        elif peer == "mlx-lm":
            yield peer, [python, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port)], port, "/health", str(folder)
        else:
            raise click.UsageError(f"--peers has {peer!r}, expected transformers, transformers-cb or mlx-lm")
    for mode in filter(None, opts["modes"].split(",")):
        port = free_port()
        name, _, drafter = mode.partition("+")
        words = ["-m", "dustin", "serve", "-m", str(source), "--port", str(port)]
        words += ["--device", opts["device"], "--dtype", opts["dtype"]]
        if draft is not None and name != "ar" and drafter in ("", "draft"):
            words += ["--draft-model", str(draft)]
        for option in ("prefill_tokens", "prefill_chunk"):
            words += ["--" + option.replace("_", "-"), str(opts[option])] if opts[option] else []
        words += ["--slots", str(opts["clients"]), "--mode", name, "--max-kv-size", str(opts["context"] + opts["tokens"] + 256)]
        yield f"dustin {mode}", [python, *words, *(["--drafter", drafter] if drafter else [])], port, "/health", str(source)


def chats(tokenizer: Any, context: int, count: int, per_passage: int = 1, how: str = "") -> list[str]:
    """Passages of a novel, each of about `context` tokens, and a question after it; `per_passage` chats begin with the same one.
    `how` ends the question."""
    ids = [tokenizer.decode(passage) for passage in passages(tokenizer, context, -(-count // per_passage))]
    ask = "Retell this passage in your own words" if per_passage == 1 else "Retell part {} of this passage in your own words"
    ask += f"{how}."
    # What a server kept of a passage that was asked about alone must not help.
    begin = "" if per_passage == 1 else f"{per_passage} questions about this:\n\n"
    return [f"{begin}{ids[i // per_passage]}\n\n{ask.format(1 + i % per_passage)}" for i in range(count)]


def start_all(
    found: list[tuple[str, list[str], int, str, str]], threads: int, patience: float, servers: contextlib.ExitStack
) -> list[Ready]:
    """All sides, which load at the same time; `servers` ends them."""
    with ThreadPoolExecutor(len(found)) as pool:
        entering = [serving(command, port, path, threads, patience) for _, command, port, path, _ in found]
        asked = [(one, pool.submit(one.__enter__)) for one in entering]
        failures = []
        for one, future in asked:
            if future.exception() is None:
                servers.push(one)
            else:
                failures.append(future.exception())
    if failures:
        raise failures[0]
    return [future.result() for _, future in asked]


@click.command()
@click.option("--model", default="SmolLM2-135M-Instruct", show_default=True, help="A known model or a .gguf file.")
@click.option("--draft-model", default=None, help="Of our modes but ar.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda, of all sides.")
@click.option("--modes", default="ar,auto,dense+lookup", show_default=True, help="Our modes, with +DRAFTER where wanted.")
@click.option("--peers", default="transformers", show_default=True, help="transformers, transformers-cb, mlx-lm; by commas.")
@click.option(
    "--peer-folder", type=click.Path(path_type=Path), help="Where the peers' copy of the weights lies, or is made."
)
@click.option("--requests", default=8, show_default=True, help="Chats a round, for one client and again for several.")
@click.option("--alone", default=None, type=int, help="Of them for one client; default: all.")
@click.option("--rounds", default=2, show_default=True, help="The sides take turns in each.")
@click.option("--clients", default=8, show_default=True, help="Clients at once; every side is measured with one client too.")
@click.option("--context", default=300, show_default=True, help="Prompt tokens, about.")
@click.option("--per-passage", default="1", show_default=True, help="Chats about the same passage; by commas: one after the other.")
@click.option("--prefill-tokens", default=None, type=int, help="Of our servers; default: theirs.")
@click.option("--prefill-chunk", default=None, type=int, help="Of our servers; default: theirs.")
@click.option("--how", default="", help='Ends the question, as ", in 300 words" does.')
@click.option("--tokens", default=48, show_default=True, help="Longest answer.")
@click.option("--whole", default="", help="Our modes asked once more, for answers of exactly that many tokens; by commas.")
@click.option("--patience", default=300.0, show_default=True, help="Seconds that a server may take to be ready.")
@click.option("--dtype", default="float32", show_default=True, help="Of all sides.")
@click.option("--threads", default=2, show_default=True)
@click.option("--note", default="", help="Kept in the rows: what else ran on the machine.")
@click.option("--output", type=click.Path(path_type=Path), default=OUT, help="Default: bench/results/serve.jsonl.")
@click.option("--append/--replace", default=False, help="Keep the rows that are there.")
def main(**opts: Any) -> None:
    """Throughput and latency of servers; rows to --output."""
    from dustin import models
    from dustin.text import Tokenizer

    whole = [mode for mode in opts["whole"].split(",") if mode]
    if strange := set(whole) - set(opts["modes"].split(",")):
        raise click.UsageError(f"--whole has {min(strange)!r}, expected some of --modes {opts['modes']}")
    if opts["alone"] is not None and not 1 <= opts["alone"] <= opts["requests"]:
        raise click.UsageError(f"--alone is {opts['alone']}, expected 1 to the {opts['requests']} of --requests")
    source = models.resolve(opts["model"])
    tokenizer = Tokenizer.load(source)
    groups = [(int(number), more) for more in ((False, True) if whole else (False,)) for number in opts["per_passage"].split(",")]
    # Every round and both kinds have passages of their own: what a server keeps of prefixes must not help it here.
    count = 2 * opts["requests"] * opts["rounds"]
    passages_of = {n: chats(tokenizer, opts["context"], count * (1 + bool(whole)), n, opts["how"]) for n in {n for n, _ in groups}}
    prompts = {(n, more): passages_of[n][count * more : count * (1 + more)] for n, more in groups}
    made: dict[tuple[str, int, tuple[int, bool]], Measured] = {}
    kept = rows.read(opts["output"]) if opts["append"] and opts["output"].exists() else []
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as servers:
        folder = opts["peer_folder"] or Path(own)
        if opts["peers"] and not (folder / "tokenizer_config.json").exists():
            export(source, folder, tokenizer, opts["dtype"])
        asked: dict[str, Client] = {}
        draft = models.resolve(opts["draft_model"]) if opts["draft_model"] else None
        begun = list(sides(opts, source, draft, folder))
        for (name, _, _, _, model), ready in zip(begun, start_all(begun, opts["threads"], opts["patience"], servers), strict=True):
            asked[name] = Client(ready, model, opts["tokens"])
            for group, clients in itertools.product(groups, (1, opts["clients"])):
                if not group[1] or name.removeprefix("dustin ") in whole:
                    made[name, clients, group] = Measured(name, clients, *group)
        with ThreadPoolExecutor(len(asked)) as pool:
            list(pool.map(lambda client: warm(client, opts), asked.values()))
        for _ in range(opts["rounds"]):
            for group, clients in itertools.product(groups, (1, opts["clients"])):
                some, prompts[group] = prompts[group][: opts["requests"]], prompts[group][opts["requests"] :]
                # In turn, so that what else the machine does meets all sides.
                for name, client in asked.items():
                    if measured := made.get((name, clients, group)):
                        measured.add(client, some[: opts["alone"]] if clients == 1 else some, tokenizer)
                # As they come: a run that is cut keeps what it has.
                lines = [_row(found, made, asked[found.side].ready, opts, source) for found in made.values() if found.requests]
                rows.write(opts["output"], kept + lines)
    for row in lines:
        click.echo(
            f"{row['side']:22s} {row['clients']:2d} clients, {row['per_passage']:2d} a passage {row['tokens_per_s']:7.1f} tok/s "
            f"{row['ratio']:5.2f}x one by one  "
            f"first {row['ttft_ms_median']:.0f} ms, gap {row['gap_ms_median']} ms (worst {row['gap_ms_worst']})",
            err=True,
        )


def _device(kind: str) -> str:
    if kind != "cuda":
        return kind
    import torch

    return torch.cuda.get_device_name()


def _row(
    found: Measured, made: dict[tuple[str, int, tuple[int, bool]], Measured], ready: Ready, opts: dict[str, Any], source: Path
) -> dict[str, Any]:
    """One measurement with its ratios: to the same server one by one, and to each peer with as many clients."""
    row = {"bench": "serve", "processor": rows.processor(), "threads": opts["threads"], "model": source.name, "weights": "real"}
    row |= {
        "device": _device(opts["device"]),
        "draft": Path(opts["draft_model"]).name if opts["draft_model"] else None,
    }
    row |= {"dtype": opts["dtype"], "context": opts["context"], "max_tokens": opts["tokens"], "rounds": opts["rounds"]}
    row |= found.as_dict() | found.of_rounds() | {"ready_s": round(ready.ready_seconds, 1), "warm_up_s": ready.warm_up_seconds}
    alone = made[found.side, 1, (found.per_passage, found.whole)]
    row |= {"ratio": round(found.rate / alone.rate, 3), "baseline": "the same server, one client"}
    for (side, clients, group), other in made.items():
        alike = other.requests and (clients, group) == (found.clients, (found.per_passage, found.whole))
        if alike and side != found.side and re.match("dustin ar$|transformers|mlx", side):
            name = re.sub(r"\W", "_", side)
            row[f"ratio_to_{name}"] = round(found.rate / other.rate, 3)
            row[f"same_answers_as_{name}"] = sum(a == b for a, b in zip(found.texts, other.texts, strict=True))
    return row | {"note": opts["note"], "command": rows.command(), "commit": rows.commit()}
