"""What is said to a mover and what it says back: plain values that can be pickled.

A block is named by its slot in a pool. Arrays are one-dimensional and contiguous; none is changed
by the mover, and it keeps none after `submit` returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Direction(IntEnum):
    """Which way the bytes go."""

    LOAD = 0
    """Host to device."""
    SAVE = 1
    """Device to host."""


class TransferClass(IntEnum):
    """The smaller goes first; within a class the earlier deadline does."""

    DEMAND = 0
    PREFETCH = 1
    SAVE = 2


class Outcome(IntEnum):
    """How a transfer ended."""

    DONE = 0
    CANCELLED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """One ordered set of block copies between the host pool and the device pool.

    `sources`, `destinations` (int32) and `after_steps` (int64) have one element for each block.
    Blocks are copied in this order; copy i begins only when `completed_step >= after_steps[i]`.
    """

    id: int
    """Chosen by the caller; larger than every id submitted before."""
    direction: Direction
    transfer_class: TransferClass
    deadline_s: float
    """On the clock of `time.monotonic`; infinity is allowed."""
    sources: NDArray[np.int32]
    """Slots of the pool that is read: host for a load, device for a save."""
    destinations: NDArray[np.int32]
    """Slots of the pool that is written."""
    after_steps: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one transfer. There is exactly one for each submitted transfer."""

    id: int
    outcome: Outcome
    blocks_done: int
    """Leading blocks whose bytes are all in place, whatever the outcome."""
    blocks_touched: int
    """At least `blocks_done`. Blocks from there up to this one may still be read or written by a
    copy that is not known to have ended: their slots must not be used again. So may those before
    `torn_from` be, where that is larger: no copy of them is under way."""
    bytes: int
    """All that landed, parts of blocks included."""
    started_s: float
    """When the first window was handed to the link (`time.monotonic`)."""
    finished_s: float
    error: str
    """Empty unless the outcome is FAILED."""
    torn_from: int = 0

    @property
    def torn(self) -> range:
        """Places of the blocks whose slots must not be used again."""
        return range(max(self.blocks_done, self.torn_from), self.blocks_touched)


@dataclass(frozen=True, slots=True)
class Report:
    """What is new since the last report."""

    issued: tuple[int, ...]
    """Transfers every window of which has now been handed to the link: they may be waited for."""
    completions: tuple[Completion, ...]
    completed_step: int
    """The largest m such that every step 1..m ran or was abandoned."""
    bands: tuple[tuple[int, int], ...] = ()
    """(transfer, count): so many leading bands of a load that goes by bands have now been handed
    to the link, and may be waited for."""


WINDOW_DTYPE = np.dtype(
    {
        "names": ["transfer", "bytes", "start_s", "end_s", "direction", "transfer_class", "lane"],
        "formats": [np.int64, np.int64, np.float64, np.float64, np.uint8, np.uint8, np.uint8],
        "itemsize": 40,
    }
)
"""One window that landed, as `Mover.windows` returns them. Times are of `time.monotonic`: from when
the window was handed over until its end was seen."""
