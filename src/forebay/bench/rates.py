"""Rates of the mover against plain pinned copies right before and right after each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from forebay.bench.cached import CachedLoads, LoadShape
from forebay.measure.copies import PlainCopies, ratios_to
from forebay.measure.link import GIB, MIB, Carrier, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction

MOVED_BYTES = 2 * GIB
BLOCK_BYTES = 2 * MIB
_FRAGMENT_WINDOWS_MIB = (8, 16, 32)
# (KiB of a fragment, MiB of a block). 16 tokens of Llama 3 8B in 16 bit are 2 MiB, of the 70B model
# 5 MiB: in both a layer's K and V together have 64 KiB, each alone 32.
_SCATTERED = ((64, 2), (64, 5), (32, 2), (32, 5), (16, 2))
# 8 conversations of 2,048 tokens of Llama 3 8B are 2 GiB; three such sets take turns.
CACHED = LoadShape(requests=8, blocks=128, sets=3, block_bytes=BLOCK_BYTES)


def rate_figures(link: Link, plain: PlainCopies, rounds: int, spin_s: float) -> list[Figure]:
    """Scattered 2 MiB blocks up (by the mover alone), up and down at once, and in fragments."""
    figures: list[Figure] = []
    for window in (8, 4):
        with link.carrier(BLOCK_BYTES, window_bytes=window * MIB, spin_s=spin_s) as carrier:
            ratios = _loads(carrier, plain, rounds)
        settings = {"window_mib": window, "block_mib": 2, "spin_us": 1e6 * spin_s}
        figures.append(median_figure(f"mover_2mib_{window}", ratios, "ratio", settings))
    ways = Direction.LOAD, Direction.SAVE
    with link.carrier(BLOCK_BYTES, window_bytes=8 * MIB, spin_s=spin_s) as carrier:
        ratios = ratios_to(
            lambda: plain.bytes_per_s(up=True, down=True),
            lambda: carrier.bytes_per_s(MOVED_BYTES // BLOCK_BYTES, *ways),
            rounds,
        )
    figures.append(median_figure("both_ways", ratios, "ratio", {"window_mib": 8, "block_mib": 2}))
    return [*figures, *(_fragments(link, plain, *each, rounds, spin_s) for each in _SCATTERED)]


def _loads(carrier: Carrier, plain: PlainCopies, rounds: int) -> list[float]:
    blocks = MOVED_BYTES // carrier.block_bytes
    return ratios_to(plain.bytes_per_s, lambda: carrier.bytes_per_s(blocks, Direction.LOAD), rounds)


def _fragments(
    link: Link, plain: PlainCopies, kib: int, block_mib: int, rounds: int, spin_s: float
) -> Figure:
    """Blocks of `block_mib` in fragments of `kib`, in the best of some windows."""
    best: tuple[float, list[float], int] = (0.0, [], 0)
    by_window: dict[str, float] = {}
    for window in _FRAGMENT_WINDOWS_MIB:
        settings = {"window_bytes": window * MIB, "spin_s": spin_s}
        with link.carrier(block_mib * MIB, kib << 10, **settings) as carrier:
            ratios = _loads(carrier, plain, rounds)
        by_window[str(window)] = round(statistics.median(ratios), 4)
        best = max(best, (statistics.median(ratios), ratios, window))
    told = {
        "fragment_kib": kib,
        "block_mib": block_mib,
        "window_mib": best[2],
        "by_window_mib": by_window,
    }
    id_ = f"frag_{kib}k" if block_mib * MIB == BLOCK_BYTES else f"frag_{kib}k_{block_mib}mib"
    return median_figure(id_, best[1], "ratio", told)


def cached_figures(link: Link, plain: PlainCopies, rounds: int, spin_s: float) -> list[Figure]:
    """The same 2 MiB blocks, asked of a `Cache` whose planner and slots bring them."""
    figures: list[Figure] = []
    for window in (8, 4):
        with _cached(link, CACHED, window * MIB, spin_s) as loads:
            ratios = ratios_to(plain.bytes_per_s, loads.bytes_per_s, rounds)
            settings = {"window_mib": window, "spin_us": 1e6 * spin_s, **loads.told()}
        figures.append(median_figure(f"h2d_2mib_{window}", ratios, "ratio", settings))
    return figures


@contextmanager
def _cached(
    link: Link, shape: LoadShape, window_bytes: int, spin_s: float
) -> Iterator[CachedLoads]:
    stream = torch.cuda.Stream()
    with link.carrier(shape.block_bytes, window_bytes=window_bytes, spin_s=spin_s) as carrier:
        yield CachedLoads(carrier.mover, shape, window_bytes, int(stream.cuda_stream))
        torch.cuda.synchronize()
