"""How an engine stands: counters since its start, and the state of queue and pools."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.cache.account import CacheStats
from forebay.cache.view import Occupancy
from forebay.core.modes import Mode


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A value that any thread may read. Seconds and counts are since the start.

    `prompt_tokens` are of requests that have started, `generation_tokens` all that were drawn.
    `stall_s` is the time in which no step ran while some request lacked only its load, by the host:
    on a GPU a step's stream may wait for issued copies after its launch, which is not in it.
    """

    mode: Mode
    waiting: int
    running: int
    steps: int
    stall_s: float
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    occupancy: Occupancy
    cache: CacheStats
