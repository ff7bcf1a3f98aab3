"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

from forebay.errors import SettingsError

_BINARY = {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_DECIMAL = {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_FACTORS = {"": 1, "B": 1, **_BINARY, **_DECIMAL}
_BY_NAME = {name.upper(): factor for name, factor in _FACTORS.items()}


def parse_size(text: str) -> int:
    """Bytes of a size such as 1GiB, 1.5 GB, 512MiB or 4096. Raises SettingsError."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BY_NAME.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise SettingsError(f"{text!r} is no size; write it like 1GiB, 512MiB, 2GB or 4096")
    return int(float(match[1]) * factor)


def show_size(size_bytes: float) -> str:
    """The same the other way round: "64 GiB", "1.5 MiB", "12 bytes"."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        factor = _BINARY[name]
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f}".removesuffix(".0") + f" {name}"
    return f"{size_bytes:,.0f} bytes"
