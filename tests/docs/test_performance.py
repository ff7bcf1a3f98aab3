"""The page of figures shows what the kept results say, whether or not they met their goals."""

from __future__ import annotations

from pages import ROOT, page, rows
from typer.main import get_command

from forebay.bench.goals import OVERLAP_GOALS, TRANSFER_GOALS
from forebay.cli import app
from forebay.measure.report import Figure, read

RESULTS = ROOT / "benchmarks" / "results" / "h200-16-cores"
GOALS = TRANSFER_GOALS | OVERLAP_GOALS


def kept() -> dict[str, Figure]:
    figures = [f for file in sorted(RESULTS.glob("bench_*.json")) for f in read(file)]
    found = {figure.id: figure for figure in figures}
    assert len(found) == len(figures)
    return found


def test_figures_with_a_goal_are_all_shown_as_they_were_measured():
    listed = {row[0].strip("`"): row[1:] for row in rows(page("performance.md")) if len(row) == 5}
    listed = {name: rest for name, rest in listed.items() if name in GOALS}
    measured = {name: figure for name, figure in kept().items() if name in GOALS}
    assert set(listed) == set(measured)
    for name, (_, value, goal, verdict) in listed.items():
        figure = measured[name]
        unit = "" if figure.unit in ("ratio", "yes or no") else f" {figure.unit}"
        assert value == f"{figure.value:.3g}{unit}", name
        assert goal.replace(",", "") == str(GOALS[name]).replace(",", ""), name
        assert verdict == ("met" if GOALS[name].met_by(figure.value) else "**missed**"), name


def test_every_option_of_the_benchmarks_is_listed():
    group = get_command(app).commands["bench"]  # pyright: ignore[reportAttributeAccessIssue]
    there: dict[str, set[str]] = {}
    for name, command in group.commands.items():
        for param in command.params:
            there.setdefault(param.opts[0], set()).add(name)
    there.pop("--help", None)
    listed = {
        row[0].strip("`"): {"transfer", "overlap"} if row[1] == "both" else {row[1]}
        for row in rows(page("performance.md"))
        if row[0].startswith("`--")
    }
    assert listed == there
