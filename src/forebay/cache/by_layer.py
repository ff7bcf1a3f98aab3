"""Starts by layer: a request computes its first layers while the KV of the later ones still flows.

Only where nothing else can run, since a step that waits keeps everybody waiting. What is left of
its loads then goes band by band, a *band* being adjacent layers of every block. An earlier start
than is needed to hide the rest gains nothing, and whoever arrives meanwhile waits for it, so the
request starts when computing takes about as long as what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.config import CacheSettings
from forebay.core.flights import Flight, Flights
from forebay.core.ledger import MissReason
from forebay.core.rates import Rates
from forebay.core.requests import Waiting
from forebay.errors import SettingsError
from forebay.transfer.mover import Mover

# Each band costs the launching thread a wait: with so little left, little could be gained.
_LEAST_LEFT_S = 2e-3
# Measured on shorter contexts, the prefill of a long one looks quicker than it is.
_SPARE = 2.0


def cut_bands(layer_ends: Sequence[int], least_bytes: int) -> tuple[tuple[int, ...], list[int]]:
    """As many bands as have `least_bytes` of each block; the ends of layers are bytes of a block.

    Returns the ends of the bands, and for each layer the band that it lies in. Smaller parts would
    cost the link's rate.
    """
    ends: list[int] = []
    for end in layer_ends:
        if end - (ends[-1] if ends else 0) >= least_bytes:
            ends.append(end)
    ends[-1:] = layer_ends[-1:]
    return tuple(ends), [sum(cut < end for cut in ends) for end in layer_ends]


class LayerStarts:
    """Decides which requests start by layer. `layer_ends` are bytes of a block; none: nobody."""

    def __init__(
        self,
        settings: CacheSettings,
        layer_ends: Sequence[int],
        flights: Flights,
        rates: Rates,
        mover: Mover,
    ) -> None:
        if layer_ends and layer_ends[-1] != settings.block_bytes:
            raise SettingsError(
                f"the last layer ends at byte {layer_ends[-1]} of a block of "
                f"{settings.block_bytes}: give the end of each layer, in order"
            )
        self._settings = settings
        self._flights = flights
        self._rates = rates
        self._mover = mover
        self._ends, bands = cut_bands(layer_ends, settings.band_bytes) if layer_ends else ((), [])
        usable = settings.band_bytes > 0 and len(self._ends) > 1
        self._band_of_layer = tuple(bands) if usable else ()

    def bands_of(self, entry: Waiting, patience_s: float) -> tuple[int, ...]:
        """For each layer the band that `entry`, which waits for loads, starts with now by layer.

        Empty where it does not; its loads may go by bands from now on. `patience_s` is how long it
        would wait for them: a load in bands that is given up has brought nothing.
        """
        flights = list(filter(None, map(self._flights.get, entry.waits)))
        if not self._band_of_layer or not self._sound(entry, flights):
            return ()
        left_s = self._rates.load_s(sum(map(self._left_bytes, flights)))
        if not _LEAST_LEFT_S <= left_s <= patience_s:
            return ()
        whole = [flight for flight in flights if not flight.bands and not flight.issued]
        if whole:
            self._mover.use_bands([flight.id for flight in whole], self._ends)
            for flight in whole:
                flight.bands = len(self._ends)
        tokens = entry.request.tokens - entry.covered * self._settings.block_tokens
        compute_s = max(self._rates.step_s.value, self._rates.prefill_s(tokens))
        return self._band_of_layer if left_s <= _SPARE * compute_s else ()

    def _sound(self, entry: Waiting, flights: list[Flight]) -> bool:
        """Whether all that it waits for will come, as far as is known."""
        given_up = entry.limit is not None and entry.limit_reason is MissReason.LATE
        return not given_up and not any(each.cancelled or each.overdue for each in flights)

    def _left_bytes(self, flight: Flight) -> int:
        if flight.issued:
            return 0
        there = self._ends[flight.bands_issued - 1] if flight.bands_issued else 0
        return len(flight.blocks) * (self._settings.block_bytes - there)
