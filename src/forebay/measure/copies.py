"""Copies of others on a GPU: plain ones as a floor, and small foreign ones timed by the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from forebay.measure.repeat import repeated

FOREIGN_BYTES = 64 << 10
FOREIGN_EVERY_S = 1e-3
# Of a spinning kernel: copy and events are queued while it runs, and so begin without the host
# between.
HEAD_START_CYCLES = 400_000
# Priorities of streams; the driver takes what is out of its range for the nearest within.
_HIGHEST, _LOWEST = -5, 0


class PlainCopies:
    """Copies of `size_bytes` in one piece, pinned, each way: the most that the link gives."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._host, self._back = (
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        )
        self._device, self._from = (
            torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()

    def bytes_per_s(self, *, up: bool = True, down: bool = False) -> float:
        """Of one copy, or of one each way together."""
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        if up:
            with torch.cuda.stream(self._up):
                self._device.copy_(self._host, non_blocking=True)
        if down:
            with torch.cuda.stream(self._down):
                self._back.copy_(self._from, non_blocking=True)
        torch.cuda.synchronize()
        return (up + down) * self.size_bytes / (time.perf_counter() - began_s)


def ratios_to(floor: Callable[[], float], run: Callable[[], float], rounds: int) -> list[float]:
    """The rate of `run` over that of `floor` right before and right after it, by round.

    One more round comes first and is not counted: it warms up.
    """
    ratios: list[float] = []
    for _ in range(rounds + 1):
        before = floor()
        moved = run()
        ratios.append(moved / statistics.mean([before, floor()]))
    return ratios[1:]


class ForeignCopy:
    """A small copy of somebody else, up or down, on a stream of the highest or lowest priority.

    A mover's lanes have the lowest.
    """

    def __init__(self, *, up: bool, urgent: bool = True, size_bytes: int = FOREIGN_BYTES) -> None:
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream(priority=_HIGHEST if urgent else _LOWEST)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._up = up

    def wait_us(self) -> float:
        """Microseconds from when it could have begun to its end, by the device's events."""
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(HEAD_START_CYCLES)
            self._begin.record()
            if self._up:
                self._device.copy_(self._host, non_blocking=True)
            else:
                self._host.copy_(self._device, non_blocking=True)
            self._end.record()
        self._end.synchronize()
        return 1e3 * self._begin.elapsed_time(self._end)


def foreign_copies(*, up: bool, urgent: bool = True) -> AbstractContextManager[list[float]]:
    """Meanwhile one foreign copy a millisecond; the waits so far, in microseconds.

    The next one starts only when the one before has ended, so that each stands for itself.
    """
    return repeated(ForeignCopy(up=up, urgent=urgent).wait_us, every_s=FOREIGN_EVERY_S)
