"""Copies of others on a GPU: plain ones as a floor, and small foreign ones timed by the device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Self

import torch

from forebay.errors import LinkTimeoutError

FOREIGN_BYTES = 64 << 10
FOREIGN_EVERY_S = 1e-3
# Of a spinning kernel: copy and events are queued while it runs, and so begin without the host
# between.
HEAD_START_CYCLES = 400_000
_END_S = 60.0


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


class ForeignCopies:
    """Within the `with` block, small copies of somebody else, one a millisecond.

    The next one starts only when the one before has ended, so each sample stands for itself.
    `waits_us` afterwards: from when a copy could have begun to its end, by the device's events.
    """

    def __init__(self, *, up: bool, size_bytes: int = FOREIGN_BYTES) -> None:
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream(priority=-5)
        self._up = up
        self.waits_us: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreign-copies")

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            while not self._stop.wait(FOREIGN_EVERY_S):
                torch.cuda._sleep(HEAD_START_CYCLES)
                begin.record()
                if self._up:
                    self._device.copy_(self._host, non_blocking=True)
                else:
                    self._host.copy_(self._device, non_blocking=True)
                end.record()
                end.synchronize()
                self.waits_us.append(1e3 * begin.elapsed_time(end))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise LinkTimeoutError(f"a copy of {FOREIGN_BYTES} bytes did not end in {_END_S:.0f} s")
