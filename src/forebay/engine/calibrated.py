"""The calibration of this machine with one of its devices: where it is, and whether it is of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from forebay.calibration.file import calibration_file, read_calibration
from forebay.calibration.record import Calibration
from forebay.engine.placement import describe_device
from forebay.errors import CalibrationError
from forebay.machine.cpus import machine_name


def own_file(device: torch.device) -> Path:
    """Where `forebay tune` keeps what it measured here with this device."""
    return calibration_file(machine_name(), describe_device(device))


def find_calibration(wanted: str, device: torch.device) -> Calibration | None:
    """What `wanted` comes to: "auto" (this machine's own, if there is one), "none", or a file.

    Warns of a file of another machine or device, and of an own one that is damaged, which is left
    out. Raises CalibrationError for a damaged file that was named.
    """
    if wanted == "none":
        return None
    file = own_file(device) if wanted == "auto" else Path(wanted)
    if wanted == "auto" and not file.exists():
        return None
    try:
        found = read_calibration(file)
    except CalibrationError as error:
        if wanted != "auto":
            raise
        warnings.warn(f"{error}; this start measures instead", stacklevel=2)
        return None
    here = machine_name(), describe_device(device)
    if (found.machine, found.device) != here:
        warnings.warn(
            f"{file} was measured on {found.machine} with {found.device}, and this is {here[0]} "
            f"with {here[1]}: its rates may be wrong here; run `forebay tune`",
            stacklevel=2,
        )
    return found
