"""Figures: their verdicts, their table, and what is kept of them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from forebay.measure import report
from forebay.measure.report import (
    Figure,
    Goal,
    Origin,
    document,
    finish,
    median_figure,
    read,
    table,
    write,
)

GOALS = {"slow": Goal(at_most=1.0), "quick": Goal(at_least=0.9)}


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "machine", lambda: {"gpus": []})


def test_a_goal_is_met_within_its_bounds_and_never_by_what_is_no_number():
    assert Goal(at_most=1.0).met_by(1.0)
    assert not Goal(at_most=1.0).met_by(1.01)
    assert not Goal(at_least=1.0).met_by(0.99)
    assert Goal(at_least=1.0, at_most=2.0).met_by(1.5)
    for goal in (Goal(at_most=1.0), Goal(at_least=1.0)):
        assert not goal.met_by(math.nan)


def test_the_table_says_what_missed():
    figures = [
        median_figure("slow", [1.0, 3.0, 2.0], "ms", {}),
        Figure("quick", 0.95, "ratio"),
        Figure("free", 12345.6, "us"),
    ]
    lines = table(figures, GOALS).splitlines()
    assert lines[2].split() == ["slow", "2", "ms", "1", "..", "3", "(3)", "<=", "1", "MISS"]
    assert lines[3].split()[-1] == "pass"
    assert lines[4].split() == ["free", "12,346", "us"]


def test_what_is_written_can_be_read_and_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(report.COMMIT_VARIABLE, "abc123")
    monkeypatch.setattr(sys, "argv", ["/somewhere/forebay/__main__.py", "bench", "a file"])
    figures = [Figure("slow", 2.0, "ms", (1.0, 1 / 3), {"window_mib": 8})]
    write(figures, tmp_path / "new" / "out.json")
    told = json.loads((tmp_path / "new" / "out.json").read_text())
    assert told["commit"] == "abc123"
    assert told["command"] == "forebay bench 'a file'"
    assert told["versions"]["python"]
    assert told["machine"] == {"gpus": []}
    back = read(tmp_path / "new" / "out.json")
    assert [(f.id, f.value, f.settings) for f in back] == [("slow", 2.0, {"window_mib": 8})]
    assert list(back[0].samples) == [1.0, 0.33333]


def test_figures_of_another_machine_say_so(tmp_path: Path):
    origin = Origin("python there", "abc123", {"gpus": ["one"]}, {"vllm": "0.26.0"})
    finish([Figure("slow", 2.0, "ms")], GOALS, json=tmp_path / "x", strict=False, origin=origin)
    told = json.loads((tmp_path / "x").read_text())
    assert Origin(*(told[part] for part in ("command", "commit", "machine", "versions"))) == origin


def test_an_id_may_not_come_twice():
    with pytest.raises(ValueError, match="once"):
        document([Figure("slow", 1.0, "ms"), Figure("slow", 2.0, "ms")])


def test_results_that_are_kept_can_be_read():
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    # A calibration has a form and a reader of its own, and so have the raw samples of vLLM's arms.
    others = {*results.rglob("calibration.json"), *results.glob("*/vllm/*/*.json")}
    files = sorted({*results.rglob("*.json")} - others)
    assert files
    for file in files:
        assert read(file), file


@pytest.mark.parametrize(
    ("value", "strict", "status"), [(2.0, True, 1), (2.0, False, 0), (1.0, True, 0)]
)
def test_a_miss_is_a_status_where_that_is_asked_for(value: float, strict: bool, status: int):
    assert finish([Figure("slow", value, "ms")], GOALS, json=None, strict=strict) == status
