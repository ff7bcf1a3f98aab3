"""Eviction order: which blocks to give up first, kept incrementally.

The one idea: a whole path is released at once, and a *run* records it children before parents under
a new serial. A block stands where its newest run says; older entries are stale and are passed over
when they come up. Appending, taking out and giving up cost time in proportion to the blocks touched
and never scan the rest. Because every lease covers a path from its root, a parent is always
released together with, or later than, its children: giving up from the front is leaf-first by
construction.

Blocks stand in one of two ranks, each an order of its own; a block is in one of them at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import EMPTY_IDS, Ids

# A front run is looked at in pieces of at least this many entries, so that taking one block from a
# run of thousands does not compare all of them.
_LOOK = 64
# Once there are this many entries for a live one, each append also looks at a few older ones for
# each new one, and drops the stale among them: more than are added, and never all in one call.
_STALE_SHARE = 1.5
_SWEEP = 4


@dataclass(slots=True)
class _Run:
    """Blocks released together, leaf first; entries before `begin` are gone."""

    serial: int
    blocks: Ids
    begin: int = 0


class EvictionOrder:
    """Least recently released first, children before parents. Blocks are ids below `max_blocks`."""

    def __init__(self, max_blocks: int) -> None:
        # A serial's lowest bit is the rank, so that leaving an order needs one look-up; 0 = in
        # none.
        self._place: NDArray[np.int64] = np.zeros(max_blocks, np.int64)
        self._runs: tuple[deque[_Run], deque[_Run]] = (deque(), deque())
        self._live = [0, 0]
        self._entries = 0
        self._next_serial = 2
        self._swept = [0, 0]

    def count(self, rank: int) -> int:
        """Blocks that stand in `rank` (0 or 1)."""
        return self._live[rank]

    def contains(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block stands in either rank."""
        return self._place.take(blocks) != 0

    def append(self, blocks: Ids, rank: int) -> None:
        """Put `blocks` (distinct, root first) at the end of `rank`. Moves those that stand
        already.
        """
        if len(blocks):
            self.discard(blocks)
            self._runs[rank].append(self._record(blocks[::-1].copy(), rank))
            self._sweep(_SWEEP * len(blocks) + _LOOK, rank)

    def prepend(self, blocks: Ids, rank: int) -> None:
        """Put `blocks` (distinct, in none, leaf first as `pop` gave them) back at the very
        front.
        """
        if len(blocks):
            self._runs[rank].appendleft(self._record(blocks, rank))

    def discard(self, blocks: Ids) -> None:
        """Take `blocks` out of the order; those that are not in it are left alone."""
        serials = self._place.take(blocks)
        standing = int(np.count_nonzero(serials))
        if not standing:
            return
        upper = int(np.count_nonzero(serials & 1))
        self._live[1] -= upper
        self._live[0] -= standing - upper
        self._place.put(blocks, 0)

    def pop(self, count: int, rank: int, busy: NDArray[np.bool_]) -> Ids:
        """Take up to `count` of the first blocks that are not `busy` (indexed by block), leaf
        first.

        Busy blocks keep their place at the front. What a caller cannot use after all, it gives back
        with `prepend`.
        """
        pieces: list[Ids] = []
        missing = count
        while missing > 0 and self._runs[rank]:
            piece = self._next_live(missing, rank)
            pieces.append(piece)
            missing -= len(piece) - int(np.count_nonzero(busy.take(piece)))
        if not pieces:
            return EMPTY_IDS
        taken = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        held = busy.take(taken)
        if not np.count_nonzero(held):
            return taken
        self.prepend(taken[held], rank)
        return taken[~held]

    def pop_newest(self, count: int, rank: int) -> Ids:
        """Take up to `count` blocks from the end: the most recently released, root first."""
        pieces: list[Ids] = []
        missing = count
        runs = self._runs[rank]
        while missing > 0 and runs:
            run = runs.pop()
            self._entries -= len(run.blocks) - run.begin
            live = self._live_part(run)
            piece, rest = live[-missing:], live[: max(0, len(live) - missing)]
            if len(rest):
                runs.append(_Run(run.serial, rest))
                self._entries += len(rest)
            self._place.put(piece, 0)
            self._live[rank] -= len(piece)
            pieces.append(piece[::-1])
            missing -= len(piece)
        return np.concatenate(pieces) if pieces else EMPTY_IDS

    def peek(self, count: int, rank: int) -> Ids:
        """The first `count` blocks of `rank` (or all), leaf first; nothing is changed."""
        pieces: list[Ids] = []
        missing = count
        for run in self._runs[rank]:
            if missing <= 0:
                break
            piece = self._live_part(run)[:missing]
            pieces.append(piece)
            missing -= len(piece)
        return np.concatenate(pieces) if pieces else EMPTY_IDS

    def _record(self, leaf_first: Ids, rank: int) -> _Run:
        serial = self._next_serial + rank
        self._next_serial += 2
        self._live[rank] += len(leaf_first)
        self._entries += len(leaf_first)
        self._place.put(leaf_first, serial)
        return _Run(serial, leaf_first)

    def _live_part(self, run: _Run) -> Ids:
        blocks = run.blocks[run.begin :]
        return blocks[self._place.take(blocks) == run.serial]

    def _next_live(self, wanted: int, rank: int) -> Ids:
        """Take up to `wanted` live blocks from the first run, dropping stale entries on the way."""
        run = self._runs[rank][0]
        looked = run.blocks[run.begin : run.begin + max(wanted, _LOOK)]
        where = np.flatnonzero(self._place.take(looked) == run.serial)[:wanted]
        piece = looked[where]
        passed = int(where[-1]) + 1 if len(where) == wanted else len(looked)
        run.begin += passed
        self._entries -= passed
        if run.begin >= len(run.blocks):
            self._runs[rank].popleft()
        self._place.put(piece, 0)
        self._live[rank] -= len(piece)
        return piece

    def _sweep(self, entries: int, rank: int) -> None:
        """Drop the stale ones among the next `entries` entries of `rank`, going round."""
        if self._entries <= _STALE_SHARE * (self._live[0] + self._live[1]):
            return
        runs = self._runs[rank]
        at = self._swept[rank]
        while entries > 0 and runs:
            if at >= len(runs):
                at = 0
                entries = min(entries, self._entries - self._live[0] - self._live[1])
            run = runs[at]
            looked = len(run.blocks) - run.begin
            entries -= looked + 1
            live = self._live_part(run)
            self._entries -= looked - len(live)
            if len(live):
                run.blocks, run.begin = live, 0
                at += 1
            else:
                del runs[at]
        self._swept[rank] = at
