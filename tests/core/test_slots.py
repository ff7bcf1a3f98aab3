"""The slots of one tier: which FREE one goes first, and what a slot may become."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forebay.core.arrays import Ids
from forebay.core.device import OwnDevicePool
from forebay.core.slots import SlotState, TierSlots
from forebay.errors import ProtocolError

FREE, LOADING, DIRTY, SAVING, CLEAN, QUARANTINED = SlotState


def slots(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def released(*steps: int) -> TierSlots:
    """A tier whose slot `i` was used, and is FREE again, and which `steps[i]` may still touch."""
    tier = TierSlots(len(steps))
    tier.take_newest(len(steps), DIRTY)
    for slot, step in sorted(enumerate(steps), key=lambda each: each[1]):
        tier.touch(slots(slot), step)
        tier.move(slots(slot), FREE)
    return tier


def test_a_load_gets_the_slot_that_was_let_go_first_and_compute_the_last():
    oldest, newest = released(5, 3, 9, 7), released(5, 3, 9, 7)
    assert [oldest.take_oldest(1, LOADING)[0] for _ in range(4)] == [1, 0, 3, 2]
    assert [newest.take_newest(1, DIRTY)[0] for _ in range(4)] == [2, 3, 0, 1]


def test_what_no_step_touches_any_more_goes_to_loads_first_and_to_compute_last():
    oldest, newest = released(5, 3, 9, 7), released(5, 3, 9, 7)
    for tier in (oldest, newest):
        tier.advance(5)
    assert set(oldest.take_oldest(2, LOADING).tolist()) == {0, 1}
    assert newest.take_newest(2, DIRTY).tolist() == [2, 3]


def test_a_group_of_slots_is_as_young_as_its_youngest():
    """Late for some, never early."""
    tier = TierSlots(4)
    tier.take_newest(4, DIRTY)
    tier.touch(slots(0), 2)
    tier.touch(slots(1), 8)
    tier.move(slots(0, 1), FREE)
    tier.touch(slots(2, 3), 4)
    tier.move(slots(2), FREE)
    tier.advance(7)
    assert tier.take_oldest(3, LOADING).tolist() == [0, 1, 2]
    assert tier.stamps(slots(0, 1, 2)).tolist() == [2, 8, 4]


def test_the_pool_gives_loads_and_compute_each_its_end():
    pool = OwnDevicePool(4, 8)
    blocks = slots(0, 1, 2, 3)
    pool.allocate(blocks, DIRTY, protected=False)
    for block in (2, 0, 1, 3):
        pool.wrote(slots(block), 1 + block)
    order = pool.slot_of(slots(0, 1, 2, 3))
    for block in range(4):
        pool.forget(slots(block))
    pool.allocate(slots(4), LOADING, protected=False)
    pool.allocate(slots(5), DIRTY, protected=False)
    assert pool.slot_of(slots(4))[0] == order[0]
    assert pool.slot_of(slots(5))[0] == order[3]
    assert pool.stamps(slots(4, 5)).tolist() == [1, 4]


ALLOWED = {
    (FREE, LOADING),
    (FREE, DIRTY),
    (FREE, SAVING),
    (LOADING, CLEAN),
    (LOADING, FREE),
    (LOADING, QUARANTINED),
    (DIRTY, SAVING),
    (DIRTY, FREE),
    (SAVING, CLEAN),
    (SAVING, DIRTY),
    (SAVING, FREE),
    (SAVING, QUARANTINED),
    (CLEAN, DIRTY),
    (CLEAN, FREE),
}
WAY_TO = {
    LOADING: [LOADING],
    DIRTY: [DIRTY],
    SAVING: [SAVING],
    CLEAN: [LOADING, CLEAN],
    QUARANTINED: [LOADING, QUARANTINED],
}


@pytest.mark.parametrize(("was", "becomes"), [*itertools.product(WAY_TO, SlotState)])
def test_a_slot_becomes_only_what_it_may(was: SlotState, becomes: SlotState):
    tier = TierSlots(2)
    first, *rest = WAY_TO[was]
    slot = tier.take_oldest(1, first)
    for state in rest:
        tier.move(slot, state)
    if (was, becomes) in ALLOWED:
        tier.move(slot, becomes)
        assert tier.counts()[becomes] == (2 if becomes is FREE else 1)
        return
    with pytest.raises(ProtocolError, match=rf"\['{was.name}'\] cannot become {becomes.name}"):
        tier.move(slot, becomes)
    assert tier.state(slot).tolist() == [was]
    assert tier.counts()[was] == 1


def test_a_slot_out_of_use_is_never_handed_out():
    tier = TierSlots(3)
    tier.move(tier.take_oldest(1, LOADING), QUARANTINED)
    assert (tier.free, tier.quarantined) == (2, 1)
    tier.take_oldest(2, LOADING)
    with pytest.raises(ProtocolError, match="1 slots were asked for and 0 are FREE"):
        tier.take_oldest(1, LOADING)


def test_slots_are_opened_from_the_first_and_never_closed():
    tier = TierSlots(4, opened=0)
    with pytest.raises(ProtocolError, match="0 are FREE"):
        tier.take_newest(1, DIRTY)
    tier.open(2)
    assert set(tier.take_oldest(2, SAVING).tolist()) == {0, 1}
    tier.open(4)
    for wrong in (3, 5):
        with pytest.raises(ProtocolError, match=f"4 of 4 slots are open: not {wrong}"):
            tier.open(wrong)
