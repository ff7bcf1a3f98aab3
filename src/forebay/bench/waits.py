"""Who waits for the mover: foreign copies, and our own urgent load."""

from __future__ import annotations

import time

import numpy as np

from forebay.measure.copies import FOREIGN_BYTES, FOREIGN_EVERY_S, foreign_copies
from forebay.measure.link import MIB, Carrier, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction, TransferClass

_BLOCK_BYTES = 2 * MIB
_URGENT_BYTES = 64 * MIB
_BOTH = (Direction.LOAD, Direction.SAVE)
FOREIGN_CASES = {
    "foreign_p99_8_us": (8, (Direction.LOAD,), True),
    "foreign_p99_4_us": (4, (Direction.LOAD,), True),
    "foreign_p99_both_h2d_us": (8, _BOTH, True),
    "foreign_p99_both_d2h_us": (8, _BOTH, False),
}
"""Window in MiB, the mover's directions, and whether the foreign copies go up."""


def foreign_figures(link: Link, samples: int, spin_s: float) -> list[Figure]:
    """How long a foreign 64 KiB copy waits while the mover runs at full rate."""
    figures: list[Figure] = []
    for id_, (window, directions, up) in FOREIGN_CASES.items():
        with link.carrier(_BLOCK_BYTES, window_bytes=window * MIB, spin_s=spin_s) as carrier:
            waits, rate = foreign_waits_us(carrier, directions, samples, up=up)
        figures.append(foreign_figure(id_, waits, {"window_mib": window, "gb_per_s": rate / 1e9}))
    with link.carrier(_BLOCK_BYTES, spin_s=spin_s) as carrier:
        waits, _ = foreign_waits_us(carrier, (), samples // 4, up=True)
    return [*figures, foreign_figure("foreign_p99_idle_us", waits, {"gb_per_s": 0.0})]


def foreign_waits_us(
    carrier: Carrier, directions: tuple[Direction, ...], samples: int, *, up: bool
) -> tuple[list[float], float]:
    """Waits of about `samples` foreign copies beside `directions`, and the link's rate then."""
    for_s = samples * FOREIGN_EVERY_S * 1.5
    with carrier.running(*directions, most_s=for_s + 1.0), foreign_copies(up=up) as waits_us:
        _, rate = carrier.rate_during(lambda: time.sleep(for_s))
    return waits_us, rate


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
