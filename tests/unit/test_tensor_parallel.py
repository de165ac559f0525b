"""Ranks of tensor parallelism on CPUs (gloo): tokens equal one rank's, ranks cannot diverge, failures name the rank."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tiny_model import write
from tests.unit.rank_helpers import ROOT, finish, mlx_launch, start

ALL = ("ar", "dense", "self", "own-sets", "rectified", "exact", "quest", "sparse", "sparse-sampled", "pool")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of three layers with 4 query and 2 kv heads, and a draft."""
    folder = tmp_path_factory.mktemp("ranks")
    return write(folder / "target", seed=3, num_hidden_layers=3), write(folder / "draft", seed=4)


def drive(ranks: list[subprocess.Popen[str]], size: int, models: tuple[Path, Path], *cases: str, **environment: str) -> dict:
    """What rank 0 generated."""
    ranks += start(size, ["tests/ranks_driver.py", *map(str, models), *cases], environment)
    ends = finish(ranks)
    assert [code for code, _, _ in ends] == [0] * size, ends
    return json.loads(ends[0][1])


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path]) -> dict:
    """Tokens of a single process."""
    (end,) = finish(start(1, ["tests/ranks_driver.py", *map(str, models), *ALL]))
    assert end[0] == 0, end
    return json.loads(end[1])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_tokens_of_one(
    ranks: list[subprocess.Popen[str]], models: tuple[Path, Path], alone: dict, size: int
) -> None:
    """Every mode, greedy and sampled, page bounds and pools; with 4 ranks each kv head lies on two of them."""
    assert len({json.dumps(alone[name]) for name in ("ar", "sparse", "sparse-sampled", "quest", "pool")}) == 5
    # A kv head that several ranks hold cannot choose a set of its own.
    cases = [name for name in ALL if size == 2 or name != "own-sets"]
    assert drive(ranks, size, models, *cases) == {name: alone[name] for name in cases}


def test_compact_keys_are_fitted_on_every_rank(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Each for its own kv heads, which choose by them."""
    wide = {"hidden_size": 128, "head_dim": 32}
    folders = write(tmp_path / "target", seed=3, num_hidden_layers=3, **wide), write(tmp_path / "draft", seed=4, **wide)
    (one,) = finish(start(1, ["tests/ranks_driver.py", *map(str, folders), "sparse", "compact"]))
    alone = json.loads(one[1])
    assert alone["compact"] != alone["sparse"]
    assert drive(ranks, 2, folders, "sparse", "compact") == alone


@pytest.mark.slow
def test_a_rank_that_computes_wrongly_cannot_make_the_ranks_diverge(
    ranks: list[subprocess.Popen[str]], models: tuple[Path, Path], alone: dict
) -> None:
    """Noise on rank 1's logits changes tokens, but rank 0 decides for all: the run ends in order."""
    config = json.loads((models[0] / "config.json").read_text())
    rows = -(-config["vocab_size"] // 2)
    found = drive(ranks, 2, models, "ar", "sparse", PERTURB_RANK="1", PERTURB_ROWS=str(rows))
    assert found["ar"] != alone["ar"]
    assert [len(tokens) for tokens in found["sparse"]] == [24, 24]


@pytest.mark.slow
def test_another_model_on_one_rank_is_named(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path], tmp_path: Path) -> None:
    """The folder has the same path on each host but another model in it."""
    for rank, seed in enumerate((3, 8)):
        (tmp_path / f"host{rank}").mkdir()
        write(tmp_path / f"host{rank}" / "model", seed=seed)
    code = (
        "import os, sys; os.chdir('{host}'); from dustin.cli import main; "
        "sys.argv = ['dustin', 'generate', '-m', './model', '-p', 'x', '-n', '2', '--device', 'cpu']; main()"
    ).replace("{host}", str(tmp_path) + "/host{rank}")
    ranks += start(2, ["-c", code])
    ends = finish(ranks)
    assert ends[0][0] == 1 and "rank 1 loaded another model than rank 0" in ends[0][2]
    assert "Traceback" not in ends[0][2] + ends[1][2]


def test_a_killed_rank_ends_all_within_seconds(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path]) -> None:
    """No hang and no orphan: rank 0 says which rank is gone."""
    command = ["-m", "dustin", "generate", "-m", str(models[0]), "--device", "cpu", "--dtype", "float32", "-p", "x", "--mode", "ar"]
    ranks += start(2, [*command, "-n", "480", "--ignore-eos"])
    assert ranks[0].stdout is not None
    ranks[0].stdout.read(1)  # The first token is out.
    ranks[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    ends = finish(ranks)
    assert time.monotonic() - began < 20
    assert ends[0][0] == 1
    assert "error: rank 1" in ends[0][2] and "Traceback" not in ends[0][2]


def test_an_interrupted_step_ends_all_ranks_at_once(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path]) -> None:
    """Ctrl-C on rank 0 may leave the others inside a sum over ranks, where nothing will come any more."""
    code = (
        "import os, sys; from dustin.backends.torch_triton import model; plain = model.TorchModel._mlp\n"
        "def cut(self, *args):\n"
        "    if cut.calls == 40 and os.environ['RANK'] == '0': raise KeyboardInterrupt\n"
        "    cut.calls += 1\n"
        "    return plain(self, *args)\n"
        "cut.calls = 0; model.TorchModel._mlp = cut\n"
        "from dustin.cli import main; sys.argv = ['dustin', *'generate --device cpu -p x --ignore-eos -m'.split(), '{model}']\n"
        "main()"
    ).replace("{model}", str(models[0]))
    ranks += start(2, ["-c", code])
    assert ranks[0].stdout is not None
    ranks[0].stdout.read(1)
    began = time.monotonic()
    ends = finish(ranks)
    assert time.monotonic() - began < 20
    assert [end[0] for end in ends] == [130, 0], ends
    assert not any(word in end[2] for end in ends for word in ("error", "Traceback", "frame #"))


def test_a_failing_rank_is_named_with_its_reason(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path]) -> None:
    """An error inside rank 1's forward reaches rank 0's message."""
    code = (
        "import os, sys; from dustin.backends.torch_triton import model\n"
        "def broken(*_): raise ValueError('the device fell over')\n"
        "if os.environ['RANK'] == '1': model.TorchModel._mlp = broken\n"
        "from dustin.cli import main; sys.argv = ['dustin', 'generate', '-m', '{model}', '--device', 'cpu', '-p', 'x']; main()"
    ).replace("{model}", str(models[0]))
    ranks += start(2, ["-c", code])
    ends = finish(ranks)
    assert [end[0] for end in ends] == [1, 1]
    for _, _, err in ends:
        assert "rank 1 failed: ValueError: the device fell over" in err and "Traceback" not in err


@pytest.mark.slow
def test_a_silent_rank_runs_into_the_time_limit(ranks: list[subprocess.Popen[str]], models: tuple[Path, Path]) -> None:
    """A stopped process keeps its connections: the collective's time limit ends the run."""
    command = ["-m", "dustin", "generate", "-m", str(models[0]), "--device", "cpu", "--dtype", "float32", "-p", "x", "--mode", "ar"]
    ranks += start(2, [*command, "-n", "480", "--ignore-eos"], {"DUSTIN_TP_TIMEOUT": "5"})
    assert ranks[0].stdout is not None
    ranks[0].stdout.read(1)
    ranks[1].send_signal(signal.SIGSTOP)
    out, err = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert "error: rank 1 does not answer" in err


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [{}, {"DRIVER_SYMMETRIC": "1"}], ids=["collectives", "shared memory"])
def test_cuda_models_of_two_ranks_give_the_tokens_of_one(
    ranks: list[subprocess.Popen[str]], tmp_path: Path, symmetric: dict[str, str]
) -> None:
    """The paged models with Triton kernels, interpreted on the CPU; the collectives are gloo's, or a stand-in's in one buffer."""
    wide = {"hidden_size": 64, "head_dim": 16}
    folders = write(tmp_path / "target", seed=3, num_hidden_layers=3, **wide), write(tmp_path / "draft", seed=4, **wide)
    interpreted = {"TRITON_INTERPRET": "1"}
    (one,) = finish(start(1, ["tests/ranks_driver.py", *map(str, folders), "sparse"], interpreted), 300)
    assert one[0] == 0, one
    ranks += start(2, ["tests/ranks_driver.py", *map(str, folders), "sparse"], interpreted | symmetric)
    ends = finish(ranks, 300)
    assert ends[0][0] == 0 and json.loads(ends[0][1]) == json.loads(one[1]), ends


def test_two_mlx_ranks_give_the_tokens_of_one(models: tuple[Path, Path]) -> None:
    """mlx.launch over the ring on loopback, mlx-lm's own shard."""
    command = [str(ROOT / "tests" / "ranks_driver.py"), *map(str, models), *ALL[-4:], "ar"]
    two = mlx_launch(*command, environment={"DRIVER_BACKEND": "mlx"})
    (one,) = finish(start(1, command, {"DRIVER_BACKEND": "mlx"}))
    assert one[0] == two.returncode == 0, (one, two.stderr)
    answers = [line for line in two.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 1 and json.loads(answers[0]) == json.loads(one[1])


def test_a_step_cut_short_ends_mlx_ranks(models: tuple[Path, Path]) -> None:
    """Ctrl-C inside rank 0's forward: later calls are refused, and the launcher ends the rank that waits in the middle of it."""
    code = (
        "import os, sys; from dustin.backends.mlx_metal import parallel; plain = parallel._forward\n"
        "def cut(ranks, *args):\n"
        "    cut.calls += 1\n"
        "    if cut.calls == 4 and os.environ['MLX_RANK'] == '0': raise KeyboardInterrupt\n"
        "    return plain(ranks, *args)\n"
        "cut.calls = 0; parallel._forward = cut\n"
        "import dustin; from dustin.config import EngineOptions, RequestOptions; from dustin.errors import RankError\n"
        "session = dustin.load('{model}', backend='mlx', device='cpu', dtype='float32')\n"
        "session.options = EngineOptions(mode='ar')\n"
        "for _ in range(2):\n"
        "    try: session.batch_generate([[5, 6, 7]], RequestOptions(max_tokens=20, ignore_eos=True))\n"
        "    except KeyboardInterrupt: print('interrupted', flush=True)\n"
        "    except RankError as error: print(error, flush=True); parallel.leave(); sys.exit(1)\n"
    ).replace("{model}", str(models[0]))
    ended = mlx_launch("-c", code)
    assert "interrupted" in ended.stdout and "out of step: KeyboardInterrupt cut a step short" in ended.stdout, ended


@pytest.mark.slow
def test_the_bench_of_split_targets_runs_through(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Every mode of `bench tensor_parallel` on tiny shapes, interpreted kernels and gloo: rows are complete (about 10 minutes)."""
    args = "--shape 72b --batches 1 --context 100 --budget 48 --drafts 2 --blocks 4 --paper-scoring --acceptance geometric"
    modes = "ar,dense,both,sparse,rectified,exact"
    command = ["tests/ranks_bench.py", *args.split(), "--modes", modes, "--output", str(tmp_path / "rows.jsonl")]
    ranks += start(2, command, {"TRITON_INTERPRET": "1", "DUSTIN_TP_TIMEOUT": "600"})
    ends = finish(ranks, 1500)
    assert [code for code, _, _ in ends] == [0, 0], ends
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["mode"].split(" ")[0].strip(",") for row in rows] == ["ar", "dense", "sparse", "sparse", "rectified", "exact"]
    assert all(row["tensor_parallel"] == 2 and row["peak_memory_gb"] is not None for row in rows)
    assert all(row["attention_ratio"] == round(1 / 3, 2) and row["collectives_us"] == 0.0 for row in rows[2:4])
    assert rows[0]["attention_us"] == 1000.0
