"""A link under measurement: two pools, and movers over them that carry scattered blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.errors import LinkTimeoutError, SettingsError
from forebay.transfer.arena import Arena, HostArena
from forebay.transfer.messages import Direction, Outcome, Transfer, TransferClass
from forebay.transfer.mover import Mover, TransferFailedError
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

MIB, GIB = 1 << 20, 1 << 30
_WAIT_S = 120.0
_PIN_S = 300.0
# So many times what a link carried when it was measured is queued for it: it must not run dry.
_AHEAD = 3
_HEAD_START_S = 0.05
# No block of 2 or 5 MiB lies across two registrations of pinned memory.
_GRAIN_BYTES = 10 * MIB

Backend = Literal["cpu", "cuda"]
Slots = NDArray[np.int32]
_T = TypeVar("_T")


def backend_here() -> Backend:
    """ "cuda" where PyTorch sees a device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Link:
    """A device pool and a host pool of `pool_bytes` each; on "cpu" both are ordinary memory, on
    "cuda" one is on the device of that index. Blocks divide `grain_bytes`, and that the pools.

    Every byte of them is touched. Raises SettingsError for memory that cannot be had.
    """

    def __init__(
        self,
        backend: Backend,
        pool_bytes: int,
        *,
        device_index: int = 0,
        grain_bytes: int = _GRAIN_BYTES,
    ) -> None:
        self.backend, self.pool_bytes, self.device_index = backend, pool_bytes, device_index
        self._arenas: list[Arena] = []
        self.device: Any
        if backend == "cuda":
            place = torch.device("cuda", device_index)
            self.device = torch.zeros(pool_bytes, dtype=torch.uint8, device=place)
            pinned = PinnedArena(pool_bytes, grain_bytes, device_index=device_index)
            self._arenas.append(pinned)
            if not pinned.wait_ready(pool_bytes, _PIN_S):
                raise SettingsError(f"host memory could not be pinned: {pinned.error}")
            self.host: Arena = pinned
        else:
            here, self.host = HostArena(pool_bytes), HostArena(pool_bytes)
            self._arenas += [here, self.host]
            self.device = here.bytes
            self.device[:], self.host.bytes[:] = 1, 2

    def pools(self, block_bytes: int, fragment_bytes: int | None = None) -> tuple[Pool, Pool]:
        """Both pools cut into blocks; a device block may be scattered in fragments."""
        slots = self.pool_bytes // block_bytes
        fragment = fragment_bytes or block_bytes
        parts = block_bytes // fragment
        flat = self.device[: slots * block_bytes]
        device = flat.reshape(parts, slots, fragment)
        return (
            Pool.of([device[part] for part in range(parts)]),
            Pool.of([self.host.blocks(slots, block_bytes)], seam_bytes=self.host.seam_bytes),
        )

    @contextmanager
    def carrier(
        self, block_bytes: int, fragment_bytes: int | None = None, **settings: Any
    ) -> Iterator[Carrier]:
        """A native mover over the pools; `settings` are those of `NativeMover`."""
        device, host = self.pools(block_bytes, fragment_bytes)
        settings = {"window_records": 1 << 18, "device_index": self.device_index} | settings
        mover = NativeMover(device, host, backend=self.backend, **settings)
        try:
            yield Carrier(mover, device.slots, block_bytes)
        finally:
            mover.close(10.0)

    def close(self) -> None:
        """Give the memory back. Every carrier is closed before."""
        self.device = None
        for arena in self._arenas:
            arena.close()


@dataclass(slots=True)
class Flow:
    """What is under way in the background. `ran_dry`: the link had nothing left at its end."""

    ids: list[int]
    ran_dry: bool = False

    def check(self) -> None:
        """Raises LinkTimeoutError where it ran dry: what was measured was not beside copies."""
        if self.ran_dry:
            raise LinkTimeoutError("the link ran out of work while it was measured: try again")


class Carrier:
    """Loads and saves of scattered blocks by one mover, whose reports nobody else polls."""

    def __init__(self, mover: Mover, slots: int, block_bytes: int) -> None:
        self.mover, self.slots, self.block_bytes = mover, slots, block_bytes
        self.issued: set[int] = set()
        self.ended: dict[int, float] = {}
        self._rng = np.random.default_rng(slots)
        self._ids = count(1)

    @property
    def most_blocks(self) -> int:
        """Of one transfer: half of a pool, so that loads and saves do not wait for each other."""
        return self.slots // 2

    def transfer(
        self,
        blocks: int,
        direction: Direction = Direction.LOAD,
        transfer_class: TransferClass = TransferClass.PREFETCH,
    ) -> Transfer:
        """A transfer of `blocks` scattered blocks, not submitted yet.

        Saves and demand loads use the upper half of both pools, prefetches the lower.
        """
        upper = direction is Direction.SAVE or transfer_class is TransferClass.DEMAND
        first = self.most_blocks if upper else 0
        sources, destinations = (
            (first + self._rng.permutation(self.most_blocks)[:blocks]).astype(np.int32)
            for _ in range(2)
        )
        steps = np.zeros(blocks, np.int64)
        id_ = next(self._ids)
        return Transfer(id_, direction, transfer_class, 0.0, sources, destinations, steps)

    def submit(
        self,
        blocks: int,
        direction: Direction = Direction.LOAD,
        transfer_class: TransferClass = TransferClass.PREFETCH,
    ) -> int:
        """Submit such a transfer; its id."""
        made = self.transfer(blocks, direction, transfer_class)
        self.mover.submit([made])
        return made.id

    def poll(self) -> None:
        """Take in what the mover reports. Raises TransferFailedError for a copy that failed."""
        report = self.mover.poll()
        self.issued.update(report.issued)
        for each in report.completions:
            if each.outcome is Outcome.FAILED:
                raise TransferFailedError(each.error)
            self.ended[each.id] = each.finished_s

    def until(self, holds: Callable[[], bool], timeout_s: float = _WAIT_S) -> None:
        """Block until `holds`. Raises LinkTimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end_s:
                raise LinkTimeoutError(f"copies did not end within {timeout_s:.0f} s")
            self.mover.wait_news(0.5)
            self.poll()

    def wait(self, ids: Sequence[int]) -> float:
        """Block until all of `ids` ended; when the last did (`time.monotonic`)."""
        self.until(lambda: all(each in self.ended for each in ids))
        return max(self.ended[each] for each in ids)

    def drop(self, ids: Sequence[int]) -> None:
        """Cancel `ids` and wait until nothing of them is in flight."""
        self.mover.cancel(ids)
        self.until(lambda: all(each in self.ended for each in ids))

    def bytes_per_s(self, blocks: int, *directions: Direction) -> float:
        """Of transfers of `blocks` blocks in each of `directions` at once, submit to last byte."""
        began_s = time.monotonic()
        end_s = self.wait([self.submit(blocks, direction) for direction in directions])
        return len(directions) * blocks * self.block_bytes / (end_s - began_s)

    @contextmanager
    def running(self, *directions: Direction, most_s: float) -> Iterator[Flow]:
        """Meanwhile the link is busy in `directions`, for up to `most_s`; without any, idle.

        How much that takes is measured first. Nothing is done meanwhile, so that what is measured
        beside copies has the interpreter to itself.
        """
        rounds = 0
        if directions:
            rate = max(self.bytes_per_s(self.most_blocks, *directions) for _ in range(4))
            round_s = len(directions) * self.most_blocks * self.block_bytes / rate
            rounds = math.ceil(_AHEAD * (_HEAD_START_S + most_s) / round_s)
        flow = Flow(
            [self.submit(self.most_blocks, way) for _ in range(rounds) for way in directions]
        )
        time.sleep(_HEAD_START_S)
        try:
            yield flow
        finally:
            self.poll()
            last = flow.ids[len(flow.ids) - len(directions) :]
            flow.ran_dry = any(each in self.ended for each in last)
            self.drop(flow.ids)

    def landed_bytes(self) -> int:
        """Bytes of windows that have ended since it was asked last."""
        return int(self.mover.windows()["bytes"].sum())

    def rate_during(self, work: Callable[[], _T]) -> tuple[_T, float]:
        """What `work` returns, and the bytes a second that the link carried meanwhile."""
        self.landed_bytes()
        began_s = time.monotonic()
        result = work()
        landed = self.landed_bytes()
        return result, landed / (time.monotonic() - began_s)


def sampled_rates(windows: NDArray[Any], every_s: float) -> NDArray[np.float64]:
    """Bytes a second in each interval of `every_s`, from the windows of `Mover.windows`.

    A window's bytes count evenly over its time. Ends with the last whole interval.
    """
    if not len(windows):
        return np.empty(0)
    starts, ends = windows["start_s"], np.maximum(windows["end_s"], windows["start_s"] + 1e-9)
    origin = float(starts.min())
    edges = origin + every_s * np.arange(int((ends.max() - origin) / every_s) + 1)
    order = np.argsort(starts)
    total = np.zeros(len(edges))
    for first, last, size in zip(starts[order], ends[order], windows["bytes"][order], strict=True):
        total += size * np.clip((edges - first) / (last - first), 0.0, 1.0)
    return np.diff(total) / every_s
