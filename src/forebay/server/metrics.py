"""Metrics for Prometheus: vLLM's names where the meaning is the same, Forebay's own beside them.

Counters and gauges of the engine are read from its snapshot when they are scraped; only what
happens once for an answer is counted as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay.core.ledger import MissReason, Source
from forebay.engine.request import FinishReason
from forebay.engine.stats import EngineStats
from forebay.server.exchange import Outcome

# vLLM's buckets, so that boards made for it fit.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_S += (20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._success = self._counter(
            "vllm:request_success", "Answers that ended, by reason.", "finished_reason"
        )
        self._reasons = {r: self._success.labels(model_name, r.value) for r in FinishReason}
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.").labels(model_name)
        self._answer = self._counter("vllm:generation_tokens", "Answer tokens.").labels(model_name)
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up."
        ).labels(model_name)
        self._hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens whose KV was found."
        ).labels(model_name)
        self._refused = self._counter(
            "forebay:requests_refused", "Requests refused because too many wait."
        ).labels(model_name)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "To a token.", _TTFT_S)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Between an answer's tokens.", _TOKEN_S
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to start.", _REQUEST_S
        )
        self._loads = self._histogram(
            "forebay:request_load_wait_seconds", "Waited for nothing but a load.", _TTFT_S
        )
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Of an answer.", _TOKENS)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Report the engine's own state too, from its newest snapshot."""
        self._registry.register(_EngineCollector(stats, self._label))

    def answered(self, outcome: Outcome) -> None:
        """An answer ended."""
        self._reasons[outcome.reason].inc()
        self._total.observe(outcome.total_s)
        self._queued.observe(outcome.queued_s)
        self._answer.inc(outcome.answer_tokens)
        self._answers.observe(outcome.answer_tokens)
        if outcome.first_token_s is None:
            return
        self._prompt.inc(outcome.prompt_tokens)
        self._prompts.observe(outcome.prompt_tokens)
        self._queries.inc(outcome.prompt_tokens)
        self._hits.inc(outcome.cached_tokens)
        self._ttft.observe(outcome.first_token_s)
        self._loads.observe(outcome.load_wait_s)
        if outcome.answer_tokens > 1:
            rest_s = outcome.total_s - outcome.first_token_s
            self._tpot.observe(rest_s / (outcome.answer_tokens - 1))

    def refused(self) -> None:
        """A request found the queue full."""
        self._refused.inc()

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._label["model_name"])


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], label: dict[str, str]) -> None:
        self._stats = stats
        self._names = list(label)
        self._values = list(label.values())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        pools, cache = stats.occupancy, stats.cache
        used = pools.device_slots - pools.device_free - pools.device_idle
        yield self._gauge("vllm:num_requests_running", "Answers in steps.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait.", stats.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of device slots in use.", used / pools.device_slots
        )
        yield self._count("vllm:num_preemptions", "Answers put back.", stats.preemptions)
        yield self._count("forebay:steps", "Launches of the model.", stats.steps)
        yield self._count(
            "forebay:stall_seconds", "No step ran, and only a load lacked.", stats.stall_s
        )
        yield self._slots(stats)
        yield self._by(
            "forebay:blocks",
            "Prompt blocks by source.",
            "source",
            {source.value: cache.sources[source] for source in Source},
        )
        yield self._by(
            "forebay:misses",
            "Prompt blocks computed, by reason.",
            "reason",
            {reason.value: cache.misses[reason] for reason in MissReason},
        )
        yield self._by(
            "forebay:prefetch_bytes", "Planned bytes by outcome.", "outcome", cache.prefetch_bytes
        )
        yield self._gauge(
            "forebay:prefetch_open_bytes", "Planned, without outcome.", cache.prefetch_open_bytes
        )
        yield self._count("forebay:loaded_bytes", "Host to device.", cache.loaded_bytes)
        yield self._count("forebay:saved_bytes", "Device to host.", cache.saved_bytes)
        yield self._count("forebay:load_seconds", "The link was busy loading.", cache.load_s)
        yield self._count("forebay:evicted_blocks", "Left the device.", cache.evicted_blocks)
        yield self._count(
            "forebay:dropped_dirty_blocks", "Left it unsaved.", cache.dropped_dirty_blocks
        )
        yield self._gauge(
            "forebay:quarantined_blocks", "Out of use for good.", cache.quarantined_blocks
        )
        mode = GaugeMetricFamily("forebay:mode", "1 for the mode.", labels=[*self._names, "mode"])
        mode.add_metric([*self._values, stats.mode.value], 1)
        yield mode

    def _slots(self, stats: EngineStats) -> Metric:
        pools = stats.occupancy
        states = {
            ("device", "used"): pools.device_slots - pools.device_free - pools.device_idle,
            ("device", "idle"): pools.device_idle,
            ("device", "free"): pools.device_free,
            ("host", "used"): pools.host_slots - pools.host_free,
            ("host", "free"): pools.host_free,
        }
        family = GaugeMetricFamily(
            "forebay:slots", "Block-sized slots.", labels=[*self._names, "tier", "state"]
        )
        for (tier, state), count in states.items():
            family.add_metric([*self._values, tier, state], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._names, label])
        for value, count in values.items():
            family.add_metric([*self._values, value], count)
        return family
