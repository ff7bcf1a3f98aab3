"""Which release of Forebay is running."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The package's version; "0" in a source tree that is not installed."""
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "0"
