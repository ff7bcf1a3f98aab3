"""`forebay bench`: see `forebay.bench`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import torch

from forebay.bench import on_cpu, overlap
from forebay.bench.goals import OVERLAP_GOALS, TRANSFER_GOALS, about_goals
from forebay.bench.overlap import OverlapPart, OverlapSettings, overlap_figures
from forebay.bench.rivals import side_by_side
from forebay.bench.transfer import TransferPart, TransferSettings, transfer_figures
from forebay.errors import SettingsError
from forebay.machine.sizes import parse_size
from forebay.measure.link import Backend, backend_here
from forebay.measure.report import Figure, Goal, finish

_Part = TypeVar("_Part", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Output:
    """Where the figures go beside the terminal, and whether a miss is an exit status."""

    json: Path | None
    picture: Path | None
    strict: bool


def run_transfer(parts: str, rounds: int, samples: int, spin_us: float, output: Output) -> int:
    """Measure, show, keep; the exit status. Raises what `told` tells."""
    settings = TransferSettings(
        rounds=_positive("rounds", rounds),
        samples=_positive("samples", samples),
        parts=parse_parts(TransferPart, parts),
        spin_s=1e-6 * spin_us,
    )
    backend = _begin(output, on_cpu.NOT_MEASURED)
    figures = transfer_figures(backend, settings)
    return _end("forebay bench transfer", figures, TRANSFER_GOALS, output)


def run_overlap(parts: str, rounds: int, pin_bytes: str, host_bytes: str, output: Output) -> int:
    """The same for what is beside compute; status 2 where there is no CUDA device."""
    settings = OverlapSettings(
        rounds=_positive("rounds", rounds),
        parts=parse_parts(OverlapPart, parts),
        pin_bytes=_positive("pin-bytes", parse_size(pin_bytes)),
        host_bytes=_positive("host-bytes", parse_size(host_bytes)),
    )
    backend = backend_here()
    if backend == "cpu":
        raise SettingsError(overlap.NOT_MEASURED)
    _begin(output, "")
    figures = overlap_figures(backend, settings)
    return _end("forebay bench overlap", figures, OVERLAP_GOALS, output)


def parse_parts(kind: type[_Part], text: str) -> tuple[_Part, ...]:
    """Parts separated by commas; all of them for "". Raises SettingsError."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    known = {part.value: part for part in kind}
    for word in words:
        if word not in known:
            raise SettingsError(f"{word!r} is no part; name any of {', '.join(known)}")
    return tuple(dict.fromkeys(known[word] for word in words)) or tuple(kind)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise SettingsError(f"{name} must be at least 1, not {value}")
    return value


def _begin(output: Output, on_cpu_only: str) -> Backend:
    """Everything that can be wrong, before minutes of work for nothing."""
    for path in (output.json, output.picture):
        if path is not None:
            _make(path.parent)
    if output.picture is not None:
        _check_matplotlib()
    backend = backend_here()
    if backend == "cpu":
        print(f"no CUDA device: {on_cpu_only}", file=sys.stderr)
    return backend


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be made: {error}; name another file") from error


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            "a picture needs matplotlib: install forebay[engine], or leave --picture out"
        )


def _end(command: str, figures: Sequence[Figure], goals: Mapping[str, Goal], output: Output) -> int:
    status = finish(figures, goals, json=output.json, strict=output.strict)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for line in (side_by_side(figures), about_goals([gpu] if gpu else [])):
        if line:
            print(f"\n{line}", flush=True)
    if output.picture is not None:
        from forebay.bench.picture import draw  # noqa: PLC0415

        draw(figures, goals, output.picture, title=command, subtitle=gpu or "on a CPU")
        print(f"drawn: {output.picture}", file=sys.stderr)
    return status
