"""One final outcome for every planned prefetch byte, and a source for every block asked.

A prefetched block is *open* from its plan until exactly one of these happens: a request reads it
(used, if it was issued before that request's turn, else late), nobody does (wasted: it lost its
slot, or its time ran out), or it never arrived (cancelled, failed). What did not fit is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from forebay._native import NumberColumn
from forebay.core.arrays import Ids


class PrefetchOutcome(StrEnum):
    """What became of prefetched bytes."""

    USED = "used"
    LATE = "late"
    WASTED = "wasted"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


class Source(StrEnum):
    """Where the blocks that a request asked for came from."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTED = "recomputed"


class MissReason(StrEnum):
    """Why an asked block was recomputed."""

    ABSENT = "absent"  # in no tier: never computed, or given up
    LAST = "last"  # holds the prompt's last token, or ends what was found: always computed
    SHORT = "short"  # in host memory, but too few tokens to be worth a load
    LATE = "late"  # the load was not issued within its bound
    FAILED = "failed"  # the copy failed
    STOPPED = "stopped"  # loads hang or fail, and none was started
    DISABLED = "disabled"  # the request or the mode does not use the cache


@dataclass(slots=True)
class PrefetchLedger:
    """Open prefetched blocks, and the bytes of each outcome so far."""

    max_blocks: int
    block_bytes: int
    outcomes: dict[PrefetchOutcome, int] = field(
        default_factory=lambda: dict.fromkeys(PrefetchOutcome, 0)
    )
    planned_bytes: int = 0
    _open: NumberColumn = field(init=False)
    _left: dict[int, int] = field(default_factory=dict[int, int])
    _issued_s: dict[int, float] = field(default_factory=dict[int, float])
    # A heap: a hint may be for much later than what comes after it.
    _expiries: list[tuple[float, int, Ids]] = field(default_factory=list[tuple[float, int, Ids]])

    def __post_init__(self) -> None:
        self._open = NumberColumn(self.max_blocks)

    @property
    def open_bytes(self) -> int:
        """Bytes planned that have no outcome yet."""
        return sum(self._left.values()) * self.block_bytes

    def planned(self, transfer: int, blocks: Ids, expires_s: float) -> None:
        """`transfer` will prefetch `blocks`; unread by `expires_s` they count as wasted."""
        self._open.put(blocks, transfer)
        self.planned_bytes += len(blocks) * self.block_bytes
        self._left[transfer] = len(blocks)
        heapq.heappush(self._expiries, (expires_s, transfer, blocks))

    def issued(self, transfer: int, at_s: float) -> None:
        """Every window of `transfer` has been handed to the link."""
        if transfer in self._left:
            self._issued_s[transfer] = at_s

    def read(self, blocks: Ids, turn_s: float) -> int:
        """A request whose turn came at `turn_s` starts with `blocks` in its table.

        Returns how many of them were open.
        """
        read = 0
        for transfer, count in self._open.clear_runs(blocks):
            in_time = self._issued_s.get(transfer, float("inf")) <= turn_s
            outcome = PrefetchOutcome.USED if in_time else PrefetchOutcome.LATE
            self._count(outcome, transfer, count)
            read += count
        return read

    def ended(self, blocks: Ids, outcome: PrefetchOutcome) -> None:
        """Those of `blocks` that are open end with `outcome`."""
        for transfer, count in self._open.clear_runs(blocks):
            self._count(outcome, transfer, count)

    def lost(self, blocks: Ids) -> None:
        """`blocks` lost their device slot: what is open of them is wasted."""
        self.ended(blocks, PrefetchOutcome.WASTED)

    def refused(self, blocks: int) -> None:
        """`blocks` were wanted and did not fit."""
        self.outcomes[PrefetchOutcome.REFUSED] += blocks * self.block_bytes

    def expire(
        self, now_s: float, wanted: Callable[[Ids], NDArray[np.bool_]], slack_s: float
    ) -> None:
        """Open blocks past their time are wasted, or, if a waiting request wants them, go on.

        `wanted` tells whether a waiting request wants each block; those that go on have `slack_s`
        more.
        """
        go_on: list[tuple[float, int, Ids]] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, transfer, blocks = heapq.heappop(self._expiries)
            if transfer not in self._left:
                continue
            still = blocks[self._open.take(blocks) == transfer]
            asked = wanted(still)
            if asked.any():
                go_on.append((now_s + slack_s, transfer, still[asked]))
            self.ended(still[~asked], PrefetchOutcome.WASTED)
        for each in go_on:
            heapq.heappush(self._expiries, each)

    def _count(self, outcome: PrefetchOutcome, transfer: int, blocks: int) -> None:
        self.outcomes[outcome] += blocks * self.block_bytes
        self._left[transfer] -= blocks
        if not self._left[transfer]:
            del self._left[transfer]
            self._issued_s.pop(transfer, None)
