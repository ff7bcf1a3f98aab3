"""What came out: one table, whether all modes gave the same answers, and the timelines as files.

Modes compute the same sums in another order, so a token may differ where the two best logits are
nearly equal. Such a near-tie is counted and named; any other difference is an error of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from forebay.core.ledger import PrefetchOutcome, Source
from forebay.core.modes import Mode, policy_of
from forebay.demo.client import Answer
from forebay.demo.run import ModeResult
from forebay.demo.workload import Turn
from forebay.timeline.record import Kind, Timeline
from forebay.timeline.trace import write_trace

NEAR_TIE = 1e-3
"""Two logits nearer than this may change places when float32 sums are taken in another order."""

_Cell = Callable[[ModeResult], str]

NAMES = {
    Mode.RECOMPUTE: "recompute",
    Mode.SYNCHRONOUS: "synchronous load",
    Mode.ASYNCHRONOUS: "asynchronous load",
    Mode.LOOK_AHEAD: "look-ahead",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the reference's; `gap` is the larger of the two."""

    mode: Mode
    turn: Turn
    position: int
    expected: str
    found: str
    gap: float

    @property
    def near_tie(self) -> bool:
        """Whether another order of summation explains it."""
        return self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the demonstration shows what it should."""

    answers: int
    modes: int
    near_ties: tuple[Difference, ...]
    errors: tuple[Difference, ...]
    problems: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0 if all answers agree and look-ahead did its work, else 1."""
        return 1 if self.errors or self.problems else 0

    def lines(self) -> list[str]:
        """The verdict in words."""
        if self.modes < 2:
            lines = ["one mode alone: there is nothing to compare its answers with"]
        elif self.errors:
            lines = [f"DIFFERENT ANSWERS: {len(self.errors)} in {self.modes} modes"]
        else:
            lines = [f"same answers: all {self.modes} modes gave the same {self.answers} answers"]
            if self.near_ties:
                lines[0] += f", but for {len(self.near_ties)} near-ties (two best logits < 0.001)"
        for title, found in (("near-tie", self.near_ties), ("error", self.errors)):
            lines += [f"  {title}: {_named(each)}" for each in found]
        return lines + [f"PROBLEM: {problem}" for problem in self.problems]


def judge(results: Sequence[ModeResult]) -> Verdict:
    """Compare every mode with the first, and look at what look-ahead did."""
    found = [each for other in results[1:] for each in _differences(results[0], other)]
    return Verdict(
        answers=len(results[0].answers),
        modes=len(results),
        near_ties=tuple(each for each in found if each.near_tie),
        errors=tuple(each for each in found if not each.near_tie),
        problems=tuple(problem for result in results for problem in _problems(result)),
    )


def first_difference(expected: Answer, found: Answer) -> int | None:
    """The first token at which two answers differ; None if they are equal.

    Beyond the last token of the shorter one if only the length or the whole text differs: a token
    with a part of a character has no text of its own.
    """
    pairs = zip(expected.tokens, found.tokens, strict=False)
    for position, (left, right) in enumerate(pairs):
        if left != right:
            return position
    same = len(expected.tokens) == len(found.tokens) and expected.text == found.text
    return None if same else min(len(expected.tokens), len(found.tokens))


def _differences(reference: ModeResult, other: ModeResult) -> list[Difference]:
    found: list[Difference] = []
    for turn, expected in sorted(reference.answers.items()):
        answer = other.answers[turn]
        at = first_difference(expected, answer)
        if at is None:
            continue
        if at < min(len(expected.tokens), len(answer.tokens)):
            gap = max(expected.gaps[at], answer.gaps[at])
            tokens = expected.tokens[at], answer.tokens[at]
        else:
            gap, tokens = float("inf"), (expected.text, answer.text)
        found.append(Difference(other.mode, turn, at, *tokens, gap))
    return found


def _problems(result: ModeResult) -> list[str]:
    if not policy_of(result.mode).look_ahead:
        return []
    problems: list[str] = []
    if not result.stats.prefetch_bytes[PrefetchOutcome.USED]:
        problems.append(f"{result.mode.value} used no prefetched bytes")
    hidden = result.hidden_share
    if hidden is None or hidden <= 0:
        problems.append(f"{result.mode.value} hid nothing of its loads")
    return problems


def _named(each: Difference) -> str:
    if each.gap == float("inf"):
        return f"{each.turn}: {each.mode.value} said {each.found!r} instead of {each.expected!r}"
    return (
        f"{each.turn}, token {each.position + 1}: {each.mode.value} chose {each.found!r} instead "
        f"of {each.expected!r} (gap {each.gap:.2g})"
    )


# -- the table ---------------------------------------------------------------------------------


def table(results: Sequence[ModeResult]) -> Table:
    """One column for each mode."""
    turns = list(results[0].answers)
    users = len({turn.user for turn in turns})
    shown = Table(title=f"{len(turns)} answers to {users} users", title_justify="left")
    shown.add_column("")
    shown.add_column("")
    for result in results:
        shown.add_column(f"{result.mode.value}\n{NAMES[result.mode]}", justify="right")
    for title, rows in _ROWS.items():
        for name, cell in rows.items():
            first = title if name == next(iter(rows)) else ""
            shown.add_row(first, name, *(cell(result) for result in results))
        shown.add_section()
    return shown


def _ttft(percent: int) -> _Cell:
    def cell(result: ModeResult) -> str:
        times = [answer.ttft_s for answer in result.answers.values()]
        return f"{np.percentile(times, percent):.2f}"

    return cell


def _tokens(source: Source) -> _Cell:
    def cell(result: ModeResult) -> str:
        return f"{sum(a.tokens_by_source[source] for a in result.answers.values()):,}"

    return cell


def _prefetched(outcome: PrefetchOutcome) -> _Cell:
    def cell(result: ModeResult) -> str:
        ahead = policy_of(result.mode).look_ahead
        return _mb(result.stats.prefetch_bytes[outcome]) if ahead else "-"

    return cell


def _hidden(result: ModeResult) -> str:
    hidden = result.hidden_share
    return "-" if hidden is None else f"{hidden:.0%}"


def _seconds(time_s: float) -> str:
    """With more digits below a tenth of a second, as on a GPU."""
    return f"{time_s:.4f}" if 5e-5 <= time_s < 0.1 else f"{time_s:.2f}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f}"


_ROWS: dict[str, dict[str, _Cell]] = {
    "TTFT, s": {"p50": _ttft(50), "p95": _ttft(95)},
    "prompt tokens": {
        "on the device": _tokens(Source.DEVICE),
        "loaded": _tokens(Source.HOST),
        "recomputed": _tokens(Source.RECOMPUTED),
    },
    "MB moved": {
        "loaded": lambda result: _mb(result.stats.loaded_bytes),
        "saved": lambda result: _mb(result.stats.saved_bytes),
    },
    "loads, s": {
        "link busy": lambda result: _seconds(result.stats.load_s),
        "steps held back": lambda result: _seconds(result.stall_s),
        "hidden share": _hidden,
    },
    "MB prefetched": {
        "used": _prefetched(PrefetchOutcome.USED),
        "late": _prefetched(PrefetchOutcome.LATE),
        "wasted": _prefetched(PrefetchOutcome.WASTED),
    },
    "wall time, s": {"": lambda result: f"{result.wall_s:.1f}"},
}


# -- files -------------------------------------------------------------------------------------


def write_timelines(results: Sequence[ModeResult], out: Path, window_s: float) -> list[str]:
    """Write trace and picture of each mode that loads; returns a sentence for each picture.

    The picture of look-ahead is timeline.png, others have the mode in their name. A picture shows
    the `window_s` in which the most was loaded under decode steps.
    """
    from forebay.timeline.picture import draw  # noqa: PLC0415 (matplotlib is slow to import)

    lines: list[str] = []
    for result in results:
        if not result.stats.loaded_bytes:
            continue
        mode, ahead = result.mode.value, policy_of(result.mode).look_ahead
        trace = out / f"timeline-{mode}.json"
        picture = out / ("timeline.png" if ahead else f"timeline-{mode}.png")
        window = _most_telling(result.timeline, window_s)
        seen = _seen(result.timeline, window)
        write_trace(result.timeline, trace)
        draw(
            result.timeline,
            picture,
            window,
            title=_TITLE_AHEAD if ahead else _TITLE,
            subtitle=f"{mode}, {NAMES[result.mode]}: {seen}",
        )
        lines.append(f"{picture}: {seen} (the whole of {mode}: {trace})")
    if lines:
        lines.append(_HOW_TO_OPEN)
    return lines


_HOW_TO_OPEN = (
    "To look at a whole timeline: open https://ui.perfetto.dev in a browser, and drop its .json "
    "file into the page. It stays on this machine."
)


_TITLE_AHEAD = "Loads run under the steps of other requests"
_TITLE = "Loads begin when it is their request's turn"


def _most_telling(timeline: Timeline, duration_s: float) -> tuple[float, float]:
    """The window of this length in which prefetches overlap decode steps the most."""
    begin_s, end_s = timeline.extent()
    decodes = [(s.start_s, s.end_s) for s in timeline if s.kind is Kind.DECODE_STEP]
    copies = sorted((s.start_s, s.end_s) for s in timeline if s.kind is Kind.PREFETCH)
    if not copies or not decodes or end_s - begin_s <= duration_s:
        return timeline.busiest(duration_s)
    edges = np.array(sorted(decodes)).ravel()
    lengths = np.diff(edges, prepend=edges[0])
    lengths[::2] = 0.0  # between two decode steps
    under = np.diff(np.interp(np.array(copies), edges, np.cumsum(lengths)), axis=1).ravel()
    starts = np.array([start for start, _ in copies])
    sums = np.concatenate(([0.0], np.cumsum(under)))
    until = np.searchsorted(starts, starts + 0.9 * duration_s)
    best = float(starts[np.argmax(sums[until] - sums[:-1])])
    first_s = max(begin_s, min(best - 0.05 * duration_s, end_s - duration_s))
    return first_s, first_s + duration_s


def _seen(timeline: Timeline, window: tuple[float, float]) -> str:
    begin_s, end_s = window
    spans = [s for s in timeline if s.start_s < end_s and s.end_s > begin_s]
    loads = [s for s in spans if s.kind in (Kind.PREFETCH, Kind.DEMAND)]
    loaded = sum(int(str(span.details["bytes"])) for span in loads)
    held_s = sum(
        min(s.end_s, end_s) - max(s.start_s, begin_s) for s in spans if s.kind is Kind.WAIT
    )
    held = f"steps are held back for {held_s:.2f} s" if held_s >= 0.005 else "no step is held back"
    return f"in {end_s - begin_s:.2g} s {_mb(loaded)} MB are loaded, and {held}"
