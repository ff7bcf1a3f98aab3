"""What the cache needs of whoever owns the device's slots: ours, or an engine's own pool.

Blocks are ids. A block has at most one device slot. A lease on a block always covers its path from
the root. A block that nobody leases is idle; published idle blocks lose their slot when others need
it, those that a waiting request wants (*protected*) last. A block that a copy reads or writes is
*busy* and keeps its slot.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import Ids, Steps
from forebay.core.slots import SlotState


class LeaseKind(IntEnum):
    """HARD: until given back. PREFETCH: revocable, by exactly the three that the planner knows."""

    HARD = 0
    PREFETCH = 1


class DevicePool(Protocol):
    """Slots in device memory. Sets of blocks come root first unless a method says otherwise."""

    # -- room ------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Slots in the pool, quarantined ones included."""
        ...

    @property
    def free(self) -> int:
        """Slots in which nothing lies."""
        ...

    @property
    def dirty(self) -> int:
        """Slots in which something lies of which nothing below has a copy."""
        ...

    @property
    def quarantined(self) -> int:
        """Slots out of use for good."""
        ...

    def obtainable(self, *, protected: bool) -> int:
        """Slots that are FREE or held by idle blocks; `protected` counts those of wanted blocks."""
        ...

    def allocate(self, blocks: Ids, state: SlotState, *, protected: bool) -> Ids | None:
        """Give each of `blocks` a slot in LOADING or DIRTY.

        Evicts exactly what is missing and returns the blocks that lost their slot, leaf first (they
        are no longer on the device when this returns); or returns None and changes nothing.
        """
        ...

    def forget(self, blocks: Ids) -> None:
        """Free the slots of `blocks`; their content is gone."""
        ...

    def quarantine(self, blocks: Ids) -> None:
        """Take the slots of `blocks` out of use for good: a copy into them never completed."""
        ...

    # -- where blocks are, and in what state -----------------------------------------------------

    def slot_of(self, blocks: Ids) -> Ids:
        """The slot of each block, -1 where it has none."""
        ...

    def along(self, path: Ids) -> tuple[int, int, int]:
        """How many blocks of `path` have a slot, how many do before the first that has none, and
        how many that have one are leased.
        """
        ...

    def absent(self, path: Ids) -> Ids:
        """The places in `path` of blocks without a slot."""
        ...

    def state(self, blocks: Ids) -> NDArray[np.int8]:
        """The `SlotState` of each block's slot; FREE where it has none."""
        ...

    def counts(self) -> dict[SlotState, int]:
        """How many slots are in each state, without a scan over them."""
        ...

    def busy(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether a copy reads or writes each block."""
        ...

    def move(self, blocks: Ids, state: SlotState) -> None:
        """Change the state of the slots of `blocks` (all on the device)."""
        ...

    # -- steps -----------------------------------------------------------------------------------

    def wrote(self, blocks: Ids, step: int) -> None:
        """`step` writes `blocks`: copies out of them, and into their slots, come after it."""
        ...

    def stamps(self, blocks: Ids) -> Steps:
        """For each block, the newest step that may touch its slot."""
        ...

    def advance(self, completed_step: int) -> None:
        """Every step up to `completed_step` has ended."""
        ...

    # -- who keeps them --------------------------------------------------------------------------

    def touch(self, blocks: Ids, kind: LeaseKind) -> None:
        """Add a lease of `kind` to each block."""
        ...

    def promote(self, blocks: Ids) -> None:
        """A prefetch lease on each block becomes a hard one."""
        ...

    def release(self, blocks: Ids, kind: LeaseKind, step: int) -> Ids:
        """End a lease of `kind` on each block, which `step` may still touch.

        Returns those that are idle now.
        """
        ...

    def leases(self, blocks: Ids) -> NDArray[np.int32]:
        """Leases on each block, of both kinds."""
        ...

    @property
    def prefetch_leased(self) -> int:
        """Blocks under at least one prefetch lease."""
        ...

    def publish(self, blocks: Ids) -> None:
        """Idle `blocks` may be given up from now on, last of all."""
        ...

    def protect(self, blocks: Ids) -> None:
        """One more waiting request wants `blocks`."""
        ...

    def unprotect(self, blocks: Ids) -> None:
        """One waiting request less wants `blocks`."""
        ...

    def wanted(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether a waiting request wants each block."""
        ...

    def next_victims(self, count: int) -> Ids:
        """The blocks that lose their slot when `count` slots are given out, leaf first."""
        ...
