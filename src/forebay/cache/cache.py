"""`Cache`: what an engine calls, in this order.

    enqueue, (poll, admit)* -> ticket, (grow, ready, begin_step, step_launched, commit)*, finish

One thread owns a cache. It assumes neither that the mover runs in this process nor that reports are
prompt: everything it does stays right when they come a step late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.cache import intake
from forebay.cache.account import Account, CacheStats
from forebay.cache.ahead import LookAhead
from forebay.cache.by_layer import LayerStarts
from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.cache.steps import Steps
from forebay.cache.view import CacheView
from forebay.cache.waits import Waits
from forebay.config import CacheSettings
from forebay.core.device_pool import DevicePool, LeaseKind
from forebay.core.modes import Mode
from forebay.core.planner import Running
from forebay.core.requests import Growth, NotYet, Request, Ticket, Waiting
from forebay.core.store import Store
from forebay.errors import ParentMissingError, ProtocolError
from forebay.transfer.messages import Completion
from forebay.transfer.mover import Mover


class Cache:
    """Look-ahead KV cache over a device pool and a host tier; see the module for the order of
    calls.

    `key_bytes` is the width of a block key, `device_pool` whose slots the device's are (None: its
    own), `first_transfer` the first id to use with `mover`, `host_ready` tells how many host slots
    can be used by now (None: all), `clock` gives seconds, in which the mover's deadlines are too.
    `layer_ends` are the bytes of a block at which each layer ends, where requests may start by
    layer: their steps call :meth:`layer`.
    """

    def __init__(
        self,
        settings: CacheSettings,
        mover: Mover,
        *,
        key_bytes: int,
        device_pool: DevicePool | None = None,
        first_transfer: int = 1,
        host_ready: Callable[[], int] | None = None,
        layer_ends: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._mover = intake.check_mover(mover, settings)
        self._clock = clock
        slots = settings.device_slots, settings.host_slots
        store = Store(key_bytes, *slots, device_pool, host_ready)
        parts = Parts.over(settings, store, mover, first_transfer=first_transfer)
        self.rates = parts.rates
        self._store = store
        self._line = parts.line
        self._flights = parts.flights
        self._ledger = parts.ledger
        self._switch = parts.switch
        self._loads = Loads(parts)
        self._ahead = LookAhead(parts, self._loads)
        self._saves = Saves(parts)
        self._tickets: dict[int, Ticket] = {}
        self._generation = 0
        self._steps = Steps(settings, self._store, self._flights, mover)
        self._stuck_since_s: float | None = None
        self._closed = False
        # Blocks that a running request, or the first waiting one, lacked in the last round. Without
        # this, look-ahead would take again what was revoked for them while its copies end.
        self._owed = 0
        self._account = Account()
        self._by_layer = LayerStarts(settings, layer_ends, self._flights, self.rates, mover)
        self._waits = Waits(
            self._flights, self._loads, mover, self._account, self._take_report, clock
        )
        self.view = CacheView(self._store, self._line, self._flights)

    # -- requests --------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Take a request in; its KV may be on its way from now on.

        Raises RequestError for one that can never run in this pool.
        """
        intake.check_new(request, (self._line, self._tickets), closed=self._closed)
        intake.check_room(request, self._most_blocks(), self.settings.block_tokens)
        self._add(request)

    def waiting(self) -> list[Request]:
        """The waiting requests in the order in which their turn comes."""
        return [entry.request for entry in self._line]

    def abort(self, request: int) -> None:
        """The request is gone, whatever its state; an unknown or ended one is ignored."""
        entry = self._line.get(request)
        if entry is not None:
            self._loads.leave(entry)
        ticket = self._tickets.get(request)
        if ticket is not None:
            self.finish(ticket)

    def admit(self, request: int, *, first: bool, alone: bool = False) -> Ticket | NotYet:
        """The turn of `request` has come: a ticket if it can start now, else why not yet.

        `first` says that nothing waits before it: only then may it take back prefetch leases and
        displace what other waiting requests want. `alone` says that nothing else can run: then one
        that lacks only its load may start by layer (`Ticket.band_of_layer`).
        """
        entry = self._line[request]
        if not intake.fits(entry.request, self._most_blocks(), self.settings.block_tokens):
            return NotYet.NEVER
        now_s = self._clock()
        self._line.refresh(entry)
        if self._line.shared_with_running(entry, self.settings.min_shared_tokens):
            return NotYet.COMPUTING
        why = NotYet.FULL  # in a mode that stalls steps, its load begins in its own step only
        if not self._switch.policy.stalls_step or self._has_room(entry, first=first):
            why = self._loads.turn(entry, now_s, first=first)
        bands: tuple[int, ...] = ()
        if why is NotYet.LOADING and alone:
            bands = self._by_layer.bands_of(entry, self._loads.patience_s(entry, now_s))
            why = None if bands else why
        if why is None and not self._has_room(entry, first=first):
            why = NotYet.FULL
        if why is NotYet.FULL and first:
            self._owed = max(self._owed, self._need(entry))
        return why or self._issue_ticket(entry, bands)

    def finish(self, ticket: Ticket) -> None:
        """The request ended: its blocks become ordinary cache, its tail is freed."""
        self._require_current(ticket)
        del self._tickets[ticket.request.id]
        self._line.computes_no_more(ticket)
        self._store.release(ticket.blocks, LeaseKind.HARD)

    def preempt(self, ticket: Ticket, request: Request) -> None:
        """Give up a running request's slots and let it wait again as `request`, by its old arrival.

        `request` carries all tokens known now. What was published of it can be found again.
        """
        brought = self._store.serials(ticket.loaded)
        self.finish(ticket)
        entry = self._add(request)
        if ticket.lost:
            entry.brought, cached = brought, ticket.cached_tokens // self.settings.block_tokens
            entry.had = cached if len(entry.blocks) < cached else 0

    # -- the mode --------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """The mode in use; at first that of the settings."""
        return self._switch.mode

    def set_mode(self, mode: Mode) -> None:
        """Go by another mode from now on; copies on their way are finished and used.

        Blocks in host memory stay there in a mode that does not load them. Raises SettingsError,
        changing nothing, for a mode that needs a host tier where the cache was made without one.
        """
        self._switch.change(mode, self.settings.host_slots)

    # -- steps -----------------------------------------------------------------------------------

    def grow(self, ticket: Ticket, tokens: int) -> Growth:
        """See to it that the block table covers `tokens` tokens in all."""
        self._require_current(ticket)
        count = self._blocks_for(tokens) - len(ticket.blocks)
        if count <= 0:
            return Growth.GROWN
        blocks = self._loads.room_to_compute(count)
        if blocks is None:
            self._owed = max(self._owed, count + self._loads.saving)
            return self._later()
        ticket.extend(blocks, self._store.device.slot_of(blocks))
        return Growth.GROWN

    def begin_step(self, work: Sequence[tuple[Ticket, int, int]]) -> int:
        """Number a step that computes, for each (ticket, start, tokens), `tokens` from `start` on.

        Raises ProtocolError for a ticket whose loads are not all issued, or whose block table does
        not cover the tokens: such a step must not be launched.
        """
        for ticket, _, _ in work:
            self._require_current(ticket)
        return self._steps.begin(work)

    def ready(
        self, tickets: Sequence[Ticket], stream: int = 0, timeout_s: float = 30.0
    ) -> list[Ticket]:
        """Make `stream` wait for the loads of `tickets`; on a CPU the caller waits. One that starts
        by layer has none to wait for yet.

        Returns the tickets that lost a block: preempt them. In a mode that stalls steps this also
        waits until the loads are issued. Every wait ends after `timeout_s`, or earlier by the
        measured rates, and no transfer that took longer is waited for again.
        """
        self._waits.whole(tickets, stream, timeout_s)
        return [ticket for ticket in tickets if ticket.lost]

    def layer(self, ticket: Ticket, layer: int, stream: int = 0, timeout_s: float = 30.0) -> None:
        """Before `layer` of a step reads the KV of `ticket`, which starts by layer: `stream` waits
        for what of its loads it reads, within the bounds of :meth:`ready`.

        Raises TransferFailedError where that does not come: the step broke off, see
        :meth:`step_launched`; preempt the ticket.
        """
        self._waits.layer(ticket, layer, stream, timeout_s)

    def step_launched(self, step: int, stream: int = 0, *, whole: bool = True) -> None:
        """The step is on `stream`: what it writes may be published once its tokens are known.

        Not `whole` where it broke off: what of it is there still touches its blocks, and is not
        published. Raises ProtocolError for a whole one of which a layer should wait and did not.
        """
        self._steps.launched(step, stream, whole=whole)

    def step_abandoned(self, step: int) -> None:
        """The step will not be launched: it touched nothing."""
        self._steps.abandoned(step)

    def commit(self, ticket: Ticket, keys: bytes) -> None:
        """Publish the blocks of `ticket` that are full, launched, and whose `keys` are known.

        `keys` are those of all whole blocks so far; more than was launched is not published yet.
        """
        self._require_current(ticket)
        whole = min(len(keys) // self._store.key_bytes, len(ticket.blocks))
        whole = min(whole, ticket.launched_tokens // self.settings.block_tokens)
        first = ticket.published
        if whole <= first or ticket.request.no_save or ticket.orphaned:
            return
        namespace = ticket.request.namespace
        mine = ticket.blocks[first:whole].copy()
        parent = ticket.parent
        try:
            canonical = self._store.publish(namespace, keys, first, mine, ticket.session)
        except ParentMissingError:
            # What it builds on was lost meanwhile: it goes on with blocks of its own.
            ticket.orphaned = True
            return
        ticket.published, ticket.parent = whole, int(canonical[-1])
        for position in np.flatnonzero(canonical != mine).tolist():
            self._share(ticket, first + position, int(canonical[position]))
        self._saves.computed(mine[canonical == mine], ticket.blocks[:whole])
        self._line.published(namespace, parent)
        self._line.computes(ticket)

    def serials(self, ticket: Ticket) -> NDArray[np.int64]:
        """For each block of `ticket` a number that names its content for good."""
        return self._store.serials(ticket.blocks)

    # -- events ----------------------------------------------------------------------------------

    def poll(self, running: Sequence[Running] = (), free_run_slots: int = 1) -> None:
        """Take in what the mover reports, save what can be saved, and plan. Does not block."""
        self._take_report()
        now_s = self._clock()
        self._ledger.expire(now_s, self._store.device.wanted, self.settings.slack_s)
        self._ahead.plan(now_s, running, free_run_slots, self._owed)
        self._owed = 0
        self._saves.flush(now_s)

    def wait_news(self, timeout_s: float) -> bool:
        """Wait until a transfer got further, at most `timeout_s`: when nothing else can run."""
        return self._mover.wait_news(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the mover, take in its last report. The cache takes nothing in afterwards."""
        self._closed = True
        self._mover.close(timeout_s)
        self._take_report()

    @property
    def quiet(self) -> bool:
        """Whether :meth:`poll` has nothing to do until something is asked of the cache."""
        return not len(self._line) and not len(self._flights) and not self._saves.pending

    def stats(self) -> CacheStats:
        """Counters since the start."""
        return self._account.stats(self._ledger, self._store.counters, self._loads.link)

    # -- inside ----------------------------------------------------------------------------------

    def _take_report(self) -> None:
        report = self._mover.poll()
        now_s = self._clock()
        self._store.advance(report.completed_step)
        for transfer in report.issued:
            self._loads.issued(transfer, now_s)
        for transfer, bands in report.bands:
            self._loads.bands_issued(transfer, bands)
        for completion in report.completions:
            self._take_completion(completion, now_s)

    def _take_completion(self, completion: Completion, now_s: float) -> None:
        flight = self._flights.get(completion.id)
        if flight is None:
            raise ProtocolError(f"transfer {completion.id} ended twice")
        self._stuck_since_s = None
        if not flight.is_load:
            self._saves.ended(completion, now_s)
            self._account.saved(completion)
            return
        self._loads.ended(completion, self._account.loaded(completion), now_s)
        incomplete = completion.blocks_done < len(flight.blocks)
        for request in flight.dependents:
            ticket = self._tickets.get(request)
            if ticket is not None and completion.id in ticket.waits:
                ticket.waits.discard(completion.id)
                ticket.lost |= incomplete

    def _issue_ticket(self, entry: Waiting, bands: tuple[int, ...]) -> Ticket:
        self._line.remove(entry)
        cached = entry.blocks[: entry.covered]
        self._store.promote(cached)
        now_s = self._clock()
        prefetched = self._ledger.read(cached, now_s if entry.turn_s is None else entry.turn_s)
        self._generation += 1
        self._account.layered += bool(bands)
        sources, misses = self._account.admitted(entry, self.settings.block_tokens)
        ticket = Ticket(
            request=entry.request,
            generation=self._generation,
            cached_tokens=entry.covered * self.settings.block_tokens,
            sources=sources,
            misses=misses,
            waits=set(entry.waits),
            band_of_layer=bands,
            loaded=cached[entry.origins],
            prefetched_blocks=prefetched,
            load_wait_s=0.0 if entry.demanded_s is None else now_s - entry.demanded_s,
            launched_tokens=entry.covered * self.settings.block_tokens,
            published=entry.covered,
            session=entry.session,
            parent=int(cached[-1]) if len(cached) else -1,
        )
        ticket.extend(cached, self._store.device.slot_of(cached))
        self._tickets[entry.request.id] = ticket
        self._line.computes(ticket)
        return ticket

    def _need(self, entry: Waiting) -> int:
        """Slots for the rest of its prompt, beside the growth that running requests may need."""
        need = self._blocks_for(entry.request.tokens) - self._line.held(entry)
        return need + (self.settings.reserve_blocks if self._tickets else 0)

    def _has_room(self, entry: Waiting, *, first: bool) -> bool:
        need, device = self._need(entry), self._store.device
        if first and device.obtainable(protected=True) < need:
            self._loads.revoke(need, spare=entry)
        return device.obtainable(protected=first) >= need

    def _add(self, request: Request) -> Waiting:
        intake.check_numbers(request)
        intake.check_keys(request, self._store.key_bytes, self.settings.block_tokens)
        return self._line.add(request)

    def _share(self, ticket: Ticket, position: int, canonical: int) -> None:
        """The same content was published by another: use its block, if it lies on the device."""
        block = np.array([canonical], np.int32)
        if not self._store.resident(block)[0] or self._store.loading(block)[0]:
            return
        own = ticket.blocks[position : position + 1].copy()
        self._store.touch(block, LeaseKind.HARD)
        ticket.replace(position, canonical, int(self._store.device.slot_of(block)[0]))
        self._store.release(own, LeaseKind.HARD)

    def _later(self) -> Growth:
        """Copies in flight will free slots; if none ends in time, something must be given up."""
        if not len(self._flights):
            return Growth.FULL
        now_s = self._clock()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        stuck_s = now_s - self._stuck_since_s
        return Growth.LATER if stuck_s < self.settings.give_up_grace_s else Growth.FULL

    def _blocks_for(self, tokens: int) -> int:
        return intake.blocks_for(tokens, self.settings.block_tokens)

    def _most_blocks(self) -> int:
        return self._store.device.slots - self._store.device.quarantined

    def _require_current(self, ticket: Ticket) -> None:
        current = self._tickets.get(ticket.request.id)
        if current is None or current.generation != ticket.generation:
            raise ProtocolError(
                f"the ticket of request {ticket.request.id} is not current: it has ended, or was "
                "preempted and admitted anew"
            )
