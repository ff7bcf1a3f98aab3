"""Loads that are near their end: vLLM schedules who waits for them while they land.

To look up a request of many blocks, to allocate for it and to prepare its step takes vLLM some ms.
On an idle engine they need not come after its loads: it is started when what it waits for is about
to land, and the worker launches no step before that has. Only a worker in the same thread can be
told so, and held, without holding up anything else.
"""

from __future__ import annotations

from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.core.flights import Flight
from forebay.vllm.scheduler.copies import Copies
from forebay.vllm.scheduler.lookups import Lookups
from forebay.vllm.scheduler.mailbox import Mailbox
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.turns import Turns

_STEP_S = 5.5e-3
_BLOCK_S = 4.5e-6
"""From the end of a step without work vLLM 0.26 takes 7.5 ms to the forward pass of a request of
1,000 blocks and 12 ms of 2,000, on the host of an H200; such steps are up to 2.5 ms apart. So long
before they land loads are near."""


class NearLoads:
    """Lets vLLM find in `device` what loads bring, before they have."""

    def __init__(
        self,
        parts: Parts,
        device: VllmDevicePool,
        mail: Mailbox,
        loads: Loads,
        copies: Copies,
        turns: Turns,
    ) -> None:
        self._line = parts.line
        self._flights = parts.flights
        self._device = device
        self._mail = mail
        self._loads = loads
        self._copies = copies
        self._turns = turns
        # Those that the worker waits for before it launches a step, and some that have ended.
        self._near: list[int] = []

    @property
    def under_way(self) -> bool:
        """Whether a step would have to wait for some."""
        return bool(self._flights.flying(self._near))

    def approach(self, lookups: Lookups, now_s: float) -> None:
        """The engine is idle: if the first request in the line lacks nothing but loads that are
        near, it lacks nothing from now on, and is looked up again.
        """
        head = self._line.head(1)
        lacking = self._flights.lacking(head[0].waits) if head else []
        if not lacking or head[0].request.hint is not None:
            return
        flights = self._flying(lacking)
        if any(flight.cancelled or flight.overdue for flight in flights):
            return
        # Not where they should have ended long ago, or near ones before them: the link stands
        # still, and so would vLLM, each time until the worker gives up waiting.
        left_s = self._left_s([*self._flying(self._near), *flights], now_s)
        if abs(left_s) > _STEP_S + len(head[0].blocks) * _BLOCK_S:
            return
        self._line.refresh(head[0])
        if head[0].here or self._loads.worth(head[0], now_s) or not self._mail.expect(lacking):
            return
        for flight in flights:
            flight.near = self._device.find_ahead(flight.blocks)
        self._near = self._flights.flying([*self._near, *lacking])
        lookups.look_again(lambda record: self._turns.ready(record, now_s))

    def _flying(self, transfers: list[int]) -> list[Flight]:
        return [flight for flight in map(self._flights.get, transfers) if flight is not None]

    def _left_s(self, flights: list[Flight], now_s: float) -> float:
        """How long until they have ended, at the link's rate."""
        blocks = sum(len(flight.blocks) for flight in flights)
        began_s = max(self._copies.landed_s, min(flight.submitted_s for flight in flights))
        return began_s + self._loads.copy_s(blocks) - now_s
