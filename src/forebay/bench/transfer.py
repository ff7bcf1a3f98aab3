"""`forebay bench transfer`: the mover alone, through a cache, and beside its rivals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from forebay.bench.calls import core_figures, submit_figure
from forebay.bench.on_cpu import cpu_figures
from forebay.bench.rates import CACHED, MOVED_BYTES, cached_figures, rate_figures
from forebay.bench.rivals import rival_figures
from forebay.bench.waits import foreign_figures, urgent_figure
from forebay.measure.copies import PlainCopies
from forebay.measure.link import Backend, Link
from forebay.measure.report import Figure
from forebay.transfer.native import DEFAULT_SPIN_S


class TransferPart(StrEnum):
    """What can be measured by itself, on a GPU."""

    CACHE = "cache"
    RATES = "rates"
    FOREIGN = "foreign"
    CALLS = "calls"
    RIVALS = "rivals"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """`rounds` of each ratio, `samples` of foreign copies a figure; `parts` of the GPU's."""

    rounds: int = 7
    samples: int = 2500
    parts: Collection[TransferPart] = field(default_factory=lambda: tuple(TransferPart))
    spin_s: float = DEFAULT_SPIN_S


def transfer_figures(backend: Backend, settings: TransferSettings) -> list[Figure]:
    """Everything that can be measured on `backend`.

    On a GPU takes 12 GiB of pinned host memory, 30 GB of the GPU's, and a minute or two.
    """
    if backend == "cpu":
        return cpu_figures(settings.rounds)
    rounds, samples, spin_s = settings.rounds, settings.samples, settings.spin_s
    figures: list[Figure] = []
    plain = PlainCopies(MOVED_BYTES)
    link = Link(backend, CACHED.host_slots * CACHED.block_bytes)
    try:
        for part in settings.parts:
            match part:
                case TransferPart.CACHE:
                    figures += cached_figures(link, plain, rounds, spin_s)
                case TransferPart.RATES:
                    figures += rate_figures(link, plain, rounds, spin_s)
                case TransferPart.FOREIGN:
                    figures += foreign_figures(link, samples, spin_s)
                    figures.append(urgent_figure(link, 2 * rounds, spin_s))
                case TransferPart.CALLS:
                    figures += [submit_figure(link, rounds), *core_figures(link, spin_s)]
                case TransferPart.RIVALS:
                    figures += rival_figures(link, rounds, samples // 2)
    finally:
        link.close()
    return figures
