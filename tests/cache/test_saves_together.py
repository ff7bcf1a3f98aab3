"""What is computed in small runs is saved together: each block once, ancestors first."""

from __future__ import annotations

import numpy as np
import pytest
from computed_saves import BLOCK_BYTES, Computed

from forebay.cache import saves as module


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
