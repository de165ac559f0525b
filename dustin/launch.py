"""Several ranks of one command: started here (`--tensor-parallel N`), by torchrun (RANK, WORLD_SIZE) or mlx.launch (MLX_RANK)."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import click

from dustin.errors import DustinError, UsageError

# Set by `spawn`: on rank 0 the processes of the others, on those the process of rank 0, which alone speaks.
LAUNCHED = "DUSTIN_LAUNCHED"
_GRACE_SECONDS, _OWN_SECONDS = 6.0, 3.0
_PR_SET_PDEATHSIG = 1


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
            ctx.exit(spawn(value, state.get("args")))

    return click.option(
        "--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, expose_value=False, callback=start,
        metavar="N", help="Split the model over N processes, each with a device of its own.",
    )(command)  # fmt: skip


def needs_ranks(group: click.Group, args: Sequence[str]) -> bool:
    """Whether a command line splits a model: not for help, nor with a command that has no --tensor-parallel."""
    options = list(args[: args.index("--")] if "--" in args else args)
    if any(word in options for word in (*group.context_settings.get("help_option_names", ["--help"]), "--version")):
        return False
    command = next((group.commands[word] for word in options if word in group.commands), None)
    return command is not None and any("--tensor-parallel" in param.opts for param in command.params)


def alone() -> None:
    """Make this process one that belongs to no ranks."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MLX_RANK"):
        os.environ.pop(name, None)


def as_rank(command: Callable[[], int], debug: Callable[[], bool]) -> int:
    """Run `command` on rank 0, follow it on the others; returns the exit code."""
    from dustin import registry

    own = 0
    try:
        own = rank()
        if own:
            # What Ctrl-C means is rank 0's business.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if LAUNCHED in os.environ:
                _end_with(int(os.environ[LAUNCHED]))
            registry.join_ranks()
            registry.follow()
            return 0
        others = _Others()
        registry.join_ranks()
        others.joined()
        code = command()
        registry.leave_ranks()
        return code or others.reap()
    except DustinError as error:
        if debug():
            raise
        return _end(error, own)
    except KeyboardInterrupt:
        # Before the others are there.
        os._exit(130)
    finally:
        if own == 0 and not isinstance(sys.exc_info()[1], DustinError):
            registry.leave_ranks()


def _end(error: DustinError, own: int) -> int:
    if own == 0 or LAUNCHED not in os.environ:
        print(f"error: {error}", file=sys.stderr, flush=True)
    # Threads of a broken group may wait for ever; nothing is left to save.
    os._exit(error.exit_code)


def _end_with(process: int) -> None:
    """End when `process`, this one's parent, has ended, however it did. Where Linux cannot see to it the ranks' watch does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != process:
        os._exit(1)


def spawn(count: int, args: Sequence[str] | None) -> int:
    """Start ranks 1 to count - 1 of this command line and become rank 0; does not return.

    So signals for this process are rank 0's, and no other one stands between it and the terminal. With `args`, which a program
    has given, a process of its own does so; returns its exit code.
    """
    if args is not None:
        return subprocess.run([sys.executable, "-m", "dustin", *args]).returncode
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    shared = {"OMP_NUM_THREADS": threads, **os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "dustin", *sys.argv[1:]]
    others = []
    for number in range(1, count):
        own = {"RANK": str(number), "LOCAL_RANK": str(number), LAUNCHED: str(os.getpid())}
        others.append(subprocess.Popen(command, env=shared | own, stdin=subprocess.DEVNULL).pid)
    sys.stdout.flush()
    os.execve(sys.executable, command, shared | {"RANK": "0", "LOCAL_RANK": "0", LAUNCHED: ",".join(map(str, others))})


class _Others:
    """On rank 0: the processes of the other ranks that `spawn` has started, none of them otherwise."""

    def __init__(self) -> None:
        self._running = {number: int(text) for number, text in enumerate(filter(None, os.environ.get(LAUNCHED, "").split(",")), 1)}
        self._joined = threading.Event()
        if self._running:
            threading.Thread(target=self._watch, daemon=True, name="start of ranks").start()

    def joined(self) -> None:
        """From here on the ranks watch each other."""
        self._joined.set()

    def _watch(self) -> None:
        while not self._joined.wait(0.1):
            for number in self._running:
                failure = self._failure(number)
                # What ended it may end this one too, with a better reason.
                if failure and not self._joined.wait(_OWN_SECONDS):
                    os.write(2, f"error: rank {number} {failure} before the ranks had joined\n".encode())
                    os._exit(1)

    def _failure(self, number: int) -> str | None:
        """How a rank ended, "" for an end in order; None while it runs."""
        ended, status = os.waitpid(self._running[number], os.WNOHANG)
        if not ended:
            return None
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"failed with exit code {code}" if code else ""

    def reap(self) -> int:
        """After all has gone well: 1, with a message, when a rank failed or does not end."""
        code, deadline = 0, time.monotonic() + _GRACE_SECONDS
        for number, process in self._running.items():
            while (failure := self._failure(number)) is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if failure is None:
                failure = f"(process {process}) does not end"
                os.kill(process, signal.SIGKILL)
            if failure:
                print(f"error: rank {number} {failure}", file=sys.stderr)
                code = 1
        return code
