"""GET /metrics: Prometheus counters, read from the scheduler when asked; latencies are observed as they happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dustin.serving.scheduler import Scheduler, Watcher

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)


class Metrics(Watcher):
    """The registry of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        made: dict[str, Any] = {"registry": self.registry}
        self._first = Histogram("dustin_time_to_first_token_seconds", "From arrival to first token.", buckets=_SECONDS, **made)
        self._between = Histogram(
            "dustin_inter_token_latency_seconds", "Between tokens of a request.", buckets=_TOKEN_SECONDS, **made
        )
        self._whole = Histogram("dustin_request_duration_seconds", "From arrival to last token.", buckets=_SECONDS, **made)
        self._ended = Counter("dustin_requests", "Sequences that ended, by outcome.", ["outcome"], **made)
        self._refused = Counter("dustin_requests_refused", "Requests that met a full queue.", **made)
        self._failed = Counter("dustin_engine_failures", "Steps that raised.", **made)

    def watch(self, scheduler: Scheduler) -> None:
        """Add what is read from the scheduler."""
        self.registry.register(_FromScheduler(scheduler))  # type: ignore[arg-type]

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    # Watcher.

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        # A round brings several tokens at once: each took its share.
        for _ in range(count):
            self._between.observe(seconds / count)

    def finished(self, outcome: str, seconds: float) -> None:
        self._ended.labels(outcome).inc()
        self._whole.observe(seconds)

    def refused(self) -> None:
        self._refused.inc()

    def engine_failure(self) -> None:
        self._failed.inc()


class _FromScheduler:
    """A collector over counters that the engine keeps anyway."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Any]:
        """All families at this moment."""
        scheduler, stats = self._scheduler, self._scheduler.stats
        used, capacity = scheduler.kv_tokens
        gauges = {
            "requests_running": ("Sequences in slots.", scheduler.num_running),
            "requests_waiting": ("Sequences waiting for a slot.", scheduler.num_waiting),
            "kv_tokens": ("KV rows that running sequences hold.", used),
            "kv_capacity_tokens": ("KV rows there are.", capacity),
            "acceptance_length": ("Mean tokens of a speculative verification.", stats.acceptance_length),
            "kv_read_share": ("KV bytes read as a share of plain decoding's.", stats.kv_read_share),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "prompt_tokens_cached": ("Prompt tokens whose KV was there already.", stats.reused_prompt_tokens),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "spec_decode_num_drafts": ("Verifications with drafts.", stats.spec_steps),
            "spec_decode_num_draft_tokens": ("Drafted tokens.", stats.drafted),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.", stats.accepted),
            "kv_bytes_read": ("Bytes read of the target's KV cache.", stats.kv_bytes_read),
            "kv_bytes_dense": ("Bytes that plain decoding would have read.", stats.kv_bytes_dense),
            "prefill_seconds": ("Time spent on prompts.", stats.prefill_seconds),
            "decode_seconds": ("Time spent on rounds.", stats.decode_seconds),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"dustin_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"dustin_{name}", text, value=value)
        by_position = CounterMetricFamily(
            "dustin_spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position.", labels=["position"]
        )
        histogram = dict(stats.acceptance_histogram)
        for position in range(max(histogram, default=0)):
            by_position.add_metric([str(position)], sum(count for kept, count in histogram.items() if kept > position))
        yield by_position
        rounds = CounterMetricFamily("dustin_rounds", "Rounds by mode.", labels=["mode"])
        for mode, count in dict(stats.mode_rounds).items():
            rounds.add_metric([str(mode)], count)
        yield rounds
