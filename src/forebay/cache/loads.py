"""Loads: bring what waiting requests want from host memory to the device.

Ahead of a request's turn this carries out plans. When its turn has come it sees to the rest: what
is not issued is expedited and, after a bound, given up and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from forebay._native import count_true
from forebay.cache.link import LinkWatch
from forebay.cache.parts import Parts
from forebay.cache.submit import submit
from forebay.config import MOST_SLOTS
from forebay.core.arrays import Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.flights import Flight
from forebay.core.ledger import MissReason, PrefetchOutcome
from forebay.core.requests import NotYet, Waiting
from forebay.core.slots import SlotState
from forebay.transfer.messages import Completion, Direction, Outcome, TransferClass


class Loads:
    """Everything between a request's arrival and its admission that moves or leases blocks.

    `bound_s` tells how long a request waits for loads once its turn has come; by default the
    smaller of twice their estimate and of computing what they bring. A load of more than
    `piece_blocks` says goes as several, so that the link has the first while the others are
    prepared, and what landed is taken in while the others fly; each costs its own work.
    """

    def __init__(
        self,
        parts: Parts,
        bound_s: Callable[[Waiting], float] | None = None,
        piece_blocks: Callable[[], int] = lambda: MOST_SLOTS,
    ) -> None:
        self._settings = parts.settings
        self._switch = parts.switch
        self._store = parts.store
        self._line = parts.line
        self._flights = parts.flights
        self._ledger = parts.ledger
        self._rates = parts.rates
        self._mover = parts.mover
        self._bound_s = bound_s or self._own_bound_s
        self._piece_blocks = piece_blocks
        self.link = LinkWatch(parts.flights)

    @property
    def longest_s(self) -> float:
        """How long what is in flight may take before the link counts as stopped."""
        blocks = self._flights.load_blocks + self._flights.save_blocks
        copied_s = self._rates.longest_s(blocks * self._settings.block_bytes)
        return self._settings.give_up_grace_s + copied_s

    def copy_s(self, blocks: int) -> float:
        """How long the link takes for `blocks`."""
        return self._rates.load_s(blocks * self._settings.block_bytes)

    def worth(self, entry: Waiting, now_s: float) -> int:
        """Blocks to load for `entry`; none where recomputing so few is the quicker way, none in a
        mode without loads, and none while the link has stopped.
        """
        if not entry.to_load:
            return 0
        if not self._switch.policy.host_tier or not self.link.may_load(now_s):
            return 0
        # Beside its path a few blocks may decide on all of it.
        gained = entry.length if entry.beside else entry.to_load + entry.behind + entry.loaded
        gained = min(gained, entry.length - self._line.dropped)
        tokens = gained * self._settings.block_tokens
        return entry.to_load if tokens >= max(1, self._settings.min_load_tokens) else 0

    # -- a request's turn ------------------------------------------------------------------------

    def turn(self, entry: Waiting, now_s: float, *, first: bool) -> NotYet | None:
        """The request could start but for its load. None: everything it covers is issued, or has
        landed where the host is who waits.

        In a mode that stalls steps, un-issued loads do not hold it back.
        """
        self._line.refresh(entry)
        if entry.turn_s is None:
            entry.turn_s = now_s
        if entry.to_load and entry.limit is None and not self.worth(entry, now_s):
            self._limit(entry, self._leading(entry), self._why_no_load(now_s))
        if entry.here or entry.to_load:
            if entry.refused:
                self._ledger.refused(entry.to_load)
                entry.refused = False
            self._cover_all(entry, now_s, first=first)
            if entry.here or entry.to_load:
                return NotYet.FULL
        overdue = self._flights.overdue(entry.waits)
        if overdue:
            self._limit(entry, self._first_of(entry, overdue), MissReason.LATE)
        unready = self._unready(entry.waits)
        self._demand(entry, unready, now_s)
        if not unready or self._switch.policy.stalls_step:
            return None
        return self._wait_or_give_up(entry, unready, now_s)

    def _unready(self, waits: set[int]) -> set[int]:
        """Those of `waits` that a step must not be launched behind."""
        if self._settings.waits_on_host:
            return self._flights.un_ended(waits)
        return self._flights.unissued(waits)

    def _why_no_load(self, now_s: float) -> MissReason:
        if not self._switch.policy.host_tier:
            return MissReason.DISABLED
        return MissReason.SHORT if self.link.may_load(now_s) else MissReason.STOPPED

    def _cover_all(self, entry: Waiting, now_s: float, *, first: bool) -> None:
        self._cover_rest(entry, now_s, protected=first)
        if first and (entry.here or entry.to_load):
            self.revoke(entry.here + entry.to_load, spare=entry)
            # The first part may have displaced what lies behind it.
            self._line.refresh(entry)
            self._cover_rest(entry, now_s, protected=True)

    def _cover_rest(self, entry: Waiting, now_s: float, *, protected: bool) -> None:
        rest = entry.here + entry.to_load
        self.cover(entry, rest, entry.to_load, now_s, now_s, protected=protected)

    def _demand(self, entry: Waiting, unready: set[int], now_s: float) -> None:
        """Its turn has come: what it waits for goes before every prefetch."""
        if not unready or entry.demanded_s is not None:
            return
        entry.demanded_s = now_s
        # What others demanded before goes first already.
        fresh = self._flights.demand(unready)
        if fresh:
            self._mover.expedite(fresh, TransferClass.DEMAND, now_s)

    def _wait_or_give_up(self, entry: Waiting, unready: set[int], now_s: float) -> NotYet | None:
        """Wait for what is not ready, but not for ever."""
        bound_s = self._bound_s(entry)
        waited_s = now_s - (now_s if entry.demanded_s is None else entry.demanded_s)
        if waited_s <= bound_s:
            return NotYet.LOADING
        if entry.limit is None:
            # What was handed to the link is kept: the cancelled transfer says how far it came.
            entry.limit, entry.limit_reason = entry.covered, MissReason.LATE
            self._mover.cancel(self._flights.abandon(unready, entry.request.id))
            self._flights.depend(self._flights.flying(unready), entry.request.id)
            return NotYet.LOADING
        if waited_s <= 2 * bound_s + self._settings.give_up_grace_s:
            return NotYet.LOADING
        self.link.hangs(self._hanging(unready, now_s), now_s)
        self._limit(entry, self._first_of(entry, unready), MissReason.LATE)
        return None

    def _hanging(self, transfers: set[int], now_s: float) -> set[int]:
        """Those of `transfers`, waited for in vain, that show that the link has stopped.

        It does not even end what was cancelled or fully issued. What others want is not cancelled:
        slow for one who waits, it may be in time for them.
        """
        flights = filter(None, map(self._flights.get, transfers))
        begun_s = now_s - self.longest_s
        return {
            flight.id
            for flight in flights
            if flight.cancelled or flight.issued or flight.submitted_s < begun_s
        }

    def patience_s(self, entry: Waiting, now_s: float) -> float:
        """How much longer `entry`, whose turn has come, waits for its loads before it gives up."""
        waited_s = now_s - (now_s if entry.demanded_s is None else entry.demanded_s)
        return self._bound_s(entry) - waited_s

    def _own_bound_s(self, entry: Waiting) -> float:
        settings = self._settings
        return self._rates.patience_s(
            entry.loaded * settings.block_bytes, entry.loaded * settings.block_tokens
        )

    def _limit(self, entry: Waiting, blocks: int, reason: MissReason) -> None:
        """Recompute what lies behind the first `blocks` of its match."""
        waits = set(entry.waits)
        self._line.uncover(entry, blocks)
        entry.limit, entry.limit_reason = blocks, reason
        self._line.count(entry)
        self._want_no_more(entry, waits - entry.waits)

    def _want_no_more(self, entry: Waiting, transfers: set[int]) -> None:
        """`entry` does not wait for `transfers` any more: stop those that nobody else wants."""
        stopped = self._flights.abandon(transfers, entry.request.id)
        if stopped:
            self._mover.cancel(stopped)

    def _leading(self, entry: Waiting) -> int:
        """Blocks of its match up to the first that would have to be loaded."""
        ahead = self._store.resident(entry.blocks[entry.covered : entry.loadable])
        return entry.covered + (len(ahead) if ahead.all() else int(np.argmin(ahead)))

    def _first_of(self, entry: Waiting, transfers: set[int]) -> int:
        """The first covered place that one of `transfers` fills."""
        flights = [self._flights.get(transfer) for transfer in transfers]
        blocks = [flight.blocks for flight in flights if flight is not None]
        if not blocks:
            return entry.covered
        waits = np.isin(entry.blocks[: entry.covered], np.concatenate(blocks))
        return int(np.argmax(waits)) if waits.any() else entry.covered

    # -- leasing and loading ---------------------------------------------------------------------

    def cover(
        self,
        entry: Waiting,
        reach: int,
        load: int,
        deadline_s: float,
        now_s: float,
        *,
        protected: bool,
    ) -> None:
        """Lease the next `reach` blocks of its match, loading up to `load` of them, if they fit.

        Changes `entry` and the store, and submits what it starts.
        """
        store = self._store
        ahead = entry.blocks[entry.covered : min(entry.covered + reach, entry.loadable)]
        absent = store.device.absent(ahead)
        # Leased before anything is evicted, so that a load cannot displace what it builds on.
        reach = _reach(absent, 0, len(ahead))
        store.touch(ahead[:reach], LeaseKind.PREFETCH)
        if len(absent):
            load = min(load, len(absent), store.device.obtainable(protected=protected))
            reach = self._bring(entry, ahead, absent, load, deadline_s, now_s, protected=protected)
        taken = ahead[:reach]
        loads = store.loads_of(taken)
        from_host = store.loading(taken)
        if len(entry.brought):
            from_host = from_host | np.isin(store.serials(taken), entry.brought)
        before = entry.origins
        entry.origins = np.concatenate([before, from_host]) if len(before) else from_host
        entry.loaded += count_true(from_host)
        entry.covered += reach
        entry.waits |= loads
        self._flights.depend(loads, entry.request.id)
        self._line.count(entry)

    def _bring(
        self,
        entry: Waiting,
        ahead: Ids,
        absent: Ids,
        load: int,
        deadline_s: float,
        now_s: float,
        *,
        protected: bool,
    ) -> int:
        """Load the first `load` of what is at the `absent` places of `ahead`, if they fit, and
        lease it and what lies between. Returns how far that reaches.
        """
        store, here = self._store, _reach(absent, 0, len(ahead))
        reach = _reach(absent, load, len(ahead))
        more = ahead[here:reach]
        store.touch(more, LeaseKind.PREFETCH)
        # Where all are absent their places need no look-up.
        blocks = ahead[:load] if len(absent) == len(ahead) else ahead[absent[:load]]
        started = self._start(entry, blocks, deadline_s, now_s, protected=protected)
        if started < load:
            reach = _reach(absent, started, len(ahead))
            store.release(more[reach - here :], LeaseKind.PREFETCH)
        return reach

    def _start(
        self, entry: Waiting, blocks: Ids, deadline_s: float, now_s: float, *, protected: bool
    ) -> int:
        """Submit loads of `blocks`, in their order; of how many there was room after all."""
        most = self._piece_blocks()
        for first in range(0, len(blocks), most):
            piece = blocks[first : first + most]
            if not self._start_piece(entry, piece, deadline_s, now_s, protected=protected):
                return first
        return len(blocks)

    def _start_piece(
        self, entry: Waiting, blocks: Ids, deadline_s: float, now_s: float, *, protected: bool
    ) -> bool:
        ahead = entry.turn_s is None
        transfer = self._flights.next_id()
        copies = self._store.start_load(transfer, blocks, protected=protected)
        if copies is None:
            return False
        submit(
            self._flights,
            self._mover,
            transfer,
            copies,
            Direction.LOAD,
            TransferClass.PREFETCH if ahead else TransferClass.DEMAND,
            deadline_s=deadline_s,
            now_s=now_s,
        )
        if ahead:
            self._ledger.planned(transfer, blocks, max(deadline_s, now_s) + self._settings.slack_s)
        return True

    def revoke(self, blocks: int, *, spare: Waiting | None = None) -> None:
        """Take prefetch leases back, last in the queue first, until `blocks` can be obtained.

        Does nothing where even all of them would not make that room.
        """
        device = self._store.device
        most = device.obtainable(protected=True) + device.prefetch_leased
        if most - (spare.covered if spare is not None else 0) < blocks:
            return
        for entry in reversed(list(self._line)):
            if device.obtainable(protected=True) >= blocks:
                return
            if entry is not spare and entry.covered:
                self.give_back(entry)

    def room_to_compute(self, blocks: int) -> Ids | None:
        """New blocks for a running request, in place of prefetches if need be; None if none are."""
        found = self._store.compute(blocks, protected=True)
        if found is not None:
            return found
        for room in (blocks, blocks + self.saving):
            self.revoke(room)
            found = self._store.compute(blocks, protected=True)
            if found is not None:
                return found
        return None

    @property
    def saving(self) -> int:
        """Blocks on the device that are being saved: they count as obtainable, and are not. When
        they are others may be saved: a running request that left them out of account could wait for
        ever.
        """
        return self._store.device.counts()[SlotState.SAVING]

    def give_back(self, entry: Waiting) -> None:
        """End all its leases; loads that nobody else wants are cancelled."""
        waits = set(entry.waits)
        self._line.uncover(entry, 0)
        self._want_no_more(entry, waits)

    def leave(self, entry: Waiting) -> None:
        """`entry` waits no more: it gives back what it has, and leaves the line."""
        self._store.release(entry.blocks[: entry.covered], LeaseKind.PREFETCH)
        self._line.remove(entry)
        self._want_no_more(entry, entry.waits)

    # -- what the mover says ---------------------------------------------------------------------

    def issued(self, transfer: int, now_s: float) -> None:
        """Every window of `transfer` has been handed to the link."""
        flight = self._flights.get(transfer)
        if flight is None:
            return
        flight.issued = True
        self._ledger.issued(transfer, now_s)

    def bands_issued(self, transfer: int, bands: int) -> None:
        """So many leading bands of `transfer` have been handed to the link."""
        flight = self._flights.get(transfer)
        if flight is not None:
            flight.bands_issued = bands

    def ended(self, completion: Completion, busy_s: float, now_s: float) -> Flight:
        """A load that kept the link busy for `busy_s` is over: who wanted it keeps what came."""
        flight = self._flights.end(completion.id)
        self.link.ended(completion, now_s)
        done, torn = completion.blocks_done, completion.torn
        missing = self._store.end_load(completion.id, done, torn)
        if completion.outcome is Outcome.DONE:
            self._rates.moved(completion.bytes, busy_s)
            self._rates.arrived(completion.bytes, now_s - flight.submitted_s)
        failed = completion.outcome is Outcome.FAILED
        if len(missing):
            self._ledger.ended(
                missing, PrefetchOutcome.FAILED if failed else PrefetchOutcome.CANCELLED
            )
        for request in flight.dependents:
            entry = self._line.get(request)
            if entry is not None:
                self._landed(entry, completion.id, missing)
        if failed and torn:
            # A copy was begun and went wrong: its source may be at fault. What was never handed
            # to the link is as good as before.
            self._give_up(int(missing[torn.start - done]))
        return flight

    def _give_up(self, block: int) -> None:
        """`block` is not matched again, nor what builds on it: whoever wants it computes it."""
        for entry in self._line:
            # Also one that was preempted for it before this was known, and depends on no load.
            if (entry.blocks == block).any():
                entry.had = max(entry.had, len(entry.blocks))
        self._store.unpublish(block)

    def _landed(self, entry: Waiting, transfer: int, missing: Ids) -> None:
        entry.waits.discard(transfer)
        if entry.limit is None and not len(missing):
            return  # what lies behind its covered blocks is as it was
        if len(missing):
            lacking = np.isin(entry.blocks[: entry.covered], missing)
            if lacking.any():
                self._line.uncover(entry, int(np.argmax(lacking)))
        if entry.limit is not None:
            entry.limit = min(entry.limit, entry.covered)
        self._line.count(entry)


def _reach(absent: Ids, load: int, length: int) -> int:
    """How far a lease reaches along a path when the first `load` absent places are loaded."""
    return int(absent[load]) if load < len(absent) else length
