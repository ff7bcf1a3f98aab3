"""Who waits for the mover: foreign copies, and our own urgent load."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from forebay.measure.copies import FOREIGN_BYTES, FOREIGN_EVERY_S, foreign_copies
from forebay.measure.link import MIB, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction, TransferClass

_BLOCK_BYTES = 2 * MIB
_URGENT_BYTES = 64 * MIB
# Of the time between copies, with the copy itself.
_PER_COPY = 1.4
_BOTH = (Direction.LOAD, Direction.SAVE)


@dataclass(frozen=True, slots=True)
class Case:
    """The mover's windows and directions, and which way and how urgent the foreign copies are."""

    window_mib: int
    directions: tuple[Direction, ...]
    up: bool = True
    urgent: bool = True


FOREIGN_CASES = {
    "foreign_p99_8_us": Case(8, (Direction.LOAD,)),
    "foreign_p99_8_low_us": Case(8, (Direction.LOAD,), urgent=False),
    "foreign_p99_4_us": Case(4, (Direction.LOAD,)),
    "foreign_p99_both_h2d_us": Case(8, _BOTH),
    "foreign_p99_both_d2h_us": Case(8, _BOTH, up=False),
    "foreign_p99_idle_us": Case(8, ()),
}


def foreign_figures(link: Link, samples: int, spin_s: float) -> list[Figure]:
    """How long a foreign 64 KiB copy waits while the mover is busy, and while it rests."""
    figures: list[Figure] = []
    for id_, case in FOREIGN_CASES.items():
        for_s = samples * FOREIGN_EVERY_S * _PER_COPY
        settings = {"window_bytes": case.window_mib * MIB, "spin_s": spin_s}
        with (
            link.carrier(_BLOCK_BYTES, **settings) as carrier,
            carrier.running(*case.directions, most_s=for_s + 1.0),
            foreign_copies(up=case.up, urgent=case.urgent) as waits_us,
        ):
            _, rate = carrier.rate_during(lambda for_s=for_s: time.sleep(for_s))
        told = {"window_mib": case.window_mib, "gb_per_s": rate / 1e9, "urgent": case.urgent}
        figures.append(foreign_figure(id_, waits_us, told))
    return figures


def foreign_figure(id_: str, waits_us: list[float], settings: dict[str, object]) -> Figure:
    """The 99th percentile of `waits_us`, all of them kept."""
    told = {
        **settings,
        "copies": len(waits_us),
        "copy_bytes": FOREIGN_BYTES,
        "p50_us": float(np.percentile(waits_us, 50)),
        "max_us": max(waits_us),
    }
    return Figure(id_, float(np.percentile(waits_us, 99)), "us", waits_us, told)


def urgent_figure(link: Link, rounds: int, spin_s: float) -> Figure:
    """A demand load of 64 MiB behind 2 GiB of prefetch: submit to the last byte in place."""
    times_ms: list[float] = []
    blocks = _URGENT_BYTES // _BLOCK_BYTES
    with link.carrier(_BLOCK_BYTES, window_bytes=8 * MIB, spin_s=spin_s) as carrier:
        for _ in range(rounds):
            behind = carrier.submit(2048 * MIB // _BLOCK_BYTES)
            time.sleep(0.005)
            began_s = time.monotonic()
            urgent = carrier.submit(blocks, transfer_class=TransferClass.DEMAND)
            times_ms.append(1e3 * (carrier.wait([urgent]) - began_s))
            carrier.drop([behind])
    return median_figure("urgent_64mib_ms", times_ms, "ms", {"window_mib": 8, "block_mib": 2})
