"""What a cache shows of itself while it runs: looks that change nothing and cost little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from forebay.core.flights import Flights
from forebay.core.requests import Waiting
from forebay.core.slots import SlotState
from forebay.core.store import Store
from forebay.core.waiting import WaitingLine


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of the pools. Idle ones hold blocks that nobody uses now; the rest of the device's
    that are not free are in use, `device_prefetched` of them for requests that still wait. The
    states say what is in the slots.
    """

    device_slots: int
    device_free: int
    device_idle: int
    device_prefetched: int
    host_slots: int
    host_free: int
    device_states: Mapping[SlotState, int]
    host_states: Mapping[SlotState, int]


@dataclass(frozen=True, slots=True)
class InLine:
    """A waiting request, as it was last matched: `found` of its blocks are cached somewhere.

    `covered` of those are leased on the device, in place or on their way; `flying` says that copies
    of them are under way.
    """

    id: int
    found: int
    covered: int
    flying: bool


class CacheView:
    """Looks into one cache, for the thread that owns it."""

    def __init__(self, store: Store, line: WaitingLine, flights: Flights) -> None:
        self._store = store
        self._line = line
        self._flights = flights

    def occupancy(self) -> Occupancy:
        """What is in the pools now."""
        device, host = self._store.device, self._store.host.tier
        return Occupancy(
            device_slots=device.slots,
            device_free=device.free,
            device_idle=device.obtainable(protected=True) - device.free,
            device_prefetched=device.prefetch_leased,
            host_slots=host.count,
            host_free=host.free,
            device_states=device.counts(),
            host_states=host.counts(),
        )

    def line(self, most: int) -> list[InLine]:
        """The first `most` waiting requests, in order."""
        return [self._in_line(entry) for entry in islice(self._line, most)]

    def _in_line(self, entry: Waiting) -> InLine:
        return InLine(
            id=entry.request.id,
            found=len(entry.blocks),
            covered=entry.covered,
            flying=bool(self._flights.flying(entry.waits)),
        )
