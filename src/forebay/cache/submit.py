"""How a transfer leaves the cache, whichever way it goes: into the books, then to the mover."""

from __future__ import annotations

from forebay.core.flights import Flight, Flights
from forebay.core.store import CopyPlan
from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.mover import Mover


def submit(
    flights: Flights,
    mover: Mover,
    transfer: int,
    copies: CopyPlan,
    direction: Direction,
    transfer_class: TransferClass,
    *,
    deadline_s: float,
    now_s: float,
) -> None:
    """Note `copies` as in flight under the id `transfer`, and hand them to `mover`."""
    flights.add(Flight(transfer, direction is Direction.LOAD, copies.blocks, now_s))
    mover.submit(
        [
            Transfer(
                id=transfer,
                direction=direction,
                transfer_class=transfer_class,
                deadline_s=deadline_s,
                sources=copies.sources,
                destinations=copies.destinations,
                after_steps=copies.after_steps,
            )
        ]
    )
