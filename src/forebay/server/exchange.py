"""One HTTP request's side of its answers: what the engine's thread sends, as the client takes it.

Lives on the event loop. What a step brings goes straight to whoever listens, without a task that
wakes up for it. What a slow client has not taken yet is kept as text, not as events, so it never
outgrows its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from forebay.engine.request import FinishReason
from forebay.engine.sampler import SampledToken
from forebay.errors import ForebayError

_MOST_PIECES = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended, and where the time went. Seconds; tokens and bytes of its prompt.

    `first_token_s` and `total_s` count from its arrival; None before it came so far.
    """

    reason: FinishReason
    error: str
    prompt_tokens: int
    answer_tokens: int
    device_tokens: int
    host_tokens: int
    queued_s: float
    load_wait_s: float
    first_token_s: float | None
    total_s: float
    prefetched_bytes: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was there."""
        return self.device_tokens + self.host_tokens


class Piece(msgspec.Struct, frozen=True):
    """What one step added to answer `index`. `tokens` only where log-probabilities were asked."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...] = ()
    outcome: Outcome | None = None


Listener = Callable[[list[Piece]], None]
"""Takes pieces in order; an empty list says that nothing came for long."""


class Exchange:
    """The answers of one HTTP request, `count` of them; `open` are still with the engine."""

    def __init__(self, count: int) -> None:
        self.open = set(range(count))
        self.submitted = False
        self.error: ForebayError | None = None
        self._broken: Exception | None = None
        self._pieces: list[Piece] = []
        self._listener: Listener | None = None
        self._held = False
        self._accepted = False
        self._quiet = False
        self._waiter: asyncio.Future[None] | None = None

    # -- what the engine's side says -------------------------------------------------------------

    def accept(self) -> None:
        """All answers are queued."""
        self._accepted = True
        self._wake()

    def push(self, pieces: list[Piece]) -> None:
        """More of its answers; after an error nothing counts any more."""
        if self.error is not None:
            return
        for piece in pieces:
            if piece.outcome is not None:
                self.open.discard(piece.index)
        self._quiet = False
        if self._listener is None or self._held:
            self._pieces += pieces
            if len(self._pieces) > _MOST_PIECES:
                self._pieces = _joined(self._pieces)
        else:
            self._give(self._listener, pieces)

    def fail(self, error: ForebayError) -> None:
        """No more will come: refused, shut down, or the client is gone."""
        self.open.clear()
        self.error = self.error or error
        self._wake()

    # -- what the client's side asks -------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until all answers are queued. Raises the error that came instead."""
        while not self._accepted and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def tell(self, listener: Listener) -> None:
        """Hand every piece to `listener`, what came already first, until all answers ended.

        Raises the error that ended the exchange, once everything before it was handed over, or
        what `listener` raised.
        """
        self._listener = listener
        try:
            self.resume()
            while self._broken is None and (self._held or (self.open and self.error is None)):
                await self._wait()
        finally:
            self._listener = None
        if self._broken is not None:
            raise self._broken
        if self.error is not None:
            raise self.error

    def hold(self) -> None:
        """The listener takes nothing for now."""
        self._held = True

    def resume(self) -> None:
        """The listener takes pieces again, first those that came meanwhile."""
        self._held = False
        pieces, self._pieces = self._pieces, []
        if pieces and self._listener is not None:
            self._give(self._listener, pieces)
        self._wake()

    def break_off(self, error: Exception) -> None:
        """The listener can take no more; `tell` raises `error`. The other exchanges go on."""
        self._broken = error
        self._wake()

    def tick(self) -> None:
        """Called now and then: whoever has heard nothing since the last time gets an empty list.

        A timer for each exchange would cost more than the rest of it.
        """
        if self._quiet and self._listener is not None and not self._held:
            self._give(self._listener, [])
        self._quiet = True

    def _give(self, listener: Listener, pieces: list[Piece]) -> None:
        try:
            listener(pieces)
        except Exception as error:
            self.break_off(error)
        if not self.open:
            self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The same with one piece for each answer."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [
        Piece(
            index,
            "".join(piece.text for piece in mine),
            tuple(token for piece in mine for token in piece.tokens),
            mine[-1].outcome,
        )
        for index, mine in by_index.items()
    ]
