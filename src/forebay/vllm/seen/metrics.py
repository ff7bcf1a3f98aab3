"""The connector's counts in vLLM's own `/metrics` and log: what vLLM asks for as classes.

Made for each process of vLLM that serves metrics. Payloads come there from the engine's process,
and in them from the workers' (see `measures`).
"""

# vLLM's classes are of no type that a checker knows where vLLM is not installed.
# pyright: standard

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from forebay.vllm.seen.measures import FAMILIES, Family, Kind, Payload, merge, nothing, summary

_PREFIX = "forebay:"


class ForebayStats(KVConnectorStats):
    """A payload on its way. `data` is its content."""

    def __init__(self, data: Payload | None = None) -> None:
        super().__init__(data=nothing() if data is None else data)  # pyright: ignore[reportCallIssue]

    def reset(self) -> None:
        """Nothing is in it any more."""
        self.data = nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add `other`: of another worker, of the scheduler, or later."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Figures for vLLM's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not any(self.data.values())


class ForebayPromMetrics(KVConnectorPromMetrics):
    """Every family, with vLLM's labels before its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        # By engine and family, then by the values of the family's labels.
        self._children: dict[tuple[int, str], dict[str, Any]] = {}
        for family in FAMILIES:
            metric = self._metric(family)
            for engine, values in per_engine_labelvalues.items():
                self._children[engine, family.name] = {
                    word: metric.labels(*values, *(word.split("/") if word else ()))
                    for word in family.values
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an engine's payload says."""
        for name, values in transfer_stats_data["counters"].items():
            for word, value in values.items():
                self._children[engine_idx, name][word].inc(value)
        for name, values in transfer_stats_data["gauges"].items():
            for word, value in values.items():
                self._children[engine_idx, name][word].set(value)
        for name, samples in transfer_stats_data["samples"].items():
            for sample in samples:
                self._children[engine_idx, name][""].observe(sample)

    def _metric(self, family: Family) -> Any:
        names = [*self._labelnames, *family.labels]
        if family.kind is Kind.COUNTER:
            return self._counter_cls(family.name, family.text, labelnames=names)
        if family.kind is Kind.GAUGE:
            # As vLLM's own gauges where several processes serve metrics.
            return self._gauge_cls(
                family.name, family.text, labelnames=names, multiprocess_mode="mostrecent"
            )
        return self._histogram_cls(
            family.name, family.text, labelnames=names, buckets=family.buckets
        )


def _forget_earlier() -> None:
    """vLLM does so with its own: an earlier engine of this process has registered them."""
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith(_PREFIX):
            REGISTRY.unregister(collector)
