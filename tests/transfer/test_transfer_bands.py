"""Loads whose first layers come first, for every mover: which bands are there, and what is torn."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_rig import BLOCK, LAYERS, PART, MakeRig, Rig

from forebay.errors import LinkTimeoutError, NotIssuedError, ProtocolError
from forebay.transfer.messages import Direction, Outcome
from forebay.transfer.mover import TransferFailedError

ENDS = [2 * PART * (layer + 1) for layer in range(LAYERS)]


def layer_is_there(rig: Rig, layer: int, sources: list[int], destinations: list[int]) -> bool:
    wanted = rig.host[sources].reshape(len(sources), LAYERS, 2, PART)[:, layer]
    return bool((rig.device[layer][:, destinations] == wanted.transpose(1, 0, 2)).all())


@pytest.mark.parametrize("window_bytes", [97, 1013, BLOCK - 1, 2 * BLOCK, 1 << 20])
def test_each_layer_is_there_once_its_band_was_waited_for(
    make_rig: MakeRig, window_bytes: int
) -> None:
    rig = make_rig(window_bytes=window_bytes)
    sources, destinations = [3, 4, 5, 9, 0, 23, 22, 21], [3, 4, 6, 7, 23, 0, 1, 2]
    kept = rig.device_block(10)
    id_ = rig.load(sources, destinations, after=[1] * 8)
    rig.mover.use_bands([id_, 999], ENDS)
    with pytest.raises(NotIssuedError):
        rig.mover.wait([id_], band=0)
    rig.mover.step_launched(1)
    for layer in range(LAYERS):
        assert rig.until(lambda band=layer: rig.bands.get(id_, 0) > band)
        rig.mover.wait([id_], 0, 10.0, band=layer)
        assert layer_is_there(rig, layer, sources, destinations)
    assert rig.ended(id_)
    assert rig.bands[id_] == LAYERS
    done = rig.completions[id_]
    assert (done.outcome, done.blocks_done, done.bytes) == (Outcome.DONE, 8, 8 * BLOCK)
    np.testing.assert_array_equal(rig.device_block(10), kept)
    rig.mover.wait([id_], band=1)


def test_the_first_layers_are_there_while_the_others_are_not(make_rig: MakeRig) -> None:
    rig = make_rig(window_bytes=2 * PART * 12)
    rig.hold(Direction.LOAD)
    slots = list(range(24))
    id_ = rig.load(slots, slots, after=[1] * 24)
    rig.mover.use_bands([id_], ENDS)
    rig.mover.step_launched(1)
    # The two lanes have the first band, a half each.
    assert rig.until(lambda: rig.bands.get(id_) == 1)
    with pytest.raises(LinkTimeoutError):
        rig.mover.wait([id_], 0, 0.05, band=0)
    for band in (1, None):
        with pytest.raises(NotIssuedError):
            rig.mover.wait([id_], band=band)
    rig.release(Direction.LOAD)
    assert rig.ended(id_)
    assert all(layer_is_there(rig, layer, slots, slots) for layer in range(LAYERS))


def test_a_fault_tells_which_blocks_may_be_torn(make_rig: MakeRig) -> None:
    rig = make_rig(lanes=1, window_bytes=4 * PART)
    rig.hook("fail_window", Direction.LOAD, 3)
    id_ = rig.load([0, 1, 2, 3], [4, 5, 6, 7], after=[1] * 4)
    rig.mover.use_bands([id_], ENDS)
    rig.mover.step_launched(1)
    assert rig.ended(id_)
    end = rig.completions[id_]
    # Two blocks' part of a layer is a window: the fourth is the second half of the second layer.
    assert (end.outcome, end.blocks_done) == (Outcome.FAILED, 0)
    assert (end.torn_from, end.blocks_touched) == (2, 4)
    with pytest.raises(TransferFailedError):
        rig.mover.wait([id_], band=0)


def test_what_cannot_go_by_bands_is_refused(rig: Rig) -> None:
    save = rig.save([1], [1], after=[1])
    load = rig.load([2], [2], after=[1])
    for ids, ends in (([save], ENDS), ([load], []), ([load], ENDS[:-1]), ([load], ENDS[::-1])):
        with pytest.raises(ProtocolError):
            rig.mover.use_bands(ids, ends)
    rig.mover.step_launched(1)
    assert rig.ended(load)
    assert rig.ended(save)
    rig.mover.use_bands([load], ENDS)


def test_random_loads_leave_the_same_by_bands(rig: Rig) -> None:
    rng = np.random.default_rng(12)

    def by_bands(id_: int, load: bool) -> None:
        # A slot that is filled twice makes its load go block by block.
        if load and rng.integers(0, 4):
            rig.mover.use_bands([id_], [int(rng.integers(1, BLOCK)), BLOCK])

    rig.random_moves(rng, 80, by_bands)
