"""Figures as a picture: ratios beside their goals, waits as distributions, rivals on their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import FuncFormatter, NullFormatter

from forebay.bench.goals import AXES, LEADS_MS
from forebay.errors import SettingsError
from forebay.measure.report import Figure, Goal

_COLOURS = ("#1b998b", "#33507a", "#f08a24", "#9a86c4", "#d7263d", "#7fa6d6", "#6b7686")
_GOOD, _BAD = "#1b998b", "#d7263d"
_FAINT = "#6b7686"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": "#222b38",
    "axes.edgecolor": "#c4cbd5",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": "#222b38",
}
_WIDTH_IN, _PANEL_IN, _HEAD_IN, _ROW_IN = 10.0, 2.9, 0.7, 0.28
_WIDE = 20.0
_NOT_ROUNDS = {"textbook_itl_p99", "pin_rate"}

ById = Mapping[str, Figure]
Panel = tuple[float, Callable[[Axes], None]]
"""Its height in inches, and who draws it."""


def draw(
    figures: Sequence[Figure],
    goals: Mapping[str, Goal],
    path: Path | str,
    *,
    title: str,
    subtitle: str,
) -> None:
    """Draw what of `figures` has a picture into the PNG `path`, making its folder.

    Raises SettingsError where nothing has one.
    """
    panels = list(_panels({figure.id: figure for figure in figures}, goals))
    if not panels:
        raise SettingsError("none of what was measured has a picture: measure more parts")
    heights = [height for height, _ in panels]
    height_in = _HEAD_IN + sum(heights)
    with mpl.rc_context(_STYLE):
        sheet = Sheet(figsize=(_WIDTH_IN, height_in), layout="constrained")
        sheet.get_layout_engine().set(rect=(0, 0, 1, 1 - _HEAD_IN / height_in))  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
        grid = sheet.add_gridspec(len(panels), 1, height_ratios=heights)
        for number, (_, panel) in enumerate(panels):
            panel(sheet.add_subplot(grid[number]))
        sheet.text(0.02, 1 - 0.3 / height_in, title, size=13, weight="bold")
        sheet.text(0.02, 1 - 0.53 / height_in, subtitle, size=9, color=_FAINT)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(sheet)
        sheet.savefig(path, format="png", dpi=130, facecolor="white")


def _panels(by_id: ById, goals: Mapping[str, Goal]) -> Iterator[Panel]:
    ratios = [f for f in by_id.values() if f.unit == "ratio" and f.id in goals and f.samples]
    ratios = [figure for figure in ratios if figure.id not in _NOT_ROUNDS]
    if ratios:
        yield 0.8 + _ROW_IN * len(ratios), lambda axis: _ratios(axis, ratios, goals)
    foreign = {n: f.samples for n, f in by_id.items() if n.startswith("foreign_") and f.samples}
    if foreign:
        yield _tails(foreign, "a foreign 64 KiB copy takes, us")
    for layout in ("64k", "2m"):
        rivals = [each for each in _rivals(by_id) if each[0] == layout]
        if rivals:
            yield _PANEL_IN, partial(_draw_rivals, rivals=rivals)
    for kind, what in {"decode": "a decode step", "weights": "reading the weights"}.items():
        steps = _steps(by_id, kind)
        if steps:
            yield _tails(steps, f"{what} takes, ms")
    if all(f"textbook_excess_{lead}_ms" in by_id for lead in LEADS_MS):
        yield _PANEL_IN, lambda axis: _textbook(axis, by_id)
    launches = {n: f.samples for n, f in by_id.items() if n.startswith("launch_delay_")}
    if launches:
        yield _tails(launches, "a launch beside copies takes, us")
    if "urgent_wait_windows" in by_id:
        yield _tails({"urgent": by_id["urgent_wait_windows"].samples}, "an urgent load, windows")


def _ratios(axis: Axes, figures: Sequence[Figure], goals: Mapping[str, Goal]) -> None:
    """Each figure's rounds as dots, their value as a bar, its goal as a tick."""
    for row, figure in enumerate(figures):
        goal = goals[figure.id]
        colour = _GOOD if goal.met_by(figure.value) else _BAD
        axis.axhline(row, color="#eef1f5", linewidth=6, zorder=0)
        axis.plot(figure.samples, [row] * len(figure.samples), "o", color=colour, alpha=0.45)
        axis.plot(figure.value, row, "|", color=colour, markersize=15, markeredgewidth=2.5)
        for bound in (goal.at_least, goal.at_most):
            if bound is not None:
                axis.plot([bound, bound], [row - 0.42, row + 0.42], color="#222b38", linewidth=1.5)
    axis.set_yticks(range(len(figures)), [figure.id for figure in figures])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("ratio: a dot is a round, the black tick the goal", color=_FAINT)


def _tails(samples: Mapping[str, Sequence[float]], label: str) -> Panel:
    return _PANEL_IN, lambda axis: _draw_tails(axis, samples, label)


def _draw_tails(axis: Axes, samples: Mapping[str, Sequence[float]], label: str) -> None:
    """The share of samples at or above each value, so that tails can be read off."""
    least, most = np.inf, 0.0
    for (name, values), colour in zip(samples.items(), _COLOURS, strict=False):
        ordered = np.sort(np.asarray(values, dtype=float))
        above = 1.0 - np.arange(len(ordered)) / len(ordered)
        axis.step(ordered, above, where="pre", color=colour, label=name, linewidth=1.3)
        least, most = min(least, float(ordered[0])), max(most, float(ordered[-1]))
    axis.set_yscale("log")
    if most > _WIDE * max(least, 1e-9):
        axis.set_xscale("log")
    for scaled in (axis.xaxis, axis.yaxis):
        scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scaled.set_minor_formatter(NullFormatter())
    axis.axhline(0.01, color=_FAINT, linewidth=0.7, linestyle=":")
    axis.set_xlabel(label, color=_FAINT)
    axis.set_ylabel("share that takes longer", color=_FAINT)
    axis.legend(frameon=False, fontsize=8)


def _rivals(by_id: ById) -> list[tuple[str, str, float, float, float]]:
    """(layout, name, GB/s, foreign p99 in us, decode ms per GB) of each."""
    found: list[tuple[str, str, float, float, float]] = []
    for id_, figure in by_id.items():
        if id_.startswith("rival_") and id_.endswith("_gb_per_s"):
            stem = id_.removesuffix("gb_per_s")
            layout, _, name = stem.removeprefix("rival_").rstrip("_").partition("_")
            wait_us, decode_ms = (by_id[stem + axis].value for axis in AXES[1:])
            found.append((layout, name, figure.value, wait_us, decode_ms))
    return found


def _draw_rivals(axis: Axes, rivals: Sequence[tuple[str, str, float, float, float]]) -> None:
    """One layout: rate to the right, foreign waits up, decode's cost in words."""
    fastest = max(rate for _, _, rate, *_ in rivals)
    for number, (layout, name, rate, wait_us, decode_ms) in enumerate(rivals):
        colour = _COLOURS[number % len(_COLOURS)]
        axis.plot(rate, wait_us, "o", color=colour, markersize=9)
        axis.annotate(
            f"{name}\n{decode_ms:.2g} ms of decode per GB",
            (rate, wait_us),
            xytext=(-9, -7 if number % 2 else 7),
            textcoords="offset points",
            ha="right",
            va="top" if number % 2 else "bottom",
            size=7.5,
        )
        axis.set_xlabel(f"fragments of {layout}: GB/s", color=_FAINT)
    axis.set_yscale("log")
    axis.set_xlim(0, 1.06 * fastest)
    axis.margins(y=0.35)
    axis.set_ylabel("foreign copy, p99, us", color=_FAINT)


def _steps(by_id: ById, kind: str) -> dict[str, Sequence[float]]:
    found: dict[str, Sequence[float]] = {}
    for case in ("load", "both"):
        figure = by_id.get(f"{kind}_inflation_{case}")
        if figure is not None:
            found.setdefault("alone", _numbers(figure, "alone_ms"))
            found[f"beside {'loads' if case == 'load' else 'loads and saves'}"] = _numbers(
                figure, "beside_ms"
            )
    return {name: values for name, values in found.items() if values}


def _textbook(axis: Axes, by_id: ById) -> None:
    """How long the reader waited by how far ahead the load began, over what the link needs."""
    figures = [by_id[f"textbook_excess_{lead}_ms"] for lead in LEADS_MS]
    needed = float(str(figures[0].settings["needed_ms"]))
    leads = np.linspace(0.0, max(LEADS_MS) * 1.05, 200)
    axis.plot(leads, np.maximum(0.0, needed - leads), color=_FAINT, label="the link at best")
    for figure in figures:
        led, waited = (_numbers(figure, name) for name in ("led_samples_ms", "exposed_samples_ms"))
        axis.plot(led, waited, ".", color=_COLOURS[0], markersize=6)
    axis.set_xlabel("the load of 671 MB began so many ms before it was needed", color=_FAINT)
    axis.set_ylabel("exposed wait, ms", color=_FAINT)
    axis.legend(frameon=False, fontsize=8)


def _numbers(figure: Figure, name: str) -> list[float]:
    found = figure.settings.get(name)
    return [float(each) for each in found] if isinstance(found, list) else []
