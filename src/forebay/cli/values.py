"""Values as a user writes them on the command line."""

from __future__ import annotations

from forebay.bounds import chosen
from forebay.core.modes import MODE, Mode
from forebay.engine.settings import DEVICE, DType
from forebay.errors import SettingsError


def parse_mode(text: str) -> Mode:
    """A mode that this build has. Raises SettingsError."""
    return MODE("mode", text.strip().lower())


def parse_device(text: str) -> str:
    """ "auto", "cpu", "cuda" or "cuda:N". Raises SettingsError."""
    return DEVICE("device", text.strip().lower())


def parse_dtype(text: str) -> DType:
    """The numbers to compute with. Raises SettingsError."""
    return chosen(DType, "dtype", text.strip().lower())


def parse_modes(text: str) -> list[Mode]:
    """Different modes, separated by commas. Raises SettingsError."""
    modes = [parse_mode(part) for part in text.split(",") if part.strip()]
    if not modes or len(set(modes)) != len(modes):
        raise SettingsError(f"{text!r}: name at least one mode, and each once, like b0,b1,b4")
    return modes
