"""`forebay bench`: what it measures without a GPU, what it says, and what it draws."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from forebay.bench.goals import AXES, LEADS_MS, OVERLAP_GOALS, TRANSFER_GOALS
from forebay.bench.overlap import OverlapPart
from forebay.bench.picture import draw
from forebay.bench.transfer import TransferPart
from forebay.cli import app
from forebay.cli.bench import parse_parts
from forebay.errors import SettingsError
from forebay.measure.report import Figure

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(each) for each in arguments)])


def test_help_names_both_benchmarks_and_their_options():
    shown = run("--help").output
    assert "transfer" in shown
    assert "overlap" in shown
    for name in ("transfer", "overlap"):
        options = CliRunner().invoke(app, ["bench", name, "--help"], env={"COLUMNS": "200"}).output
        for option in ("--parts", "--rounds", "--json", "--picture", "--strict"):
            assert option in options


def test_parts_are_named_in_any_order_once_each():
    assert parse_parts(TransferPart, " calls,cache, calls") == (
        TransferPart.CALLS,
        TransferPart.CACHE,
    )
    assert parse_parts(OverlapPart, "") == tuple(OverlapPart)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("transfer", "--parts", "speed"), "'speed' is no part; name any of cache"),
        (("transfer", "--rounds", "0"), "rounds must be at least 1"),
        (("transfer", "--json", "/dev/null/out/x.json"), "/dev/null/out cannot be made"),
        (("overlap", "--pin-bytes", "much"), "no size"),
        (("overlap", "--host-bytes", "0"), "host-bytes must be at least 1"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(arguments: tuple[str, ...], said: str):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_overlap_says_that_it_needs_a_gpu():
    done = run("overlap")
    assert done.exit_code == 2
    assert "CUDA device" in done.stderr


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    done = run("transfer", "--picture", tmp_path / "x.png")
    assert done.exit_code == 2
    assert "needs matplotlib" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_transfer_on_a_cpu_measures_what_it_can_and_says_what_it_cannot(tmp_path: Path):
    done = run(
        "transfer", "--rounds", 1, "--json", tmp_path / "t.json", "--picture", tmp_path / "t.png"
    )
    assert done.exit_code == 0, done.output
    assert "foreign copies and rivals need a CUDA device" in done.stderr
    told = json.loads((tmp_path / "t.json").read_text())
    ids = [figure["id"] for figure in told["figures"]]
    assert ids == [
        "arbiter_vs_memcpy",
        "cached_vs_mover",
        "urgent_wait_windows",
        "submit_us_2048_blocks",
    ]
    assert all(figure["samples"] for figure in told["figures"])
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)
    for id_ in ids:
        assert id_ in done.stdout


def spread(around: float, count: int = 200) -> list[float]:
    return (around * np.random.default_rng(3).lognormal(0.0, 0.2, count)).tolist()


def transfer_samples() -> list[Figure]:
    figures = [
        Figure("h2d_2mib_8", 0.97, "ratio", spread(0.97, 7)),
        Figure("both_ways", 0.90, "ratio", spread(0.9, 7)),
        Figure("foreign_p99_8_us", 300.0, "us", spread(150.0)),
        Figure("foreign_p99_4_us", 150.0, "us", spread(80.0)),
    ]
    for layout in ("64k", "2m"):
        for name, factor in {"forebay": 1.0, "copy_loop": 0.3, "fifo_batch": 40.0}.items():
            values = (50.0 * min(factor, 1.1), 300.0 * factor, 0.5)
            figures += [
                Figure(f"rival_{layout}_{name}_{axis}", value, "", spread(value, 5))
                for axis, value in zip(AXES, values, strict=True)
            ]
    return figures


def overlap_samples() -> list[Figure]:
    figures: list[Figure] = []
    for case in ("load", "both"):
        settings = {"alone_ms": spread(3.0), "beside_ms": spread(3.1)}
        figures.append(Figure(f"decode_inflation_{case}", 1.03, "ratio", spread(1.03, 7), settings))
    for lead in LEADS_MS:
        settings = {
            "needed_ms": 12.5,
            "led_samples_ms": [float(lead)] * 7,
            "exposed_samples_ms": spread(max(0.1, 12.6 - lead), 7),
        }
        figures.append(Figure(f"textbook_excess_{lead}_ms", 0.1, "ms", spread(0.1, 7), settings))
    figures.append(Figure("launch_delay_2mib_us", 5.0, "us", spread(9.0)))
    return figures


@pytest.mark.parametrize(
    ("figures", "goals", "panels"),
    [(transfer_samples(), TRANSFER_GOALS, 3), (overlap_samples(), OVERLAP_GOALS, 4)],
    ids=["transfer", "overlap"],
)
def test_a_fixed_set_of_samples_is_drawn_alike_each_time(
    figures: list[Figure], goals: Any, panels: int, tmp_path: Path
):
    made: list[bytes] = []
    for name in ("one.png", "two.png"):
        draw(figures, goals, tmp_path / "new" / name, title="t", subtitle="s")
        made.append((tmp_path / "new" / name).read_bytes())
    assert made[0] == made[1]
    assert made[0].startswith(PNG)
    width, height = (int.from_bytes(made[0][at : at + 4]) for at in (16, 20))
    assert width > 1000
    assert height > 200 * panels
    draw(figures[:1], goals, tmp_path / "less.png", title="t", subtitle="s")
    less = (tmp_path / "less.png").read_bytes()
    assert int.from_bytes(less[20:24]) < height


def test_nothing_to_draw_is_an_error(tmp_path: Path):
    with pytest.raises(SettingsError, match="measure more parts"):
        draw([Figure("arbiter_cores", 1.0, "cores")], {}, tmp_path / "x.png", title="", subtitle="")
    assert not (tmp_path / "x.png").exists()
