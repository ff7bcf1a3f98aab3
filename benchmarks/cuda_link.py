"""What the mover makes of a GPU's link: rates, fragments, and who waits for whom.

Everything is set against a plain pinned copy of the same direction, taken right before and after.
How long a foreign copy waits is told by the device: an event before it and one behind it, on a
stream of its own. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from report import Figure, Goal, arguments, finish, median_figure

from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.native import DEFAULT_SPIN_S, NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

MIB = 1 << 20
POOL_BYTES = 4 << 30
# The pools are cut into blocks of 2 and of 5 MiB in turn.
GRAIN_BYTES = 10 << 20
MOVED_BYTES = 2 << 30
FOREIGN_BYTES = 64 << 10
FOREIGN_EVERY_S = 1e-3
GOALS = {
    "h2d_2mib_8": Goal(at_least=0.96),
    "h2d_2mib_4": Goal(at_least=0.93),
    "foreign_p99_8_us": Goal(at_most=380),
    "foreign_p99_4_us": Goal(at_most=230),
    "both_ways": Goal(at_least=0.92),
    "foreign_p99_both_h2d_us": Goal(at_most=380),
    "foreign_p99_both_d2h_us": Goal(at_most=380),
    "frag_64k": Goal(at_least=0.92),
    "frag_32k": Goal(at_least=0.82),
    "urgent_64mib_ms": Goal(at_most=2),
    "submit_us_2048_tokens": Goal(at_most=20),
    "arbiter_cores": Goal(at_most=1),
    "arbiter_cores_idle": Goal(at_most=0.01),
}
PARTS = ["rates", "foreign", "calls"]
Slots = NDArray[np.int32]
_HEAD_START_CYCLES = 400_000


class Bench:
    """A pool in device memory, one in pinned memory, and plain copies beside them."""

    def __init__(self) -> None:
        self.device = torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda")
        self.arena = PinnedArena(POOL_BYTES, GRAIN_BYTES)
        if not self.arena.wait_ready(POOL_BYTES, 300.0):
            raise SystemExit(f"host memory could not be pinned: {self.arena.error}")
        self.plain_host = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.plain_back = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.plain_device = torch.empty(MOVED_BYTES, dtype=torch.uint8, device="cuda")
        self.up, self.down = torch.cuda.Stream(), torch.cuda.Stream()

    @contextmanager
    def mover(
        self, block_bytes: int, fragment_bytes: int | None = None, **settings: Any
    ) -> Iterator[Run]:
        """A mover over the pools cut into blocks; device blocks may be scattered in fragments."""
        slots = POOL_BYTES // block_bytes
        fragment = fragment_bytes or block_bytes
        parts = block_bytes // fragment
        device = self.device[: slots * block_bytes].view(parts, slots, fragment)
        made = NativeMover(
            Pool.of([device[part] for part in range(parts)]),
            Pool.of([self.arena.blocks(slots, block_bytes)], seam_bytes=self.arena.seam_bytes),
            backend="cuda",
            window_records=1 << 20,
            **settings,
        )
        try:
            yield Run(made, slots, block_bytes)
        finally:
            made.close(10.0)

    def plain_gbs(self, *, up: bool = True, down: bool = False) -> float:
        """Bytes a second of plain copies of 2 GiB, both ways together if asked."""
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        if up:
            with torch.cuda.stream(self.up):
                self.plain_device.copy_(self.plain_host, non_blocking=True)
        if down:
            with torch.cuda.stream(self.down):
                self.plain_back.copy_(self.device[:MOVED_BYTES], non_blocking=True)
        torch.cuda.synchronize()
        return (up + down) * MOVED_BYTES / (time.perf_counter() - began_s) / 1e9


class Run:
    """Transfers of one mover."""

    def __init__(self, mover: NativeMover, slots: int, block_bytes: int) -> None:
        self.mover, self.slots, self.block_bytes = mover, slots, block_bytes
        self.rng = np.random.default_rng(slots)
        self.ids = count(1)
        self.ended: dict[int, float] = {}

    def scattered(self, size_bytes: int, *, upper: bool) -> tuple[Slots, Slots]:
        """Slots to read and to write, of the lower or the upper half of both pools."""
        blocks, half = size_bytes // self.block_bytes, self.slots // 2
        first = half if upper else 0
        sources, destinations = (
            (first + self.rng.permutation(half)[:blocks]).astype(np.int32) for _ in range(2)
        )
        return sources, destinations

    def submit(
        self,
        size_bytes: int,
        direction: Direction = Direction.LOAD,
        transfer_class: TransferClass = TransferClass.PREFETCH,
    ) -> int:
        # What goes on at once uses slots of its own, or one would have to wait for the other.
        upper = direction is Direction.SAVE or transfer_class is TransferClass.DEMAND
        sources, destinations = self.scattered(size_bytes, upper=upper)
        transfer = Transfer(
            next(self.ids),
            direction,
            transfer_class,
            0.0,
            sources,
            destinations,
            np.zeros(len(sources), np.int64),
        )
        self.mover.submit([transfer])
        return transfer.id

    def wait(self, ids: Sequence[int]) -> float:
        """Block until all ended; when the last did."""
        while not all(each in self.ended for each in ids):
            self.mover.wait_news(1.0)
            for done in self.mover.poll().completions:
                if done.error:
                    raise SystemExit(done.error)
                self.ended[done.id] = done.finished_s
        return max(self.ended[each] for each in ids)

    def gbs(self, *directions: Direction) -> float:
        began_s = time.monotonic()
        end_s = self.wait([self.submit(MOVED_BYTES, direction) for direction in directions])
        return len(directions) * MOVED_BYTES / (end_s - began_s) / 1e9


class Foreign:
    """Small copies of somebody else, one a millisecond, timed by the device."""

    def __init__(self, *, up: bool) -> None:
        self.host = torch.empty(FOREIGN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(FOREIGN_BYTES, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream(priority=-5)
        self.up = up
        self.waits_us: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        with torch.cuda.stream(self.stream):
            while not self._stop.wait(FOREIGN_EVERY_S):
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                # Copy and events are queued while it runs, and so begin without the host between.
                torch.cuda._sleep(_HEAD_START_CYCLES)
                pair[0].record()
                if self.up:
                    self.device.copy_(self.host, non_blocking=True)
                else:
                    self.host.copy_(self.device, non_blocking=True)
                pair[1].record()
                pairs.append(pair)
        self.stream.synchronize()
        self.waits_us = [1e3 * begin.elapsed_time(end) for begin, end in pairs]

    def __enter__(self) -> Foreign:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def against_plain(on: Bench, run: Callable[[], float], rounds: int, **ways: bool) -> list[float]:
    """The run's rate over that of plain copies right before and right after it, by round."""
    ratios: list[float] = []
    for _ in range(rounds + 1):
        before = on.plain_gbs(**ways)
        moved = run()
        ratios.append(moved / statistics.mean([before, on.plain_gbs(**ways)]))
    return ratios[1:]  # the first warms up


def rates(on: Bench, rounds: int, spin_s: float) -> list[Figure]:
    """Scattered 2 MiB blocks up, up and down at once, and blocks in fragments."""
    figures: list[Figure] = []
    for window in (8, 4):
        with on.mover(2 * MIB, window_bytes=window * MIB, spin_s=spin_s) as run:
            ratios = against_plain(on, lambda run=run: run.gbs(Direction.LOAD), rounds)
        settings = {"window_mib": window, "block_mib": 2, "spin_us": 1e6 * spin_s}
        figures.append(median_figure(f"h2d_2mib_{window}", ratios, "ratio", settings))
    with on.mover(2 * MIB, window_bytes=8 * MIB, spin_s=spin_s) as run:
        both = lambda: run.gbs(Direction.LOAD, Direction.SAVE)  # noqa: E731
        ratios = against_plain(on, both, rounds, up=True, down=True)
    figures.append(median_figure("both_ways", ratios, "ratio", {"window_mib": 8, "block_mib": 2}))
    for kib in (64, 32):
        best: tuple[float, list[float], int] = (0.0, [], 0)
        for window in (4, 8, 16, 32):
            with on.mover(2 * MIB, kib << 10, window_bytes=window * MIB, spin_s=spin_s) as run:
                ratios = against_plain(on, lambda run=run: run.gbs(Direction.LOAD), rounds)
            best = max(best, (statistics.median(ratios), ratios, window))
        figures.append(
            median_figure(
                f"frag_{kib}k", best[1], "ratio", {"fragment_kib": kib, "window_mib": best[2]}
            )
        )
    return figures


def foreign(on: Bench, samples: int, spin_s: float) -> list[Figure]:
    """How long a foreign 64 KiB copy waits while the mover runs at full rate."""
    cases = {
        "foreign_p99_8_us": (8, [Direction.LOAD], True),
        "foreign_p99_4_us": (4, [Direction.LOAD], True),
        "foreign_p99_both_h2d_us": (8, [Direction.LOAD, Direction.SAVE], True),
        "foreign_p99_both_d2h_us": (8, [Direction.LOAD, Direction.SAVE], False),
    }
    figures: list[Figure] = []
    for id_, (window, directions, up) in cases.items():
        with (
            on.mover(2 * MIB, window_bytes=window * MIB, spin_s=spin_s) as run,
            Foreign(up=up) as probe,
        ):
            end_s = time.monotonic() + samples * FOREIGN_EVERY_S * 1.3
            ids = [run.submit(MOVED_BYTES, direction) for direction in directions]
            while time.monotonic() < end_s:
                # Always one more than runs, so that the link never idles.
                ids += [run.submit(MOVED_BYTES, direction) for direction in directions]
                run.wait(ids[: -len(directions)])
            moved = len(ids[: -len(directions)])
            run.mover.cancel(ids)
            run.wait(ids)
        waits = probe.waits_us
        settings = {
            "window_mib": window,
            "samples": len(waits),
            "p50_us": float(np.percentile(waits, 50)),
            "max_us": max(waits),
            "transfers_of_2_gib": moved,
        }
        shown = np.percentile(waits, range(0, 101, 5)).tolist()
        figures.append(Figure(id_, float(np.percentile(waits, 99)), "us", shown, settings))
    return figures


def urgent(on: Bench, rounds: int, spin_s: float) -> Figure:
    """A demand load of 64 MiB behind 2 GiB of prefetch: submit to the last byte in place."""
    times_ms: list[float] = []
    with on.mover(2 * MIB, window_bytes=8 * MIB, spin_s=spin_s) as run:
        for _ in range(rounds):
            behind = run.submit(MOVED_BYTES)
            time.sleep(0.005)
            began_s = time.monotonic()
            end_s = run.wait([run.submit(64 * MIB, transfer_class=TransferClass.DEMAND)])
            times_ms.append(1e3 * (end_s - began_s))
            run.mover.cancel([behind])
            run.wait([behind])
    return median_figure("urgent_64mib_ms", times_ms, "ms", {"window_mib": 8, "block_mib": 2})


def submits(on: Bench, rounds: int) -> Figure:
    """A load of 2,048 tokens of a 70B model, 128 blocks of 5 MiB, on the calling thread.

    The figure is taken with the arbiter asleep, so that it has to be woken; `busy_us` with it at
    work on another load.
    """
    with on.mover(5 * MIB, window_bytes=8 * MIB) as run:
        asleep_us = [submit_us(run) for _ in range(20 * rounds)]
        behind = run.submit(MOVED_BYTES, transfer_class=TransferClass.DEMAND)
        busy_us = [submit_us(run) for _ in range(10)]
        run.mover.cancel([behind])
        run.wait([behind])
    settings = {"blocks": 128, "busy_us": statistics.median(busy_us)}
    return median_figure("submit_us_2048_tokens", asleep_us, "us", settings)


def submit_us(run: Run) -> float:
    """Submits one load and cancels it again; what the submit took."""
    sources, destinations = run.scattered(128 * 5 * MIB, upper=False)
    steps = np.zeros(128, np.int64)
    began_s = time.perf_counter()
    transfer = Transfer(
        next(run.ids), Direction.LOAD, TransferClass.PREFETCH, 0.0, sources, destinations, steps
    )
    run.mover.submit([transfer])
    spent_us = 1e6 * (time.perf_counter() - began_s)
    run.mover.cancel([transfer.id])
    run.wait([transfer.id])
    return spent_us


def cores(on: Bench, spin_s: float) -> list[Figure]:
    """Processor time of the mover's threads: both directions at full rate, and idle."""

    def used_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    with on.mover(2 * MIB, window_bytes=8 * MIB, spin_s=spin_s) as run:
        directions = [Direction.LOAD, Direction.SAVE]
        ids = [run.submit(MOVED_BYTES, direction) for _ in range(10) for direction in directions]
        began_s, began_cpu_s = time.monotonic(), used_s()
        end_s = run.wait(ids)
        busy = (used_s() - began_cpu_s) / (end_s - began_s)
        time.sleep(0.2)
        began_cpu_s = used_s()
        time.sleep(2.0)
        idle = (used_s() - began_cpu_s) / 2.0
    settings = {"spin_us": 1e6 * spin_s, "method": "processor time of the process over wall time"}
    return [
        Figure("arbiter_cores", busy, "cores", (busy,), settings),
        Figure("arbiter_cores_idle", idle, "cores", (idle,), settings),
    ]


def calls(on: Bench, rounds: int, spin_s: float) -> list[Figure]:
    """What is urgent, what a submit costs, and what the threads use."""
    return [urgent(on, 2 * rounds, spin_s), submits(on, rounds), *cores(on, spin_s)]


def main() -> int:
    """Measures all figures; see `--help`."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--rounds", type=int, default=9)
    extra.add_argument("--samples", type=int, default=2500, help="foreign copies a figure")
    extra.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    extra.add_argument("--spin-us", type=float, default=1e6 * DEFAULT_SPIN_S)
    options = arguments(__doc__ or "", extra).parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured", file=sys.stderr)
        return 1
    spin_s = 1e-6 * options.spin_us
    on = Bench()
    figures: list[Figure] = []
    if "rates" in options.parts:
        figures += rates(on, options.rounds, spin_s)
    if "foreign" in options.parts:
        figures += foreign(on, options.samples, spin_s)
    if "calls" in options.parts:
        figures += calls(on, options.rounds, spin_s)
    on.arena.close()
    return finish(figures, GOALS, options)


if __name__ == "__main__":
    sys.exit(main())
