"""Metrics for Prometheus: vLLM's names where the meaning is the same, Forebay's own beside them.

Counters and gauges of the engine are read from its snapshot when they are scraped; only what
happens once for an answer is counted as it happens. Every label has a fixed set of values: nothing
of a tenant, a session or a prompt is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forebay.cache.account import CacheStats
from forebay.cache.figures import FIGURES, Figure
from forebay.cache.view import Occupancy
from forebay.core.modes import Mode
from forebay.engine.request import FinishReason
from forebay.engine.stats import EngineStats
from forebay.release import installed_version
from forebay.server.exchange import Outcome
from forebay.server.state import State

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# vLLM's words for the same ends.
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.FAILED: "error",
}
# vLLM's buckets, so that boards made for it fit.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_S += (20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
# From 1 ms on, where vLLM's begin at 0.3 s: how long a request queues is what look-ahead hides in.
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 960)
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
        self._reasons = {
            reason: self._success.labels(model_name, word) for reason, word in _REASONS.items()
        }
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens of prompts of answers that ended."
        ).labels(model_name)
        self._hits = self._counter(
            "vllm:prefix_cache_hits", "Of vllm:prefix_cache_queries, those whose KV was found."
        ).labels(model_name)
        self._refused = self._counter(
            "forebay:requests_refused", "Requests refused with 429 because too many wait."
        ).labels(model_name)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "An answer's time from its first to its last token, over the tokens after the first.",
            _TOKEN_S,
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to start.", _QUEUE_S
        )
        self._loads = self._histogram(
            "forebay:request_load_wait_seconds", "Lacked nothing but a load.", _TTFT_S
        )
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Of an answer.", _TOKENS)

    def watch(
        self, stats: Callable[[], EngineStats], state: Callable[[], State], block_bytes: int
    ) -> None:
        """Report engine, server and process too, as they are when somebody asks."""
        self._registry.register(_EngineCollector(stats, self._label, block_bytes))
        self._registry.register(_ServerCollector(state, self._label))
        ProcessCollector(registry=self._registry)

    def answered(self, outcome: Outcome) -> None:
        """An answer ended."""
        self._reasons[outcome.reason].inc()
        self._total.observe(outcome.total_s)
        self._queued.observe(outcome.queued_s)
        self._answers.observe(outcome.answer_tokens)
        if outcome.first_token_s is None:
            return
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
        """The exposition, in Prometheus' text form, of the type `CONTENT_TYPE`.

        Also to who asks for OpenMetrics: there the library writes the colons of names as
        underscores, and every query would find nothing.
        """
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._label["model_name"])


class _Families:
    """Makes families that all carry the same labels."""

    def __init__(self, label: dict[str, str]) -> None:
        self._names = list(label)
        self._values = list(label.values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def count_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._names, label])
        for value, count in values.items():
            family.add_metric([*self._values, value], count)
        return family

    def figure(self, figure: Figure, cache: CacheStats) -> Metric:
        values = figure.values(cache)
        if figure.label:
            return self.count_by(figure.name, figure.text, figure.label, values)
        return (self.gauge if figure.gauge else self.count)(figure.name, figure.text, values[""])

    def one_of(self, name: str, text: str, label: str, words: list[str], now: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._names, label])
        for word in words:
            family.add_metric([*self._values, word], float(word == now))
        return family

    def slots(self, pools: Occupancy) -> Metric:
        held = pools.device_slots - pools.device_free - pools.device_idle
        states = {
            ("device", "used"): held - pools.device_prefetched,
            ("device", "prefetched"): pools.device_prefetched,
            ("device", "idle"): pools.device_idle,
            ("device", "free"): pools.device_free,
            ("host", "used"): pools.host_slots - pools.host_free,
            ("host", "free"): pools.host_free,
        }
        text = "Of running answers (used), for waiting ones (prefetched), cache (idle), free."
        family = GaugeMetricFamily("forebay:slots", text, labels=[*self._names, "tier", "state"])
        for (tier, state), count in states.items():
            family.add_metric([*self._values, tier, state], count)
        return family


class _ServerCollector(Collector):
    def __init__(self, state: Callable[[], State], label: dict[str, str]) -> None:
        self._state = state
        self._make = _Families(label)
        self._info = _Families({**label, "version": installed_version()})

    def collect(self) -> Iterator[Metric]:
        states = [state.value for state in State]
        yield self._make.one_of(
            "forebay:state", "1 for the server's state.", "state", states, self._state().value
        )
        yield self._info.gauge("forebay:build_info", "1 for the version.", 1)


class _EngineCollector(Collector):
    def __init__(
        self, stats: Callable[[], EngineStats], label: dict[str, str], block_bytes: int
    ) -> None:
        self._stats = stats
        self._make = _Families(label)
        self._block_bytes = block_bytes

    def collect(self) -> Iterator[Metric]:
        stats, make = self._stats(), self._make
        yield from self._requests(stats)
        pools = stats.occupancy
        held = pools.device_slots - pools.device_free - pools.device_idle
        yield make.gauge(
            "vllm:kv_cache_usage_perc", "Share of device slots in use.", held / pools.device_slots
        )
        yield make.slots(pools)
        yield make.gauge("forebay:block_bytes", "Size of a slot.", self._block_bytes)
        modes = [mode.value for mode in Mode]
        yield make.one_of("forebay:mode", "1 for the mode.", "mode", modes, stats.mode.value)
        yield from self._cache(stats.cache)

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        make = self._make
        yield make.gauge("vllm:num_requests_running", "Answers in steps.", stats.running)
        yield make.gauge("vllm:num_requests_waiting", "Answers that wait.", stats.waiting)
        yield make.count("vllm:num_preemptions", "Answers put back.", stats.preemptions)
        yield make.count("vllm:prompt_tokens", "Of prompts that started.", stats.prompt_tokens)
        yield make.count("vllm:generation_tokens", "Of answers.", stats.generation_tokens)
        yield make.count("forebay:steps", "Launches of the model.", stats.steps)
        yield make.count(
            "forebay:stall_seconds", "No step ran, and only a load lacked.", stats.stall_s
        )

    def _cache(self, cache: CacheStats) -> Iterator[Metric]:
        make = self._make
        for figure in FIGURES:
            yield make.figure(figure, cache)
        yield make.count(
            "forebay:layered_starts", "Prompts that started by layer.", cache.layered_starts
        )
        yield make.count(
            "forebay:layered_hidden_seconds",
            "They computed while the rest of their loads flowed.",
            cache.layered_hidden_s,
        )
