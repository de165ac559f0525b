"""Frozen, validated options: the only place with defaults. CLI, server and Python API read them from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from dustin.errors import UsageError

MODES = ("auto", "ar", "dense", "sparse", "rectified", "exact")
DRAFTERS = ("auto", "draft", "self", "lookup", "none")
FIDELITIES = ("standard", "high")
SELECTORS = ("dustin", "history", "lookahead", "specattn", "streaming", "h2o", "snapkv", "quest", "oracle", "dense")
# Those that a program added by dustin.add_selector: name -> what makes one.
ADDED_SELECTORS: dict[str, Callable[..., Any]] = {}


def require(name: str, value: object, ok: bool, expected: str) -> None:
    """Raise UsageError naming the field and its value unless `ok`."""
    if not ok:
        raise UsageError(f"{name} is {value!r}, expected {expected}")


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": (tuple, "a string or several"),
    "tuple[int, ...]": (tuple, "whole numbers, as in (3, 5)"),
}


def check_types(options: Any) -> None:
    """Make tuples of lists (and of a single string); raise UsageError for a value that is not what its field takes."""
    for field in fields(options):
        value, kind = getattr(options, field.name), str(field.type).removesuffix(" | None")
        if kind not in _KINDS or (value is None and kind != field.type):
            continue
        if kind.startswith("tuple") and isinstance(value, (list, str)):
            value = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(options, field.name, value)
        types, expected = _KINDS[kind]
        parts = value if kind.startswith("tuple") and isinstance(value, tuple) else (value,)
        inner = _KINDS[kind[6:9]][0] if kind.startswith("tuple") else types
        # True is 1 to Python, and never what was meant here.
        fits = isinstance(value, types) and all(isinstance(p, inner) and (kind == "bool" or not isinstance(p, bool)) for p in parts)
        require(field.name, "..." if "key" in field.name else value, fits, expected)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and the neutral penalties change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more")
        require("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        require("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and up to 1")
        require("min_p", self.min_p, 0 <= self.min_p < 1, "a number from 0 up to, not including, 1")
        require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "a number above 0")
        require("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 10, "-10 to 10")
        require("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 10, "-10 to 10")
        require("seed", self.seed, 0 <= self.seed < 2**63, "a whole number from 0 to 2**63-1")


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for. `max_tokens` counts generated tokens; `stop` is a string or several; `top_logprobs` None = no
    logprobs, 0 = chosen token only."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    sampling: SamplingOptions = SamplingOptions()

    def __post_init__(self) -> None:
        check_types(self)
        require("sampling", self.sampling, isinstance(self.sampling, SamplingOptions), "SamplingOptions(...)")
        require("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        require("stop", self.stop, all(self.stop), "stop strings that are not empty")
        require("top_logprobs", self.top_logprobs, self.top_logprobs is None or 0 <= self.top_logprobs <= 20, "0 to 20")


@dataclass(frozen=True)
class EngineOptions:
    """How the engine works (METHOD sections 4 and 7). Budgets, windows and intervals are in tokens.

    `lookahead_share` is m of METHOD 3: the share of the unprotected budget filled by draft scores; None takes the profile's.
    `profile` is a file of scoring heads that `dustin calibrate` wrote, `auto` (the one of this pair, else the heuristic) or
    `none`. `dense_layers` ignore the set; `reselection_layers` choose sets of their own by the rows in flight, over compact keys
    of `reselection_rank` numbers (0: whole keys), with `reselection_by_kv_head` one for each kv head; with `reselection_reuse`
    the layers up to the next of these read what it chose. None takes the profile's. `fidelity` "high" lets every layer choose so
    where neither options nor profile say which do. `top_mass` cuts each set to what holds that share of the scores, so that the
    budget is only the most.
    `lookahead_lag` 1 uses the previous round's drafts (needed for exact sampling); None chooses 0, or 1 where exactness needs it.
    `exact_block` is how many tokens one dense check covers: provisional ones, then drafts; with the pending one the default is a
    number of rows that a GPU's recordings have. A row drafts no more once the
    chance that its run of drafts is kept falls below `min_draft_confidence` (0: off). `relaxed_weight` w and `route_confidence`
    P are lossy and off at 0: drafted positions follow (1 - w) target + w draft; a draft whose distribution peaks at P or more is
    kept unchecked.
    """

    mode: str = "auto"
    drafter: str = "auto"
    selector: str = "dustin"
    num_draft_tokens: int = 5
    budget: int = 1024
    num_sink_tokens: int = 4
    num_recent_tokens: int = 32
    lookahead_share: float | None = None
    profile: str = "auto"
    dense_layers: tuple[int, ...] | None = None
    reselection_layers: tuple[int, ...] | None = None
    reselection_rank: int | None = None
    reselection_by_kv_head: bool | None = None
    reselection_reuse: bool | None = None
    fidelity: str = "standard"
    top_mass: float | None = None
    lookahead_lag: int | None = None
    rectify_interval: int = 256
    exact_block: int = 31
    min_draft_confidence: float = 0.0
    relaxed_weight: float = 0.0
    route_confidence: float = 0.0
    sparse_draft: bool = True
    prefill_chunk: int | None = None
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        require("mode", self.mode, self.mode in MODES, "one of " + ", ".join(MODES))
        require("drafter", self.drafter, self.drafter in DRAFTERS, "one of " + ", ".join(DRAFTERS))
        known = (*SELECTORS, *ADDED_SELECTORS)
        require("selector", self.selector, self.selector in known, "one of " + ", ".join(known))
        require("num_draft_tokens", self.num_draft_tokens, 1 <= self.num_draft_tokens <= 15, "1 to 15 tokens")
        require("num_sink_tokens", self.num_sink_tokens, self.num_sink_tokens >= 0, "0 or more tokens")
        require("num_recent_tokens", self.num_recent_tokens, self.num_recent_tokens >= 1, "1 or more tokens")
        protected = self.num_sink_tokens + self.num_recent_tokens
        if self.budget <= protected:
            raise UsageError(
                f"budget is {self.budget} tokens, expected more than the {protected} protected ones "
                f"({self.num_sink_tokens} sinks + {self.num_recent_tokens} recent): raise --budget or lower the window"
            )
        require("lookahead_share", self.lookahead_share, self.lookahead_share is None or 0 <= self.lookahead_share <= 1, "0 to 1")
        require("profile", self.profile, bool(self.profile), "auto, none or a file")
        for name in ("dense_layers", "reselection_layers"):
            layers = getattr(self, name) or ()
            require(name, layers, all(layer >= 0 for layer in layers), "layers from 0 on")
        both = set(self.dense_layers or ()) & set(self.reselection_layers or ())
        if both:
            raise UsageError(
                f"layer {min(both)} is named by dense_layers and by reselection_layers, but reads either everything or a set of "
                "its own: name it in one of them"
            )
        require("reselection_rank", self.reselection_rank, self.reselection_rank in (None, 0, 32, 64), "0 (whole keys), 32 or 64")
        require("fidelity", self.fidelity, self.fidelity in FIDELITIES, "one of " + ", ".join(FIDELITIES))
        require("top_mass", self.top_mass, self.top_mass is None or 0 < self.top_mass <= 1, "above 0, up to 1")
        require("lookahead_lag", self.lookahead_lag, self.lookahead_lag in (None, 0, 1), "0 or 1")
        require("rectify_interval", self.rectify_interval, self.rectify_interval >= 1, "1 or more tokens")
        require("exact_block", self.exact_block, 1 <= self.exact_block <= 128, "1 to 128 tokens")
        require("min_draft_confidence", self.min_draft_confidence, 0 <= self.min_draft_confidence < 1, "0 (off) up to, not 1")
        require("relaxed_weight", self.relaxed_weight, 0 <= self.relaxed_weight < 1, "0 (off) up to, not including, 1")
        require("route_confidence", self.route_confidence, 0 <= self.route_confidence <= 1, "0 (off) to 1")
        for name in ("relaxed_weight", "route_confidence"):
            if getattr(self, name) and self.mode not in ("sparse", "rectified"):
                raise UsageError(
                    f"{name} is {getattr(self, name)}: it changes the output, which mode {self.mode!r} promises not to: "
                    "use --mode sparse or rectified, or leave it out"
                )
        require("prefill_chunk", self.prefill_chunk, self.prefill_chunk is None or self.prefill_chunk >= 1, "1 or more tokens")
        rows = self.max_kv_size
        require("max_kv_size", rows, rows is None or rows >= 2, "2 or more tokens, of prompt and answer")


def defaults(options: type) -> dict[str, object]:
    """Field name -> default of one of the classes above (the CLI shows and tests compare these)."""
    return {field.name: field.default for field in fields(options)}
