"""A timeline as a picture: steps over lanes over requests, so that one sees what ran under what.

The light bands behind the lanes are the times in which a step ran: a copy on a band is hidden, a
copy beside one is not. An exposed wait is red and marked through every panel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from forebay.errors import SettingsError
from forebay.timeline.record import (
    COMPUTE,
    EXPOSED_WAIT,
    GROUPS,
    LINK,
    REQUESTS,
    STEPS,
    Group,
    Kind,
    Occupancy,
    Span,
    Timeline,
)

_COLOURS = {
    Kind.DECODE_STEP: "#33507a",
    Kind.PREFILL_STEP: "#7fa6d6",
    Kind.WAIT: "#d7263d",
    Kind.PREFETCH: "#1b998b",
    Kind.DEMAND: "#f08a24",
    Kind.SAVE: "#9a86c4",
    Kind.QUEUED: "#d9dde3",
    Kind.PREFILL: "#7fa6d6",
    Kind.DECODE: "#33507a",
}
_LEGEND = {
    "decode": Kind.DECODE_STEP,
    "prefill": Kind.PREFILL_STEP,
    "prefetch": Kind.PREFETCH,
    "demand load": Kind.DEMAND,
    "save": Kind.SAVE,
    "queued": Kind.QUEUED,
    "exposed wait": Kind.WAIT,
}
_STEP_KINDS = (Kind.DECODE_STEP, Kind.PREFILL_STEP)
_TIER_COLOURS = ("#1b998b", "#9a86c4", "#f08a24", "#7fa6d6")
_INK = "#222b38"
_FAINT_INK = "#6b7686"
_BAND = "#e8eef7"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#c4cbd5",
    "xtick.color": _FAINT_INK,
    "ytick.color": _INK,
}

_WIDTH_IN = 12.0
_LEFT, _RIGHT = 0.105, 0.975
_TOP_IN, _BOTTOM_IN, _GAP_IN = 0.82, 0.78, 0.1
_ROW_IN = 0.27
_OCCUPANCY_IN = 0.85
_MOST_REQUEST_ROWS = 14
_PIXELS = 1400  # of the time axis, at the usual resolution: what is nearer than one is one bar
_LABEL_PIXELS = 65  # a bar wider than this carries its size


@dataclass(frozen=True, slots=True)
class _View:
    """What is drawn: the spans that touch [begin_s, end_s], and the rows of each group."""

    begin_s: float
    end_s: float
    origin_s: float
    spans: Sequence[Span]
    rows: Mapping[Group, Sequence[str]]

    @property
    def pixel_s(self) -> float:
        return (self.end_s - self.begin_s) / _PIXELS

    def of(self, kinds: Sequence[Kind], row: str | None = None) -> list[Span]:
        return [s for s in self.spans if s.kind in kinds and row in (None, s.row)]


def draw(
    timeline: Timeline,
    path: Path | str,
    window: tuple[float, float] | None = None,
    *,
    title: str = "Loads run under the steps of other requests",
    subtitle: str = "",
    dpi: int = 160,
) -> None:
    """Draw what of `timeline` touches `window` (seconds of its clock; None: all) into a PNG `path`.

    Makes the folder of `path`. Raises SettingsError for a window without length or without a span.
    """
    begin_s, end_s = window or timeline.extent()
    spans = [span for span in timeline if span.end_s > begin_s and span.start_s < end_s]
    if not end_s > begin_s or not spans:
        raise SettingsError(f"nothing to draw from {begin_s} s to {end_s} s: choose another window")
    rows = {group: _shown_rows(timeline, spans, group) for group in GROUPS}
    view = _View(begin_s, end_s, timeline.extent()[0], spans, rows)
    with mpl.rc_context(_STYLE):
        figure = _figure(view, _occupancy_in(timeline, view), title, subtitle)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=dpi, facecolor="white")


def _shown_rows(timeline: Timeline, spans: Sequence[Span], group: Group) -> list[str]:
    if group is COMPUTE:
        return [STEPS, EXPOSED_WAIT]
    touched = {span.row for span in spans if span.kind in group.kinds}
    return [row for row in timeline.rows(group) if row in touched]


def _occupancy_in(timeline: Timeline, view: _View) -> list[Occupancy]:
    """The samples that hold somewhere in the view: also the last one before it."""
    samples = [s for s in timeline.occupancy_samples if s.at_s < view.end_s]
    before = [index for index, sample in enumerate(samples) if sample.at_s <= view.begin_s]
    return samples[before[-1] if before else 0 :]


def _figure(view: _View, occupancy: Sequence[Occupancy], title: str, subtitle: str) -> Figure:
    unseen = len(view.rows[REQUESTS]) - _MOST_REQUEST_ROWS
    rows = dict(view.rows) | {REQUESTS: view.rows[REQUESTS][:_MOST_REQUEST_ROWS]}
    panels = [group for group in GROUPS if rows[group]]
    heights = [len(rows[group]) * _ROW_IN for group in panels]
    if occupancy:
        heights.append(_OCCUPANCY_IN)
    height_in = sum(heights) + _GAP_IN * (len(heights) - 1) + _TOP_IN + _BOTTOM_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    axes = _panels(figure, heights, height_in)
    for axis, group in zip(axes, panels, strict=False):
        _draw_group(axis, view, rows[group], group)
    if occupancy:
        _draw_occupancy(axes[-1], view, occupancy)
    for axis in axes:
        axis.set_xlim(view.begin_s, view.end_s)
        _bars(axis, view.of((Kind.WAIT,)), (0, 1), _COLOURS[Kind.WAIT], alpha=0.13, zorder=1,
              transform=axis.get_xaxis_transform())  # fmt: skip
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0, labelbottom=False)
    _time_axis(axes[-1], view)
    figure.text(_LEFT, 1 - 0.32 / height_in, title, size=14, weight="bold")
    figure.text(_LEFT, 1 - 0.57 / height_in, subtitle, size=9.5, color=_FAINT_INK)
    if unseen > 0:
        figure.text(_RIGHT, 0.45 / height_in, f"{unseen} more requests are not shown", ha="right",
                    size=8, color=_FAINT_INK)  # fmt: skip
    _legend(figure, view, height_in)
    return figure


def _panels(figure: Figure, heights: Sequence[float], height_in: float) -> list[Axes]:
    grid = figure.add_gridspec(
        len(heights), 1, height_ratios=heights, left=_LEFT, right=_RIGHT,
        top=1 - _TOP_IN / height_in, bottom=_BOTTOM_IN / height_in,
        hspace=_GAP_IN * len(heights) / sum(heights),
    )  # fmt: skip
    return [figure.add_subplot(grid[index]) for index in range(len(heights))]


def _draw_group(axis: Axes, view: _View, rows: Sequence[str], group: Group) -> None:
    if group is not COMPUTE:
        _bars(axis, view.of(_STEP_KINDS), (0, 1), _BAND, zorder=0,
              transform=axis.get_xaxis_transform())  # fmt: skip
    for position, row in enumerate(rows):
        spans = view.of(group.kinds, row)
        if group is LINK:
            spans = list(_merged(spans, 2 * view.pixel_s))
        edge = 0.6 if len(spans) < _PIXELS / 8 else 0.0
        for kind in group.kinds:
            _bars(axis, [s for s in spans if s.kind is kind], (position - 0.37, 0.74),
                  _COLOURS[kind], at_least_s=1.5 * view.pixel_s, edgecolor="white",
                  linewidth=edge, zorder=3)  # fmt: skip
        if group is LINK:
            _label_sizes(axis, view, spans, position)
        if group is REQUESTS:
            _underline_loads(axis, view, spans, position)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_yticks(range(len(rows)), rows)
    if group is COMPUTE:
        _name_waits(axis, bool(view.of((Kind.WAIT,))))


def _bars(
    axis: Axes,
    spans: Iterable[Span],
    at: tuple[float, float],
    colour: str,
    *,
    at_least_s: float = 0.0,
    **look: Any,
) -> None:
    """One bar for each span, `at` (lowest, height)."""
    bars = [(span.start_s, max(span.end_s - span.start_s, at_least_s)) for span in spans]
    if bars:
        axis.broken_barh(bars, at, **({"facecolor": colour, "linewidth": 0} | look))


def _name_waits(axis: Axes, exposed: bool) -> None:
    if exposed:
        axis.get_yticklabels()[-1].set_color(_COLOURS[Kind.WAIT])
    else:
        axis.text(0.004, 1, "none", transform=axis.get_yaxis_transform(), va="center", size=8,
                  color=_FAINT_INK)  # fmt: skip


def _underline_loads(axis: Axes, view: _View, requests: Sequence[Span], position: int) -> None:
    """Mark in a request's row when the transfers named in its details ran."""
    wanted: set[object] = set()
    for span in requests:
        named = span.details.get("transfers")
        wanted.update(named if isinstance(named, Iterable) else ())
    for kind in (Kind.PREFETCH, Kind.DEMAND):
        loads = [s for s in view.of((kind,)) if s.details.get("transfer") in wanted]
        _bars(axis, loads, (position + 0.15, 0.22), _COLOURS[kind], zorder=4)


def _merged(spans: Sequence[Span], nearer_s: float) -> Iterator[Span]:
    """`spans` of one lane, the windows of one transfer joined where they are nearer than this."""
    held: Span | None = None
    for span in sorted(spans, key=lambda span: span.start_s):
        if held is not None and _joins(held, span, nearer_s):
            size = _size(held) + _size(span)
            held = replace(held, end_s=span.end_s, details={**held.details, "bytes": size})
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held


def _joins(held: Span, span: Span, nearer_s: float) -> bool:
    return (
        span.kind is held.kind
        and span.details.get("transfer") == held.details.get("transfer")
        and span.start_s - held.end_s < nearer_s
    )


def _size(span: Span) -> int:
    size = span.details.get("bytes")
    return size if isinstance(size, int) else 0


def _label_sizes(axis: Axes, view: _View, spans: Sequence[Span], position: int) -> None:
    for span in spans:
        start_s, end_s = max(span.start_s, view.begin_s), min(span.end_s, view.end_s)
        if _size(span) and end_s - start_s > _LABEL_PIXELS * view.pixel_s:
            axis.text((start_s + end_s) / 2, position, f"{_size(span) / 2**20:.3g} MiB", size=7.5,
                      color="white", ha="center", va="center_baseline", zorder=5)  # fmt: skip


def _draw_occupancy(axis: Axes, view: _View, samples: Sequence[Occupancy]) -> None:
    tiers = dict.fromkeys(tier for sample in samples for tier in sample.blocks)
    times = [max(sample.at_s, view.begin_s) for sample in samples] + [view.end_s]
    for tier, colour in zip(tiers, _TIER_COLOURS, strict=False):
        blocks = [sample.blocks.get(tier, 0) for sample in samples]
        blocks.append(blocks[-1])
        axis.fill_between(times, blocks, step="post", color=colour, alpha=0.1, linewidth=0)
        axis.step(times, blocks, where="post", color=colour, linewidth=1.3, label=tier)
    axis.margins(y=0.25)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    axis.set_ylabel("blocks held", size=8, color=_FAINT_INK)
    axis.legend(loc="upper left", ncol=len(tiers), frameon=False, fontsize=8,
                borderaxespad=0.1, handlelength=1.4)  # fmt: skip


def _time_axis(axis: Axes, view: _View) -> None:
    in_ms = view.end_s - view.begin_s < 1.0
    scale = 1e3 if in_ms else 1.0
    first, last = ((at_s - view.origin_s) * scale for at_s in (view.begin_s, view.end_s))
    ticks = [at for at in MaxNLocator(nbins=10).tick_values(first, last) if first <= at <= last]
    axis.set_xticks([view.origin_s + at / scale for at in ticks], [f"{at:g}" for at in ticks])
    axis.tick_params(labelbottom=True, length=3, axis="x")
    axis.spines["bottom"].set_visible(True)
    axis.set_xlabel("milliseconds" if in_ms else "seconds", color=_FAINT_INK)


def _legend(figure: Figure, view: _View, height_in: float) -> None:
    present = {span.kind for span in view.spans}
    patches = [
        Patch(facecolor=_COLOURS[kind], label=name)
        for name, kind in _LEGEND.items()
        if kind in present
    ]
    patches.append(Patch(facecolor=_BAND, label="a step is running"))
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(_LEFT - 0.005, 0.02 / height_in),
        ncol=len(patches), frameon=False, fontsize=9, handlelength=1.2, handleheight=0.9,
        columnspacing=1.8,
    )  # fmt: skip
