"""What ran in the last minutes, always on: numbers in rings, of which a look copies the newest.

A `Timeline` has an object for every span, which suits a demonstration and not a server that runs
for weeks. Here a step costs one row of a ring, and the windows of a transfer on one lane that were
handed over together become one row. What the rings no longer have is gone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.timeline.record import Kind, Records, Timeline
from forebay.transfer.messages import WINDOW_DTYPE

# At a step each millisecond the last half minute, at the usual tens of milliseconds the last ten.
_STEPS = 1 << 15
_COPIES = 1 << 15
_WAITS = 1 << 14
_REQUESTS = 1 << 13
# Windows that follow each other this closely are drawn as one: less than a pixel of a minute.
_JOIN_S = 1e-3

STEP_DTYPE = np.dtype(
    [
        ("step", np.int64),
        ("start_s", np.float64),
        ("end_s", np.float64),
        ("decode_tokens", np.int32),
        ("prefill_tokens", np.int32),
    ]
)
WAIT_DTYPE = np.dtype([("start_s", np.float64), ("end_s", np.float64)])

Row = tuple[str, Kind, float, float]
"""A request's state: its row, what it did, from when to when."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far somebody has read."""

    steps: int = 0
    copies: int = 0
    waits: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Steps, copies (`WINDOW_DTYPE`) and waits that were recorded since a mark, oldest first.

    `mark` is where the next part begins. The arrays are the reader's own.
    """

    steps: NDArray[np.void]
    copies: NDArray[np.void]
    waits: NDArray[np.void]
    mark: Mark


class Recent:
    """The newest steps, copies, waits and ended requests, on the clock they were recorded with.

    Not locked: the thread that owns the cache records and reads.
    """

    def __init__(self) -> None:
        self._steps = _Ring(STEP_DTYPE, _STEPS)
        self._copies = _Ring(WINDOW_DTYPE, _COPIES)
        self._waits = _Ring(WAIT_DTYPE, _WAITS)
        self._requests: deque[Row] = deque(maxlen=_REQUESTS)

    def step(
        self,
        number: int,
        start_s: float,
        end_s: float,
        *,
        decode_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        """See `Timeline.step`."""
        self._steps.add((number, start_s, end_s, decode_tokens, prefill_tokens))

    def windows(self, windows: NDArray[np.void]) -> None:
        """See `Timeline.windows`."""
        if len(windows):
            self._copies.extend(_joined(windows) if len(windows) > 1 else windows)

    def wait(self, start_s: float, end_s: float, *, request: str | None = None) -> None:
        """See `Timeline.wait`. Whose wait it was is not kept."""
        self._waits.add((start_s, end_s))

    def request(
        self, row: str, kind: Kind, start_s: float, end_s: float, **details: object
    ) -> None:
        """See `Timeline.request`. Details are not kept."""
        self._requests.append((row, kind, start_s, end_s))

    def since(self, mark: Mark) -> Part:
        """What was recorded after `mark` and is still there."""
        return Part(
            steps=self._steps.since(mark.steps),
            copies=self._copies.since(mark.copies),
            waits=self._waits.since(mark.waits),
            mark=Mark(self._steps.added, self._copies.added, self._waits.added),
        )

    def requests(self) -> list[Row]:
        """The states of requests that have ended, oldest first."""
        return list(self._requests)


def timeline_of(part: Part, requests: list[Row], after_s: float) -> Timeline:
    """A timeline of all that ended after `after_s`."""
    steps = part.steps[part.steps["end_s"] > after_s]
    copies = part.copies[part.copies["end_s"] > after_s]
    waits = part.waits[part.waits["end_s"] > after_s]
    rows = [row for row in requests if row[3] > after_s]
    timeline = Timeline(max(1, len(steps) + len(copies) + len(waits) + len(rows)))
    for number, start_s, end_s, decode, prefill in steps.tolist():
        timeline.step(number, start_s, end_s, decode_tokens=decode, prefill_tokens=prefill)
    timeline.windows(copies)
    for start_s, end_s in waits.tolist():
        timeline.wait(start_s, end_s)
    for row, kind, start_s, end_s in rows:
        timeline.request(row, kind, max(start_s, after_s), end_s)
    return timeline


class _Ring:
    """The newest `capacity` rows; `added` counts all there ever were."""

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self._rows = np.zeros(capacity, dtype)
        self.added = 0

    def add(self, row: tuple[float, ...]) -> None:
        self._rows[self.added % len(self._rows)] = row
        self.added += 1

    def extend(self, rows: NDArray[np.void]) -> None:
        rows = rows[-len(self._rows) :]
        at = self.added % len(self._rows)
        head = min(len(rows), len(self._rows) - at)
        self._rows[at : at + head] = rows[:head]
        self._rows[: len(rows) - head] = rows[head:]
        self.added += len(rows)

    def since(self, mark: int) -> NDArray[np.void]:
        count = min(self.added - mark, len(self._rows))
        end = self.added % len(self._rows)
        if count <= end:
            return self._rows[end - count : end].copy()
        return np.concatenate([self._rows[end - count :], self._rows[:end]])


def _joined(windows: NDArray[np.void]) -> NDArray[np.void]:
    """The same with the windows of one transfer that follow each other on a lane as one."""
    order = np.lexsort((windows["start_s"], windows["lane"], windows["direction"]))
    ordered = windows[order]
    before, after = ordered[:-1], ordered[1:]
    apart = after["start_s"] - before["end_s"] > _JOIN_S
    for name in ("transfer", "transfer_class", "lane", "direction"):
        apart |= before[name] != after[name]
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    joined = ordered[firsts]
    joined["bytes"] = np.add.reduceat(ordered["bytes"], firsts)
    joined["end_s"] = np.maximum.reduceat(ordered["end_s"], firsts)
    return joined[np.argsort(joined["end_s"], kind="stable")]


class Both:
    """Tells two records the same: an engine's own timeline, and what is always on."""

    def __init__(self, first: Records, second: Records) -> None:
        self._records = (first, second)

    def step(
        self,
        number: int,
        start_s: float,
        end_s: float,
        *,
        decode_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        """See `Timeline.step`."""
        for record in self._records:
            record.step(
                number,
                start_s,
                end_s,
                decode_tokens=decode_tokens,
                prefill_tokens=prefill_tokens,
            )

    def windows(self, windows: NDArray[np.void]) -> None:
        """See `Timeline.windows`."""
        for record in self._records:
            record.windows(windows)

    def wait(self, start_s: float, end_s: float, *, request: str | None = None) -> None:
        """See `Timeline.wait`."""
        for record in self._records:
            record.wait(start_s, end_s, request=request)

    def request(
        self, row: str, kind: Kind, start_s: float, end_s: float, **details: object
    ) -> None:
        """See `Timeline.request`."""
        for record in self._records:
            record.request(row, kind, start_s, end_s, **details)
