"""What every benchmark prints and writes: figures, the goal of each, and where they were measured.

A benchmark builds a list of `Figure`, each id once, and hands it to `finish`, which prints a table
and, where a file is given, writes the same figures for a machine to read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from forebay.machine.cpus import affinity, processor_name
from forebay.machine.driver import read_driver

COMMIT_VARIABLE = "FOREBAY_COMMIT"
"""Names the commit where the code that is measured does not lie in its repository."""

_PACKAGES = ("forebay", "numpy", "torch", "transformers", "nanobind", "triton")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    `value` is what is compared with the goal, in `unit` ("ratio" has no dimension); `samples` are
    the rounds it was taken from, in the same unit; `settings` say what was measured (sizes, seed,
    threads, method) in plain JSON values.
    """

    id: str
    value: float
    unit: str
    samples: Sequence[float] = ()
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound a figure has to keep: `at_most` (smaller is better) or `at_least`."""

    at_most: float | None = None
    at_least: float | None = None

    def met_by(self, value: float) -> bool:
        """Whether `value` lies within the bound; a NaN never does."""
        if self.at_most is not None and not value <= self.at_most:
            return False
        return self.at_least is None or value >= self.at_least

    def __str__(self) -> str:
        bounds: list[str] = []
        if self.at_most is not None:
            bounds.append(f"<= {self.at_most:,g}")
        if self.at_least is not None:
            bounds.append(f">= {self.at_least:,g}")
        return " and ".join(bounds)


def median_figure(
    id: str, samples: Sequence[float], unit: str, settings: Mapping[str, object]
) -> Figure:
    """The figure whose value is the median of `samples`."""
    return Figure(id, statistics.median(samples), unit, tuple(samples), settings)


def arguments(
    description: str, extra: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """The parser that all benchmarks share; `extra` (made with `add_help=False`) adds their own."""
    parser = argparse.ArgumentParser(description=description, parents=[extra] if extra else [])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here as JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit with status 1 when a figure misses its goal"
    )
    return parser


def machine() -> dict[str, object]:
    """The processor, its cores that this process may use, memory, system, driver and GPUs."""
    driver = read_driver()
    return {
        "processor": processor_name(),
        "cores": len(affinity()),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": list(os.getloadavg()),
        "driver": None if driver.version is None else ".".join(map(str, driver.version)),
        "kernel_module": _kernel_module(),
        "gpus": [device.name for device in driver.devices],
    }


def _kernel_module() -> str | None:
    """The release of NVIDIA's driver, like 580.95.05."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Python's version and that of each package that shapes a figure, where it is installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit measured: that of `COMMIT_VARIABLE`, or of the repository that this file is in.

    "+changes" is added when its working tree differs; "unknown" outside git.
    """
    named = os.environ.get(COMMIT_VARIABLE, "")
    if named:
        return named
    root = Path(__file__).resolve().parents[3]
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git(root, "status", "--porcelain") else "")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where figures are from: the command that measured, the commit, the machine, the versions."""

    command: str
    commit: str
    machine: Mapping[str, object]
    versions: Mapping[str, str]

    @classmethod
    def here(cls) -> Origin:
        """This process."""
        return cls(_command(), commit(), machine(), versions())


def document(figures: Sequence[Figure], origin: Origin | None = None) -> dict[str, object]:
    """The JSON document of `figures`, measured at `origin`, by default here.

    Raises ValueError when an id appears twice.
    """
    ids = [figure.id for figure in figures]
    if len(set(ids)) != len(ids):
        raise ValueError(f"each figure id may appear once, got {ids}")
    origin = origin or Origin.here()
    return {
        "command": origin.command,
        "commit": origin.commit,
        "machine": dict(origin.machine),
        "versions": dict(origin.versions),
        "figures": [
            {
                "id": figure.id,
                "value": float(figure.value),
                "unit": figure.unit,
                "settings": dict(figure.settings),
                "samples": [_short(sample) for sample in figure.samples],
            }
            for figure in figures
        ],
    }


def write(figures: Sequence[Figure], path: Path | str, origin: Origin | None = None) -> None:
    """Write `figures` and where they were measured to `path`, a line each, making its folder."""
    told = document(figures, origin)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in cast("list[object]", told["figures"]))
    lines = [
        f"  {json.dumps(name)}: {json.dumps(told[name])}" for name in told if name != "figures"
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join([*lines, f'  "figures": [\n{rows}\n  ]'])
    path.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")


def read(path: Path | str) -> list[Figure]:
    """The figures that `write` wrote to `path`."""
    told = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Figure(**each) for each in told["figures"]]


def table(figures: Sequence[Figure], goals: Mapping[str, Goal]) -> str:
    """The figures as aligned text; one without a goal has an empty verdict."""
    rows = [("figure", "value", "unit", "spread", "goal", "")]
    for figure in figures:
        goal = goals.get(figure.id)
        verdict = "" if goal is None else "pass" if goal.met_by(figure.value) else "MISS"
        rows.append(
            (
                figure.id,
                f"{figure.value:,.4g}" if abs(figure.value) < 1000 else f"{figure.value:,.0f}",
                figure.unit,
                _spread(figure.samples),
                "" if goal is None else str(goal),
                verdict,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def finish(
    figures: Sequence[Figure],
    goals: Mapping[str, Goal],
    *,
    json: Path | None,
    strict: bool,
    origin: Origin | None = None,
) -> int:
    """Print the table, write it to `json` if given; 1 where a goal is missed and `strict`, or 0."""
    print(table(figures, goals), flush=True)
    if json is not None:
        write(figures, json, origin)
        print(f"written: {json}", file=sys.stderr)
    missed = [f.id for f in figures if f.id in goals and not goals[f.id].met_by(f.value)]
    return 1 if missed and strict else 0


def _command() -> str:
    """As it would be typed again, without the folders of this machine."""
    name = Path(sys.argv[0]).name
    return shlex.join(["forebay" if name == "__main__.py" else name, *sys.argv[1:]])


def _short(sample: float) -> float:
    """Five digits: more than any clock here tells, at half the length."""
    return float(f"{sample:.5g}")


def _spread(samples: Sequence[float]) -> str:
    if len(samples) < 2:
        return ""
    return f"{min(samples):.4g} .. {max(samples):.4g} ({len(samples)})"


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
