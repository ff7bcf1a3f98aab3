"""The store: what keeps a block, what a copy that failed leaves, and what may be saved."""

from __future__ import annotations

import pytest
from computed_paths import KEY_BYTES, ComputedPaths

from forebay.core.arrays import Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.slots import SlotState
from forebay.core.store import Store
from forebay.errors import ProtocolError

STATES = list(SlotState)


class Rig:
    """A store of eight slots in each tier, and paths that it computes."""

    def __init__(self) -> None:
        self.store = Store(KEY_BYTES, 8, 8)
        self.compute = ComputedPaths(self.store).compute
        self._transfers = 0

    def next_id(self) -> int:
        self._transfers += 1
        return self._transfers

    def save(self, blocks: Ids) -> int:
        """Begin to save `blocks`. Returns the transfer."""
        transfer = self.next_id()
        plan = self.store.start_save(transfer, blocks)
        assert plan is not None
        assert plan.blocks.tolist() == blocks.tolist()
        return transfer

    def load(self, blocks: Ids) -> int:
        """Begin to load `blocks`, which somebody leases. Returns the transfer."""
        transfer = self.next_id()
        self.store.touch(blocks, LeaseKind.PREFETCH)
        assert self.store.start_load(transfer, blocks, protected=False) is not None
        return transfer

    def sole(self, count: int) -> Ids:
        """A path in host memory alone."""
        path = self.compute(count)
        self.store.end_save(self.save(path), count, count)
        self.leave_device(path)
        return path

    def leave_device(self, path: Ids) -> None:
        leaf_first = path[::-1].copy()
        self.store.device.forget(leaf_first)
        self.store.left_device(leaf_first)

    def states(self, blocks: Ids) -> list[SlotState]:
        return [STATES[state] for state in self.store.device.state(blocks).tolist()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_slots_that_a_load_may_have_torn_are_out_of_use(rig: Rig):
    path = rig.sole(4)
    transfer = rig.load(path)
    missing = rig.store.end_load(transfer, 1, range(2, 3))
    assert missing.tolist() == path[1:].tolist()
    assert rig.states(path) == [SlotState.CLEAN] + 3 * [SlotState.FREE]
    assert (rig.store.device.quarantined, rig.store.device.free) == (1, 6)
    assert rig.store.counters.quarantined == 1
    assert rig.store.host.valid(path).all(), "the source is as it was"
    rig.store.release(path, LeaseKind.PREFETCH)


def test_where_a_load_that_never_completed_may_read_yet_nothing_else_comes(rig: Rig):
    path = rig.sole(4)
    torn = path[1:3]
    slots = rig.store.host.slot_of(torn).tolist()
    rig.store.end_load(rig.load(path), 1, range(1, 3))
    rig.store.release(path, LeaseKind.PREFETCH)
    # It is found and loaded there as before, and stays there when nobody finds it any more.
    rig.store.end_load(rig.load(path[1:]), 3, range(0))
    rig.store.release(path[1:], LeaseKind.PREFETCH)
    rig.store.unpublish(int(path[0]))
    assert rig.store.host.held(torn).all()
    others = rig.compute(5)
    plan = rig.store.start_save(rig.next_id(), others, displacing=True)
    assert plan is not None
    assert len(plan.destinations) == 5
    assert set(plan.destinations.tolist()).isdisjoint(slots)
    assert rig.store.host.tier.free == 8 - 5 - 2


def test_host_slots_that_a_save_may_have_torn_are_out_of_use(rig: Rig):
    path = rig.compute(4)
    rig.store.end_save(rig.save(path), 1, 3)
    assert rig.store.host.valid(path).tolist() == [True, False, False, False]
    assert (rig.store.host.tier.quarantined, rig.store.host.tier.free) == (2, 5)
    assert rig.states(path) == [SlotState.CLEAN] + 3 * [SlotState.DIRTY]
    assert rig.store.counters.quarantined == 2


def test_what_is_still_being_saved_is_not_loaded(rig: Rig):
    path = rig.compute(2)
    transfer = rig.save(path)
    assert not rig.store.host.valid(path).any()
    with pytest.raises(ProtocolError, match="in host memory and not on the device"):
        rig.store.start_load(rig.next_id(), path, protected=False)
    rig.store.end_save(transfer, 2, 2)
    with pytest.raises(ProtocolError, match="in host memory and not on the device"):
        rig.store.start_load(rig.next_id(), path, protected=False)


def test_only_what_is_published_and_offered_is_saved(rig: Rig):
    private = rig.store.compute(2, protected=False)
    assert private is not None
    assert rig.states(private) == 2 * [SlotState.DIRTY]
    assert not rig.store.dirty(private).any()
    path = rig.compute(2)
    assert rig.store.dirty(path).all()
    rig.store.withhold(path)
    assert not rig.store.dirty(path).any()
    rig.store.offer(path[:1])
    assert rig.store.dirty(path).tolist() == [True, False]


def test_an_id_that_is_used_again_is_not_withheld(rig: Rig):
    path = rig.compute(8)
    rig.store.withhold(path)
    rig.leave_device(path)
    again = [rig.compute(8) for _ in range(3)]
    assert all(rig.store.dirty(each).all() for each in again[-1:])
    assert not rig.store.withheld(again[-1]).any()


def test_the_next_to_go_are_saved_root_first(rig: Rig):
    path = rig.compute(8)
    assert rig.store.next_to_clean(3).tolist() == path[-3:].tolist()
    rig.store.withhold(path[-1:])
    assert rig.store.next_to_clean(3).tolist() == path[-3:-1].tolist()


def test_where_there_is_no_room_a_load_changes_nothing(rig: Rig):
    path, other = rig.sole(6), rig.compute(6)
    rig.store.touch(other[:3], LeaseKind.HARD)
    rig.store.device.protect(other[:4])
    device, evicted = rig.store.device, rig.store.counters.evicted
    for protected in (True, False):
        assert rig.store.start_load(rig.next_id(), path, protected=protected) is None
        assert device.next_victims(8).tolist() == other[:2:-1].tolist()
        assert device.obtainable(protected=False) == 2 + 2
        assert device.obtainable(protected=True) == 2 + 3
    assert rig.store.host.valid(path).all()
    assert not rig.store.host.held(path).any()
    assert (device.free, rig.store.counters.evicted) == (2, evicted)


def test_what_is_nowhere_is_not_loaded(rig: Rig):
    path = rig.sole(2)
    rig.store.unpublish(int(path[0]))
    with pytest.raises(ProtocolError, match="in host memory and not on the device"):
        rig.store.start_load(rig.next_id(), path, protected=False)


def test_blocks_that_others_want_go_last_and_only_where_that_is_allowed(rig: Rig):
    wanted, plain = rig.compute(4), rig.compute(4)
    rig.store.device.protect(wanted)
    assert rig.store.compute(5, protected=False) is None
    assert rig.store.published(wanted).all()
    assert rig.store.published(plain).all()
    made = rig.store.compute(5, protected=True)
    assert made is not None
    assert rig.store.published(wanted).tolist() == [True, True, True, False]
    assert not rig.store.published(plain).any()


def test_what_is_let_go_while_somebody_waits_for_it_is_kept_for_him(rig: Rig):
    path = rig.compute(6)
    rig.store.touch(path, LeaseKind.HARD)
    rig.store.device.protect(path[:4])
    rig.store.release(path, LeaseKind.HARD)
    assert rig.store.compute(5, protected=False) is None
    assert rig.store.compute(4, protected=False) is not None
    assert rig.store.published(path).tolist() == 4 * [True] + 2 * [False]


def test_what_is_lost_takes_with_it_all_that_builds_on_it(rig: Rig):
    """And stays while somebody leases it, without being found."""
    path = rig.compute(4)
    rig.store.touch(path, LeaseKind.HARD)
    rig.store.unpublish(int(path[1]))
    assert rig.store.published(path).tolist() == [True, False, False, False]
    assert (rig.store.serials(path) > 0).all()
    assert (rig.store.device.slot_of(path) >= 0).all()
    rig.store.release(path, LeaseKind.HARD)
    assert (rig.store.serials(path) > 0).tolist() == [True, False, False, False]
    assert rig.store.device.free == 7


def test_an_unpublished_block_keeps_its_slots_until_its_copies_end(rig: Rig):
    path = rig.compute(2)
    saving = rig.save(path)
    rig.store.unpublish(int(path[0]))
    assert (rig.store.device.slot_of(path) >= 0).all()
    assert rig.store.device.free == 6
    rig.store.end_save(saving, 2, 2)
    assert (rig.store.device.free, rig.store.host.tier.free) == (8, 8)
    path = rig.sole(2)
    loading = rig.load(path)
    rig.store.unpublish(int(path[0]))
    rig.store.release(path, LeaseKind.PREFETCH)
    assert (rig.store.device.free, rig.store.host.tier.free) == (6, 6)
    rig.store.end_load(loading, 2, range(0))
    assert (rig.store.device.free, rig.store.host.tier.free) == (8, 8)
    assert rig.store.device.obtainable(protected=True) == 8


def test_who_waits_is_told_of_what_he_wants_alone(rig: Rig):
    path, other = rig.sole(2), rig.sole(2)
    rig.store.device.protect(path)
    told = rig.store.lost_epoch, rig.store.moved_epoch
    rig.store.end_load(rig.load(other), 2, range(0))
    rig.store.unpublish(int(other[0]))
    assert (rig.store.lost_epoch, rig.store.moved_epoch) == told
    rig.load(path)
    assert rig.store.moved_epoch > told[1]
    rig.store.unpublish(int(path[0]))
    assert rig.store.lost_epoch > told[0]


def test_who_wants_to_know_is_told_of_every_slot_that_is_lost(rig: Rig):
    """Before the id is another block's: by eviction, and by the end of what is not found again."""
    told: list[int] = []
    rig.store.lost_slot = lambda blocks: told.extend(blocks.tolist())
    first, second = rig.compute(4), rig.compute(4)
    rig.compute(2)
    assert told == first[:1:-1].tolist()
    rig.store.unpublish(int(second[0]))
    assert sorted(told[2:]) == sorted(second.tolist())
    private = rig.store.compute(2, protected=False)
    assert private is not None
    rig.store.release(private, LeaseKind.HARD)
    assert sorted(told[6:]) == sorted(private.tolist())
