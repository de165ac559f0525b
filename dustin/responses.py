"""What a call gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dustin.interfaces import TokenLogprobs
from dustin.stats import Stats


@dataclass(frozen=True)
class GenerationResponse:
    """One streamed token (mlx-lm's names). `text` is new text, never taken back; counters are those so far."""

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    logprobs: TokenLogprobs | None
    stats: Stats

    @property
    def metrics(self) -> dict[str, Any]:
        """vLLM's block: `{"speculative_decoding": {...}}`."""
        return {"speculative_decoding": self.stats.as_dict()["speculative_decoding"]}


@dataclass
class GenerationResult:
    """One finished request; `tokens` are the generated ones (an end-of-sequence token included)."""

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    error: str | None = None
