"""A timeline in the Chrome trace format, which opens in Perfetto. Times are microseconds there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from forebay.timeline.record import GROUPS, Group, Kind, Timeline

_GROUP_OF = {kind: group for group in GROUPS for kind in group.kinds}


def write_trace(timeline: Timeline, path: Path | str) -> None:
    """Write `timeline` to `path`, gzip if that ends in ".gz". Makes the folder of `path`."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(timeline))})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def trace_events(timeline: Timeline) -> Iterator[dict[str, object]]:
    """The events of `timeline`, one by one. Times count from its first span."""
    origin_s = timeline.extent()[0]
    threads: dict[tuple[Group, str], tuple[int, int]] = {}
    for pid, group in enumerate(GROUPS, start=1):
        yield from _metadata("process", pid, 0, group.name, pid)
        for tid, row in enumerate(timeline.rows(group), start=1):
            threads[group, row] = (pid, tid)
            yield from _metadata("thread", pid, tid, row, tid)
    for span in timeline:
        pid, tid = threads[_GROUP_OF[span.kind], span.row]
        start_us = _microseconds(span.start_s - origin_s)
        event: dict[str, object] = {
            "ph": "X",
            "name": span.kind.value.partition(": ")[2],
            "cat": span.kind.value.partition(": ")[0],
            "pid": pid,
            "tid": tid,
            "ts": start_us,
            "dur": round(_microseconds(span.end_s - origin_s) - start_us, 3),
            "args": dict(span.details),
        }
        if span.kind is Kind.WAIT:
            event["cname"] = "terrible"
        yield event
    yield from _counter_events(timeline, origin_s)


def _counter_events(timeline: Timeline, origin_s: float) -> list[dict[str, object]]:
    if not timeline.occupancy_samples:
        return []
    pid = len(GROUPS) + 1
    samples: list[dict[str, object]] = [
        {
            "ph": "C",
            "name": f"{tier} blocks",
            "pid": pid,
            "tid": 0,
            "ts": _microseconds(sample.at_s - origin_s),
            "args": {"blocks": blocks},
        }
        for sample in timeline.occupancy_samples
        for tier, blocks in sample.blocks.items()
    ]
    return _metadata("process", pid, 0, "tiers", pid) + samples


def _metadata(what: str, pid: int, tid: int, name: str, position: int) -> list[dict[str, object]]:
    place: dict[str, object] = {"ph": "M", "pid": pid, "tid": tid}
    return [
        place | {"name": f"{what}_name", "args": {"name": name}},
        place | {"name": f"{what}_sort_index", "args": {"sort_index": position}},
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
