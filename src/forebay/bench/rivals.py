"""The mover beside other ways of doing the same copies, in the same run, on three axes.

Every one brings the same scattered blocks from pinned memory to the GPU, load after load, as fast
as it can. Measured are its rate, how long foreign copies wait beside it, and how many milliseconds
of decode it costs for each gigabyte that it moves.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.bench.goals import AXES
from forebay.bench.rival_movers import Loader, loaders
from forebay.bench.waits import foreign_figure
from forebay.errors import LinkTimeoutError
from forebay.measure.copies import FOREIGN_EVERY_S, ForeignCopies
from forebay.measure.decode import DecodeStep, llama_8b
from forebay.measure.link import MIB, Link
from forebay.measure.report import Figure, median_figure

OURS, LOOP = "forebay", "copy_loop"
LAYOUTS = {"64k": 64 << 10, "2m": 2 * MIB}
"""Bytes of a fragment: a block scattered by layer, as frameworks lay KV out, or in one piece."""
LOAD_BYTES = 512 * MIB
_LEAST_LOADS = 8
_STOP_S = 60.0


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
                three = _measure(f"{layout}_{name}", loader, step, rounds, samples)
                standings[name] = Standing(*(figure.value for figure in three))
                figures += three
        figures += dominance(layout, standings)
    return figures


def dominance(layout: str, standings: Mapping[str, Standing]) -> list[Figure]:
    """How many rivals dominate ours (none should), and whether ours dominates the loop."""
    ours = standings[OURS]
    above = [name for name, each in standings.items() if each.dominates(ours)]
    loop = float(ours.dominates(standings[LOOP]))
    return [
        Figure(f"rivals_that_dominate_{layout}", len(above), "rivals", (), {"which": above}),
        Figure(f"loop_is_dominated_{layout}", loop, "yes or no"),
    ]


def _measure(id_: str, loader: Loader, step: DecodeStep, rounds: int, samples: int) -> list[Figure]:
    settings = {"load_bytes": LOAD_BYTES, "about": loader.about}
    loader.load()  # warms up
    rates = [_rate(loader) / 1e9 for _ in range(rounds)]
    with _repeated(loader), ForeignCopies(up=True) as foreign:
        time.sleep(samples * FOREIGN_EVERY_S * 1.5)
    costs = [_decode_ms_per_gb(loader, step) for _ in range(3)]
    return [
        median_figure(f"rival_{id_}_gb_per_s", rates, "GB/s", settings),
        foreign_figure(f"rival_{id_}_foreign_p99_us", foreign.waits_us, settings),
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
    with _repeated(loader) as loads:
        loads.begin()
        while len(beside_ms) < steps or loads.since_begin < _LEAST_LOADS:
            beside_ms.append(step.replay_ms())
        bytes_per_s = loads.bytes_per_s()
    beside = statistics.fmean(beside_ms)
    return (beside - alone_ms) / (bytes_per_s / 1e9 * beside * 1e-3)


@dataclass(slots=True)
class _Loads:
    """Ends of the loads of a thread that repeats them (`time.monotonic`)."""

    ends_s: list[float] = field(default_factory=list[float])
    error: Exception | None = None
    _first: int = 0

    def begin(self) -> None:
        """Count from the next load on."""
        self._first = len(self.ends_s)

    @property
    def since_begin(self) -> int:
        """Loads that ended since then. Raises what ended the thread."""
        if self.error is not None:
            raise self.error
        return len(self.ends_s) - self._first

    def bytes_per_s(self) -> float:
        """Between the first and the last of these ends."""
        ends = self.ends_s[self._first :]
        return (len(ends) - 1) * LOAD_BYTES / (ends[-1] - ends[0])


@contextmanager
def _repeated(loader: Loader) -> Iterator[_Loads]:
    """Meanwhile a thread loads again and again; the next load begins when the last one ended."""
    loads, stop = _Loads(), threading.Event()

    def run() -> None:
        try:
            while not stop.is_set():
                loader.load()
                loads.ends_s.append(time.monotonic())
        except Exception as error:
            loads.error = error

    thread = threading.Thread(target=run, name="repeated-loads")
    thread.start()
    try:
        yield loads
    finally:
        stop.set()
        thread.join(_STOP_S)
        if thread.is_alive():
            raise LinkTimeoutError(f"a load did not end within {_STOP_S:.0f} s")


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
