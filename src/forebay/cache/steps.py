"""Steps between their number and their launch: what each computes, and what must be there first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.cache import intake
from forebay.config import CacheSettings
from forebay.core.flights import Flights
from forebay.core.requests import Ticket
from forebay.core.store import Store
from forebay.errors import ProtocolError
from forebay.transfer.mover import Mover


class Steps:
    """The steps that have begun and are neither launched nor abandoned."""

    def __init__(
        self, settings: CacheSettings, store: Store, flights: Flights, mover: Mover
    ) -> None:
        self._block_tokens = settings.block_tokens
        self._store = store
        self._flights = flights
        self._mover = mover
        self._begun: dict[int, list[tuple[Ticket, int]]] = {}

    def begin(self, work: Sequence[tuple[Ticket, int, int]]) -> int:
        """See `Cache.begin_step`; the tickets are current."""
        step = self._store.newest_step + 1
        written: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        for ticket, start, tokens in work:
            self._check(ticket, start + tokens)
            first = start // self._block_tokens
            written.append(ticket.blocks[first : self._blocks_for(start + tokens)])
        self._store.newest_step = step
        if written:
            self._store.wrote(np.concatenate(written), step)
        self._begun[step] = [(ticket, start + tokens) for ticket, start, tokens in work]
        return step

    def launched(self, step: int, stream: int, *, whole: bool) -> None:
        """See `Cache.step_launched`."""
        work = self._take(step)
        for ticket, _ in work if whole else ():
            _check_layers(ticket)
        self._mover.step_launched(step, stream)
        for ticket, end in work:
            ticket.band_of_layer = ()
            if whole:
                ticket.launched_tokens = max(ticket.launched_tokens, end)

    def abandoned(self, step: int) -> None:
        """See `Cache.step_abandoned`."""
        self._take(step)
        self._mover.step_abandoned(step)

    def _check(self, ticket: Ticket, end: int) -> None:
        if not ticket.band_of_layer and self._flights.unissued(ticket.waits):
            raise ProtocolError(f"request {ticket.request.id} has loads that are not issued")
        if len(ticket.slots) < self._blocks_for(end):
            raise ProtocolError(
                f"request {ticket.request.id} has {len(ticket.slots)} slots, too few for "
                f"{end} tokens: call grow until it says GROWN"
            )

    def _take(self, step: int) -> list[tuple[Ticket, int]]:
        if step not in self._begun:
            raise ProtocolError(f"step {step} was not begun, or was launched or abandoned already")
        return self._begun.pop(step)

    def _blocks_for(self, tokens: int) -> int:
        return intake.blocks_for(tokens, self._block_tokens)


def _check_layers(ticket: Ticket) -> None:
    if ticket.band_of_layer and ticket.bands_waited <= ticket.band_of_layer[-1]:
        raise ProtocolError(
            f"request {ticket.request.id} starts by layer, and its step was launched before all "
            "layers had waited: call layer for each before it reads"
        )
