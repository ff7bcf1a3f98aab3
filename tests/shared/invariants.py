"""What must hold between any two calls of a cache. Looks inside on purpose."""

from __future__ import annotations

import numpy as np

from forebay.cache import Cache
from forebay.core.device_pool import LeaseKind
from forebay.core.slots import SlotState


def check(cache: Cache) -> None:
    store = cache._store
    device, host, directory = store.device, store.host, store.directory
    directory.check()
    everything = np.arange(store.max_blocks, dtype=np.int32)
    device_slot, host_slot = device.slot_of(everything), host.slot_of(everything)
    for slots, pool in ((device_slot, device.tier), (host_slot, host.tier)):
        used = slots[slots >= 0]
        assert len(set(used.tolist())) == len(used), "two blocks in one slot"
        counts = pool.counts()
        assert counts[SlotState.FREE] == pool.free, "the free list and the states differ"
        assert len(used) + pool.free + counts[SlotState.QUARANTINED] == pool.opened, "a slot leaked"
        assert (used < pool.opened).all(), "a slot is used that is not open"
        states = pool.state(np.arange(pool.opened, dtype=np.int32))
        assert list(counts.values()) == np.bincount(states, minlength=len(counts)).tolist()
        states = pool.state(used)
        assert not np.isin(states, [SlotState.FREE, SlotState.QUARANTINED]).any()
    _check_leases(cache, everything)
    live = store.serials(everything) > 0
    kept = (
        store._published.take(everything)
        | (device.leases(everything) > 0)
        | device.busy(everything)
        | host.held(everything)
    )
    assert not (kept & ~live).any(), "a block without an id is kept"
    assert not (live & ~kept).any(), f"blocks leaked: {np.flatnonzero(live & ~kept)}"
    assert store._ids.left == int((~live).sum()), "an id leaked"
    _check_published(cache, everything, device_slot, host_slot)


def _check_leases(cache: Cache, everything: np.ndarray) -> None:
    store = cache._store
    total = np.zeros(store.max_blocks, np.int32)
    prefetch = np.zeros(store.max_blocks, np.int32)
    wanted = np.zeros(store.max_blocks, np.int32)
    for ticket in cache._tickets.values():
        np.add.at(total, ticket.blocks, 1)
        assert (store.device.slot_of(ticket.blocks) == ticket.slots).all() or ticket.lost, (
            "a running request's slot moved"
        )
    for entry in cache._line:
        np.add.at(total, entry.blocks[: entry.covered], 1)
        np.add.at(prefetch, entry.blocks[: entry.covered], 1)
        np.add.at(wanted, entry.blocks, 1)
        assert len(entry.origins) == entry.covered
    assert (store.device.leases(everything) == total).all(), "a lease outlived its owner"
    assert (store.device._prefetch.of(everything) == prefetch).all()
    assert (store.device._wanted.of(everything) == wanted).all(), "protection outlived its owner"
    assert store.device.prefetch_leased == int((prefetch > 0).sum())
    assert LeaseKind.HARD == 0


def _check_published(
    cache: Cache, everything: np.ndarray, device_slot: np.ndarray, host_slot: np.ndarray
) -> None:
    store = cache._store
    published = store._published.numbers()
    assert len(published) == len(store.directory)
    valid = store.host.valid(published)
    assert ((device_slot[published] >= 0) | valid).all(), "a published block is nowhere"
    leased = store.device.leases(published) > 0
    resident = device_slot[published] >= 0
    assert (store.device.idle(published) == (resident & ~leased)).all(), "an order is wrong"
    held = store.host.held(published)
    assert (store.host._order.contains(published) == (valid & ~held)).all(), "host order is wrong"
    for block in published.tolist():
        parent = store.directory.parent(block)
        assert parent == -1 or store._published.of(parent), "a child whose parent is nowhere"
    state = store.device.state(published)
    clean = resident & (state == SlotState.CLEAN)
    assert valid[clean].all(), "CLEAN without a lower copy"


def nothing_left(cache: Cache) -> None:
    """After everything ended: only published, idle blocks and free slots."""
    store = cache._store
    everything = np.arange(store.max_blocks, dtype=np.int32)
    assert not cache._tickets
    assert not len(cache._line)
    assert not len(cache._flights)
    assert not store.device.leases(everything).any()
    assert not store.device.busy(everything).any()
    # Of loads that may be torn each block is out of use on the device, and held in host memory.
    torn = store.counters.quarantined - store.host.tier.quarantined
    assert store.host.held(everything).sum() <= torn, "a hold outlived its copy"
    assert not cache._line._ends
    assert not cache._line._computing
    assert not cache._line._computing_key
