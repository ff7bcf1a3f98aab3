"""Ids of blocks: which are free, and a serial that tells two uses of one id apart.

On a path of blocks what is below another got its id later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay._native import NumberColumn
from forebay.core.arrays import Ids
from forebay.errors import ProtocolError


def ids_for(device_slots: int, host_slots: int) -> int:
    """How many ids there are: one for every slot, and for one allocation before it evicts."""
    return 2 * device_slots + host_slots


class BlockIds:
    """The ids below `count`, all of them free."""

    def __init__(self, count: int) -> None:
        self.left = count
        """How many are free."""
        self._free: Ids = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._serial = NumberColumn(count)
        self._next_serial = 1

    def take(self, count: int) -> Ids:
        """`count` free ids. Each gets the next serial: later ones are of later uses.

        Raises `ProtocolError`, with nothing changed, where fewer are free.
        """
        if count > self.left:
            raise ProtocolError("block ids ran out: a block without any slot was kept")
        self.left -= count
        ids = self._free[self.left : self.left + count].copy()
        self._serial.put_up(ids, self._next_serial)
        self._next_serial += count
        return ids

    def give_back(self, ids: Ids) -> None:
        """`ids` are free again."""
        self._serial.put(ids, 0)
        self._free[self.left : self.left + len(ids)] = ids
        self.left += len(ids)

    def serials(self, ids: Ids) -> NDArray[np.int64]:
        """The serial of each id in its present use, 0 where it is free."""
        return self._serial.take(ids)

    def leaf_first(self, ids: Ids) -> Ids:
        """`ids`, with the runs among them that were taken one after another turned round."""
        serials = self.serials(ids)
        follows = np.diff(serials) == 1
        if not follows.any():
            return ids
        runs = np.cumsum(np.concatenate([[0], ~follows]))
        return ids[np.lexsort((-serials, runs))]
