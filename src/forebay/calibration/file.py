"""The calibration as a file: JSON of one format, refused as a whole where anything is not as it was
written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from forebay.bounds import shown
from forebay.calibration.record import (
    Calibration,
    FragmentRate,
    LinkRates,
    Missing,
    ModelRates,
    WindowCost,
)
from forebay.errors import CalibrationError, SettingsError

FORMAT = 1
_MOST_BYTES = 1 << 20
_AGAIN = "run `forebay tune` again, or leave it out with --calibration none"
_LISTS: dict[str, type] = {
    "fragments": FragmentRate,
    "windows": WindowCost,
    "models": ModelRates,
    "missing": Missing,
}

_T = TypeVar("_T")


def calibration_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`forebay/calibration` below ``$XDG_STATE_HOME``, or ``~/.local/state``."""
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base / "forebay" / "calibration"


def calibration_file(machine: str, device: str) -> Path:
    """Where the calibration of this machine with this device is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine} {device}".lower()).strip("-")
    return calibration_folder() / f"{name[:150]}.json"


def write_calibration(calibration: Calibration, file: Path) -> None:
    """Write it whole or not at all, making its folder. Raises SettingsError."""
    said = {"format": FORMAT, **asdict(calibration)}
    del said["source"]
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise SettingsError(
            f"the calibration cannot be written to {file}: {error.strerror or error}; give "
            "another --out"
        ) from error


def read_calibration(file: Path) -> Calibration:
    """The calibration in `file`. Raises CalibrationError, saying what is wrong with it."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CalibrationError(
            f"the calibration {file} cannot be read: {error.strerror or error}; {_AGAIN}"
        ) from error
    try:
        if len(text) > _MOST_BYTES:
            raise CalibrationError(f"it has more than {_MOST_BYTES} bytes")
        return replace(_calibration(json.loads(text)), source=str(file))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{file} is no calibration: {error}; {_AGAIN}") from error


def _calibration(read: object) -> Calibration:
    said = _object(read, "it")
    form = said.pop("format", None)
    if form != FORMAT:
        raise CalibrationError(f"its format is {shown(form)}, and this version reads {FORMAT}")
    said["link"] = _made(LinkRates, said.get("link"), "link")
    for name, kind in _LISTS.items():
        listed = said.get(name)
        if not isinstance(listed, list):
            raise CalibrationError(f"{name} is no list")
        members = cast("list[object]", listed)
        made: list[object] = [_made(kind, e, f"{name}[{at}]") for at, e in enumerate(members)]
        said[name] = tuple(made)
    return _made(Calibration, said, "it")


def _object(read: object, where: str) -> dict[str, Any]:
    if not isinstance(read, dict):
        raise CalibrationError(f"{where} is no object")
    return cast("dict[str, Any]", read)


def _made(kind: type[_T], read: object, where: str) -> _T:
    """A value of a dataclass from an object with exactly its fields."""
    said = _object(read, where)
    known: dict[str, Any] = {each.name: each for each in fields(kind) if each.name != "source"}  # pyright: ignore[reportArgumentType]
    strange = sorted(set(said) - set(known))
    lacking = sorted(
        name for name, each in known.items() if name not in said and each.default is MISSING
    )
    if strange or lacking:
        what = f"has {shown(strange[0])}, which is not known" if strange else f"lacks {lacking[0]}"
        raise CalibrationError(f"{where} {what}")
    try:
        return kind(**said)
    except SettingsError as error:
        raise CalibrationError(f"{where}: {error}") from error
