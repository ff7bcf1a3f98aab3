"""Transfers in flight: what each carries, for whom, and how far it is.

Bookkeeping only: the cache submits to the mover and reports back what the mover said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.core.arrays import Ids


@dataclass(slots=True)
class Flight:
    """One un-ended transfer. `dependents` are the waiting requests that want it, by id.

    `bands`: it goes by so many bands of layers (0: block by block), of which the first
    `bands_issued` are issued. `overdue`: a bounded wait for it passed its bound. Nobody waits for
    it again. `demanded`: it goes before every prefetch. `near`: the next step is launched when it
    has ended, so it is not stopped any more.
    """

    id: int
    is_load: bool
    blocks: Ids
    submitted_s: float
    dependents: set[int] = field(default_factory=set[int])
    issued: bool = False
    demanded: bool = False
    bands: int = 0
    bands_issued: int = 0
    cancelled: bool = False
    overdue: bool = False
    near: bool = False


class Flights:
    """All un-ended transfers, by id. Ids grow and are never used again."""

    def __init__(self, first_id: int) -> None:
        self._flights: dict[int, Flight] = {}
        self._next_id = first_id
        self._load_blocks = 0
        self._save_blocks = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def load_blocks(self) -> int:
        """Blocks of un-ended loads."""
        return self._load_blocks

    @property
    def save_blocks(self) -> int:
        """Blocks of un-ended saves."""
        return self._save_blocks

    def next_id(self) -> int:
        """The id for the next transfer."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, flight: Flight) -> None:
        """A transfer was submitted."""
        self._flights[flight.id] = flight
        if flight.is_load:
            self._load_blocks += len(flight.blocks)
        else:
            self._save_blocks += len(flight.blocks)

    def get(self, transfer: int) -> Flight | None:
        """The transfer, or None when it has ended."""
        return self._flights.get(transfer)

    def end(self, transfer: int) -> Flight:
        """A completion came: the transfer is over."""
        flight = self._flights.pop(transfer)
        if flight.is_load:
            self._load_blocks -= len(flight.blocks)
        else:
            self._save_blocks -= len(flight.blocks)
        return flight

    def flying(self, transfers: Iterable[int]) -> list[int]:
        """Those of `transfers` that are un-ended, in order."""
        return sorted(transfer for transfer in transfers if transfer in self._flights)

    def un_ended(self, transfers: set[int]) -> set[int]:
        """Those of `transfers` that are un-ended."""
        return self._flights.keys() & transfers

    def lacking(self, transfers: Iterable[int]) -> list[int]:
        """Those of `transfers` that are un-ended and not near, in order."""
        return [each for each in self.flying(transfers) if not self._flights[each].near]

    def lacks_any(self, transfers: Iterable[int]) -> bool:
        """Whether any of `transfers` is un-ended and not near."""
        for transfer in transfers:
            flight = self._flights.get(transfer)
            if flight is not None and not flight.near:
                return True
        return False

    def unissued(self, transfers: Iterable[int], band: int | None = None) -> set[int]:
        """Those of `transfers` that are un-ended and not yet issued, or not up to `band`."""
        found = filter(None, map(self._flights.get, transfers))
        open_ = (flight for flight in found if not flight.issued)
        return {flight.id for flight in open_ if band is None or flight.bands_issued <= band}

    def note_overdue(self, transfers: Iterable[int]) -> None:
        """These did not end within their bound."""
        for flight in filter(None, map(self._flights.get, transfers)):
            flight.overdue = True

    def overdue(self, transfers: Iterable[int]) -> set[int]:
        """Those of `transfers` that are un-ended and overdue."""
        found: set[int] = set()
        for transfer in transfers:
            flight = self._flights.get(transfer)
            if flight is not None and flight.overdue:
                found.add(transfer)
        return found

    def demand(self, transfers: Iterable[int]) -> list[int]:
        """Somebody's turn waits for `transfers`. Returns those for which nobody's did, in order."""
        fresh: list[int] = []
        for transfer in sorted(transfers):
            flight = self._flights.get(transfer)
            if flight is not None and not flight.demanded:
                flight.demanded = True
                fresh.append(transfer)
        return fresh

    def depend(self, transfers: Iterable[int], request: int) -> None:
        """`request` wants what `transfers` bring."""
        for transfer in transfers:
            self._flights[transfer].dependents.add(request)

    def abandon(self, transfers: Iterable[int], request: int) -> list[int]:
        """`request` wants them no longer. Returns those that nobody wants and that can be
        stopped.
        """
        stop: list[int] = []
        for transfer in transfers:
            flight = self._flights.get(transfer)
            if flight is None:
                continue
            flight.dependents.discard(request)
            if flight.near or flight.issued or flight.cancelled:
                continue
            if not flight.dependents:
                flight.cancelled = True
                stop.append(transfer)
        return stop
