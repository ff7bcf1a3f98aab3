"""The parts of one cache: what it knows, and the mover that it tells what to move."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.config import CacheSettings
from forebay.core.flights import Flights
from forebay.core.ledger import PrefetchLedger
from forebay.core.modes import ModeSwitch
from forebay.core.rates import Average, Rates
from forebay.core.store import Store
from forebay.core.waiting import WaitingLine
from forebay.transfer.mover import Mover


@dataclass(frozen=True, slots=True)
class Parts:
    """There is one of each in a cache. What loads, saves and looks ahead works on them, in one
    thread.
    """

    settings: CacheSettings
    switch: ModeSwitch
    store: Store
    line: WaitingLine
    flights: Flights
    ledger: PrefetchLedger
    rates: Rates
    mover: Mover

    @classmethod
    def over(
        cls,
        settings: CacheSettings,
        store: Store,
        mover: Mover,
        *,
        first_transfer: int = 1,
        last_too: bool = False,
        dropped: int = 0,
    ) -> Parts:
        """Parts over a `store` that nobody uses yet: what loses its slot there is wasted.

        `first_transfer` is the first id to use with `mover`, `last_too` and `dropped` are
        the line's.
        """
        ledger = PrefetchLedger(store.max_blocks, settings.block_bytes)
        store.lost_slot = ledger.lost
        return cls(
            settings,
            ModeSwitch(settings.mode),
            store,
            WaitingLine(store, settings.block_tokens, last_too=last_too, dropped=dropped),
            Flights(first_transfer),
            ledger,
            Rates(Average(settings.link_bytes_per_s)),
            mover,
        )
