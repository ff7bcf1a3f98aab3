"""Sends to one client from wherever the event loop is, without a task for each message.

An ASGI `send` waits only for a client that does not take what it was sent. So it is begun at once,
and only one that has to wait becomes a task; its exchange holds everything back meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, cast

from forebay.server.exchange import Exchange
from forebay.server.guard import Message, Send


class Sender:
    """The body of one streamed response, up to what is sent at its end. Close it."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send = send
        self._exchange = exchange
        self._waiting: asyncio.Task[None] | None = None

    def put(self, message: Message) -> None:
        """Send `message`; call it only while the exchange is not held. Raises what `send` does."""
        sending = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._exchange.hold()
        self._waiting = asyncio.ensure_future(self._finish(sending, awaited))

    async def rest(self) -> None:
        """Wait until what was begun is sent."""
        if self._waiting is not None:
            await asyncio.wait((self._waiting,))

    def close(self) -> None:
        """Give up what still waits."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _finish(self, sending: Coroutine[Any, Any, None], awaited: Any) -> None:
        try:
            await _go_on(sending, awaited)
        except Exception as error:
            self._exchange.break_off(error)
        else:
            self._exchange.resume()


@coroutine
def _go_on(sending: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that runs already and now waits for `awaited`."""
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:
                awaited = sending.throw(error)
            else:
                awaited = sending.send(None)
    except StopIteration:
        return
