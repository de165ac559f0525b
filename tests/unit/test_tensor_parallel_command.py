"""`--tensor-parallel`: the command starts its ranks, ends them whatever happens, and refuses what they cannot do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dustin import cli
from tests.tiny_model import write
from tests.unit.rank_helpers import ROOT, finish, free_port, run_dustin, start


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of three layers with 4 query and 2 kv heads, and a draft."""
    folder = tmp_path_factory.mktemp("ranks")
    return write(folder / "target", seed=3, num_hidden_layers=3), write(folder / "draft", seed=4)


def test_the_option_starts_the_ranks(models: tuple[Path, Path]) -> None:
    """`--tensor-parallel 2` prints rank 0's answer once."""
    args = ["generate", "-m", str(models[0]), "--device", "cpu", "--dtype", "float32", "-p", "hello", "-n", "12", "--mode", "ar"]
    one, two = run_dustin(*args), run_dustin(*args, "--tensor-parallel", "2")
    assert one.returncode == two.returncode == 0, (one.stderr, two.stderr)
    assert two.stdout == one.stdout


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (["--tensor-parallel", "3"], 2, "3 ranks cannot share 4 query heads evenly: use 1, 2 or 4 ranks"),
        (["--tensor-parallel", "2", "--backend", "numpy"], 2, "expected torch"),
        (["--tensor-parallel", "0"], 2, "0 is not in the range"),
    ],
)
def test_what_ranks_cannot_do_is_refused(models: tuple[Path, Path], extra: list[str], code: int, text: str) -> None:
    """One line, the right exit code, and no rank left behind."""
    ended = run_dustin("generate", "-m", str(models[0]), "--device", "cpu", "-p", "x", "-n", "2", *extra)
    assert ended.returncode == code
    assert text in ended.stderr and ended.stderr.count("error:") == 1, ended.stderr


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"DUSTIN_TP_TIMEOUT": "soon"}, "DUSTIN_TP_TIMEOUT is 'soon', expected seconds"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK is 'first', expected the number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a number"),
    ],
)
def test_variables_of_ranks_are_checked(models: tuple[Path, Path], environment: dict[str, str], text: str) -> None:
    """One line and exit code 2, whatever is wrong with them."""
    ranks = [] if "WORLD_SIZE" in environment else ["--tensor-parallel", "2"]
    ended = run_dustin("generate", "-m", str(models[0]), "--device", "cpu", "-p", "x", "-n", "2", *ranks, environment=environment)
    assert ended.returncode == 2
    assert text in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


def generating(models: tuple[Path, Path], size: int = 2) -> subprocess.Popen[str]:
    """`dustin generate --tensor-parallel` in a session of its own, which has printed something."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    args = ["generate", "-m", str(models[0]), "--device", "cpu", "-p", "x", "-n", "480", "--ignore-eos", "--mode", "ar"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dustin", *args, "--tensor-parallel", str(size)], env=inherited | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def members(session: int) -> list[int]:
    """Processes of a session that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes in /proc")
@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_a_signal_to_the_command_ends_all_its_ranks(models: tuple[Path, Path], sig: int, code: int) -> None:
    """Sent to the one process that was started: it ends as a single one would, and no rank is left behind."""
    process = generating(models)
    assert len(members(process.pid)) == 2
    process.send_signal(sig)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in err and "error" not in err, err
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(process.pid)


def test_a_rank_that_cannot_start_is_named(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Before the ranks have found each other, where the time limit is minutes."""
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif os.environ.get('RANK') == '1': os._exit(7)\n")
    args = ["generate", "-m", str(models[0]), "--device", "cpu", "-p", "x", "-n", "2", "--tensor-parallel", "2"]
    began = time.monotonic()
    ended = run_dustin(*args, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.returncode == 1 and time.monotonic() - began < 30
    assert ended.stderr == "error: rank 1 failed with exit code 7 before the ranks had joined\n"


@pytest.mark.parametrize("args", ["--version", "generate -m x -h", "config"])
def test_what_splits_no_model_waits_for_nobody(args: str) -> None:
    """Under torchrun's variables rank 0 answers alone, the others end."""
    for rank in ("0", "1"):
        found = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ended = run_dustin(*args.split(), environment=found)
        assert (ended.returncode, bool(ended.stdout), ended.stderr) == (0, rank == "0", "")


def test_ranks_that_a_program_asks_for(models: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    """`dustin.cli.run` leaves its caller as it is."""
    args = ["generate", "-m", str(models[0]), "--device", "cpu", "--dtype", "float32", "-p", "hello", "-n", "12", "--mode", "ar"]
    assert cli.run([*args, "--tensor-parallel", "2"]) == 0
    assert capfd.readouterr().out == run_dustin(*args).stdout


@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_refused(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path]) -> None:
    """torchrun's ranks and the option disagree."""
    ranks += start(2, ["-m", "dustin", "generate", "-m", str(models[0]), "-p", "x", "--tensor-parallel", "4"])
    ends = finish(ranks)
    assert ends[0][0] == 2 and "--tensor-parallel is 4, but 2 ranks are running" in ends[0][2]


@pytest.mark.parametrize(
    ("size", "extra", "text"),
    [
        ("2", [], "a layer's set cannot be chosen by heads of several ranks: give --reselection-by-kv-head true"),
        ("4", ["--reselection-by-kv-head", "true"], "4 ranks share 2 kv heads, which then cannot choose sets of their own"),
    ],
)
def test_sets_that_ranks_cannot_choose(models: tuple[Path, Path], size: str, extra: list[str], text: str) -> None:
    """Refused on rank 0 with what to do."""
    args = ["generate", "-m", str(models[0]), "--draft-model", str(models[1]), "--device", "cpu", "-p", "hello " * 30, "-n", "4"]
    args += ["--mode", "sparse", "--budget", "48", "--reselection-layers", "1", *extra, "--tensor-parallel", size]
    ended = run_dustin(*args)
    assert ended.returncode == 2 and text in ended.stderr and ended.stderr.count("error:") == 1, ended.stderr
