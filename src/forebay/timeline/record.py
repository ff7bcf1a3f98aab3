"""What ran when: steps, copies, waits and requests on one clock.

The question a timeline answers is whether copies ran *under* steps or in front of them. So the
steps, the lanes of the link and the exposed waits (the time a step was held back by a copy) stand
under each other, and the requests they served below.

All times are seconds of one host clock (`time.monotonic`). A `Timeline` keeps the newest `capacity`
spans and as many occupancy samples and forgets the oldest, so it may run for as long as its engine.
It is not locked: the thread that owns the cache records into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import SettingsError
from forebay.transfer.messages import Direction, TransferClass

STEPS = "steps"
EXPOSED_WAIT = "exposed wait"
_WINDOW_FIELDS = ("transfer", "direction", "transfer_class", "lane", "bytes", "start_s", "end_s")


class Kind(Enum):
    """What a span is. The value is its name in trace and legend, as "group: kind"."""

    DECODE_STEP = "step: decode only"
    PREFILL_STEP = "step: with prefill"
    WAIT = "step: exposed wait"
    PREFETCH = "copy: prefetch"
    DEMAND = "copy: demand"
    SAVE = "copy: save"
    QUEUED = "request: queued"
    PREFILL = "request: prefill"
    DECODE = "request: decode"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that stand together: a process of the trace, a panel of the picture."""

    name: str
    kinds: tuple[Kind, ...]


COMPUTE = Group("compute", (Kind.DECODE_STEP, Kind.PREFILL_STEP, Kind.WAIT))
LINK = Group("link", (Kind.PREFETCH, Kind.DEMAND, Kind.SAVE))
REQUESTS = Group("requests", (Kind.QUEUED, Kind.PREFILL, Kind.DECODE))
GROUPS = (COMPUTE, LINK, REQUESTS)

_CLASS_KINDS = {
    TransferClass.DEMAND: Kind.DEMAND,
    TransferClass.PREFETCH: Kind.PREFETCH,
    TransferClass.SAVE: Kind.SAVE,
}
_LANE_ROWS = {Direction.LOAD: "load lane", Direction.SAVE: "save lane"}


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: a `kind` on a `row` from `start_s` to `end_s`; `details` are shown on a click."""

    row: str
    kind: Kind
    start_s: float
    end_s: float
    details: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks each tier held from `at_s` on."""

    at_s: float
    blocks: Mapping[str, int]


class Records(Protocol):
    """What an engine tells of its work, as it is done; see `Timeline` for each."""

    def step(
        self,
        number: int,
        start_s: float,
        end_s: float,
        *,
        decode_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        """A step ended."""
        ...

    def windows(self, windows: NDArray[np.void]) -> None:
        """These windows were copied."""
        ...

    def wait(self, start_s: float, end_s: float, *, request: str | None = None) -> None:
        """No step ran, for want of a load."""
        ...

    def request(
        self, row: str, kind: Kind, start_s: float, end_s: float, **details: object
    ) -> None:
        """A request was in a state."""
        ...


class Timeline:
    """A bounded record of spans and of tier occupancy, oldest first.

    `capacity` is the most spans, and the most occupancy samples, that are kept. `dropped` counts
    what was forgotten. Raises SettingsError when `capacity` is not positive.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        if capacity < 1:
            raise SettingsError(f"a timeline needs room for at least one span, got {capacity}")
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._occupancy: deque[Occupancy] = deque(maxlen=capacity)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    @property
    def occupancy_samples(self) -> tuple[Occupancy, ...]:
        """The kept samples of tier occupancy, oldest first."""
        return tuple(self._occupancy)

    def clear(self) -> None:
        """Forget all that was recorded, `dropped` too."""
        self._spans.clear()
        self._occupancy.clear()
        self.dropped = 0

    def step(
        self,
        number: int,
        start_s: float,
        end_s: float,
        *,
        decode_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        """Record step `number` and how many tokens of each sort it ran. Steps do not overlap."""
        kind = Kind.PREFILL_STEP if prefill_tokens else Kind.DECODE_STEP
        details = {
            "step": number,
            "decode_tokens": decode_tokens,
            "prefill_tokens": prefill_tokens,
        }
        self._add(Span(STEPS, kind, start_s, end_s, details))

    def windows(self, windows: NDArray[np.void]) -> None:
        """Record the windows of a mover: the structured array that `Mover.windows` returns.

        Its fields are transfer, direction, transfer_class, lane, bytes, start_s and end_s; the
        windows of one lane do not overlap.
        """
        for transfer, direction, of_class, lane, size, start_s, end_s in zip(
            *(windows[name].tolist() for name in _WINDOW_FIELDS), strict=True
        ):
            row = f"{_LANE_ROWS[Direction(direction)]} {lane}"
            details: dict[str, object] = {"transfer": transfer, "bytes": size}
            if end_s > start_s:
                details["GB/s"] = round(size / (end_s - start_s) / 1e9, 3)
            self._add(Span(row, _CLASS_KINDS[TransferClass(of_class)], start_s, end_s, details))

    def wait(self, start_s: float, end_s: float, *, request: str | None = None) -> None:
        """Record an exposed wait: no step ran since one needed a load that had not ended.

        Waits do not overlap: what several requests wait for at once is one wait.
        """
        details: dict[str, object] = {} if request is None else {"request": request}
        self._add(Span(EXPOSED_WAIT, Kind.WAIT, start_s, end_s, details))

    def request(
        self, row: str, kind: Kind, start_s: float, end_s: float, **details: object
    ) -> None:
        """Record that a request was QUEUED, in PREFILL or in DECODE (`kind`) for this time.

        `row` names its row ("request 7", or "user 3" for all turns of one conversation). Raises
        SettingsError for a kind that no request has.
        """
        if kind not in REQUESTS.kinds:
            states = ", ".join(known.name for known in REQUESTS.kinds)
            raise SettingsError(f"a request is one of {states}, not {kind.name}")
        self._add(Span(row, kind, start_s, end_s, details))

    def occupancy(self, at_s: float, **blocks: int) -> None:
        """Record how many blocks each tier holds from now on: `occupancy(t, device=9, host=40)`."""
        if len(self._occupancy) == self._occupancy.maxlen:
            self.dropped += 1
        self._occupancy.append(Occupancy(at_s, blocks))

    def rows(self, group: Group) -> tuple[str, ...]:
        """The rows of `group` that have a span: lanes by name, requests by their first start."""
        first: dict[str, float] = {}
        for span in self._spans:
            if span.kind in group.kinds:
                first[span.row] = min(span.start_s, first.get(span.row, span.start_s))
        if group is REQUESTS:
            return tuple(sorted(first, key=lambda row: (first[row], row)))
        return tuple(sorted(first, key=lambda row: (row == EXPOSED_WAIT, row)))

    def extent(self) -> tuple[float, float]:
        """The first start and the last end of all spans; (0, 0) when there is none."""
        if not self._spans:
            return 0.0, 0.0
        return min(s.start_s for s in self._spans), max(s.end_s for s in self._spans)

    def busiest(self, duration_s: float) -> tuple[float, float]:
        """The window of this length that has the most time of load windows that start in it."""
        first, last = self.extent()
        loads = sorted(
            (s.start_s, s.end_s - s.start_s)
            for s in self._spans
            if s.kind in (Kind.DEMAND, Kind.PREFETCH)
        )
        if not loads or last - first <= duration_s:
            return first, last
        starts = np.array([start for start, _ in loads])
        sums = np.concatenate(([0.0], np.cumsum([length for _, length in loads])))
        until = np.searchsorted(starts, starts + duration_s)
        best = float(starts[np.argmax(sums[until] - sums[:-1])])
        begin = max(first, min(best - 0.05 * duration_s, last - duration_s))
        return begin, begin + duration_s

    def _add(self, span: Span) -> None:
        if len(self._spans) == self._spans.maxlen:
            self.dropped += 1
        self._spans.append(span)
