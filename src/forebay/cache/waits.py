"""What a step waits for: loads that are issued, whole before it is launched, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.cache.account import Account
from forebay.cache.loads import Loads
from forebay.core.flights import Flights
from forebay.core.requests import Ticket
from forebay.errors import LinkTimeoutError, NotIssuedError
from forebay.transfer.mover import Mover, TransferFailedError

_SLICE_S = 0.1


class Waits:
    """Bounded waits for the loads of tickets; `take_report` takes in what the mover reports."""

    def __init__(
        self,
        flights: Flights,
        loads: Loads,
        mover: Mover,
        account: Account,
        take_report: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._flights = flights
        self._loads = loads
        self._mover = mover
        self._account = account
        self._take_report = take_report
        self._clock = clock
        self._layer_at_s = 0.0

    def whole(self, tickets: Sequence[Ticket], stream: int, timeout_s: float) -> None:
        """Make `stream` wait for the loads of `tickets`; those that it cannot have are lost."""
        for ticket in tickets:
            ticket.lost |= bool(self._flights.overdue(ticket.waits))
        waits = {
            transfer
            for ticket in tickets
            if not ticket.lost and not ticket.band_of_layer
            for transfer in ticket.waits
        }
        late = self._wait(waits, stream, timeout_s)
        for ticket in tickets:
            ticket.lost |= bool(ticket.waits & late)

    def layer(self, ticket: Ticket, layer: int, stream: int, timeout_s: float) -> None:
        """Make `stream` wait for what `layer` reads of the loads of `ticket`.

        Raises TransferFailedError where it does not come; the ticket is lost then.
        """
        band = ticket.band_of_layer[layer]
        if band < ticket.bands_waited:
            return
        if ticket.bands_waited and self._flights.flying(ticket.waits):
            self._account.hidden_s += self._clock() - self._layer_at_s
        late = self._wait(set(ticket.waits), stream, timeout_s, band)
        self._layer_at_s = self._clock()
        ticket.lost |= bool(late)
        if ticket.lost:
            raise TransferFailedError(
                f"layer {layer} of request {ticket.request.id} did not arrive: preempt it"
            )
        ticket.bands_waited = band + 1

    def _wait(
        self, waits: set[int], stream: int, timeout_s: float, band: int | None = None
    ) -> set[int]:
        """Those of `waits` that `stream` does not wait for now, since they are late or failed."""
        end_s = self._clock() + min(timeout_s, self._loads.longest_s)
        while self._flights.unissued(waits, band) and self._clock() < end_s:
            self._mover.wait_news(max(0.0, min(_SLICE_S, end_s - self._clock())))
            self._take_report()
        late = self._flights.unissued(waits, band)
        flying = self._flights.flying(waits - late)
        try:
            self._mover.wait(flying, stream, max(0.0, end_s - self._clock()), band=band)
        except (LinkTimeoutError, TransferFailedError, NotIssuedError):
            # Which of them it was, a late report will say; no step may read any of them until then.
            late |= set(flying)
        self._take_report()
        if self._clock() >= end_s:
            self._loads.link.hangs(late, end_s)
        return late
