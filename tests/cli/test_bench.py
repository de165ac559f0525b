"""`dustin bench` on a tiny random model: the table, its numbers, CSV and JSON, and what it refuses before measuring."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dustin import bench_command
from dustin import cli as command_line
from dustin.bench_command import Prompts, equal_share
from dustin.generation import Session, load
from tests import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def bench(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `dustin bench` on the tiny model; (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DUSTIN_BACKEND", "numpy")

    def run(*args: object) -> tuple[int, str, str]:
        code = command_line.run(["bench", "-m", str(model), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


SMALL = ("--context", "48,64", "--batch", "1,2", "-n", "6", "--budget", "48")


def test_table(bench: Any) -> None:
    code, out, err = bench(*SMALL, "--modes", "dense,sparse")
    assert code == 0, err
    head, titles, *lines, foot = out.splitlines()
    assert "numpy on cpu, float64, 6 tokens a prompt, greedy" in head and "sparse and rectified are approximate" in foot
    cells = [line.split() for line in lines]
    assert [line[:3] for line in cells] == [
        [context, batch, mode] for context in ("48", "64") for batch in ("1", "2") for mode in ("ar", "dense", "sparse")
    ]
    assert all(line[5] == "1.00x" for line in cells if line[2] == "ar")
    assert "context 64: 2 prompts read at" in err and "mode sparse" in err


def test_json_and_csv_hold_the_same_rows(bench: Any) -> None:
    code, out, _ = bench(*SMALL, "--modes", "dense,exact", "--json", "--repeats", 2)
    rows = json.loads(out)
    assert code == 0 and len(rows) == 2 * 2 * 3
    for row in rows:
        base = next(r for r in rows if (r["context"], r["batch"], r["mode"]) == (row["context"], row["batch"], "ar"))
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / base["tokens_per_s"], rel=0.02, abs=0.002)
        assert row["lossless"] and row["same_as_ar"] and row["equal_leading_share"] == 1.0, "float64: the same tokens"
        assert row["repeats"] == 2 and row["spread"] >= 1 and row["backend"] == "numpy"
    code, out, _ = bench(*SMALL, "--modes", "dense,exact", "--csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and list(table[0]) == list(rows[0])
    assert [(r["context"], r["batch"], r["mode"]) for r in table] == [(str(r["context"]), str(r["batch"]), r["mode"]) for r in rows]


def test_every_mode_runs(bench: Any) -> None:
    modes = "ar,dense,sparse,rectified,exact,auto"
    code, out, err = bench("--context", 64, "--batch", 1, "-n", 6, "--budget", 48, "--json", "--modes", modes)
    assert code == 0, err
    assert [row["mode"] for row in json.loads(out)] == ["ar", "dense", "sparse", "rectified", "exact", "auto"]


def test_lists_repeat_and_sort(bench: Any) -> None:
    code, out, _ = bench("--context", 64, "--context", "48,48", "--batch", "1", "-n", 2, "--modes", "ar,ar", "--json")
    assert code == 0 and [row["context"] for row in json.loads(out)] == [48, 64]


def test_a_draft_model(bench: Any, model: Path) -> None:
    code, out, err = bench("--context", 48, "--batch", 1, "-n", 6, "--modes", "dense", "--draft-model", model, "--json")
    rows = json.loads(out)
    assert code == 0 and rows[1]["drafter"] == "draft" and rows[1]["draft"] and rows[1]["acceptance_length"] > 2, err


def test_prompts_are_read_once_and_runs_start_equal(model: Path) -> None:
    """A run from the shared cache gives the tokens of a cold run, at every context, whatever ran before it."""
    from dustin.config import RequestOptions

    session = load(str(model), backend="numpy")
    ids = [[(7 * i + 3 * row) % 250 + 3 for i in range(60)] for row in range(2)]
    prompts = Prompts(session, ids, 61, 1)
    request = RequestOptions(max_tokens=5, ignore_eos=True)
    for context in (30, 60):
        assert prompts.read(context) > 0 and prompts.read(context) == 0.0
        for batch in (1, 2, 1):
            stats, tokens = bench_command._run(session, *prompts.case(context, batch, 5), request)
            cold = session.batch_generate([row[:context] for row in ids[:batch]], request)
            assert tokens == [result.tokens for result in cold]
            assert stats.reused_prompt_tokens == batch * (context - 1)


def test_selectors_that_look_at_the_prompt_get_its_rows(bench: Any) -> None:
    shape = ("--context", 64, "--batch", 1, "-n", 4, "--budget", 48)
    code, out, err = bench(*shape, "--modes", "sparse", "--select", "snapkv", "--json")
    assert code == 0, err
    assert json.loads(out)[1]["mode"] == "sparse"


@pytest.mark.parametrize("dtype,same,said", [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)])
def test_near_ties_are_explained_where_they_show(dtype: str, same: bool, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"model": "m", "draft": None, "backend": "torch", "device": "cpu", "dtype": dtype, "max_tokens": 4}
    row = {"context": 8, "batch": 1, "mode": "exact", "drafter": "none", "lossless": True, "tokens_per_s": 1.0, "ratio": None}
    row |= {"acceptance_length": 1.0, "kv_read_share": 1.0, "peak_memory_bytes": 1, "equal_leading_share": 0.5, "same_as_ar": same}
    printed = bench_command._Printer("table", common)
    printed.add(row)
    printed.end()
    out = capsys.readouterr().out
    assert ("near-ties may fall either way" in out) == said and " - " in out


def test_options_that_trade_exactness_away_stay_in_the_approximate_modes(
    bench: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    start = Session._start

    def noted(self: Session, *args: Any) -> Any:
        seen.append((self.options.mode, self.options.route_confidence))
        return start(self, *args)

    monkeypatch.setattr(Session, "_start", noted)
    shape = ("--context", "64,72", "--batch", 1, "-n", 6, "--budget", 48, "--modes", "sparse,dense", "--json")
    code, out, err = bench(*shape, "--draft-model", model, "--route-confidence", "0.5")
    rows = json.loads(out)
    assert code == 0 and [row["lossless"] for row in rows] == [True, False, True] * 2, err
    assert rows[2]["same_as_ar"] and seen == [("ar", 0.0), ("sparse", 0.5), ("dense", 0.0)] * 2


def test_equal_share() -> None:
    assert equal_share([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert equal_share([[1], []], [[1], [2]]) == 0.5
    assert equal_share([[]], [[]]) == 0.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--context", "0"], "'0' is no whole number of 1 or more"),
        (["--context", "512;2048"], "'512;2048' is no whole number"),
        (["--batch", "1,,2"], "'' is no whole number"),
        (["--batch", "-1"], "'-1' is no whole number"),
        (["--batch", "²"], "'²' is no whole number"),
        (["--modes", "dense,fast"], "--modes has 'fast'"),
        (["--mode", "dense"], "name them by --modes"),
        (["--json", "--csv"], "--json and --csv are two formats"),
        (["-n", "1"], "1 is not in the range x>=2"),
        (["--repeats", "0"], "0 is not in the range"),
        (["--context", "505"], "--context 505 and 24 new tokens exceed the 512 tokens of tiny: use --context 488 or less"),
        (["--file", "-", "--file", "-"], "only once"),
        (["--file", "/nonexistent"], "cannot read /nonexistent"),
        (["--modes", "sparse", "--drafter", "self"], "drafter 'self' drafts with the attention"),
        (["--drafter", "none"], "needs a drafter"),
        (["--budget", "10"], "budget"),
        (["--modes", ""], "--modes is '', expected some of auto"),
        (["--modes", "sparse", "--exact-block", "4"], "--exact-block needs --mode exact"),
        (["--modes", "dense,sparse", "--rectify-interval", "9"], "--rectify-interval needs --mode rectified, and no mode of"),
        (["--lookahead-share", "1"], "--lookahead-share needs --draft-model"),
        (["--draft-model", "x", "--modes", "dense", "--fidelity", "high"], "--fidelity has no effect with --mode dense"),
        (["--draft-model", "x", "--drafter", "lookup"], "--draft-model has no use with --drafter lookup"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_refused_before_anything_is_measured(bench: Any, args: list[str], words: str) -> None:
    code, out, err = bench("--context", "64", "--batch", "1", *args) if "--context" not in args else bench(*args)
    assert code == 2 and out == "" and words in err, err
    assert err.count("error: ") == 1 and "Traceback" not in err and "batch 1, mode" not in err


def test_an_option_that_one_of_the_modes_uses_is_none_too_many(bench: Any, model: Path) -> None:
    more = ["--fidelity", "high", "--rectify-interval", "9", "--draft-model", model, "--budget", "40"]
    code, out, err = bench("--context", "64", "--batch", "1", "--modes", "dense,rectified", "-n", "2", *more)
    assert code == 0, err
    assert [line.split()[2] for line in out.splitlines() if line.startswith("     64")] == ["ar", "dense", "rectified"]


def test_a_text_too_short_is_refused(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 50)
    code, out, err = bench("--context", "49", "--batch", "4", "--file", tmp_path / "short.txt")
    assert code == 2 and out == "" and "the text has 50 tokens, expected at least 52 for 4 passages" in err
