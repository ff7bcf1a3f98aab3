"""The host tier: pinned memory under the device, filled by saves, read by loads.

Host copies of blocks that are on the device too (*copies*) are the first to go, newest first: those
stay on the device longest. Blocks that are only here (*sole*) go least recently used first,
children before parents. A slot that a copy reads is *held*, and neither evicted nor reused until
it ends; for good, if it never completed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay._native import EvictionOrder, SlotColumn
from forebay.core.arrays import Ids
from forebay.core.slots import SlotState, TierSlots, in_state
from forebay.errors import ProtocolError

_COPIES, _SOLE = 0, 1


class HostWatch(Protocol):
    """Is told which blocks host memory has, as that changes."""

    def saved(self, blocks: Ids) -> None:
        """`blocks` (root first) are in host memory from now on."""
        ...

    def dropped(self, blocks: Ids) -> None:
        """`blocks`, saved before, are not in host memory from now on."""
        ...


class HostPool:
    """Slots in host memory, none of them open yet. Blocks are ids below `max_blocks`."""

    def __init__(self, slots: int, max_blocks: int) -> None:
        self.watch: HostWatch | None = None
        self.tier = TierSlots(slots, opened=0)
        self._slot = SlotColumn(max_blocks)
        self._order = EvictionOrder(max_blocks, "a hold")

    @property
    def slots(self) -> int:
        """Slots in the pool, quarantined ones included."""
        return self.tier.count

    @property
    def sole(self) -> int:
        """Blocks that only host memory has, but those that a copy reads."""
        return self._order.count(_SOLE)

    def slot_of(self, blocks: Ids) -> Ids:
        """The slot of each block, -1 where it has none."""
        return self._slot.take(blocks)

    def held(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether a copy reads each block's slot."""
        return self._order.held(blocks)

    def valid(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block has a host slot whose save has completed."""
        return in_state(self.tier.state(self._slot.take(blocks)), SlotState.CLEAN)

    def count_valid(self, blocks: Ids) -> int:
        """How many of `blocks` are valid."""
        return self.tier.count_in(self._slot.take(blocks), SlotState.CLEAN)

    def take(self, blocks: Ids) -> None:
        """Give each of `blocks` a slot in SAVING. The caller checked `tier.free`."""
        self._slot.put_each(blocks, self.tier.take_oldest(len(blocks), SlotState.SAVING))

    def saved(self, blocks: Ids) -> None:
        """The save of `blocks` (root first), which are on the device still, has completed."""
        self.tier.move(self._slot.take(blocks), SlotState.CLEAN)
        self._order.append(blocks, _COPIES)
        if self.watch is not None:
            self.watch.saved(blocks)

    def hold(self, blocks: Ids) -> None:
        """A copy reads `blocks`: out of the order until `unhold`."""
        self._order.hold(blocks)

    def unhold(self, blocks: Ids, *, on_device: bool) -> None:
        """A copy that read `blocks` (root first) has ended; whether they are on the device now."""
        free = self._order.release(blocks)
        self._order.append(free, _COPIES if on_device else _SOLE)

    def left_device(self, leaf_first: Ids) -> None:
        """`leaf_first`, all valid here, lost their device slot: now they are only here."""
        unheld = leaf_first[~self._order.held(leaf_first)]
        self._order.append(unheld[::-1], _SOLE)

    def newest_copies(self, count: int) -> Ids:
        """Take up to `count` copies out of the order. Give back with `stand_copies`, or
        `forget`.
        """
        return self._order.pop_newest(count, _COPIES)

    def stand_copies(self, blocks: Ids) -> None:
        """Blocks (newest first) that `newest_copies` took stand as the oldest copies again."""
        self._order.prepend(blocks, _COPIES)

    def oldest_sole(self, count: int) -> Ids:
        """Take up to `count` sole blocks out of the order, leaf first."""
        return self._order.pop(count, _SOLE)

    def stand_sole(self, blocks: Ids) -> None:
        """Sole blocks (leaf first) stand at the end again: something under them is in use."""
        self._order.append(blocks[::-1], _SOLE)

    def forget(self, blocks: Ids) -> None:
        """Free the slots of `blocks`; their content here is gone."""
        self._drop(blocks, SlotState.FREE)

    def quarantine(self, blocks: Ids) -> None:
        """Take the slots of `blocks` out of use for good: a copy into them never completed."""
        self._drop(blocks, SlotState.QUARANTINED)

    def _drop(self, blocks: Ids, state: SlotState) -> None:
        if not len(blocks):
            return
        if np.count_nonzero(self._order.held(blocks)):
            raise ProtocolError("a host slot was to be freed while a copy reads it")
        if self.watch is not None:
            self.watch.dropped(blocks[self.valid(blocks)])
        self._order.discard(blocks)
        self.tier.move(self._slot.take(blocks), state)
        self._slot.put(blocks, -1)
