"""When steps ran, and when they waited for loads: as the host saw it, or as the device did.

Events of the device cost a little at every step, so an engine takes them only when it was made with
a timeline. Without, what it shows of itself are the host's times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.timeline.record import Records
from forebay.transfer.native import NativeMover

_MOST_OPEN = 256
"""Steps that have not ended on the device; older ones are told of by no one."""
_HOST_S = 0.2e-3
"""On a stream without work, two events are as far apart as the host took between them, loads or
not. Waits up to this are not shown."""


class Trace(Protocol):
    """What an engine says while it works; the order is that of the methods."""

    def wait_begins(self, *, expected: bool) -> None:
        """The stream is about to be told to wait for loads, where some are `expected`."""
        ...

    def waited(self, timeline: Records, start_s: float, end_s: float, *, in_step: bool) -> None:
        """The host waited for loads; `in_step`, and now the stream does, else none could run."""
        ...

    def step_begins(self) -> None:
        """The next step is about to be launched."""
        ...

    def step_ends(self) -> None:
        """All of it has been given to the stream."""
        ...

    def stepped(
        self, timeline: Records, number: int, start_s: float, end_s: float, **tokens: int
    ) -> None:
        """The step was this one; the times are the host's."""
        ...


class HostTrace:
    """The host's times."""

    def wait_begins(self, *, expected: bool) -> None:
        """Nothing to do."""

    def step_begins(self) -> None:
        """Nothing to do."""

    def step_ends(self) -> None:
        """Nothing to do."""

    def waited(self, timeline: Records, start_s: float, end_s: float, *, in_step: bool) -> None:
        """See `Trace.waited`."""
        timeline.wait(start_s, end_s)

    def stepped(
        self, timeline: Records, number: int, start_s: float, end_s: float, **tokens: int
    ) -> None:
        """See `Trace.stepped`."""
        timeline.step(number, start_s, end_s, **tokens)


@dataclass(slots=True)
class _Open:
    number: int
    wait: tuple[torch.cuda.Event, torch.cuda.Event] | None
    begin: torch.cuda.Event
    end: torch.cuda.Event
    tokens: dict[str, int]


class DeviceTrace:
    """The times of the CUDA device `device`, by events on its current stream; `mover` puts them on
    the host's clock, on which its windows are too. What ended is told of at the next step.
    """

    def __init__(self, mover: NativeMover, device: torch.device) -> None:
        self._mover = mover
        self._device = device
        self._before_wait: torch.cuda.Event | None = None
        self._wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._begin: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._open: deque[_Open] = deque(maxlen=_MOST_OPEN)

    def wait_begins(self, *, expected: bool) -> None:
        """See `Trace.wait_begins`."""
        self._before_wait = self._now() if expected else None
        self._wait = None

    def step_begins(self) -> None:
        """See `Trace.step_begins`."""
        self._begin = self._now()

    def step_ends(self) -> None:
        """See `Trace.step_ends`."""
        self._end = self._now()

    def waited(self, timeline: Records, start_s: float, end_s: float, *, in_step: bool) -> None:
        """See `Trace.waited`: in a step the device's events tell how long."""
        if not in_step:
            timeline.wait(start_s, end_s)
        elif self._before_wait is not None:
            self._wait = (self._before_wait, self._now())

    def stepped(
        self, timeline: Records, number: int, start_s: float, end_s: float, **tokens: int
    ) -> None:
        """See `Trace.stepped`."""
        if self._begin is not None and self._end is not None:
            self._open.append(_Open(number, self._wait, self._begin, self._end, tokens))
        self._wait = self._begin = self._end = None
        while self._open and self._open[0].end.query():
            self._tell(timeline, self._open.popleft())

    def _tell(self, timeline: Records, step: _Open) -> None:
        begin_s, end_s = self._when(step.begin), self._when(step.end)
        if begin_s is None or end_s is None:
            return
        if step.wait is not None:
            from_s, until_s = map(self._when, step.wait)
            if from_s is not None and until_s is not None and until_s - from_s > _HOST_S:
                timeline.wait(from_s, until_s)
        timeline.step(step.number, begin_s, end_s, **step.tokens)

    def _when(self, event: torch.cuda.Event) -> float | None:
        return self._mover.when(event.cuda_event)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
