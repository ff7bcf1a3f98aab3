"""The figures of many requests that come at once on one prefix."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from arms import NATIVE, OURS
from start import Start, ratio_figure

from forebay.measure.report import Figure


def convoys(start: Start, ours: str) -> list[Figure]:
    """Of the arm `ours` beside vLLM's own; none if it had no convoy."""
    found = {arm + "_small": start.raw(arm + "_small", "convoy") for arm in (*OURS, *NATIVE)}
    rounds = {arm: each for arm, each in found.items() if each}
    if ours not in rounds:
        return []
    told = _told(rounds)
    medians = told["median_ttft_ms"]
    made = [ratio_figure("convoy", told["spread_over_median"][ours], told)]
    for id, times in (("convoy", medians), ("convoy_last", told["last_ttft_ms"])):
        middle = {arm: statistics.median(values) for arm, values in times.items()}
        mine = {arm: middle.pop(arm) for arm in list(middle) if arm.removesuffix("_small") in OURS}
        if not middle:
            continue
        best = min(middle.values())
        made.append(Figure(f"{id}_vs_native", mine[ours] / best, "ratio", (), told))
        if len(mine) > 1:
            value = min(mine.values()) / best
            made.append(Figure(f"{id}_best_runner_vs_native", value, "ratio", (), told))
    return made + _on_gpu(rounds, ours, medians[ours])


def _on_gpu(
    rounds: Mapping[str, Sequence[dict[str, Any]]], ours: str, medians_ms: Sequence[float]
) -> list[Figure]:
    """Beside the same with the prefix on the GPU, which runs of commits before 47bafa0 lack."""
    there = {
        arm: [raw["on_gpu"] for raw in each if "on_gpu" in raw] for arm, each in rounds.items()
    }
    if not there[ours]:
        return []
    told = _told(there)
    ratios = [a / b for a, b in zip(medians_ms, told["median_ttft_ms"][ours], strict=True)]
    return [
        ratio_figure("convoy_on_gpu", told["spread_over_median"][ours], told),
        ratio_figure("convoy_vs_on_gpu", ratios, told),
    ]


def _told(rounds: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Of each arm a value for each round."""
    asked = {
        "spread_over_median": _spread,
        "median_ttft_ms": _median_ttft,
        "last_ttft_ms": lambda raw: max(raw["first_s"]) * 1e3,
    }
    return {
        name: {arm: [of(raw) for raw in each] for arm, each in rounds.items()}
        for name, of in asked.items()
    }


def _median_ttft(raw: dict[str, Any]) -> float:
    """Of requests that came together, in ms."""
    return statistics.median(sample["ttft_ms"] for sample in raw["requests"])


def _spread(raw: dict[str, Any]) -> float:
    """From the first one's first token to the last one's, over the median TTFT."""
    return (max(raw["first_s"]) - min(raw["first_s"])) * 1e3 / _median_ttft(raw)
