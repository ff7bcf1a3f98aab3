"""One HTTP request's side of its answers: what the engine's thread sends, as the client takes it.

Lives on the event loop. What a slow client has not taken yet is kept as text, not as events, so it
never outgrows its answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to answer `index`. `tokens` only where they were asked for."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...] = ()
    outcome: Outcome | None = None


class Exchange:
    """The answers of one HTTP request, `count` of them; `open` are still with the engine."""

    def __init__(self, count: int) -> None:
        self.open = set(range(count))
        self.submitted = False
        self.error: ForebayError | None = None
        self._pieces: list[Piece] = []
        self._accepted = False
        self._quiet = False
        self._waiter: asyncio.Future[None] | None = None

    # -- what the engine's side says -------------------------------------------------------------

    def accept(self) -> None:
        """All answers are queued."""
        self._accepted = True
        self._wake()

    def push(self, piece: Piece) -> None:
        """More of an answer; after an error nothing counts any more."""
        if self.error is not None:
            return
        if piece.outcome is not None:
            self.open.discard(piece.index)
        self._quiet = False
        self._pieces.append(piece)
        if len(self._pieces) > _MOST_PIECES:
            self._pieces = _joined(self._pieces)
        self._wake()

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

    async def take(self) -> list[Piece]:
        """What came since the last call, in order; empty if nothing did for long.

        Raises the error that ended the exchange, once everything before it was taken.
        """
        if not self._pieces and self.error is None:
            await self._wait()
        pieces, self._pieces = self._pieces, []
        if not pieces and self.error is not None:
            raise self.error
        return pieces

    def tick(self) -> None:
        """Called now and then: whoever has waited since the last time gets an empty list.

        A timer for each wait would cost more than the rest of it.
        """
        if self._quiet and self._accepted:
            self._wake()
        self._quiet = True

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
