"""Values as a user writes them on the command line."""

from __future__ import annotations

import re

from forebay.core.modes import Mode, policy_of
from forebay.errors import SettingsError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_BY_NAME = {name.upper(): factor for name, factor in _UNITS.items()}


def parse_size(text: str) -> int:
    """Bytes of a size such as 1GiB, 1.5 GB, 512MiB or 4096. Raises SettingsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BY_NAME.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise SettingsError(f"{text!r} is no size; write it like 1GiB, 512MiB, 2GB or 4096")
    return int(float(match[1]) * factor)


def parse_mode(text: str) -> Mode:
    """A mode that this build has. Raises SettingsError."""
    name = text.strip().lower()
    if name not in set(Mode):
        known = ", ".join(f"{mode.value} ({mode.name.lower()})" for mode in Mode)
        raise SettingsError(f"{text!r} is no mode; the modes are {known}")
    mode = Mode(name)
    policy_of(mode)
    return mode


def parse_modes(text: str) -> list[Mode]:
    """Different modes, separated by commas. Raises SettingsError."""
    modes = [parse_mode(part) for part in text.split(",") if part.strip()]
    if not modes or len(set(modes)) != len(modes):
        raise SettingsError(f"{text!r}: name at least one mode, and each once, like b0,b1,b4")
    return modes
