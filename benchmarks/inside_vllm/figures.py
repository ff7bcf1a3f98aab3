"""The figures of one machine start, from the raw samples of its arms."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from arms import NATIVE, NONE, RESIDENT
from convoys import convoys
from memory import taken
from sizes import MOST_DIVERGENCE
from start import Start, quantile, ratio_figure

from forebay.measure.report import Figure, Goal

GOALS = {
    **{
        f"backlog_{answer}_{q}": Goal(at_least=share)
        for answer, share in ((64, 0.8), (16, 0.7))
        for q in ("p50", "p90")
    },
    **{
        f"backlog_{answer}_vs_native_{q}": Goal(at_most=1.0)
        for answer in (64, 16)
        for q in ("p50", "p90")
    },
    "hit_16k": Goal(at_most=1.05),
    "hit_32k": Goal(at_most=1.05),
    "hit_16k_vs_native": Goal(at_most=1.0),
    "hit_32k_vs_native": Goal(at_most=1.0),
    "hinted_hit_32k": Goal(at_most=1.15),
    "no_hits": Goal(at_least=0.98),
    "itl": Goal(at_most=1.10),
    "thrash_bytes": Goal(at_most=1.1),
    "thrash_vs_native": Goal(at_least=0.97),
    "convoy": Goal(at_most=0.1),
    "convoy_vs_native": Goal(at_most=1.0),
    "divergence": Goal(at_most=MOST_DIVERGENCE),
    "divergence_swapped": Goal(at_least=MOST_DIVERGENCE),
    "pin_start_s": Goal(at_most=5.0),
    "pin_memory": Goal(at_most=1.02),
}
_LOADED = ("vllm:kv_offload_load_bytes_total", "forebay:loaded_bytes_total")
_FAILED = ("forebay:failed_transfers_total", "forebay:link_stops_total")
_SEEN_AS = ("resident", "charged", "MemAvailable", "MemFree")
_LEAST_SEEN = 0.5
"""A smaller share of the host memory is something else."""
_QUANTILES = {"p50": 0.5, "p90": 0.9}


def figures(start: Start, ours: str) -> list[Figure]:
    """All figures for which there are samples. `ours` is the arm that is judged."""
    made: list[Figure] = []
    for answer in (64, 16):
        made += _backlog(start, ours, answer)
    made += _hits(start, ours if start.raw(ours, "solo") else ours + "_small")
    made += _pairs("no_hits", start, ours, NONE, "no_hits", lambda mine, other: other / mine)
    made += _itl(start, ours)
    made += _thrash(start, ours + "_small")
    made += convoys(start, ours + "_small")
    made += _divergence(start, ours)
    made += _start_up(start, ours)
    return made


def faults(start: Start) -> list[str]:
    """What makes figures say something else than they are about: an arm that broke, rounds that
    were left out, copies that failed, hits in host memory that were none, and running requests
    that did not run beside all hits.
    """
    found: list[str] = []
    for arm, document in start.arms.items():
        if document.get("broken"):
            found.append(f"{arm} broke: {document.get('failure', '')[-200:]}")
        found += [f"{arm}: {each} was left out" for each in document.get("left_out", [])]
        for sample in document["samples"]:
            where = f"{arm}: {sample['workload']} {sample['round']}"
            found += [
                f"{where}: {name} grew by {value:g}"
                for name, value in sample["counted"].items()
                if name.split("{")[0] in _FAILED
            ]
            if sample["workload"] == "solo":
                found += [f"{where}: {why}" for why in _no_hits_at_all(sample["raw"])]
            if sample["workload"] == "itl":
                found += [
                    f"{where}: decoding ended before hits on the {kind} did"
                    for kind, beside in sample["raw"].items()
                    if beside["decoding_ended_first"]
                ]
    return found


def _no_hits_at_all(raw: dict[str, Any]) -> list[str]:
    told: list[str] = []
    for length, kinds in raw.items():
        for kind in ("host_hit", "hinted"):
            cached = kinds.get(kind, kinds["gpu_hit"])["cached_tokens"]
            if cached < 0.9 * kinds["gpu_hit"]["cached_tokens"]:
                told.append(f"{kind} of {length} tokens found {cached}")
    return told


def _backlog(start: Start, ours: str, answer: int) -> list[Figure]:
    workload, made = f"backlog_{answer}", list[Figure]()
    for name, q in _QUANTILES.items():
        of = {arm: _last_turn(start.raw(arm, workload), q) for arm in start.arms}
        known = {arm: values for arm, values in of.items() if values}
        natives = {arm: statistics.median(known[arm]) for arm in NATIVE if arm in known}
        if ours not in known or not natives:
            continue
        best = min(natives, key=lambda arm: natives[arm])
        mine = statistics.median(known[ours])
        told = {"ttft_ms": known, "better_native": best}
        made.append(Figure(f"{workload}_vs_native_{name}", mine / natives[best], "ratio", (), told))
        resident = [statistics.median(known[arm]) for arm in RESIDENT if arm in known]
        if resident:
            way = natives[best] - min(resident)
            made.append(
                Figure(f"{workload}_{name}", (natives[best] - mine) / way, "share", (), told)
            )
    return made


def _last_turn(rounds: Iterable[dict[str, Any]], q: float) -> list[float]:
    return [quantile([turns[-1]["ttft_ms"] for turns in raw["users"]], q) for raw in rounds]


def _hits(start: Start, ours: str) -> list[Figure]:
    made: list[Figure] = []
    mine = start.raw(ours, "solo")
    for length in mine[0] if mine else []:
        label = f"{int(length) // 1024}k" if int(length) >= 1024 else length
        floors = _floors(start, ours, length)
        hosts = [raw[length]["host_hit"]["ttft_ms"] for raw in mine]
        told = {
            "tokens": int(length),
            "ttft_ms": {arm: _ttfts(start, arm, length) for arm in start.arms},
            "equal_tokens": _equal(mine, length),
            "link_bytes_per_s": start.link_bytes_per_s,
        }
        if floors:
            ratios = [host / floor for host, floor in zip(hosts, floors, strict=True)]
            made.append(ratio_figure(f"hit_{label}", ratios, {**told, "floors_ms": floors}))
        natives = [
            _ttfts(start, arm, length).get("host_hit")
            for arm in start.arms
            if arm.removesuffix("_small") in NATIVE
        ]
        medians = [statistics.median(values) for values in natives if values]
        if medians:
            value = statistics.median(hosts) / min(medians)
            made.append(Figure(f"hit_{label}_vs_native", value, "ratio", (), told))
        for against, end in (("gpu_hit", ""), ("rested", "_rested")):
            ratios = [
                raw[length]["hinted"]["ttft_ms"] / raw[length][against]["ttft_ms"]
                for raw in mine
                if against in raw[length]
            ]
            if ratios:
                made.append(ratio_figure(f"hinted_hit_{label}{end}", ratios, told))
    return made


def _floors(start: Start, ours: str, length: str) -> list[float]:
    """For each round: the lowest GPU hit of its prompt in any arm, and its bytes over the link."""
    if start.link_bytes_per_s is None:
        return []
    token_bytes = _token_bytes(start.arms[ours])
    floors: list[float] = []
    for number, raw in enumerate(start.raw(ours, "solo")):
        seen = [
            rounds[number][length]["gpu_hit"]["ttft_ms"]
            for arm in start.arms
            if len(rounds := start.raw(arm, "solo")) > number
        ]
        moved = raw[length]["host_hit"]["cached_tokens"] * token_bytes
        floors.append(min(seen) + moved / start.link_bytes_per_s * 1e3)
    return floors


def _ttfts(start: Start, arm: str, length: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for raw in start.raw(arm, "solo"):
        for kind, sample in raw[length].items():
            found.setdefault(kind, []).append(sample["ttft_ms"])
    return found


def _equal(rounds: Sequence[dict[str, Any]], length: str) -> dict[str, str]:
    """In how many rounds a kind of hit gave the tokens of the GPU hit."""
    told: dict[str, str] = {}
    for kind in ("cold", "host_hit", "hinted"):
        same = [raw[length][kind]["tokens"] == raw[length]["gpu_hit"]["tokens"] for raw in rounds]
        told[kind] = f"{sum(same)}/{len(same)}"
    return told


def _pairs(
    id: str,
    start: Start,
    ours: str,
    others: Sequence[str],
    workload: str,
    ratio: Callable[[float, float], float],
) -> list[Figure]:
    """Ratios of the seconds of the same round, against the fastest of `others`."""
    seconds = {arm: [raw["seconds"] for raw in start.raw(arm, workload)] for arm in start.arms}
    there = [arm for arm in others if seconds.get(arm)]
    if not seconds.get(ours) or not there:
        return []
    best = min(there, key=lambda arm: statistics.median(seconds[arm]))
    ratios = [ratio(mine, other) for mine, other in zip(seconds[ours], seconds[best], strict=False)]
    return [ratio_figure(id, ratios, {"seconds": seconds, "against": best})]


def _itl(start: Start, ours: str) -> list[Figure]:
    rounds = [raw for raw in start.raw(ours, "itl") if _all_have_gaps(raw)]
    if not rounds:
        return []
    p99 = {
        kind: [quantile(raw[kind]["gaps_ms"], 0.99) for raw in rounds]
        for kind in ("device", "host")
    }
    beside = {
        arm: [quantile(raw["host"]["gaps_ms"], 0.99) for raw in told]
        for arm in NATIVE
        if (told := [raw for raw in start.raw(arm, "itl") if _all_have_gaps(raw)])
    }
    ratios = [host / device for host, device in zip(p99["host"], p99["device"], strict=True)]
    return [
        ratio_figure(
            "itl",
            ratios,
            {
                "p99_ms": p99,
                "native_host_p99_ms": beside,
                "gaps": [len(raw["host"]["gaps_ms"]) for raw in rounds],
            },
        )
    ]


def _all_have_gaps(raw: dict[str, Any]) -> bool:
    return all(beside["gaps_ms"] for beside in raw.values())


def _thrash(start: Start, ours: str) -> list[Figure]:
    natives = [arm + "_small" for arm in NATIVE]
    made = _pairs(
        "thrash_vs_native", start, ours, natives, "thrash", lambda mine, other: other / mine
    )
    told = {arm: _loaded(start, arm) for arm in [ours, *natives] if start.raw(arm, "thrash")}
    if told.get(ours):
        made.append(ratio_figure("thrash_bytes", told[ours], {"loaded_over_used": told}))
    return made


def _loaded(start: Start, arm: str) -> list[float]:
    """Bytes loaded over bytes used, a round each, where the connector counts what it loads."""
    token_bytes = _token_bytes(start.arms[arm])
    ratios: list[float] = []
    for raw, counted in zip(start.raw(arm, "thrash"), start.counted(arm, "thrash"), strict=True):
        loaded = sum(value for name, value in counted.items() if name.split("{")[0] in _LOADED)
        used = sum(sample["cached_tokens"] for sample in raw["requests"]) * token_bytes
        if loaded and used:
            ratios.append(loaded / used)
    return ratios


def _divergence(start: Start, ours: str) -> list[Figure]:
    """Mean divergence per token from hits on the GPU, in nats."""
    rounds = [raw for raw in start.raw(ours, "accuracy") if raw]
    made: list[Figure] = []
    for kind, id in (
        ("host", "divergence"),
        ("swapped", "divergence_swapped"),
        ("recomputed", "divergence_recomputed"),
    ):
        samples = [each for raw in rounds for each in raw["divergences"].get(kind, [])]
        if not samples:
            continue
        told = {
            name: [raw[name] for raw in rounds]
            for name in ("prompts", "answer", "attention_gain", "cached_tokens", "same_best")
        }
        value = statistics.mean(samples)
        made.append(Figure(id, value, "nats per token", tuple(samples), told))
    return made


def _start_up(start: Start, ours: str) -> list[Figure]:
    told: dict[str, Any] = {}
    for arm, document in start.arms.items():
        began = document.get("start")
        if began is not None:
            told[arm] = {
                "engine_start_s": began["engine_start_s"],
                "kv_memory_s": max(began["kv_memory_s"]),
                "memory_settled_s": began["memory_settled_s"],
                "taken_bytes": taken(began["memory_before"], began["memory_started"]),
                "beside": document["beside"],
            }
    if ours not in told or "none" not in told:
        return []
    mine, none = told[ours], told["none"]
    made = [Figure("pin_start_s", mine["kv_memory_s"] - none["kv_memory_s"], "s", (), told)]
    asked = start.arms[ours]["sizes"]["host_bytes"]
    seen = _host_memory(mine["taken_bytes"], none["taken_bytes"], asked)
    if seen is not None:
        where, value = seen
        made.append(Figure("pin_memory", value, "ratio", (), {**told, "seen_as": where}))
    return made


def _host_memory(
    mine: dict[str, int], none: dict[str, int], asked: int
) -> tuple[str, float] | None:
    """Where the host memory shows, first in an arm's own processes, and its share of what was
    asked; None where it shows nowhere: it is there, since it is used.
    """
    for where in _SEEN_AS:
        if where in mine and where in none:
            value = (mine[where] - none[where]) / asked
            if value > _LEAST_SEEN:
                return where, value
    return None


def _token_bytes(document: dict[str, Any]) -> int:
    return int(document["token_bytes"])
