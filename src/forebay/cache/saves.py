"""Saves: copies of computed blocks to host memory, behind the running requests.

Written through as blocks are computed while free host slots last; and in every mode the next
victims of the device tier are kept CLEAN ahead of their eviction, as many as are allocated in two
save round trips, or in two steps where it is known what a step may take. Where there are fewer
victims than that, what runs is the next to be given up, as soon as it ends, and is saved too, in
the order in which it was computed. A block still DIRTY when its slot is taken is dropped and
counted, never awaited.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from forebay.cache.parts import Parts
from forebay.cache.submit import submit
from forebay.config import SaveMode
from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.flights import Flight
from forebay.core.rates import Average
from forebay.transfer.messages import Completion, Direction, TransferClass

# How much of the greatest burst counts one save round trip later.
_BURST_MEMORY = 0.95
# Also of a save that a coarse clock saw end at once.
_SHORTEST_TRIP_S = 1e-6
# Bounds the work of one event; more victims than this are not given up between two of them.
_MOST_AHEAD = 4096
# Small runs go together up to this over each link, a ms of a fast one: each save costs its own
# work, and whoever must have one ended waits for all of it.
_TOGETHER_BYTES = 64 << 20


class Saves:
    """Chooses what to save and when. Changes the store, submits to the mover.

    `displaces`: what is written through takes the place of what host memory has not used longest,
    rather than of copies of what the device has.
    So many as `step_blocks` may be allocated from one `flush` to the next, whatever was before.
    A part of each block moves over each of `links`.
    """

    def __init__(
        self, parts: Parts, *, displaces: bool = False, step_blocks: int = 0, links: int = 1
    ) -> None:
        self._settings = parts.settings
        self._switch = parts.switch
        self._through = parts.settings.save_mode is SaveMode.WRITE_THROUGH
        self._store = parts.store
        self._flights = parts.flights
        self._rates = parts.rates
        self._mover = parts.mover
        self._displaces = displaces
        self._step_blocks = step_blocks
        self._together = links * _TOGETHER_BYTES // parts.settings.block_bytes
        # (block, serial): a block that is gone has another serial, or none.
        self._pending: deque[tuple[Ids, NDArray[np.int64]]] = deque()
        self._pending_blocks = 0
        self._round_trip_s = Average(0.05)
        self._allocated = 0
        self._allocated_since_s = 0.0
        self._burst = 0.0
        # The next victims are looked at again when slots were given out, or a look was cut short.
        self._look_again = False

    @property
    def pending(self) -> bool:
        """Whether computed blocks are to be saved still, whatever comes."""
        return self._enabled and self._through and bool(self._pending)

    def computed(self, blocks: Ids, *path: Ids) -> None:
        """`blocks`, of the last ones of `path` (in pieces, root first), were published: save them
        when the link has time or they are to go, or all of the path once it is long enough to be
        saved.
        """
        settings = self._settings
        if settings.min_save_tokens:
            whole = np.concatenate(path)
            if len(whole) * settings.block_tokens < settings.min_save_tokens:
                self._store.withhold(blocks)
                return
            if self._store.withheld(whole).any():
                self._store.offer(whole)
                blocks = whole
        self.again(blocks)

    def again(self, blocks: Ids) -> None:
        """Save `blocks`, whose last save was cancelled, as if they were computed now."""
        if not self._enabled or not len(blocks):
            return
        self._pending.append((blocks.copy(), self._store.serials(blocks)))
        self._pending_blocks += len(blocks)
        if self._pending_blocks > 2 * self._settings.device_slots:
            # Of those that can still be saved there are fewer than slots.
            left = [self._still_dirty(*each) for each in self._pending]
            self._pending = deque((each, self._store.serials(each)) for each in left if len(each))
            self._pending_blocks = sum(map(len, left))

    def flush(self, now_s: float) -> None:
        """Submit what fits into the bound on saves in flight."""
        if not self._enabled:
            return
        room = self._room()
        # Without saving through the order changes too when blocks are let go.
        self._look_again |= not self._through or self._store.counters.allocated > self._allocated
        # What is DIRTY among the next victims is mostly what was just computed: once that is on its
        # way they need not be looked up.
        if self._through and self._pending_blocks <= room:
            room = self._save_pending(room, now_s)
        in_use = 0
        if room > 0 and self._look_again:
            ahead = self._ahead(now_s)
            any_dirty = self._store.device.dirty > 0
            dirty = self._store.next_to_clean(ahead) if any_dirty else EMPTY_IDS
            self._look_again = len(dirty) > room
            room -= self._save(dirty[:room], now_s, ahead)
            in_use = ahead - self._store.device.obtainable(protected=True)
        self._save_pending(room if self._through else min(room, in_use), now_s)

    def _save_pending(self, room: int, now_s: float) -> int:
        """Save what was computed, as far as there is `room`. Returns what is left of it."""
        while room > 0 and self._pending:
            left = self._still_dirty(*self._next_pending())
            if len(left) > room:
                rest = left[room:]
                self._pending.appendleft((rest, self._store.serials(rest)))
                self._pending_blocks += len(rest)
                left = left[:room]
            room -= self._save(left, now_s, 0)
        return room

    def _next_pending(self) -> tuple[Ids, NDArray[np.int64]]:
        """Take out what was computed first, of small runs several: each block once."""
        runs = [self._pending.popleft()]
        count = len(runs[0][0])
        while self._pending and count + len(self._pending[0][0]) <= self._together:
            runs.append(self._pending.popleft())
            count += len(runs[-1][0])
        self._pending_blocks -= count
        if len(runs) == 1:
            return runs[0]
        blocks = np.concatenate([blocks for blocks, _ in runs])
        serials = np.concatenate([serials for _, serials in runs])
        # By their serials ancestors come first. To sort lets go of the interpreter lock.
        if np.count_nonzero(serials[1:] <= serials[:-1]):
            serials, places = np.unique(serials, return_index=True)
            blocks = blocks[places]
        return blocks, serials

    def ended(self, completion: Completion, now_s: float) -> Flight:
        """A save is over."""
        flight = self._flights.end(completion.id)
        self._store.end_save(completion.id, completion.blocks_done, completion.blocks_touched)
        self._round_trip_s.add(now_s - flight.submitted_s)
        return flight

    def _still_dirty(self, blocks: Ids, serials: NDArray[np.int64]) -> Ids:
        left = blocks[self._store.serials(blocks) == serials]
        return left[self._store.dirty(left)]

    @property
    def _enabled(self) -> bool:
        return self._switch.policy.host_tier and self._settings.host_slots > 0

    def _room(self) -> int:
        settings = self._settings
        most = self._rates.blocks_in(settings.saves_in_flight_s, settings.block_bytes)
        return most - self._flights.save_blocks

    def _ahead(self, now_s: float) -> int:
        """Slots given out soon, whose blocks to keep CLEAN: what is allocated in two save round
        trips, and one reserve.
        """
        trips = (now_s - self._allocated_since_s) / max(self._round_trip_s.value, _SHORTEST_TRIP_S)
        if trips >= 1.0:
            allocated = self._store.counters.allocated
            # Prompts come in bursts, far above the average.
            per_trip = (allocated - self._allocated) / trips
            self._burst = max(per_trip, _BURST_MEMORY * self._burst)
            self._allocated, self._allocated_since_s = allocated, now_s
        soon = max(math.ceil(2.0 * self._burst), 2 * self._step_blocks)
        wanted = soon + self._settings.reserve_blocks
        return min(wanted, self._settings.device_slots // 2, _MOST_AHEAD)

    def _save(self, blocks: Ids, now_s: float, ahead: int) -> int:
        if not len(blocks):
            return 0
        transfer = self._flights.next_id()
        # Written through, what was saved last must not make room for what is saved next: nobody
        # would save it again before it goes.
        displacing = self._displaces and (self._through or not ahead)
        copies = self._store.start_save(transfer, blocks, ahead=ahead, displacing=displacing)
        if copies is None:
            return 0
        submit(
            self._flights,
            self._mover,
            transfer,
            copies,
            Direction.SAVE,
            TransferClass.SAVE,
            deadline_s=now_s,
            now_s=now_s,
        )
        return len(copies.blocks)
