"""The device tier: leases, protection, and the order in which blocks lose their device slot.

A block is idle when nobody leases it. Idle published blocks stand in one of two eviction orders:
ordinary ones first, those that a waiting request wants (*protected*) after them. A block that a
copy reads or writes is *busy*: it keeps its place and is passed over.

This is the `DevicePool` of an engine that leaves its slots to the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay._native import BlockCounts, EvictionOrder
from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.core.device_pool import LeaseKind
from forebay.core.slots import SlotState, TierSlots

_ORDINARY, _PROTECTED = 0, 1


class OwnDevicePool:
    """A `DevicePool` over slots of our own. Blocks are ids below `max_blocks`."""

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.tier = TierSlots(slots)
        self._slot: Ids = np.full(max_blocks, -1, np.int32)
        self._prefetch = BlockCounts(max_blocks, "a prefetch lease")
        self._wanted = BlockCounts(max_blocks, "protection")
        self._busy: NDArray[np.bool_] = np.zeros(max_blocks, np.bool_)
        self._order = EvictionOrder(max_blocks, "a lease")

    @property
    def slots(self) -> int:
        return self.tier.count

    @property
    def free(self) -> int:
        return self.tier.free

    @property
    def dirty(self) -> int:
        return self.tier.dirty

    @property
    def quarantined(self) -> int:
        return self.tier.quarantined

    @property
    def prefetch_leased(self) -> int:
        return self._prefetch.held

    def obtainable(self, *, protected: bool) -> int:
        extra = self._order.count(_PROTECTED) if protected else 0
        return self.tier.free + self._order.count(_ORDINARY) + extra

    def slot_of(self, blocks: Ids) -> Ids:
        return self._slot.take(blocks)

    def along(self, path: Ids) -> tuple[int, int, int]:
        here = self._slot.take(path) >= 0
        count = int(np.count_nonzero(here))
        leading = count if count == len(path) else int(np.argmin(here))
        return count, leading, int(np.count_nonzero(self._order.holds(path[here])))

    def absent(self, path: Ids) -> Ids:
        return np.flatnonzero(self._slot.take(path) < 0).astype(np.int32)

    def advance(self, completed_step: int) -> None:
        self.tier.advance(completed_step)

    def wrote(self, blocks: Ids, step: int) -> None:
        self.tier.touch(self._slot.take(blocks), step)

    def stamps(self, blocks: Ids) -> Steps:
        return self.tier.stamps(self._slot.take(blocks))

    def leases(self, blocks: Ids) -> NDArray[np.int32]:
        return self._order.holds(blocks)

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
        self._order.hold(blocks)
        if kind is LeaseKind.PREFETCH:
            self._prefetch.add(blocks)

    def release(self, blocks: Ids, kind: LeaseKind, step: int) -> Ids:
        if kind is LeaseKind.PREFETCH:
            self._prefetch.take_away(blocks)
        idle = self._order.release(blocks)
        slots = self._slot.take(blocks)
        here = slots >= 0
        self.tier.touch(slots if np.count_nonzero(here) == len(slots) else slots[here], step)
        return idle

    def promote(self, blocks: Ids) -> None:
        self._prefetch.take_away(blocks)

    def publish(self, blocks: Ids) -> None:
        wanted = self._wanted.any(blocks)
        if np.count_nonzero(wanted):
            self._order.append(blocks[wanted], _PROTECTED)
            blocks = blocks[~wanted]
        self._order.append(blocks, _ORDINARY)

    def protect(self, blocks: Ids) -> None:
        fresh = self._wanted.add(blocks)
        # Requests come in order of arrival: what only the latest wants is given up first of all
        # that is protected, and what the next in line wants keeps its place behind it.
        self._order.prepend(fresh[self._order.contains(fresh)][::-1], _PROTECTED)

    def unprotect(self, blocks: Ids) -> None:
        last = self._wanted.take_away(blocks)
        self._order.append(last[self._order.contains(last)], _ORDINARY)

    def wanted(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._wanted.any(blocks)

    def next_victims(self, count: int) -> Ids:
        count = max(0, count - self.tier.free)
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
