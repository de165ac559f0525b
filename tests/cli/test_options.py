"""Defaults, precedence and combinations of options, without a model."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import click
import pytest

import dustin
from dustin import cli as command_line
from dustin.cli_options import ENGINE, LOADING, REQUEST, SAMPLING, build_engine_options, build_request
from dustin.config import EngineOptions, RequestOptions, SamplingOptions, defaults
from dustin.models import DEFAULT

COMMANDS = command_line.cli.commands


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def params(name: str) -> dict[str, click.Parameter]:
    return {param.name: param for param in COMMANDS[name].params if param.name}


def parse(monkeypatch: pytest.MonkeyPatch, args: list[str], name: str = "generate") -> dict[str, object]:
    """What `args` mean, after environment and file: the command's body is replaced."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(COMMANDS[name], "callback", lambda **values: seen.update(values))
    assert command_line.run(args) == 0
    return seen


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_every_default_is_the_one_of_the_dataclass(command: str) -> None:
    tables = [(EngineOptions, ENGINE)]
    if command != "bench":
        tables += [(RequestOptions, REQUEST), (SamplingOptions, SAMPLING)]
    for options, table in tables:
        expected = defaults(options)
        for name in table:
            if name == "top_logprobs" and command == "chat":
                assert name not in params(command)  # nothing would show them
                continue
            assert params(command)[name].get_default(click.Context(COMMANDS[command])) == expected[name] or expected[name] == ()


def test_every_field_has_an_option() -> None:
    for options, table in ((EngineOptions, ENGINE), (SamplingOptions, SAMPLING)):
        assert {field.name for field in fields(options)} == set(table)
    assert {field.name for field in fields(RequestOptions)} == {*REQUEST, "sampling"}


def test_loading_defaults_are_those_of_the_api() -> None:
    signature = inspect.signature(dustin.load)
    for name, (_, _, default) in LOADING.items():
        assert default == (DEFAULT if name == "model" else signature.parameters[name].default)


def test_no_arguments_mean_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    values = parse(monkeypatch, ["generate", "hi"])
    assert build_engine_options(values) == EngineOptions()
    assert build_request(values) == RequestOptions()


@pytest.mark.parametrize(
    ("args", "variable", "graphs"),
    [([], None, True), (["--no-cuda-graphs"], None, False), ([], "0", False), (["--no-cuda-graphs"], "1", False)],
)
def test_graphs_are_used_unless_refused(
    monkeypatch: pytest.MonkeyPatch, args: list[str], variable: str | None, graphs: bool
) -> None:
    torch = pytest.importorskip("torch")
    from dustin.backends.torch_triton.cuda_graphs import graphs_enabled

    # Set first, so that what the command line leaves there goes again.
    monkeypatch.setenv("DUSTIN_CUDA_GRAPHS", variable or "1")
    if variable is None:
        monkeypatch.delenv("DUSTIN_CUDA_GRAPHS")
    parse(monkeypatch, ["generate", "hi", *args])
    assert graphs_enabled(torch.device("cuda")) == graphs
    assert not graphs_enabled(torch.device("cpu"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "36"], "budget is 36 tokens, expected more than the 36 protected ones (4 sinks + 32 recent)"),
        (["--mode", "fast"], "Invalid value for '--mode'"),
        (["--max-tokens", "0"], "max_tokens is 0, expected 1 or more"),
        (["--max-tokens", "many"], "not a valid integer"),
        (["--temp", "-1"], "temperature is -1.0"),
        (["--temp", "nan"], "temperature is nan"),
        (["--temp", "1", "--top-p", "0"], "top_p is 0.0"),
        (["--top-p", "0.5"], "--top-p has no effect at temperature 0"),
        (["--stop", ""], "stop is ('',)"),
        (["--num-draft-tokens", "16"], "num_draft_tokens is 16, expected 1 to 15"),
        (["--raw", "--system-prompt", "x"], "--system-prompt needs the chat template"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--json", "--logprobs", "21"], "top_logprobs is 21"),
        (["--draft-model", "x", "--mode", "ar"], "--draft-model has no use with --mode ar"),
        (["--draft-model", "x", "--drafter", "lookup"], "--draft-model has no use with --drafter lookup"),
        (["--mode", "ar", "--budget", "100"], "--budget has no effect with --mode ar"),
        (["--mode", "ar", "--drafter", "self"], "--drafter has no effect with --mode ar"),
        (["--mode", "dense", "--drafter", "lookup", "--select", "history"], "--select has no effect"),
        (["--select", "quest", "--reselection-layers", "2"], "--reselection-layers has no effect with --select quest"),
        (["--select", "streaming", "--fidelity", "high"], "--fidelity has no effect with --select streaming"),
        (["--fidelity", "high", "--reselection-layers", "2"], "--fidelity has no effect with --reselection-layers"),
        (["--reselection-layers", "none", "--reselection-rank", "64"], "--reselection-rank has no effect"),
        (["--profile", "none", "--reselection-reuse", "true"], "--reselection-reuse needs --reselection-layers or --fidelity"),
        (["--fidelity", "high", "--top-mass", "0.5"], "--top-mass has no effect with --fidelity high"),
        (["--draft-model", "x", "--mode", "dense", "--fidelity", "high"], "--fidelity has no effect with --mode dense"),
        (["--draft-model", "x", "--mode", "dense", "--dense-layers", "1"], "--dense-layers has no effect with --mode dense"),
        (["--select", "h2o", "--dense-layers", "1"], "--dense-layers has no effect with --select h2o"),
        (["--select", "snapkv", "--top-mass", "0.5"], "--top-mass has no effect with --select snapkv"),
        (["--select", "quest", "--profile", "none"], "--profile has no effect with --select quest"),
        (["--select", "streaming", "--lookahead-lag", "1"], "--lookahead-lag has no effect with --select streaming"),
        (["--select", "dense", "--budget", "100"], "--budget has no effect with --select dense"),
        (["--dense-layers", "0-99999999999"], "'0-99999999999' is no list of layers"),
        (["--dense-layers", "3,5", "--reselection-layers", "5-7"], "layer 5 is named by dense_layers and by reselection_layers"),
        (["--rectify-interval", "64"], "--rectify-interval needs --mode rectified"),
        (["--exact-block", "64"], "--exact-block needs --mode exact"),
        (["--no-sparse-draft"], "--sparse-draft needs --draft-model"),
        (["--unknown"], "No such option"),
        (["--max-kv-size", "1"], "max_kv_size is 1, expected 2 or more"),
        (["--backend", "jax"], "backend is 'jax', expected auto, numpy, torch, mlx"),
        (["-p", "again"], "two prompts"),
        (["--file", "-", "--file", "-"], "only once"),
    ],
)
def test_impossible_options_are_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["generate", "hi", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args", [["chat", "--logprobs", "1"], ["bench", "--mode", "ar"], ["bench", "--modes", "fast"], ["nothing"]]
)
def test_other_commands_refuse_too(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(args) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DUSTIN_BUDGET", "much")
    assert command_line.run(["generate", "hi"]) == 2
    assert "not a valid integer" in (message := capsys.readouterr().err) and "(from the variable DUSTIN_BUDGET)" in message
