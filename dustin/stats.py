"""Raw counters of a run and the rates derived from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counters of one batch; times in seconds, KV traffic in bytes (of the target's cache unless said otherwise).

    `kv_bytes_dense` is what plain decoding of the emitted tokens would have read. `mode_rounds` counts rounds by the mode
    they ran in (what `auto` decided); `plan` has its last decision and the numbers behind it (see `AutoPlanner.as_dict`).
    """

    mode: str = ""
    drafter: str = ""
    selector: str = ""
    scoring: str = ""
    sequences: int = 0
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    verified_rows: int = 0
    spec_steps: int = 0
    dense_checks: int = 0
    checked_tokens: int = 0
    check_accepted_tokens: int = 0
    rectified_tokens: int = 0
    rectify_passes: int = 0
    kv_bytes_read: int = 0
    kv_bytes_dense: int = 0
    draft_kv_bytes_read: int = 0
    peak_memory_bytes: int = 0
    mode_rounds: Counter[str] = field(default_factory=Counter)
    plan: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def count_round(self, num_drafts: int, num_accepted: int) -> None:
        """One verification of one sequence."""
        self.verified_rows += 1
        self.drafted += num_drafts
        self.accepted += num_accepted
        if num_drafts:
            self.spec_steps += 1
            self.acceptance_histogram[num_accepted] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification that had drafts: 1 + accepted; 1 where nothing was drafted."""
        return 1 + self.accepted / self.spec_steps if self.spec_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens read per second of prefill."""
        read = self.prompt_tokens - self.reused_prompt_tokens
        return read / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Generated tokens per second of decoding (the first token belongs to the prefill)."""
        return (self.generated_tokens - self.sequences) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def kv_read_share(self) -> float:
        """Target KV bytes read as a share of what plain dense decoding would have read."""
        return self.kv_bytes_read / self.kv_bytes_dense if self.kv_bytes_dense else 0.0

    def summary_lines(self) -> list[str]:
        """Lines for people, for stderr: of drafter, selector and heads only where a round could use them."""
        reused = f" ({self.reused_prompt_tokens} of them reused)" if self.reused_prompt_tokens else ""
        lines = [
            f"prompt: {self.prompt_tokens} tokens{reused}, {self.prompt_tps:.1f} tok/s",
            f"generated: {self.generated_tokens} tokens, {self.generation_tps:.1f} tok/s",
            f"peak memory: {self.peak_memory_bytes / 2**30:.2f} GiB",
        ]
        how = f"mode {self.mode}"
        if self.mode == "auto":
            how += " (" + (", ".join(f"{mode} {count}" for mode, count in self.mode_rounds.most_common()) or "no") + " rounds)"
        plain = set(self.mode_rounds) <= {"ar"}
        lines.append(how if plain else f"{how}, drafter {self.drafter}, selector {self.selector}")
        if self.plan and self.plan["forecast_tokens_per_s"]:
            speeds = ", ".join(f"{text}: {speed:.1f}" for text, speed in self.plan["forecast_tokens_per_s"].items())
            lines.append(f"auto: last plan {self.plan['plan']}; tokens/s of a row it expects of {speeds}")
        if self.scoring and not plain:
            lines.append(f"scoring heads: {self.scoring}")
        if self.drafted:
            lines.append(
                f"accepted {self.accepted} of {self.drafted} drafted ({100 * self.acceptance_rate:.0f} %), "
                f"mean acceptance length {self.acceptance_length:.2f}"
            )
        if self.dense_checks:
            lines.append(
                f"dense checks: {self.dense_checks}, {self.check_accepted_tokens} of {self.checked_tokens} provisional tokens kept"
            )
        if self.rectify_passes:
            lines.append(f"rectified: {self.rectified_tokens} rows in {self.rectify_passes} passes")
        if self.kv_bytes_dense:
            lines.append(f"KV read: {100 * self.kv_read_share:.1f} % of dense decoding")
        return lines + [f"note: {text}" for text in self.warnings]

    def as_dict(self) -> dict[str, Any]:
        """Counters and rates, ready for JSON, with vLLM's `speculative_decoding` block."""
        fields = {name: value for name, value in vars(self).items() if not isinstance(value, Counter)}
        return fields | {
            "prompt_tps": self.prompt_tps,
            "generation_tps": self.generation_tps,
            "kv_read_share": self.kv_read_share,
            "mode_rounds": dict(self.mode_rounds),
            "speculative_decoding": {
                "mean_acceptance_length": self.acceptance_length,
                "draft_acceptance_rate": self.acceptance_rate,
                "acceptance_histogram": {str(n): count for n, count in sorted(self.acceptance_histogram.items())},
                "num_spec_steps": self.spec_steps,
                "num_accepted_draft_tokens": self.accepted,
                "num_draft_tokens": self.drafted,
            },
        }
