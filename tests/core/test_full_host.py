"""Room in host memory that is full, in the store."""

from __future__ import annotations

import numpy as np
import pytest
from computed_paths import KEY_BYTES, ComputedPaths

from forebay.core import host_room
from forebay.core.arrays import Ids
from forebay.core.block_ids import BlockIds
from forebay.core.device_pool import LeaseKind
from forebay.core.host import HostPool
from forebay.core.store import Store


class FullHost:
    """A store of `device` + `host` slots, of which it computes and saves paths."""

    def __init__(self, device: int, host: int) -> None:
        self.store = Store(KEY_BYTES, device, host)
        self.compute = ComputedPaths(self.store).compute
        self._saves = 0

    def give_up(self, blocks: Ids) -> None:
        """The device gives up `blocks`, the first one first."""
        self.store.device.forget(blocks)
        self.store.left_device(blocks)

    def save(self, path: Ids, *, displacing: bool, ahead: int = 0) -> int:
        """How many of `path` got a host slot."""
        self._saves += 1
        plan = self.store.start_save(self._saves, path, ahead=ahead, displacing=displacing)
        if plan is None:
            return 0
        self.store.end_save(self._saves, len(plan.blocks), len(plan.blocks))
        return len(plan.blocks)


@pytest.fixture
def full() -> tuple[FullHost, Ids, Ids]:
    """Of two paths of four blocks, that fill host memory, only the second is on the device too."""
    host = FullHost(8, 8)
    first, second = host.compute(4), host.compute(4)
    assert host.save(first, displacing=False) + host.save(second, displacing=False) == 8
    host.give_up(first[::-1])
    return host, first, second


@pytest.mark.parametrize("displacing", [True, False])
def test_what_is_written_through_takes_the_place_of_what_was_not_used_longest(
    full: tuple[FullHost, Ids, Ids], displacing: bool
):
    host, first, second = full
    new = host.compute(2)
    assert host.save(new, displacing=displacing, ahead=2) == 2
    there = host.store.host.valid
    assert there(new).all()
    assert there(first).tolist() == [True, True, not displacing, not displacing]
    assert there(second).sum() == (4 if displacing else 2)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_a_parent_that_was_given_up_before_its_children_keeps_nobody_out(
    rule: str, monkeypatch: pytest.MonkeyPatch
):
    if rule == "broken":
        monkeypatch.setattr(host_room, "_TRIES", 1)
    host = FullHost(8, 4)
    path = host.compute(4)
    assert host.save(path, displacing=False) == 4
    host.give_up(path[:2])
    host.give_up(path[2:])
    new = host.compute(2)
    assert host.save(new, displacing=True) == (2 if rule == "kept" else 0)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_what_leaves_the_device_at_once_stands_leaf_first(
    rule: str, monkeypatch: pytest.MonkeyPatch
):
    if rule == "broken":
        monkeypatch.setattr(BlockIds, "leaf_first", lambda self, ids: ids)
    host = FullHost(8, 8)
    first, second = host.compute(4), host.compute(4)
    assert host.save(second, displacing=False) + host.save(first, displacing=False) == 8
    # Each from its root, the one that was computed later before the other.
    host.give_up(np.concatenate([second, first]))
    sole = host.store.host.oldest_sole(8).tolist()
    expected = second.tolist()[::-1] + first.tolist()[::-1]
    assert (sole == expected) == (rule == "kept")


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_where_nothing_can_go_host_memory_is_looked_through_once(
    full: tuple[FullHost, Ids, Ids], rule: str, monkeypatch: pytest.MonkeyPatch
):
    host, first, _ = full
    pool, looks = host.store.host, 0
    if rule == "broken":
        monkeypatch.setattr(HostPool, "sole", 1 << 30)

    def counted(count: int) -> Ids:
        nonlocal looks
        looks += 1
        return HostPool.oldest_sole(pool, count)

    host.store.device.protect(first)
    monkeypatch.setattr(pool, "oldest_sole", counted)
    assert host.save(host.compute(2), displacing=True) == 0
    assert (looks <= 2) == (rule == "kept")
    host.store.device.unprotect(first)
    assert host.save(host.compute(2), displacing=True) == 2


def test_a_block_that_a_running_request_still_leases_goes_with_its_lease(
    full: tuple[FullHost, Ids, Ids],
):
    """The load that was to bring it never did, and the request is not preempted yet."""
    host, first, _ = full
    store = host.store
    store.touch(first, LeaseKind.HARD)
    assert host.save(host.compute(2), displacing=True) == 0
    assert store.published(first).tolist() == [False] * 4
    assert store.host.valid(first).all()
    store.release(first, LeaseKind.HARD)
    assert store.serials(first).tolist() == [0] * 4
    assert store.host.tier.free == 4


@pytest.mark.parametrize(("ahead", "stay"), [(4, 4), (2, 2)])
def test_copies_of_what_goes_next_itself_make_no_room(ahead: int, stay: int):
    """They would be the last ones."""
    host = FullHost(8, 4)
    first, second = host.compute(4), host.compute(4)
    assert host.save(first, displacing=False) == 4
    assert host.save(second, displacing=False, ahead=ahead) == 4 - stay
    there = host.store.host.valid(first)
    assert there.tolist() == [False] * (4 - stay) + [True] * stay
    assert host.store.dirty(first).tolist() == (~there).tolist()


def test_the_newest_copies_make_room_first():
    """What was saved last stays on the device longest."""
    host = FullHost(12, 8)
    first, second, third = (host.compute(4) for _ in range(3))
    assert host.save(first, displacing=False) + host.save(second, displacing=False) == 8
    assert host.save(third, displacing=False, ahead=1) == 4
    assert host.store.host.valid(first).all()
    assert not host.store.host.valid(second).any()


def test_copies_that_were_spared_are_not_looked_at_again_first():
    host = FullHost(12, 8)
    first, second, third = (host.compute(4) for _ in range(3))
    assert host.save(first, displacing=False) + host.save(second, displacing=False) == 8
    # Used again: now the second goes next.
    host.store.touch(first, LeaseKind.HARD)
    host.store.release(first, LeaseKind.HARD)
    assert host.save(third, displacing=False, ahead=4) == 0
    assert host.save(third, displacing=False, ahead=4) == 4
    assert host.store.host.valid(second).all()


def test_what_somebody_waits_for_hides_nothing_behind_it():
    """However much of it there is."""
    host = FullHost(80, 74)
    wanted, other = host.compute(70), host.compute(4)
    assert host.save(wanted, displacing=False) + host.save(other, displacing=False) == 74
    host.give_up(wanted[::-1])
    host.give_up(other[::-1])
    host.store.device.protect(wanted)
    assert host.save(host.compute(2), displacing=True) == 2
    assert host.store.host.valid(wanted).all()
