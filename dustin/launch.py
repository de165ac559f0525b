"""Several ranks of one command: started here (`--tensor-parallel N`), by torchrun (RANK, WORLD_SIZE) or mlx.launch (MLX_RANK)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import click

from dustin.errors import DustinError, UsageError

# Set for the ranks that `spawn` starts: rank 0 alone speaks there, the launcher sees the others end.
LAUNCHED = "DUSTIN_LAUNCHED"
_GRACE_SECONDS = 6.0


def world_size() -> int:
    """Ranks of this run; 1 outside torchrun and --tensor-parallel. Raise UsageError on a WORLD_SIZE that is no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"WORLD_SIZE is {text!r}, expected a number of 1 or more")
    return int(text)


def rank() -> int:
    """The rank of this process. Raise UsageError on a variable that is no number."""
    name = "MLX_RANK" if kind() == "mlx" else "RANK"
    text = os.environ.get(name, "0")
    if not text.isdigit():
        raise UsageError(f"{name} is {text!r}, expected the number of this process: torchrun and mlx.launch set it")
    return int(text)


def kind() -> str | None:
    """Whose ranks run: "torch", "mlx" (their number is known once they have joined), or None for a single process."""
    if world_size() > 1:
        return "torch"
    return "mlx" if "MLX_RANK" in os.environ else None


def tensor_parallel_option(command: Callable[..., object]) -> Callable[..., object]:
    """--tensor-parallel N: starts N ranks of the same command line, unless torchrun has."""

    def start(ctx: click.Context, _: click.Parameter, value: int) -> None:
        if ctx.resilient_parsing:
            return
        running = world_size()
        if kind() == "mlx" and value > 1:
            raise UsageError("--tensor-parallel starts ranks of torch, but mlx.launch has started ranks already: drop the option")
        if running > 1 and value not in (1, running):
            raise UsageError(f"--tensor-parallel is {value}, but {running} ranks are running: drop the option or start {value}")
        if running == 1 and value > 1:
            state = ctx.find_root().obj or {}
            ctx.exit(spawn(value, state.get("args") or sys.argv[1:]))

    return click.option(
        "--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, expose_value=False, callback=start,
        metavar="N", help="Split the model over N processes, each with a device of its own.",
    )(command)  # fmt: skip


def as_rank(command: Callable[[], int], debug: Callable[[], bool]) -> int:
    """Run `command` on rank 0, follow it on the others; returns the exit code."""
    from dustin import registry

    own = 0
    try:
        own = rank()
        registry.join_ranks()
        if own == 0:
            return command()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        registry.follow()
        return 0
    except DustinError as error:
        if debug():
            raise
        return _end(error, own)
    finally:
        if own == 0 and not isinstance(sys.exc_info()[1], DustinError):
            registry.leave_ranks()


def _end(error: DustinError, own: int) -> int:
    if own == 0 or LAUNCHED not in os.environ:
        print(f"error: {error}", file=sys.stderr, flush=True)
    # Threads of a broken group may wait for ever; nothing is left to save.
    os._exit(error.exit_code)


def spawn(count: int, args: Sequence[str]) -> int:
    """Run `python -m dustin ARGS` in `count` ranks on this machine; returns rank 0's exit code, 1 when another one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: "1"}
    threads = str(max(1, (os.cpu_count() or 1) // count))
    processes = []
    for number in range(count):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **shared, **own}
        stdin = None if number == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen([sys.executable, "-m", "dustin", *args], env=environment, stdin=stdin))
    # Ctrl-C reaches rank 0 through the terminal, and what it means is rank 0's business.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ask_end = signal.signal(signal.SIGTERM, lambda *_: processes[0].terminate())
    try:
        return _supervise(processes)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, ask_end)


def _supervise(processes: list[subprocess.Popen[bytes]]) -> int:
    ended: dict[int, int] = {}
    deadline: float | None = None
    while len(ended) < len(processes):
        for number, process in enumerate(processes):
            code = process.poll()
            if code is not None:
                ended.setdefault(number, code)
        if deadline is None and (0 in ended or any(ended.values())):
            # The others see it too and end by themselves; rank 0 says why.
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    return _verdict(ended)


def _verdict(ended: dict[int, int]) -> int:
    """The exit code; a rank that a signal ended, or that failed while rank 0 did not, is named."""
    first = ended[0]
    if first > 0:
        return first
    for number, code in ended.items():
        if code < 0 and (number == 0 or first == 0):
            print(f"error: rank {number} was ended by signal {-code} ({signal.Signals(-code).name})", file=sys.stderr)
            return 1
        if code > 0:
            print(f"error: rank {number} failed with exit code {code}", file=sys.stderr)
            return 1
    return first
