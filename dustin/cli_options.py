"""The options of the command line: every default comes from `dustin.config`."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from dustin.config import DRAFTERS, FIDELITIES, MODES, SELECTORS, EngineOptions, RequestOptions, SamplingOptions
from dustin.errors import UsageError
from dustin.launch import tensor_parallel_option
from dustin.models import DEFAULT, KNOWN

# Commands read DUSTIN_MODEL, not DUSTIN_GENERATE_MODEL: one name for every command.
CONTEXT: dict[str, Any] = {"auto_envvar_prefix": "DUSTIN", "help_option_names": ["-h", "--help"], "max_content_width": 120}

# Text files; shells complete their names. What is wrong with one is said by `terminal.read_file`.
FILE = click.Path(allow_dash=True)


# No model has so many layers: a range that goes further is a slip, and would fill the memory.
_MOST_LAYERS = 9999


class LayerList(click.ParamType):
    """Layer numbers and ranges of them with commas between, or `none`."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """`14,19-21` -> (14, 19, 20, 21). Fail on anything else, and on a range that goes down."""
        if not isinstance(value, str):
            # From a file: a list, or one layer; what its numbers are is checked with the other options.
            return tuple(value) if isinstance(value, (list, tuple)) else (value,)
        try:
            return () if value == "none" else tuple(layer for part in value.split(",") for layer in self._layers(part))
        except ValueError:
            self.fail(f"{value!r} is no list of layers, expected numbers or ranges as 14,19-21, or none", param, ctx)

    @staticmethod
    def _layers(part: str) -> list[int]:
        first, dash, last = part.strip().partition("-")
        made = range(int(first), (int(last) if dash else int(first)) + 1)
        if not made or made[-1] > _MOST_LAYERS:
            raise ValueError(part)
        return list(made)


# Field -> (flags, help, extra settings); the type and the default are the field's.
ENGINE: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "mode": (("--mode",), "How tokens are verified; ar, dense, exact and auto change no output.", {"type": click.Choice(MODES)}),
    "drafter": (("--drafter",), "Who guesses the next tokens.", {"type": click.Choice(DRAFTERS)}),
    "selector": (("--select",), "Who chooses the tokens that sparse attention reads.", {"type": click.Choice(SELECTORS)}),
    "num_draft_tokens": (("--num-draft-tokens",), "Tokens drafted a round (mode auto: at most).", {}),
    "budget": (("--budget",), "Tokens that sparse attention reads.", {}),
    "num_sink_tokens": (("--num-sink-tokens",), "First tokens that are always read.", {}),
    "num_recent_tokens": (("--num-recent-tokens",), "Last tokens that are always read.", {}),
    "lookahead_share": (("--lookahead-share",), "Share of the budget chosen by the draft's queries.", {"type": float}),
    "profile": (("--profile",), "Scoring heads: auto (this pair's profile, else a heuristic), none, or a file.", {}),
    "dense_layers": (("--dense-layers",), "Layers that read everything. Default: the profile's.", {"type": LayerList()}),
    "reselection_layers": (
        ("--reselection-layers",), "Layers whose queries choose the set anew. Default: the profile's.", {"type": LayerList()},
    ),
    "reselection_rank": (("--reselection-rank",), "Numbers of a compact key (32, 64), 0: whole keys. Default: the profile's.", {}),
    "reselection_by_kv_head": (
        ("--reselection-by-kv-head",), "Whether each kv head chooses its own set. Default: the profile's.", {"type": bool},
    ),
    "reselection_reuse": (
        ("--reselection-reuse",), "Whether layers in between read the set chosen last. Default: the profile's.", {"type": bool},
    ),
    "fidelity": (
        ("--fidelity",), "high: every layer's kv heads choose sets of their own. Closer to dense attention, slower.",
        {"type": click.Choice(FIDELITIES)},
    ),
    "top_mass": (("--top-mass",), "Read no more than holds this share of the scores.", {"type": float}),
    "lookahead_lag": (("--lookahead-lag",), "1: queries of the round before. Default: as needed.", {}),
    "rectify_interval": (("--rectify-interval",), "Mode rectified: tokens between dense passes.", {}),
    "exact_block": (("--exact-block",), "Modes exact and (at most) auto: tokens a dense check covers.", {}),
    "min_draft_confidence": (
        ("--min-draft-confidence",), "Draft no further once the run is this unlikely to be kept; 0 is off.", {},
    ),
    "relaxed_weight": (
        ("--relaxed-weight",), "LOSSY: drafted tokens follow this share of the draft's distribution; 0 is off.", {},
    ),
    "route_confidence": (("--route-confidence",), "LOSSY: keep drafts this likely, to the draft, unchecked; 0 is off.", {}),
    "sparse_draft": (("--sparse-draft/--no-sparse-draft",), "Whether a draft model reads its own selected tokens only.", {}),
    "prefill_chunk": (("--prefill-chunk",), "Prompt tokens read at a time. Default: 512, on an NVIDIA GPU up to 4096.", {}),
    "max_kv_size": (("--max-kv-size",), "Refuse what needs more KV rows than this. Default: the model's context.", {}),
}
SAMPLING: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "temperature": (("--temp", "--temperature"), "0 is greedy.", {}),
    "top_k": (("--top-k",), "Sample from the k likeliest tokens; 0 is off.", {}),
    "top_p": (("--top-p",), "Sample from the likeliest tokens that hold this mass; 1 is off.", {}),
    "min_p": (("--min-p",), "Drop tokens below this share of the likeliest one's probability; 0 is off.", {}),
    "repetition_penalty": (("--repetition-penalty",), "Divide (above 1) the scores of tokens seen; 1 is off.", {}),
    "presence_penalty": (("--presence-penalty",), "Lower the scores of tokens seen; 0 is off.", {}),
    "frequency_penalty": (("--frequency-penalty",), "Lower the scores of tokens seen, by how often; 0 is off.", {}),
    "seed": (("--seed",), "Seed of the samples.", {}),
}
REQUEST: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "max_tokens": (("--max-tokens", "-n"), "Tokens to generate at most.", {}),
    "stop": (("--stop",), "Stop before this text; may be given several times.", {"multiple": True}),
    "ignore_eos": (("--ignore-eos",), "Go on after the model's end token.", {"is_flag": True}),
    "top_logprobs": (("--logprobs",), "With --json: log-probabilities, and of N alternatives.", {"metavar": "N"}),
}
LOADING = {
    "model": (("--model", "-m"), "A hub id, a folder, a .gguf file or a known name (`dustin models`).", DEFAULT),
    "draft_model": (("--draft-model",), "A small model of the same tokenizer that drafts.", None),
    "backend": (("--backend",), "auto, torch, mlx or numpy.", "auto"),
    "device": (("--device",), "auto, cpu, cuda or metal.", "auto"),
    "dtype": (("--dtype",), "auto, float32, bfloat16 or float16.", "auto"),
}


def _dataclass_options(options: type, table: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]]) -> list[Any]:
    made = []
    for field in fields(options):
        if field.name not in table:
            continue
        flags, text, extra = table[field.name]
        shown = field.default not in (None, ()) and field.default is not False
        settings: dict[str, Any] = {"default": field.default, "show_default": shown, "help": text} | extra
        if field.default is None:
            settings.setdefault("type", int)
        made.append(click.option(*flags, field.name, **settings))
    return made


def _apply(command: Any, made: list[Any]) -> Any:
    for option in reversed(made):
        command = option(command)
    return command


def dataclass_options(command: Any, options: type, table: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]]) -> Any:
    """The fields of `options` that the table names (see ENGINE)."""
    return _apply(command, _dataclass_options(options, table))


def graphs_option(command: Any) -> Any:
    """--no-cuda-graphs, which reaches the backend as DUSTIN_CUDA_GRAPHS=0."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if not value:
            os.environ["DUSTIN_CUDA_GRAPHS"] = "0"

    text = "Whether a GPU replays recorded launches; without them rounds are slower, and easier to debug."
    flags = "--cuda-graphs/--no-cuda-graphs"
    return click.option(flags, default=True, show_default=True, expose_value=False, callback=remember, help=text)(command)


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, and the known names."""
    names = [CompletionItem(name) for name in KNOWN if name.lower().startswith(incomplete.lower())]
    return [CompletionItem(incomplete, type="file"), *names]


def loading_options(command: Any) -> Any:
    """--model, --draft-model, --backend, --device, --dtype, --cuda-graphs, --tensor-parallel."""
    made = []
    for name, (flags, text, default) in LOADING.items():
        complete: dict[str, Any] = {"shell_complete": _complete_model} if name in ("model", "draft_model") else {}
        made.append(click.option(*flags, name, default=default, show_default=default is not None, help=text, **complete))
    return _apply(graphs_option(tensor_parallel_option(command)), made)


def engine_options(command: Any) -> Any:
    """All fields of EngineOptions."""
    return _apply(command, _dataclass_options(EngineOptions, ENGINE))


def request_options(command: Any) -> Any:
    """All fields of RequestOptions and SamplingOptions."""
    return _apply(command, _dataclass_options(RequestOptions, REQUEST) + _dataclass_options(SamplingOptions, SAMPLING))


def answer_options(command: Any) -> Any:
    """The same but --logprobs, for commands whose output has no place for them."""
    fewer = {name: entry for name, entry in REQUEST.items() if name != "top_logprobs"}
    return _apply(command, _dataclass_options(RequestOptions, fewer) + _dataclass_options(SamplingOptions, SAMPLING))


def prompt_cache_option(command: Any) -> Any:
    """--prompt-cache-file."""
    text = "Take up the KV of this file where the prompt begins alike, and keep the KV there at the end."
    return click.option("--prompt-cache-file", type=click.Path(path_type=Path, dir_okay=False), help=text)(command)


def debug_option(command: Any) -> Any:
    """--debug, seen by the handler of errors."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(dict)["debug"] = True

    return click.option("--debug", is_flag=True, expose_value=False, callback=remember, help="Show tracebacks.")(command)


def build_engine_options(values: dict[str, Any]) -> EngineOptions:
    """EngineOptions from click's values; raises UsageError as the dataclass does."""
    return EngineOptions(**{name: values[name] for name in ENGINE})


def build_request(values: dict[str, Any]) -> RequestOptions:
    """RequestOptions from click's values."""
    sampling = SamplingOptions(**{name: values[name] for name in SAMPLING})
    request = {name: values[name] for name in REQUEST if name in values}
    return RequestOptions(sampling=sampling, **request | {"stop": tuple(values["stop"])})


def refuse_useless(ctx: click.Context, values: dict[str, Any]) -> None:
    """Raise UsageError for a flag on the command line that the other options leave without any effect."""
    mode, drafter = values["mode"], values["drafter"]
    if values["draft_model"] and (mode == "ar" or drafter in ("self", "lookup", "none")):
        why = "--mode ar" if mode == "ar" else f"--drafter {drafter}"
        raise UsageError(f"--draft-model has no use with {why}: drop one of them")
    if mode == "exact" and drafter == "self":
        raise UsageError("--drafter self has no use with --mode exact, whose sparse target proposes by itself: --drafter none")
    for why in useless(ctx, values).values():
        raise UsageError(why)


def useless(ctx: click.Context, values: dict[str, Any]) -> dict[str, str]:
    """Flags on the command line that the other options leave without effect -> why, in words that begin with the flag."""
    mode, drafter = values["mode"], values["drafter"]
    rules = [(name, mode not in needed, f"needs --mode {needed[0]}") for name, needed in _NEEDS_MODE.items()]
    if mode == "ar":
        rules += [(name, True, "has no effect with --mode ar") for name in _SPECULATIVE]
    elif mode == "dense" and drafter == "lookup":
        why = f"has no effect with --mode {mode} and this drafter, which never reads sparsely"
        rules += [(name, True, why) for name in (*_SPARSE, "sparse_draft", "lookahead_lag")]
    elif mode == "dense" and values["draft_model"]:
        why = "has no effect with --mode dense and a draft model: the target reads everything"
        rules += [(name, True, why) for name in _LAYERS]
    by_itself = drafter == "self" or (drafter == "auto" and not values["draft_model"])
    rules.append(("exact_block", mode == "auto" and by_itself, "needs --mode exact, or a draft model in auto"))
    if drafter == "none" or (mode == "exact" and drafter == "auto" and not values["draft_model"]):
        rules.append(("num_draft_tokens", True, "has no effect: nothing drafts here"))
    if values["selector"] not in ("dustin", "history", "lookahead", "specattn"):
        why = f"has no effect with --select {values['selector']}, whose sets are its own"
        rules += [(name, True, why) for name in (*_LAYERS, "top_mass", "lookahead_lag")]
        # H2O's heavy hitters are those of the scoring heads.
        rules.append(("profile", values["selector"] != "h2o", why))
    if values["selector"] == "dense":
        rules += [(name, True, "has no effect with --select dense, which reads everything") for name in _SIZES]
    if values["fidelity"] == "high":
        rules.append(("top_mass", True, "has no effect with --fidelity high: sets that layers choose themselves are not cut"))
    if values["reselection_layers"] is not None:
        rules.append(("fidelity", True, "has no effect with --reselection-layers, which says what layers choose"))
    if values["reselection_layers"] == ():
        rules += [(name, True, "has no effect with --reselection-layers none") for name in _RESELECTION]
    if values["reselection_layers"] is None and values["profile"] == "none" and values["fidelity"] == "standard":
        rules += [(name, True, "needs --reselection-layers or --fidelity high") for name in _RESELECTION]
    if values["selector"] != "dustin":
        rules.append(("lookahead_share", True, f"has no effect with --select {values['selector']}"))
    if not values["draft_model"]:
        rules += [(name, True, "needs --draft-model") for name in ("lookahead_share", "lookahead_lag", "sparse_draft")]
    if values.get("temperature") == 0:
        rules += [(name, True, "has no effect at temperature 0: give --temp too") for name in ("top_k", "top_p", "min_p")]
    found: dict[str, str] = {}
    for name, broken, why in rules:
        if broken and ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            found.setdefault(name, f"{(ENGINE | SAMPLING)[name][0][0].split('/')[0]} {why}")
    return found


_NEEDS_MODE = {"rectify_interval": ("rectified",), "exact_block": ("exact", "auto")}
_RESELECTION = ("reselection_rank", "reselection_by_kv_head", "reselection_reuse")
# What single layers of the target do.
_LAYERS = ("dense_layers", "reselection_layers", *_RESELECTION, "fidelity")
_SIZES = ("budget", "num_sink_tokens", "num_recent_tokens")
_SPARSE = ("selector", *_SIZES, "lookahead_share", "profile", *_LAYERS, "top_mass")
_SPECULATIVE = (*_SPARSE, "drafter", "num_draft_tokens", "sparse_draft", "lookahead_lag")
