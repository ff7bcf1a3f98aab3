"""Whether loads may start: a link that has stopped is not waited for again and again.

A load *hangs* when a bounded wait for it passed its bound. From then on, or when some in a row have
failed and brought nothing, whoever wants a load computes instead. Once nothing is in flight any
more one load is tried, then others after pauses that double, until some byte arrives.
"""

from __future__ import annotations

import logging

from forebay.core.flights import Flights
from forebay.transfer.messages import Completion, Outcome

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
FAILED_IN_A_ROW = 8
"""After a driver's fault, or with every lane lost, each load fails as soon as it is asked for: so
many thousand a second would be asked for."""

_logger = logging.getLogger("forebay.cache")


class LinkWatch:
    """The link as loads find it: `stopped` from the first that hangs, or the last of
    `FAILED_IN_A_ROW`, to the next that lands.
    """

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self._pause_s = FIRST_PAUSE_S
        self._retry_s = 0.0
        self._failed = 0
        self.stopped = False
        self.stops = 0

    def may_load(self, now_s: float) -> bool:
        """Whether a load may start now."""
        if not self.stopped:
            return True
        return now_s >= self._retry_s and not self._flights.load_blocks

    def hangs(self, transfers: set[int], now_s: float) -> None:
        """A wait for `transfers` passed its bound: nobody waits for them again."""
        self._flights.note_overdue(transfers)
        if self._flights.overdue(transfers):
            self._stop("hang", now_s)

    def ended(self, completion: Completion, now_s: float) -> None:
        """A load is over."""
        if completion.outcome is Outcome.FAILED:
            self._failed += not completion.bytes
            if self.stopped or self._failed >= FAILED_IN_A_ROW:
                self._stop("fail", now_s)
        elif completion.bytes:
            self._failed = 0
            if self.stopped:
                self.stopped = False
                _logger.warning("loads from host memory arrive again")

    def _stop(self, what: str, now_s: float) -> None:
        if not self.stopped:
            self.stopped, self._pause_s = True, FIRST_PAUSE_S
            self.stops += 1
            _logger.warning(
                "loads from host memory %s: they are left out, and their tokens computed, until "
                "the link moves again",
                what,
            )
        self._pause(now_s)

    def _pause(self, now_s: float) -> None:
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
