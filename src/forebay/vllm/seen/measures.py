"""What the connector counts, as it travels from vLLM's engine to its metrics: plain values.

A payload is what is new since the last: counters and samples of histograms by what they grew,
gauges as they stand. `FAMILIES` is the one list of all there is, with names as in `forebay serve`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from forebay.cache.account import CacheStats
from forebay.cache.figures import FIGURES
from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.core.store import Store
from forebay.vllm.scheduler.hints import HintOutcome
from forebay.vllm.scheduler.wishes import Ignored

Values = dict[str, float]
"""By the values of its labels, joined by "/"; of a family without labels that is ""."""


class Payload(TypedDict):
    """By names of families."""

    counters: dict[str, Values]
    gauges: dict[str, Values]
    samples: dict[str, list[float]]


def nothing() -> Payload:
    """A payload without anything."""
    return {"counters": {}, "gauges": {}, "samples": {}}


_WAIT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_STEP_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
# Samples of one payload: a scheduler that nobody asks for its statistics keeps no more.
_MOST_SAMPLES = 4096


class Kind(StrEnum):
    """What Prometheus makes of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `values` are all that its labels can have."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, label: str = "", words: type[StrEnum] | None = None) -> Family:
    if words is None:
        return Family(name, Kind.COUNTER, text)
    return Family(name, Kind.COUNTER, text, (label,), tuple(word.value for word in words))


_SLOTS = (
    *("device/used", "device/prefetched", "device/idle", "device/free"),
    *("host/used", "host/free"),
)

_OF_CACHE = tuple(
    Family(
        figure.name,
        Kind.GAUGE if figure.gauge else Kind.COUNTER,
        figure.text,
        (figure.label,) if figure.label else (),
        figure.words,
    )
    for figure in FIGURES
)

FAMILIES = (
    *_OF_CACHE,
    _counter("forebay:prompt_tokens", "Prompt tokens by source.", "source", Source),
    _counter("forebay:stall_seconds", "No step ran, and only a load lacked."),
    _counter("forebay:settle_seconds", "Steps waited for saves of what they write, all workers."),
    _counter("forebay:steps", "Launches of the model."),
    Family(
        "forebay:slots",
        Kind.GAUGE,
        "In use (used), brought for waiting requests (prefetched), cache (idle), free.",
        ("tier", "state"),
        _SLOTS,
    ),
    Family("forebay:block_bytes", Kind.GAUGE, "Size of a slot."),
    Family(
        "forebay:mode",
        Kind.GAUGE,
        "1 for the mode.",
        ("mode",),
        tuple(mode.value for mode in Mode),
    ),
    _counter("forebay:hints", "Hints by what became of them.", "outcome", HintOutcome),
    Family("forebay:hints_open", Kind.GAUGE, "Hints that are taken up."),
    _counter("forebay:wishes_ignored", "Parts of requests left out.", "reason", Ignored),
    Family(
        "forebay:request_load_wait_seconds",
        Kind.HISTOGRAM,
        "Lacked nothing but a load.",
        buckets=_WAIT_S,
    ),
    Family(
        "forebay:scheduler_seconds",
        Kind.HISTOGRAM,
        "Of this connector, in vLLM's scheduler, for each step.",
        buckets=_STEP_S,
    ),
)


@dataclass(slots=True)
class Tally:
    """What the half in the scheduler counts beside the books of the cache."""

    prompt_tokens: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    ignored: dict[Ignored, int] = field(default_factory=lambda: dict.fromkeys(Ignored, 0))
    steps: int = 0
    stall_s: float = 0.0
    load_waits_s: list[float] = field(default_factory=list[float])
    _stalled_since_s: float | None = None

    def prompt(self, tokens: int, loaded: int, found: int, waited_s: float) -> None:
        """A request of `tokens` starts: `found` were there, of which `loaded` came from host."""
        self.prompt_tokens[Source.HOST] += loaded
        self.prompt_tokens[Source.DEVICE] += found - loaded
        self.prompt_tokens[Source.RECOMPUTED] += tokens - found
        if len(self.load_waits_s) < _MOST_SAMPLES:
            self.load_waits_s.append(waited_s)

    def step(self, now_s: float, *, computes: bool, loads_lack: bool) -> None:
        """vLLM scheduled a step."""
        if self._stalled_since_s is not None:
            self.stall_s += now_s - self._stalled_since_s
        self._stalled_since_s = now_s if loads_lack and not computes else None
        self.steps += computes


def counted(cache: CacheStats, tally: Tally, hints: Mapping[HintOutcome, int]) -> dict[str, Values]:
    """All counters as they stand."""
    own: dict[str, Values] = {
        "forebay:prompt_tokens": {each.value: tally.prompt_tokens[each] for each in Source},
        "forebay:stall_seconds": {"": tally.stall_s},
        "forebay:steps": {"": tally.steps},
        "forebay:hints": {each.value: hints[each] for each in HintOutcome},
        "forebay:wishes_ignored": {each.value: tally.ignored[each] for each in Ignored},
    }
    return _of(cache, gauges=False) | own


def standing(
    cache: CacheStats, store: Store, unused: int, now: Mode, hints: int
) -> dict[str, Values]:
    """All gauges as they stand but those that never change. Of vLLM's blocks no request has
    `unused`, with content in them or not.
    """
    device, host = store.device, store.host.tier
    free = min(device.free, unused)
    prefetched = min(device.prefetch_leased, unused - free)
    own: dict[str, Values] = {
        "forebay:slots": {
            "device/used": device.slots - unused,
            "device/prefetched": prefetched,
            "device/idle": unused - free - prefetched,
            "device/free": free,
            "host/used": host.count - host.free,
            "host/free": host.free,
        },
        "forebay:mode": {mode.value: int(mode is now) for mode in Mode},
        "forebay:hints_open": {"": hints},
    }
    return _of(cache, gauges=True) | own


def _of(cache: CacheStats, *, gauges: bool) -> dict[str, Values]:
    return {each.name: dict(each.values(cache)) for each in FIGURES if each.gauge is gauges}


class Growth:
    """Turns totals into what is new since the last time."""

    def __init__(self) -> None:
        self._last: dict[str, Values] = {}
        self._stood: dict[str, Values] = {}

    def changed(self, gauges: dict[str, Values]) -> dict[str, Values]:
        """Those of `gauges` that are others than the last time."""
        new = {name: value for name, value in gauges.items() if value != self._stood.get(name)}
        self._stood = gauges
        return new

    def since(self, totals: dict[str, Values]) -> dict[str, Values]:
        """What grew, and by how much."""
        grown: dict[str, Values] = {}
        for name, values in totals.items():
            last = self._last.get(name, {})
            more = {
                word: value - last.get(word, 0)
                for word, value in values.items()
                if value != last.get(word, 0)
            }
            if more:
                grown[name] = more
        self._last = totals
        return grown


class Stopwatch:
    """The time that this connector takes of vLLM's scheduler, a sample for each step.

    What is done inside it, as a context, counts. May not be nested.
    """

    def __init__(self) -> None:
        self._taken_s = 0.0
        self._began_s = 0.0
        self._steps_s: list[float] = []

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._taken_s += time.perf_counter() - self._began_s

    def step(self) -> None:
        """A step is over: what was taken since the last is a sample."""
        if len(self._steps_s) < _MOST_SAMPLES:
            self._steps_s.append(self._taken_s)
        self._taken_s = 0.0

    def take(self) -> list[float]:
        """The samples since the last time."""
        taken, self._steps_s = self._steps_s, []
        return taken


def merge(one: Payload, other: Payload) -> None:
    """Add `other`, which is later, to `one`."""
    for name, values in other["counters"].items():
        mine = one["counters"].setdefault(name, {})
        for word, value in values.items():
            mine[word] = mine.get(word, 0) + value
    one["gauges"].update(other["gauges"])
    for name, samples in other["samples"].items():
        one["samples"].setdefault(name, []).extend(samples)


def summary(payload: Payload) -> dict[str, int | float]:
    """A few figures of a payload for a line of vLLM's log."""
    counters = payload["counters"]
    said: dict[str, int | float] = {}
    for source, tokens in counters.get("forebay:prompt_tokens", {}).items():
        said[f"{source} tokens"] = tokens
    for word, seconds in (("loaded", "load"), ("saved", "save")):
        moved = counters.get(f"forebay:{word}_bytes", {}).get("", 0)
        busy_s = counters.get(f"forebay:{seconds}_seconds", {}).get("", 0.0)
        if moved:
            said[f"{word} GB"] = round(moved / 1e9, 3)
        if moved and busy_s > 0:
            said[f"{seconds} GB/s"] = round(moved / 1e9 / busy_s, 1)
    for outcome, moved in counters.get("forebay:prefetch_bytes", {}).items():
        said[f"prefetch {outcome} GB"] = round(moved / 1e9, 3)
    return said
