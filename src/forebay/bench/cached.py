"""Loads through a `Cache`: conversations in host memory come back as requests for them arrive.

Several sets of conversations are computed, saved and displaced, one set more than the device pool
has room for. Blocks of different conversations are computed in turns, so that a conversation's
blocks lie scattered in both pools. A load then is everything from the first request's arrival to
the last byte on the device: matching, planning, eviction, slots, submits, copies.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from forebay.cache import Cache
from forebay.config import CacheSettings
from forebay.core.requests import Growth, Request, Ticket
from forebay.errors import LinkTimeoutError, ProtocolError
from forebay.transfer.mover import Mover

_TOKENS = 16
_KEY_BYTES = 8
_WAIT_S = 60.0
_SPARE = 0.25


@dataclass(frozen=True, slots=True)
class LoadShape:
    """`sets` of `requests` conversations of `blocks` blocks each; two sets or more."""

    requests: int
    blocks: int
    sets: int
    block_bytes: int

    @property
    def set_blocks(self) -> int:
        """Blocks that one load brings."""
        return self.requests * self.blocks

    @property
    def device_slots(self) -> int:
        """One set and some spare, which the tails and the next set's first victims take."""
        return int((1 + _SPARE) * self.set_blocks) + self.requests

    @property
    def host_slots(self) -> int:
        """All sets, and no less than the device pool."""
        return max(self.sets * self.set_blocks, self.device_slots) + self.requests


class CachedLoads:
    """A cache over `mover`'s pools, filled with the sets of `shape`; loads go through them in turn.

    `stream` is what steps are launched on, 0 the calling thread. Raises LinkTimeoutError when
    copies do not end.
    """

    def __init__(self, mover: Mover, shape: LoadShape, window_bytes: int, stream: int) -> None:
        self._mover, self._shape, self._stream = mover, shape, stream
        self.settings = CacheSettings(
            block_tokens=_TOKENS,
            block_bytes=shape.block_bytes,
            device_slots=shape.device_slots,
            host_slots=shape.host_slots,
            window_bytes=window_bytes,
            # One whole set may be on its way at once.
            prefetch_share=0.9,
            in_flight_s=2.0,
            min_load_tokens=0,
            waits_on_host=stream == 0,
        )
        self.cache = Cache(self.settings, mover, key_bytes=_KEY_BYTES)
        self._rng = np.random.default_rng(7)
        self._requests = 0
        self._next_set = 0
        self._planning_s: list[float] = []
        for number in range(shape.sets):
            self._fill(number)

    def bytes_per_s(self) -> float:
        """Of the next set, from its first request to its last byte; then its requests run a step.

        Raises ProtocolError when anything but the whole set was loaded.
        """
        number, self._next_set = self._next_set, (self._next_set + 1) % self._shape.sets
        expected = self._shape.set_blocks * self._shape.block_bytes
        before = self.cache.stats().loaded_bytes
        self._mover.windows()
        began_s = time.monotonic()
        waiting = [self._arrive(number, each) for each in range(self._shape.requests)]
        self._planning_s.append(time.monotonic() - began_s)
        self._until_loaded(before + expected)
        ended_s = float(self._mover.windows()["end_s"].max())
        self._run(waiting)
        loaded = self.cache.stats().loaded_bytes - before
        if loaded != expected:
            raise ProtocolError(f"{loaded} bytes were loaded and not {expected}")
        return expected / (ended_s - began_s)

    def told(self) -> dict[str, object]:
        """What was measured, for a figure's settings."""
        return {
            "requests": self._shape.requests,
            "blocks_each": self._shape.blocks,
            "block_bytes": self._shape.block_bytes,
            "arrivals_ms": round(1e3 * float(np.median(self._planning_s)), 3),
            "method": "first request's arrival to the last byte, through Cache, no decode beside",
        }

    def _fill(self, number: int) -> None:
        """Compute one set, blocks of its conversations in turns, and have it saved."""
        tickets = self._admit([self._arrive(number, each) for each in range(self._shape.requests)])
        turns = self._rng.permutation(np.repeat(np.arange(len(tickets)), self._shape.blocks))
        grown = np.zeros(len(tickets), np.int64)
        for each in turns.tolist():
            grown[each] += 1
            self._grow(tickets[each], int(grown[each]) * _TOKENS)
        whole = self._shape.blocks * _TOKENS
        step = self.cache.begin_step([(ticket, 0, whole) for ticket in tickets])
        self.cache.step_launched(step, self._stream)
        done = np.zeros(len(tickets), np.int64)
        for each in self._rng.permutation(turns).tolist():
            done[each] += 1
            keys = tickets[each].request.keys[: int(done[each]) * _KEY_BYTES]
            self.cache.commit(tickets[each], keys)
        for ticket in tickets:
            self.cache.finish(ticket)
        self._until_quiet()

    def _arrive(self, number: int, each: int) -> int:
        """A request for conversation `each` of a set; its id."""
        self._requests += 1
        first = (number * self._shape.requests + each) << 32
        keys = (first + np.arange(self._shape.blocks, dtype=np.int64)).tobytes()
        self.cache.enqueue(
            Request(
                id=self._requests,
                namespace=b"bench",
                keys=keys,
                tokens=self._shape.blocks * _TOKENS + 1,
                max_answer_tokens=1,
                arrival_s=float(self._requests),
            )
        )
        self.cache.poll()
        return self._requests

    def _admit(self, requests: list[int]) -> list[Ticket]:
        tickets: list[Ticket] = []
        end_s = time.monotonic() + _WAIT_S
        for request in requests:
            while not isinstance(ticket := self.cache.admit(request, first=True), Ticket):
                self._wait(end_s)
            tickets.append(ticket)
        return tickets

    def _grow(self, ticket: Ticket, tokens: int) -> None:
        end_s = time.monotonic() + _WAIT_S
        while self.cache.grow(ticket, tokens) is not Growth.GROWN:
            self._wait(end_s)

    def _run(self, requests: list[int]) -> None:
        """One step computes the last token of each request, and they end."""
        tickets = self._admit(requests)
        for ticket in tickets:
            self._grow(ticket, ticket.request.tokens)
        self.cache.ready(tickets, self._stream)
        work = [(ticket, ticket.cached_tokens, 1) for ticket in tickets]
        self.cache.step_launched(self.cache.begin_step(work), self._stream)
        for ticket in tickets:
            self.cache.finish(ticket)
        self._until_quiet()

    def _until_loaded(self, loaded_bytes: int) -> None:
        end_s = time.monotonic() + _WAIT_S
        while self.cache.stats().loaded_bytes < loaded_bytes:
            self._wait(end_s)

    def _until_quiet(self) -> None:
        end_s = time.monotonic() + _WAIT_S
        self.cache.poll()
        while not self.cache.quiet:
            self._wait(end_s)

    def _wait(self, end_s: float) -> None:
        if time.monotonic() > end_s:
            raise LinkTimeoutError(f"copies of the cache did not end within {_WAIT_S:.0f} s")
        self.cache.wait_news(0.05)
        self.cache.poll()
