"""How much the arbiter costs: against bare copies, for what is urgent, and for who submits.

Copies are real, between two pools of this process; no GPU is involved.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np
from numpy.typing import NDArray
from report import Figure, Goal, arguments, finish, median_figure

from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.native import DEFAULT_WINDOW_BYTES, NativeMover
from forebay.transfer.pool import Pool

BLOCK_BYTES = 2 << 20
SLOTS = 96
LANES = 2
ROUNDS = 15
GOALS = {
    "arbiter_vs_memcpy": Goal(at_least=0.9),
    "urgent_wait_windows": Goal(at_most=3),
    "submit_us_2048_blocks": Goal(at_most=100),
}
Slots = NDArray[np.int32]


class Bench:
    """Two pools of `slots` blocks, touched throughout, and a mover over them."""

    def __init__(self, slots: int, block_bytes: int, link_bytes_per_s: float = 0.0) -> None:
        self.arenas = [HostArena(slots * block_bytes), HostArena(slots * block_bytes)]
        self.device, self.host = (arena.blocks(slots, block_bytes) for arena in self.arenas)
        self.device[:] = 1
        self.host[:] = 2
        self.mover = NativeMover(
            Pool.of([self.device]),
            Pool.of([self.host]),
            lanes=LANES,
            link_bytes_per_s=link_bytes_per_s,
        )
        self.ids = count(1)

    def load(
        self,
        sources: Slots,
        destinations: Slots,
        transfer_class: TransferClass = TransferClass.PREFETCH,
        after_step: int = 0,
    ) -> int:
        """Submit one load; its id."""
        transfer = Transfer(
            next(self.ids),
            Direction.LOAD,
            transfer_class,
            0.0,
            sources,
            destinations,
            np.full(len(sources), after_step, np.int64),
        )
        self.mover.submit([transfer])
        return transfer.id

    def end_of(self, id_: int) -> float:
        """Block until a transfer ended; when it did."""
        while True:
            for each in self.mover.poll().completions:
                if each.id == id_:
                    return each.finished_s
            self.mover.wait_news(1.0)

    def close(self) -> None:
        """Give everything back."""
        self.mover.close(10.0)
        del self.device, self.host
        for arena in self.arenas:
            arena.close()


@contextmanager
def bench(slots: int, block_bytes: int, link_bytes_per_s: float = 0.0) -> Iterator[Bench]:
    made = Bench(slots, block_bytes, link_bytes_per_s)
    try:
        yield made
    finally:
        made.close()


def bare_copies_s(on: Bench, sources: Slots, destinations: Slots, threads: int) -> float:
    """The same blocks copied by `threads` threads that do nothing else."""

    def base(pool: NDArray[np.uint8]) -> int:
        return int(pool.ctypes.data)

    to = [base(on.device) + int(slot) * BLOCK_BYTES for slot in destinations]
    at = [base(on.host) + int(slot) * BLOCK_BYTES for slot in sources]
    start = threading.Barrier(threads + 1)

    def run(lane: int) -> None:
        start.wait()
        for i in range(lane, len(to), threads):
            ctypes.memmove(to[i], at[i], BLOCK_BYTES)

    workers = [threading.Thread(target=run, args=(lane,)) for lane in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    begin_s = time.monotonic()
    for worker in workers:
        worker.join()
    return time.monotonic() - begin_s


def arbiter_vs_memcpy() -> Figure:
    rng = np.random.default_rng(1)
    ratios: list[float] = []
    rates: list[float] = []
    with bench(SLOTS, BLOCK_BYTES) as on:
        for round_ in range(ROUNDS + 1):
            sources = rng.permutation(SLOTS).astype(np.int32)
            destinations = rng.permutation(SLOTS).astype(np.int32)
            bare_s = [bare_copies_s(on, sources, destinations, LANES)]
            begin_s = time.monotonic()
            moved_s = on.end_of(on.load(sources, destinations)) - begin_s
            bare_s.append(bare_copies_s(on, sources, destinations, LANES))
            if round_ > 0:  # the first one warms up
                ratios.append(statistics.mean(bare_s) / moved_s)
                rates.append(SLOTS * BLOCK_BYTES / moved_s / 1e9)
    settings = {
        "block_bytes": BLOCK_BYTES,
        "blocks": SLOTS,
        "threads": LANES,
        "window_bytes": DEFAULT_WINDOW_BYTES,
        "arbiter_gb_per_s": round(statistics.median(rates), 2),
        "method": "wall time, bare copies right before and right after each transfer",
    }
    return median_figure("arbiter_vs_memcpy", ratios, "ratio", settings)


def urgent_wait_windows(samples: int = 60, link_bytes_per_s: float = 5e8) -> Figure:
    """From submit to the last byte in place, while a long prefetch keeps both lanes busy."""
    rng = np.random.default_rng(2)
    slots = np.arange(SLOTS - 1, dtype=np.int32)
    urgent = np.array([SLOTS - 1], np.int32)
    window_s = DEFAULT_WINDOW_BYTES / link_bytes_per_s
    waits: list[float] = []
    with bench(SLOTS, BLOCK_BYTES, link_bytes_per_s) as on:
        while len(waits) < samples:
            background = on.load(slots, slots)
            for _ in range(3):
                time.sleep((1 + rng.random()) * 2 * window_s)
                begin_s = time.monotonic()
                end_s = on.end_of(on.load(urgent, urgent, TransferClass.DEMAND))
                waits.append((end_s - begin_s) / window_s)
            on.mover.cancel([background])
            on.end_of(background)
    settings = {
        "block_bytes": BLOCK_BYTES,
        "window_bytes": DEFAULT_WINDOW_BYTES,
        "link_bytes_per_s": link_bytes_per_s,
        "unit": "the time one window alone takes on the link",
        "method": "95th percentile of submit to completion, arrivals at random",
    }
    p95 = float(np.percentile(waits, 95))
    return Figure("urgent_wait_windows", p95, "windows", waits, settings)


def submit_us_2048_blocks(blocks: int = 2048, calls: int = 20) -> Figure:
    rng = np.random.default_rng(3)
    medians: list[float] = []
    with bench(blocks, 4096) as on:
        for _ in range(ROUNDS):
            costs: list[float] = []
            for _ in range(calls):
                sources = rng.permutation(blocks).astype(np.int32)
                destinations = rng.permutation(blocks).astype(np.int32)
                begin_s = time.process_time()
                id_ = on.load(sources, destinations, after_step=1)
                costs.append((time.process_time() - begin_s) * 1e6)
                on.mover.cancel([id_])
                on.mover.poll()
            medians.append(statistics.median(costs))
    settings = {
        "blocks": blocks,
        "calls_per_round": calls,
        "method": "CPU time of the whole process, building the message included; median by round",
    }
    return median_figure("submit_us_2048_blocks", medians, "us", settings)


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(__doc__ or "").parse_args(words)
    figures = [arbiter_vs_memcpy(), urgent_wait_windows(), submit_us_2048_blocks()]
    return finish(figures, GOALS, options)


if __name__ == "__main__":
    sys.exit(main())
