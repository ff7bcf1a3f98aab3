from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transfer_rig import MakeRig, Rig


@pytest.fixture(params=["cpu", "sim", "process"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[MakeRig]:
    """Makes rigs of one kind; closes them."""
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        if request.param == "sim":
            settings = {"backend": "sim", "seed": 3, "longest_delay_s": 1e-4} | settings
        rig = Rig("process" if request.param == "process" else "native", **settings)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()
