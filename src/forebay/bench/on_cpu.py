"""What has a meaning without a GPU: the arbiter against bare copies, for what is urgent, and for
who submits. Copies are real, between two pools of this process.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from dataclasses import replace

import numpy as np

from forebay.bench.cached import CachedLoads, LoadShape
from forebay.measure.copies import ratios_to
from forebay.measure.link import MIB, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.native import DEFAULT_WINDOW_BYTES
from forebay.transfer.pool import Pool

NOT_MEASURED = (
    "rates of a link, foreign copies and rivals need a CUDA device: these are copies "
    "between two pools in ordinary memory"
)
_BLOCK_BYTES = 2 * MIB
_BLOCKS = 48
_LANES = 2
_SLOW_BYTES_PER_S = 5e8
_SUBMITTED_BLOCKS, _SUBMITTED_BYTES = 2048, 4096
_CALLS = 20


def cpu_figures(rounds: int) -> list[Figure]:
    """All of them; takes about 450 MiB of memory."""
    link = Link("cpu", 2 * _BLOCKS * _BLOCK_BYTES)
    small = Link("cpu", 2 * _SUBMITTED_BLOCKS * _SUBMITTED_BYTES)
    try:
        return [
            arbiter_vs_memcpy(link, rounds),
            cached_vs_mover(link, rounds),
            urgent_wait_windows(link, 4 * rounds),
            submit_us(small, rounds),
        ]
    finally:
        link.close()
        small.close()


def arbiter_vs_memcpy(link: Link, rounds: int) -> Figure:
    """The arbiter's rate over that of as many threads that do nothing but copy the same blocks."""
    ratios: list[float] = []
    rates: list[float] = []
    pools = link.pools(_BLOCK_BYTES)
    with link.carrier(_BLOCK_BYTES, lanes=_LANES) as carrier:
        for round_ in range(rounds + 1):
            load = carrier.transfer(_BLOCKS)
            bare_s = [_bare_copies_s(pools, load)]
            began_s = time.monotonic()
            carrier.mover.submit([load])
            moved_s = carrier.wait([load.id]) - began_s
            bare_s.append(_bare_copies_s(pools, load))
            if round_ > 0:  # the first one warms up
                ratios.append(statistics.mean(bare_s) / moved_s)
                rates.append(_BLOCKS * _BLOCK_BYTES / moved_s / 1e9)
    settings = {
        "block_bytes": _BLOCK_BYTES,
        "blocks": _BLOCKS,
        "threads": _LANES,
        "window_bytes": DEFAULT_WINDOW_BYTES,
        "arbiter_gb_per_s": round(statistics.median(rates), 2),
        "method": "wall time, bare copies right before and right after each transfer",
    }
    return median_figure("arbiter_vs_memcpy", ratios, "ratio", settings)


def _bare_copies_s(pools: tuple[Pool, Pool], load: Transfer) -> float:
    """The blocks of `load` copied by threads that do nothing else."""
    device, host = (pool.base_address for pool in pools)
    to = [device + int(slot) * _BLOCK_BYTES for slot in load.destinations]
    at = [host + int(slot) * _BLOCK_BYTES for slot in load.sources]
    start = threading.Barrier(_LANES + 1)

    def run(lane: int) -> None:
        start.wait()
        for i in range(lane, len(to), _LANES):
            ctypes.memmove(to[i], at[i], _BLOCK_BYTES)

    workers = [threading.Thread(target=run, args=(lane,)) for lane in range(_LANES)]
    for worker in workers:
        worker.start()
    start.wait()
    began_s = time.monotonic()
    for worker in workers:
        worker.join()
    return time.monotonic() - began_s


def cached_vs_mover(link: Link, rounds: int) -> Figure:
    """Loads through a `Cache` over the same blocks by its mover alone."""
    shape = LoadShape(requests=4, blocks=6, sets=3, block_bytes=_BLOCK_BYTES)
    with link.carrier(_BLOCK_BYTES) as alone, link.carrier(_BLOCK_BYTES) as under:
        loads = CachedLoads(under.mover, shape, DEFAULT_WINDOW_BYTES, stream=0)
        ratios = ratios_to(
            lambda: alone.bytes_per_s(shape.set_blocks, Direction.LOAD), loads.bytes_per_s, rounds
        )
    return median_figure("cached_vs_mover", ratios, "ratio", loads.told())


def urgent_wait_windows(link: Link, samples: int) -> Figure:
    """From submit to the last byte in place, while a long prefetch keeps both lanes busy."""
    rng = np.random.default_rng(2)
    window_s = DEFAULT_WINDOW_BYTES / _SLOW_BYTES_PER_S
    waits: list[float] = []
    with link.carrier(_BLOCK_BYTES, link_bytes_per_s=_SLOW_BYTES_PER_S) as carrier:
        while len(waits) < samples:
            background = carrier.submit(_BLOCKS)
            for _ in range(2):
                time.sleep((1 + rng.random()) * 2 * window_s)
                began_s = time.monotonic()
                urgent = carrier.submit(1, transfer_class=TransferClass.DEMAND)
                waits.append((carrier.wait([urgent]) - began_s) / window_s)
            carrier.drop([background])
    settings = {
        "block_bytes": _BLOCK_BYTES,
        "window_bytes": DEFAULT_WINDOW_BYTES,
        "link_bytes_per_s": _SLOW_BYTES_PER_S,
        "unit": "the time one window alone takes on the link",
        "method": "95th percentile of submit to completion, arrivals at random",
    }
    p95 = float(np.percentile(waits, 95))
    return Figure("urgent_wait_windows", p95, "windows", waits, settings)


def submit_us(link: Link, rounds: int) -> Figure:
    """What submitting a load of 2,048 blocks costs, in processor time; it waits for its step."""
    medians: list[float] = []
    after = np.ones(_SUBMITTED_BLOCKS, np.int64)
    with link.carrier(_SUBMITTED_BYTES) as carrier:
        for _ in range(rounds):
            costs: list[float] = []
            for _ in range(_CALLS):
                load = replace(carrier.transfer(_SUBMITTED_BLOCKS), after_steps=after)
                began_s = time.process_time()
                carrier.mover.submit([load])
                costs.append((time.process_time() - began_s) * 1e6)
                carrier.drop([load.id])
            medians.append(statistics.median(costs))
    settings = {
        "blocks": _SUBMITTED_BLOCKS,
        "calls_per_round": _CALLS,
        "method": "processor time of the whole process; median by round",
    }
    return median_figure("submit_us_2048_blocks", medians, "us", settings)
