"""A modelled link, and what a worker does at each step with its orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from forebay.transfer.messages import Completion, Direction, Outcome, Report, Transfer
from forebay.vllm.connector import ForebayReport
from forebay.vllm.messages import Expedite, News

WINDOW_BLOCKS = 4
IDLE_S = 1e-3
_TICK_S = 5e-5


@dataclass
class Copy:
    """One transfer under way."""

    transfer: Transfer
    order: tuple[float, ...]
    submitted_s: float
    done: int = 0
    started_s: float = -1.0
    cancelled: bool = False


class Link:
    """Both directions of a link, each a queue by class and deadline that yields at every window.

    A copy begins when the steps that it comes after have ended. Time goes on in `advance` alone.
    """

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self._block_s = block_bytes / bytes_per_s
        self._block_bytes = block_bytes
        self._copies: dict[int, Copy] = {}
        self._free_s = [0.0, 0.0]
        self._step_ends: dict[int, float] = {0: 0.0}
        self._newest = 0
        self._ended: list[Completion] = []
        self.moved_blocks = [0, 0]
        self.busy_s = [0.0, 0.0]

    def step(self, number: int, end_s: float) -> None:
        """Step `number` was launched and ends then; those before it that were not, end with it."""
        for step in range(self._newest + 1, number + 1):
            self._step_ends[step] = max(end_s, self._step_ends[step - 1])
        self._newest = max(self._newest, number)

    def submit(self, transfer: Transfer, at_s: float) -> None:
        """See `Mover.submit`."""
        order = (float(transfer.transfer_class), transfer.deadline_s, float(transfer.id))
        self._copies[transfer.id] = Copy(transfer, order, at_s)

    def expedite(self, ids: tuple[int, ...], transfer_class: int, deadline_s: float) -> None:
        """See `Mover.expedite`."""
        for each in ids:
            if each in self._copies:
                self._copies[each].order = (float(transfer_class), deadline_s, float(each))

    def cancel(self, ids: tuple[int, ...], at_s: float) -> None:
        """See `Mover.cancel`."""
        for each in ids:
            copy = self._copies.get(each)
            if copy is not None:
                self._end(copy, max(at_s, self._free_s[copy.transfer.direction]), cancelled=True)

    def advance(self, to_s: float) -> None:
        """Copy until then."""
        for direction in Direction:
            while self._window(direction, to_s):
                pass

    def poll(self) -> list[Completion]:
        """What ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, now_s: float, bound_s: float) -> float:
        """Copy until one has ended, none is left, or the bound is over; returns when that is."""
        while self._copies and not self._ended and now_s < bound_s:
            now_s = min(bound_s, now_s + _TICK_S)
            self.advance(now_s)
        return now_s

    def land(self, loads: set[int], now_s: float) -> float:
        """Copy until these have ended; returns when that is."""
        while loads & self._copies.keys():
            now_s += _TICK_S
            self.advance(now_s)
        return now_s

    def _window(self, direction: Direction, to_s: float) -> bool:
        """Copy the next window of a direction, if one may begin before `to_s`."""
        best: tuple[float, tuple[float, ...], Copy] | None = None
        for copy in self._copies.values():
            if copy.transfer.direction is not direction:
                continue
            ready_s = max(self._ready_s(copy), self._free_s[direction])
            key = (ready_s, copy.order, copy)
            if best is None or key[:2] < best[:2]:
                best = key
        if best is None or best[0] >= to_s:
            return False
        begin_s, _, copy = best
        # All that may begin by then: the most urgent one goes.
        for other in self._copies.values():
            if other.transfer.direction is direction and self._ready_s(other) <= begin_s:
                copy = min(copy, other, key=lambda each: each.order)
        count = min(WINDOW_BLOCKS, len(copy.transfer.sources) - copy.done)
        end_s = begin_s + count * self._block_s
        if end_s > to_s:
            return False
        if copy.started_s < 0:
            copy.started_s = begin_s
        copy.done += count
        self._free_s[direction] = end_s
        self.moved_blocks[direction] += count
        self.busy_s[direction] += count * self._block_s
        if copy.done == len(copy.transfer.sources):
            self._end(copy, end_s, cancelled=False)
        return True

    def _ready_s(self, copy: Copy) -> float:
        count = min(WINDOW_BLOCKS, len(copy.transfer.sources) - copy.done)
        after = int(copy.transfer.after_steps[copy.done : copy.done + count].max())
        return max(copy.submitted_s, self._step_ends.get(after, float("inf")))

    def _end(self, copy: Copy, at_s: float, *, cancelled: bool) -> None:
        del self._copies[copy.transfer.id]
        self._ended.append(
            Completion(
                copy.transfer.id,
                Outcome.CANCELLED if cancelled else Outcome.DONE,
                copy.done,
                copy.done,
                copy.done * self._block_bytes,
                copy.started_s if copy.started_s >= 0 else at_s,
                at_s,
                "",
            )
        )


class NoWorker:
    """The worker of an engine without a connector."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def begin(self, output: Any, now_s: float) -> float:
        """Before a step; returns when it may be launched."""
        return now_s

    def launched(self, output: Any, end_s: float) -> None:
        """The step was launched."""

    def idled(self, now_s: float) -> float:
        """A step without work goes on until then."""
        return now_s

    def report(self) -> KVConnectorOutput | None:
        """What is told with a step's output."""
        return None


class ForebayWorker(NoWorker):
    """Our worker half, in the thread of `half`: moves what it is told to when it is told to.

    `clock` tells the time between steps.
    """

    def __init__(self, link: Link, half: Any, host_slots: int, clock: Callable[[], float]) -> None:
        super().__init__(link)
        self._half = half
        self._clock = clock
        self._host_slots = host_slots
        self._step, self._idle = 0, False
        self._expected: set[int] = set()
        self._slots_told = False

    def begin(self, output: Any, now_s: float) -> float:
        """See the class."""
        orders = output.kv_connector_metadata.orders
        self.link.advance(now_s)
        # A window under way ends before the step starts.
        if orders.settle:
            self.link.cancel(orders.settle, now_s)
        self._step, self._idle = orders.step, orders.idle
        if not self._idle:
            now_s = self.link.land(self._expected, now_s)
            self._expected.clear()
        return now_s

    def launched(self, output: Any, end_s: float) -> None:
        """See the class."""
        self.link.step(self._step, end_s)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """See `Mover.submit`."""
        self.link.advance(self._clock())
        for each in transfers:
            self.link.submit(each, self._clock())

    def cancel(self, ids: Sequence[int]) -> None:
        """See `Mover.cancel`."""
        self.link.advance(self._clock())
        self.link.cancel(tuple(ids), self._clock())

    def expedite(self, each: Expedite) -> None:
        """See `Mover.expedite`."""
        self.link.advance(self._clock())
        self.link.expedite(each.ids, each.transfer_class, each.deadline_s)

    def expect(self, loads: Sequence[int]) -> bool:
        """See `Hands.expect`."""
        self._expected.update(loads)
        return True

    def news(self) -> News | None:
        """What is new."""
        self.link.advance(self._clock())
        ended = tuple(self.link.poll())
        if not ended and self._slots_told:
            return None
        self._slots_told = True
        return News(Report(tuple(each.id for each in ended), ended, 0), self._host_slots)

    def idled(self, now_s: float) -> float:
        """See the class: a step without work waits for the end of a copy."""
        return self.link.wait(now_s, now_s + IDLE_S)

    def report(self) -> KVConnectorOutput:
        """See the class."""
        self._half.look()
        meta = None if self._idle else ForebayReport(self._step, ())
        return KVConnectorOutput(kv_connector_worker_meta=meta)
