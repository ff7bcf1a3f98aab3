"""What is read on the engine's thread for those who watch: bounded, and handed over as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.cache.view import Tree
from forebay.engine.engine import Engine
from forebay.engine.request import EngineRequest
from forebay.engine.stats import EngineStats
from forebay.engine.view import RequestView
from forebay.server.access import Tenant
from forebay.server.driver import Job
from forebay.timeline.recent import Both, Mark, Part, Recent, Row
from forebay.timeline.record import Kind

MOST_WAITING = 100
"""Waiting requests of one viewer: the next in line. Who waits behind them is counted only."""
MOST_NODES = 400
"""Nodes of a tree. A page a thousand pixels wide shows no more of them."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Whose tree to draw: all namespaces', or those of `salts`."""

    salts: Sequence[str] | None


Jobs = Mapping[int, tuple[EngineRequest, Job]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, and what its client called the conversation."""

    view: RequestView
    session: str


@dataclass(frozen=True, slots=True)
class Look:
    """How the engine stood at `at_s`; `part` is what it did since the last look."""

    at_s: float
    stats: EngineStats
    link_bytes_per_s: float
    seen: list[Seen]
    part: Part
    tree: Tree | None


@dataclass(frozen=True, slots=True)
class LastMinutes:
    """Everything that is still recorded, and the states of requests, ended or not."""

    at_s: float
    part: Part
    requests: list[Row]


def record(engine: Engine) -> Recent:
    """Keep what `engine` does from now on, beside the timeline that it may have."""
    recent = Recent()
    engine.timeline = recent if engine.timeline is None else Both(engine.timeline, recent)
    return recent


def look(
    engine: Engine,
    jobs: Jobs,
    recent: Recent,
    mark: Mark,
    tenant: Tenant | None,
    tree: Drawing | None,
) -> Look:
    """What `tenant` may see, or, for None, an operator."""
    if engine.timeline is not None:
        engine.timeline.windows(engine.mover.windows())
    mine = None if tenant is None else {i for i, (_, job) in jobs.items() if tenant.owns(job.salt)}
    return Look(
        at_s=engine.view.now_s,
        stats=engine.stats(),
        link_bytes_per_s=engine.cache.rates.link_bytes_per_s.value,
        seen=[
            Seen(view, jobs[view.id][1].session)
            for view in engine.view.requests(MOST_WAITING, mine)
            if view.id in jobs
        ],
        part=recent.since(mark),
        tree=engine.view.tree(tree.salts, MOST_NODES) if tree is not None else None,
    )


def last_minutes(engine: Engine, jobs: Jobs, recent: Recent) -> LastMinutes:
    """A copy of the record."""
    if engine.timeline is not None:
        engine.timeline.windows(engine.mover.windows())
    now_s = engine.view.now_s
    rows = recent.requests()
    for request, _ in jobs.values():
        rows += _states(request, now_s)
    return LastMinutes(now_s, recent.since(Mark()), rows)


def _states(request: EngineRequest, now_s: float) -> list[Row]:
    """What a request that has not ended did so far."""
    timing = request.timing
    moments = [timing.arrival_s, timing.started_s, timing.first_token_s]
    begun = [moment for moment in moments if moment is not None]
    kinds = (Kind.QUEUED, Kind.PREFILL, Kind.DECODE)
    ends = [*begun[1:], now_s]
    return [
        (request.label, kind, start_s, end_s)
        for kind, start_s, end_s in zip(kinds, begun, ends, strict=False)
    ]
