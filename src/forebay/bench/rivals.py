"""The mover beside other ways of doing the same copies, in the same run, on three axes.

Every one brings the same scattered blocks from pinned memory to the GPU, load after load, as fast
as it can. Measured are its rate, how long foreign copies wait beside it, and how many milliseconds
of decode it costs for each gigabyte that it moves.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.bench.goals import AXES
from forebay.bench.rival_movers import Loader, loaders
from forebay.bench.waits import foreign_figure
from forebay.errors import LinkTimeoutError, SettingsError
from forebay.measure.copies import FOREIGN_EVERY_S, foreign_copies
from forebay.measure.decode import DecodeStep, llama_8b
from forebay.measure.link import MIB, Link
from forebay.measure.repeat import repeated
from forebay.measure.report import Figure, median_figure

OURS, LOOP = "forebay", "copy_loop"
LAYOUTS = {"64k": 64 << 10, "2m": 2 * MIB}
"""Bytes of a fragment: a block scattered by layer, as frameworks lay KV out, or in one piece."""
LOAD_BYTES = 512 * MIB
_LEAST_LOADS = 9
_MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Standing:
    """One way on the three axes; more is better on the first, less on the others."""

    gb_per_s: float
    foreign_p99_us: float
    decode_ms_per_gb: float

    def dominates(self, other: Standing) -> bool:
        """Whether it is nowhere worse than `other`, and somewhere better."""
        mine = (-self.gb_per_s, self.foreign_p99_us, self.decode_ms_per_gb)
        theirs = (-other.gb_per_s, other.foreign_p99_us, other.decode_ms_per_gb)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def rival_figures(link: Link, rounds: int, samples: int) -> list[Figure]:
    """Three figures for each way and layout, and who dominates whom in each layout."""
    step = DecodeStep(llama_8b())
    figures: list[Figure] = []
    for layout, fragment_bytes in LAYOUTS.items():
        standings: dict[str, Standing] = {}
        with loaders(link, fragment_bytes, LOAD_BYTES) as ways:
            for name, loader in ways.items():
                try:
                    three = _measure(f"{layout}_{name}", loader, step, rounds, samples)
                except SettingsError as error:
                    warnings.warn(f"{name} is left out: {error}", stacklevel=2)
                    continue
                standings[name] = Standing(*(figure.value for figure in three))
                figures += three
        figures += dominance(layout, standings)
    return figures


def dominance(layout: str, standings: Mapping[str, Standing]) -> list[Figure]:
    """How many rivals dominate ours (none should), and whether ours dominates the loop."""
    ours = standings[OURS]
    above = [name for name, each in standings.items() if each.dominates(ours)]
    loop = float(LOOP in standings and ours.dominates(standings[LOOP]))
    return [
        Figure(f"rivals_that_dominate_{layout}", len(above), "rivals", (), {"which": above}),
        Figure(f"loop_is_dominated_{layout}", loop, "yes or no"),
    ]


def _measure(id_: str, loader: Loader, step: DecodeStep, rounds: int, samples: int) -> list[Figure]:
    settings = {"load_bytes": LOAD_BYTES, "about": loader.about}
    loader.load()  # warms up
    rates = [_rate(loader) / 1e9 for _ in range(rounds)]
    with repeated(loader.load), foreign_copies(up=True) as waits_us:
        time.sleep(samples * FOREIGN_EVERY_S * 1.5)
    costs = [_decode_ms_per_gb(loader, step) for _ in range(3)]
    return [
        median_figure(f"rival_{id_}_gb_per_s", rates, "GB/s", settings),
        foreign_figure(f"rival_{id_}_foreign_p99_us", waits_us, settings),
        median_figure(f"rival_{id_}_decode_ms_per_gb", costs, "ms/GB", settings),
    ]


def _rate(loader: Loader) -> float:
    began_s = time.monotonic()
    loader.load()
    return LOAD_BYTES / (time.monotonic() - began_s)


def _decode_ms_per_gb(loader: Loader, step: DecodeStep, steps: int = 40) -> float:
    """What steps take longer beside the loads, over the bytes that were moved meanwhile."""
    alone_ms = statistics.median(step.replay_ms() for _ in range(steps))
    beside_ms: list[float] = []
    with repeated(lambda: _timed(loader)) as ends_s:
        give_up_s = time.monotonic() + _MOST_S
        while len(beside_ms) < steps or len(ends_s) < _LEAST_LOADS:
            if time.monotonic() > give_up_s:
                raise LinkTimeoutError(f"{_LEAST_LOADS} loads did not end within {_MOST_S:.0f} s")
            beside_ms.append(step.replay_ms())
        spans_s = np.diff(ends_s)
    beside, bytes_per_s = statistics.fmean(beside_ms), LOAD_BYTES / spans_s.mean()
    return (beside - alone_ms) / (bytes_per_s / 1e9 * beside * 1e-3)


def _timed(loader: Loader) -> float:
    """Load once; when it ended (`time.monotonic`)."""
    loader.load()
    return time.monotonic()


def side_by_side(figures: Sequence[Figure]) -> str:
    """The rivals' figures as one table for each layout; empty where there are none."""
    values = {figure.id: figure.value for figure in figures}
    show: Callable[[str], str] = lambda id_: f"{values[id_]:.4g}"  # noqa: E731
    lines: list[str] = []
    for layout in LAYOUTS:
        prefix, suffix = f"rival_{layout}_", f"_{AXES[0]}"
        names = [
            id_.removeprefix(prefix).removesuffix(suffix)
            for id_ in values
            if id_.startswith(prefix) and id_.endswith(suffix)
        ]
        if names:
            lines.append(f"{f'fragments of {layout}':20}{''.join(f'{axis:>20}' for axis in AXES)}")
        for name in names:
            cells = [show(f"{prefix}{name}_{axis}") for axis in AXES]
            lines.append(f"{name:20}{''.join(f'{cell:>20}' for cell in cells)}")
    return "\n".join(lines)
