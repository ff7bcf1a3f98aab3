"""Room in host memory for what is to be saved, and who makes it.

Host copies of blocks that are on the device too go first: they cost nothing but another save. Then
go the blocks that host memory alone has, least recently used first, children before parents.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from forebay._native import count_true
from forebay.core.arrays import Ids
from forebay.core.device_pool import DevicePool
from forebay.core.directory import Directory
from forebay.core.host import HostPool
from forebay.core.slots import SlotState

_TRIES, _LOOKED = 64, 64
"""How often host memory is asked for room, for one save, and for how many blocks at least from the
second time on: bounds the work where much of what it has not used longest stands under what is
newer, and how much more than is needed is given up then."""


class HostRoom:
    """Makes slots of `host` FREE. `give_up` is called with blocks that were in host memory alone
    and have left `directory`: it frees their slots.
    """

    def __init__(
        self,
        host: HostPool,
        device: DevicePool,
        directory: Directory,
        give_up: Callable[[Ids], None],
    ) -> None:
        self._host = host
        self._device = device
        self._directory = directory
        self._give_up = give_up

    def of_copies(self, room: int, spared: Ids) -> None:
        """Have `room` FREE slots, as far as copies of blocks on the device make it, none of those
        in `spared`: such blocks are DIRTY again.
        """
        copies = self._host.newest_copies(room - self._host.tier.free)
        if not len(copies):
            return
        stay = np.isin(copies, spared)
        self._host.stand_copies(copies[stay])
        copies = copies[~stay]
        self._host.forget(copies)
        self._device.move(copies, SlotState.DIRTY)

    def of_sole(self, room: int) -> None:
        """Have `room` FREE slots, as far as blocks in host memory alone make it that nobody waits
        for.
        """
        look, in_vain = room - self._host.tier.free, 0
        for _ in range(_TRIES):
            victims = self._host.oldest_sole(look)
            in_vain += len(victims)
            victims = self._stand_but(victims, ~self._device.wanted(victims))
            # A pool that others allocate from may give up a parent before its children.
            victims = self._stand_but(victims, self._directory.remove_leaves(victims))
            if len(victims):
                self._give_up(victims)
                in_vain = 0
            if self._host.tier.free >= room or in_vain >= self._host.sole:
                return
            look = max(room - self._host.tier.free, _LOOKED)

    def _stand_but(self, victims: Ids, go: NDArray[np.bool_]) -> Ids:
        """Those of `victims` that `go`; the others stand at the end again."""
        if count_true(go) == len(victims):
            return victims
        self._host.stand_sole(victims[~go])
        return victims[go]
