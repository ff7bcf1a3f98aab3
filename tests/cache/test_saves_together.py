"""What is computed in small runs is saved together: each block once, ancestors first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from computed_paths import KEY_BYTES, ComputedPaths

from forebay.cache import saves as module
from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.config import CacheSettings
from forebay.core.store import Store
from forebay.transfer.messages import Transfer

BLOCK_BYTES, SLOTS = 1 << 20, 64


class Sent:
    """A mover that takes note of what it is given."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.transfers += transfers


class Computed:
    """Saves over a store that computes paths."""

    def __init__(self) -> None:
        settings = CacheSettings(
            block_tokens=16, block_bytes=BLOCK_BYTES, device_slots=SLOTS, host_slots=SLOTS
        )
        self.store = Store(KEY_BYTES, SLOTS, SLOTS)
        self.sent = Sent()
        self.saves = Saves(Parts.over(settings, self.store, cast("Any", self.sent)))
        self.compute = ComputedPaths(self.store).compute

    def saved(self) -> list[list[int]]:
        """The device slots of each transfer that a flush starts."""
        self.sent.transfers.clear()
        self.saves.flush(0.0)
        return [each.sources.tolist() for each in self.sent.transfers]


def test_small_runs_go_in_one_transfer():
    computed = Computed()
    runs = [computed.compute(count) for count in (3, 1, 4)]
    for run in runs:
        computed.saves.again(run)
    slots = computed.store.device.slot_of(np.concatenate(runs))
    assert computed.saved() == [slots.tolist()]
    assert not computed.saves.pending


def test_up_to_a_bound_and_never_less_than_one_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_TOGETHER_BYTES", 4 * BLOCK_BYTES)
    computed = Computed()
    for count in (6, 2, 2, 1):
        computed.saves.again(computed.compute(count))
    assert [len(each) for each in computed.saved()] == [6, 4, 1]


def test_each_block_is_saved_once_and_ancestors_first():
    computed = Computed()
    path = computed.compute(4)
    # As where a save was cancelled whose blocks, or some of them, wait still.
    for run in (path[2:], path[:3], path):
        computed.saves.again(run)
    assert computed.saved() == [computed.store.device.slot_of(path).tolist()]
