"""`forebay tune`: see `forebay.tune`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from forebay.calibration.advice import advise
from forebay.calibration.file import read_calibration, write_calibration
from forebay.calibration.record import Calibration
from forebay.cli.values import parse_device, parse_dtype
from forebay.engine.calibrated import own_file
from forebay.engine.models import load_model
from forebay.engine.placement import choose_device
from forebay.errors import CalibrationError, SettingsError
from forebay.machine.memory import read_memory
from forebay.machine.tree import Tree
from forebay.tune.report import lines, table
from forebay.tune.run import tune


def run_tune(model: str, device: str, dtype: str, out: Path | None) -> None:
    """Measure, show, keep. Raises what `told` tells."""
    if out is not None and not out.parent.is_dir():
        raise SettingsError(f"there is no folder {out.parent}: make it, or give another --out")
    place = str(choose_device(parse_device(device)))
    progress, console = Console(stderr=True), Console()
    progress.print(f"loading {model}", highlight=False)
    loaded = load_model(model, parse_dtype(dtype), place)
    file = out or own_file(loaded.model.device)
    found = tune(loaded, begun=lambda part: progress.print(f"measuring: {part}", highlight=False))
    console.print(table(found))
    for line in lines(found, advise(found, found.models[0], read_memory(Tree()).room_bytes)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    write_calibration(_joined(found, file), file)
    how = "forebay serve" if out is None else f"forebay serve --calibration {shlex.quote(str(out))}"
    kept = f"kept in {file}; rates and window are read from there by: {how}"
    console.print(kept, soft_wrap=True, markup=False, highlight=False)


def _joined(found: Calibration, file: Path) -> Calibration:
    """With models that were measured earlier on the same machine and device."""
    try:
        earlier = read_calibration(file)
    except CalibrationError:
        return found
    same = (earlier.machine, earlier.device) == (found.machine, found.device)
    return found.with_models_of(earlier) if same else found
