"""The device tier: leases, protection, and the order in which blocks lose their device slot.

A block is idle when nobody leases it. Idle published blocks stand in one of two eviction orders:
ordinary ones first, those that a waiting request wants (*protected*) after them. A block that a
copy reads or writes is *busy*: it keeps its place and is passed over.

This is the `DevicePool` of an engine that leaves its slots to the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.core.device_pool import LeaseKind
from forebay.core.order import EvictionOrder
from forebay.core.slots import SlotState, TierSlots
from forebay.errors import ProtocolError

_ORDINARY, _PROTECTED = 0, 1


class OwnDevicePool:
    """A `DevicePool` over slots of our own. Blocks are ids below `max_blocks`."""

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.tier = TierSlots(slots)
        self._slot: Ids = np.full(max_blocks, -1, np.int32)
        self._leases: NDArray[np.int32] = np.zeros(max_blocks, np.int32)
        self._prefetch: NDArray[np.int32] = np.zeros(max_blocks, np.int32)
        self._wanted: NDArray[np.int32] = np.zeros(max_blocks, np.int32)
        self._busy: NDArray[np.bool_] = np.zeros(max_blocks, np.bool_)
        self._order = EvictionOrder(max_blocks)
        self._prefetch_leased = 0

    @property
    def slots(self) -> int:
        return self.tier.count

    @property
    def free(self) -> int:
        return self.tier.free

    @property
    def quarantined(self) -> int:
        return self.tier.quarantined

    @property
    def prefetch_leased(self) -> int:
        return self._prefetch_leased

    def obtainable(self, *, protected: bool) -> int:
        extra = self._order.count(_PROTECTED) if protected else 0
        return self.tier.free + self._order.count(_ORDINARY) + extra

    def slot_of(self, blocks: Ids) -> Ids:
        return self._slot.take(blocks)

    def advance(self, completed_step: int) -> None:
        self.tier.advance(completed_step)

    def wrote(self, blocks: Ids, step: int) -> None:
        self.tier.touch(self._slot.take(blocks), step)

    def stamps(self, blocks: Ids) -> Steps:
        return self.tier.stamps(self._slot.take(blocks))

    def leases(self, blocks: Ids) -> NDArray[np.int32]:
        return self._leases.take(blocks)

    def idle(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block stands in an eviction order: published, on the device, not leased."""
        return self._order.contains(blocks)

    def allocate(self, blocks: Ids, state: SlotState, *, protected: bool) -> Ids | None:
        count = len(blocks)
        evicted = self._evict(count - self.tier.free, protected)
        if evicted is None:
            return None
        take = self.tier.take_oldest if state is SlotState.LOADING else self.tier.take_newest
        self._slot.put(blocks, take(count, state))
        if state is SlotState.LOADING:
            self._busy.put(blocks, True)
        return evicted

    def touch(self, blocks: Ids, kind: LeaseKind) -> None:
        self._leases.put(blocks, self._leases.take(blocks) + 1)
        if kind is LeaseKind.PREFETCH:
            held = self._prefetch.take(blocks)
            self._prefetch_leased += len(blocks) - int(np.count_nonzero(held))
            self._prefetch.put(blocks, held + 1)
        self._order.discard(blocks)

    def release(self, blocks: Ids, kind: LeaseKind, step: int) -> Ids:
        left = self._leases.take(blocks) - 1
        if kind is LeaseKind.PREFETCH:
            self._end_prefetch(blocks)
        elif np.count_nonzero(left < 0):
            raise ProtocolError("a lease was given back twice")
        self._leases.put(blocks, left)
        slots = self._slot.take(blocks)
        here = slots >= 0
        self.tier.touch(slots if np.count_nonzero(here) == len(slots) else slots[here], step)
        return blocks[left == 0]

    def promote(self, blocks: Ids) -> None:
        self._end_prefetch(blocks)

    def publish(self, blocks: Ids) -> None:
        wanted = self._wanted.take(blocks) > 0
        if np.count_nonzero(wanted):
            self._order.append(blocks[wanted], _PROTECTED)
            blocks = blocks[~wanted]
        self._order.append(blocks, _ORDINARY)

    def protect(self, blocks: Ids) -> None:
        before = self._wanted.take(blocks)
        self._wanted.put(blocks, before + 1)
        # Requests come in order of arrival: what only the latest wants is given up first of all
        # that is protected, and what the next in line wants keeps its place behind it.
        fresh = blocks[(before == 0) & self._order.contains(blocks)]
        self._order.discard(fresh)
        self._order.prepend(fresh[::-1].copy(), _PROTECTED)

    def unprotect(self, blocks: Ids) -> None:
        left = self._wanted.take(blocks) - 1
        if np.count_nonzero(left < 0):
            raise ProtocolError("protection was given back twice")
        self._wanted.put(blocks, left)
        last = blocks[left == 0]
        self._order.append(last[self._order.contains(last)], _ORDINARY)

    def wanted(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._wanted.take(blocks) > 0

    @property
    def wanted_counts(self) -> NDArray[np.int32]:
        return self._wanted

    def next_victims(self, count: int) -> Ids:
        victims = self._order.peek(count, _ORDINARY)
        if len(victims) < count:
            more = self._order.peek(count - len(victims), _PROTECTED)
            victims = np.concatenate([victims, more])
        return victims

    def move(self, blocks: Ids, state: SlotState) -> None:
        self.tier.move(self._slot.take(blocks), state)
        self._busy.put(blocks, state in (SlotState.LOADING, SlotState.SAVING))

    def state(self, blocks: Ids) -> NDArray[np.int8]:
        return self.tier.state(self._slot.take(blocks))

    def counts(self) -> dict[SlotState, int]:
        return self.tier.counts()

    def busy(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._busy.take(blocks)

    def forget(self, blocks: Ids) -> None:
        self._drop(blocks, SlotState.FREE)

    def quarantine(self, blocks: Ids) -> None:
        self._drop(blocks, SlotState.QUARANTINED)

    def _drop(self, blocks: Ids, state: SlotState) -> None:
        self._order.discard(blocks)
        self.tier.move(self._slot.take(blocks), state)
        self._slot.put(blocks, -1)
        self._busy.put(blocks, False)

    def _end_prefetch(self, blocks: Ids) -> None:
        held = self._prefetch.take(blocks) - 1
        if np.count_nonzero(held < 0):
            raise ProtocolError("a prefetch lease was given back twice")
        self._prefetch.put(blocks, held)
        self._prefetch_leased -= len(blocks) - int(np.count_nonzero(held))

    def _evict(self, count: int, protected: bool) -> Ids | None:
        if count <= 0:
            return EMPTY_IDS
        victims = self._order.pop(count, _ORDINARY, self._busy)
        missing = count - len(victims)
        if missing and protected:
            wanted = self._order.pop(missing, _PROTECTED, self._busy)
            if len(wanted) < missing:
                self._order.prepend(wanted, _PROTECTED)
            else:
                victims, missing = np.concatenate([victims, wanted]), 0
        if missing:
            self._order.prepend(victims, _ORDINARY)
            return None
        self.tier.move(self._slot.take(victims), SlotState.FREE)
        self._slot.put(victims, -1)
        return victims
