"""The ranks of tensor parallelism: one process a device, joined by torch.distributed (gloo on CPUs, NCCL on GPUs).

Rank 0 drives: it alone runs the engine, samples and decides, and tells the others which model calls to mirror. So ranks
cannot diverge. Orders travel over gloo in a group that may wait for hours; collectives inside a forward have a time limit.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dustin.backends.common.steps import Steps
from dustin.backends.torch_triton.symmetric import Sums, prepare
from dustin.errors import RankError, UsageError

_HEADER = 4096
_IDLE = timedelta(days=365)
_BEAT_SECONDS = 0.5
# What rank 0 waits for the others to see that it has cut a step short, and any rank for its group to end.
_CUT_SECONDS, _LEAVE_SECONDS = 3.0, 10.0
# Words by which a failed collective is known; torch raises plain RuntimeErrors.
_PEER_ERRORS = ("gloo", "NCCL", "Connection", "Timed out", "timeout", "Broken pipe")


def world_size() -> int:
    """Ranks of this run as torchrun (or --tensor-parallel) says in WORLD_SIZE; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    """This process's rank, from RANK."""
    return int(os.environ.get("RANK", "0"))


def time_limit() -> float:
    """Seconds a rank may keep the others waiting in a collective, from DUSTIN_TP_TIMEOUT. Raise UsageError on no such number."""
    text = os.environ.get("DUSTIN_TP_TIMEOUT", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e6:
        raise UsageError(f"DUSTIN_TP_TIMEOUT is {text!r}, expected seconds from 1 to 1000000")
    return seconds


def gather_into_one(parts: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """Fill parts [size, ...] with every rank's x, over NCCL."""
    # Newer versions of torch rename the one to the other.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(parts, x, group=group)


class Ranks(Steps, Sums):
    """All ranks of a run. `rank`, `size`, and after `open` the device of this one."""

    def __init__(self) -> None:
        """Join the others. Raise RankError when they do not come within the time limit."""
        super().__init__()
        self.rank, self.size, self.device = this_rank(), world_size(), torch.device("cpu")
        self.variant: Any = None
        self._limit = timedelta(seconds=time_limit())
        try:
            self._store, _, _ = next(dist.rendezvous("env://", timeout=self._limit))
            # A group of its own prefix, because the keys below are ours.
            store = dist.PrefixStore("group", self._store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=self._limit)
            # A limit is each rank's own: rank 0 must be heard at once, the others may wait for its next order for ever.
            self._orders = dist.new_group(backend="gloo", timeout=_IDLE if self.rank else self._limit)
            self._slow = dist.new_group(backend="gloo", timeout=_IDLE)
            self._data = dist.group.WORLD
            dist.barrier()
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} found not all of {self.size} ranks within {time_limit():.0f} s ({_line(error)}): see why one "
                "did not start, and whether MASTER_ADDR and MASTER_PORT can be reached"
            ) from error
        self._watch = _Watch(self._store, self.rank, self.size)

    def open(self, device: torch.device) -> None:
        """Choose where models live. On GPUs the collectives of a forward go over NCCL. Called on all ranks."""
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._data = dist.new_group(backend="nccl", timeout=self._limit)
            self.symmetric = prepare(self, self._data)

    # Inside a forward.

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if x.numel():
            dist.all_reduce(x, group=self._data)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 [R, size * n] from every rank's [R, n], in order of ranks; elsewhere x itself."""
        if not x.numel():
            return x.new_zeros(len(x), self.size * x.shape[1])
        parts = self.gather(x)
        return x if self.rank else parts.transpose(0, 1).reshape(len(x), -1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] of every rank's x."""
        parts, x = x.new_empty(self.size, *x.shape), x.contiguous()
        if x.is_cuda:
            # All ranks get them: NCCL has one kernel for it, where a gather to one rank is a send for each pair.
            gather_into_one(parts, x, self._data)
        else:
            dist.all_gather(list(parts.unbind(0)), x, group=self._data)
        return parts

    # Orders of rank 0.

    def order(self, what: str, values: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Tell the other ranks to do `what`. Rank 0 only."""
        shapes = [(tuple(x.shape), x.dtype) for x in tensors]
        body = pickle.dumps((what, values, shapes))
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        fits = len(body) <= _HEADER - 8
        content = len(body).to_bytes(8, "little") + (body if fits else b"")
        header[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(header, 0, self._orders)
        if not fits:
            dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, self._orders)
        for x in tensors:
            dist.broadcast(x.contiguous(), 0, group=self._data)

    def next_order(self) -> tuple[str, dict[str, Any], list[torch.Tensor]]:
        """Wait for rank 0's next order. Other ranks only."""
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        dist.broadcast(header, 0, self._orders)
        content = header.numpy().tobytes()
        length = int.from_bytes(content[:8], "little")
        if length <= _HEADER - 8:
            body = content[8 : 8 + length]
        else:
            long = torch.zeros(length, dtype=torch.uint8)
            dist.broadcast(long, 0, self._orders)
            body = long.numpy().tobytes()
        what, values, shapes = pickle.loads(body)
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        for x in tensors:
            dist.broadcast(x, 0, group=self._data)
        return what, values, tensors

    def agree(self, mine: Any) -> list[Any]:
        """Every rank's value, on every rank. May wait for long: reading weights takes minutes."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, mine, group=self._slow)
        return values

    # The end.

    def failed(self, message: str) -> None:
        """Leave word of this rank's own failure for the others."""
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", message[:2000])

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a collective's error into the reason why another rank is gone."""
        try:
            with super().guard():
                yield
        except RuntimeError as error:
            if not any(mark in str(error) for mark in _PEER_ERRORS):
                raise
            raise self.why(error) from error

    def why(self, error: Exception) -> RankError:
        """What ended the run, after a collective failed with `error`: the failure another rank left word of, if any."""
        deadline = time.monotonic() + 4 * _BEAT_SECONDS
        while time.monotonic() < deadline:
            if found := self._watch.failure():
                return RankError(found)
            time.sleep(0.05)
        if silent := self._watch.silent():
            return RankError(f"rank {silent[0]} does not answer: no sign of life for {silent[1]:.0f} s ({_line(error)})")
        return RankError(f"rank {self.rank} lost another rank, which left no word: {_line(error)}")

    def cut(self) -> None:
        """On rank 0: end the others wherever they are, a collective say; waits a moment until they have gone."""
        deadline = time.monotonic() + _CUT_SECONDS
        with suppress(RuntimeError, KeyboardInterrupt):
            self._store.set("cut", "1")
            others = [f"left/{rank}" for rank in range(self.size) if rank != self.rank]
            while time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.05)

    def close(self) -> None:
        """Leave the group in good order."""
        self._watch.stop()
        self.drop_graphs()
        if self.broken is not None:
            # A collective that will never end is not waited for.
            return
        # NCCL waits without a limit for whatever still holds a communicator.
        ending = threading.Thread(target=_destroy, daemon=True, name="leave ranks")
        ending.start()
        ending.join(_LEAVE_SECONDS)

    def drop_graphs(self) -> None:
        """Give up the CUDA graphs, which keep their communicator from ending."""
        if self.device.type == "cuda":
            from dustin.backends.torch_triton.cuda_graphs import drop_shared

            drop_shared()


def _destroy() -> None:
    with suppress(RuntimeError):
        dist.destroy_process_group()


_joined: list[Ranks] = []


def join() -> Ranks:
    """The ranks of this run; the first call waits for them all."""
    if not _joined:
        _joined.append(Ranks())
    return _joined[0]


def leave() -> None:
    """On rank 0: let the others go. Does nothing where `join` was never called."""
    while _joined:
        ranks = _joined.pop()
        if ranks.rank == 0:
            if ranks.busy:
                ranks.broken = "the run has ended"
            try:
                with ranks.together():
                    ranks.order("end", {"first": []})
            except (RankError, RuntimeError, KeyboardInterrupt):
                ranks.cut()
        ranks.close()


class _Watch:
    """A thread that ends this process when another rank has failed or gone silent: a GPU waiting for NCCL would hang."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._stopped = threading.Event()
        began = time.monotonic()
        self._beats = {other: (b"", began) for other in range(size) if other != rank}
        host = socket.gethostname()
        with suppress(RuntimeError):
            store.set(f"process/{rank}", f"{host} {os.getpid()}")
        self._host = host
        self._thread = threading.Thread(target=self._run, daemon=True, name="rank watch")
        self._thread.start()

    def failure(self) -> str | None:
        """Which rank failed first and why; None when all seem well."""
        for rank in range(self._size):
            if rank == self._rank:
                continue
            try:
                if self._store.check([f"failed/{rank}"]):
                    return f"rank {rank} failed: {self._store.get(f'failed/{rank}').decode()}"
                if self._store.check([f"left/{rank}"]):
                    continue
                if self._store.check([f"process/{rank}"]):
                    host, pid = self._store.get(f"process/{rank}").decode().split()
                    if host == self._host and not _alive(int(pid)):
                        return f"rank {rank} (process {pid}) has ended without a word, killed perhaps: see its output"
            except RuntimeError:
                return None if self._rank == 0 else "rank 0 has ended: it no longer answers"
        return None

    def silent(self) -> tuple[int, float] | None:
        """The rank whose sign of life is the oldest and older than a few beats, and its age in seconds."""
        now = time.monotonic()
        ages = [(now - seen, rank) for rank, (_, seen) in self._beats.items() if now - seen > 6 * _BEAT_SECONDS]
        return (max(ages)[1], max(ages)[0]) if ages else None

    def _beat(self, count: int) -> None:
        with suppress(RuntimeError):
            self._store.set(f"beat/{self._rank}", str(count))
            for rank in self._beats:
                if self._store.check([f"beat/{rank}"]):
                    beat = self._store.get(f"beat/{rank}")
                    if self._beats[rank][0] != beat:
                        self._beats[rank] = (beat, time.monotonic())

    def stop(self) -> None:
        """Say good-bye: the end of this process is no failure."""
        self._stopped.set()
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")

    def _cut(self) -> bool:
        """Whether rank 0 wants this rank gone."""
        with suppress(RuntimeError):
            return self._rank > 0 and bool(self._store.check(["cut"]))
        return False

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(_BEAT_SECONDS):
            count += 1
            self._beat(count)
            if self._cut():
                self.stop()
                os._exit(0)
            found = self.failure()
            if found and not self._stopped.wait(6 * _BEAT_SECONDS):
                # The main thread had its chance to report; it hangs in a collective.
                os.write(2, f"error: rank {self._rank} ends: {found}\n".encode())
                os._exit(RankError.exit_code)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    except OSError:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
