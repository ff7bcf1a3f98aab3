"""What the arms of one machine start wrote, and what all figures are made of."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import SettingsError
from forebay.measure.report import Figure, Origin


@dataclass(frozen=True, slots=True)
class Start:
    """The arms of one machine start, by name, the link's rate in bytes a second, and where all
    was measured.
    """

    arms: dict[str, dict[str, Any]]
    link_bytes_per_s: float | None
    origin: Origin

    @classmethod
    def read(cls, folder: Path) -> Start:
        """What `batch` wrote to `folder`. Raises SettingsError if it is of several starts."""
        arms: dict[str, dict[str, Any]] = {}
        for file in sorted(folder.glob("*.json")):
            told = json.loads(file.read_text(encoding="utf-8"))
            if "arm" in told:
                arms[told["arm"]["name"]] = told
        starts = {told["machine_start"] for told in arms.values()}
        if len(starts) != 1:
            raise SettingsError(f"{folder} has results of {len(starts)} machine starts: keep one")
        link = folder / "link.json"
        rates = json.loads(link.read_text())["gb_per_s"] if link.exists() else []
        return cls(arms, max(rates) * 1e9 if rates else None, _origin(next(iter(arms.values()))))

    def raw(self, arm: str, workload: str) -> list[dict[str, Any]]:
        """The raw samples of a workload, by round."""
        return [
            sample["raw"]
            for sample in self.arms.get(arm, {}).get("samples", [])
            if sample["workload"] == workload
        ]

    def counted(self, arm: str, workload: str) -> list[dict[str, float]]:
        """What was counted meanwhile."""
        return [
            sample["counted"]
            for sample in self.arms.get(arm, {}).get("samples", [])
            if sample["workload"] == workload
        ]


def _origin(told: dict[str, Any]) -> Origin:
    command = shlex.join(["python", "benchmarks/inside_vllm", *told["command"][1:]])
    return Origin(command, told["commit"], told["machine"], told["versions"])


def ratio_figure(id: str, samples: Sequence[float], told: dict[str, Any]) -> Figure:
    """The median of ratios, a round each."""
    return Figure(id, statistics.median(samples), "ratio", tuple(samples), told)


def quantile(values: Sequence[float], q: float) -> float:
    """The value at `q` of the sorted ones."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
