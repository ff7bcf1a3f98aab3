"""Which release of Forebay is running, and how the rest of it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

INSTALL_SERVER = "pip install '.[server]' in the source tree"
"""Brings the packages that the command line and the server need, and the core does not."""


def installed_version() -> str:
    """The package's version; "0" in a source tree that is not installed."""
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "0"
