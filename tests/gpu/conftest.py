"""Tests that need a CUDA device; without one each is skipped, saying so."""

from __future__ import annotations

import pytest

from forebay.errors import SettingsError
from forebay.transfer.pinned import cuda_devices


def _why_not() -> str:
    try:
        return "" if cuda_devices() else "the driver sees no CUDA device"
    except SettingsError as error:
        return str(error)


def pytest_collection_modifyitems(items):
    why = _why_not()
    if why:
        for item in items:
            if "gpu" in item.path.parent.name:
                item.add_marker(pytest.mark.skip(reason=why))
