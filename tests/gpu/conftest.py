"""Tests that need a CUDA device; without one each is skipped, saying so."""

from __future__ import annotations

import pytest
from gpu_rig import GpuRig

from forebay.errors import SettingsError
from forebay.transfer.pinned import cuda_devices


def _why_not() -> str:
    try:
        return "" if cuda_devices() else "the driver sees no CUDA device"
    except SettingsError as error:
        return str(error)


@pytest.fixture
def make_rig():
    made: list[GpuRig] = []

    def make(**settings):
        made.append(GpuRig(**settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def pytest_collection_modifyitems(items):
    why = _why_not()
    if why:
        for item in items:
            if "gpu" in item.path.parent.name:
                item.add_marker(pytest.mark.skip(reason=why))
